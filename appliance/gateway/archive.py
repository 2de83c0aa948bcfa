"""The last few thousand requests, each packed into one piece of bytes.

A record is about forty objects. Were they kept as they are, the road would make its objects in memory that no cache
holds any more, and let go of as many: with 4,000 records so kept a request cost a tenth more than with 50. Packed, they
are freed while they are warm, and the next request is made of the same memory.

What is unusual is kept as it is: failures and what was done about them are of many classes, and seldom.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from typing import Any, cast

import msgspec

from ..facts.choice import Choice
from ..rules.admission.ticket import Ticket
from .promises import Promises
from .record import Record
from .usage import Tally

KEPT_RECORDS = 4000

_NAME_AT = 3
"""Where a packed record's name begins: behind the count of what it holds."""

_pack = msgspec.msgpack.Encoder().encode
_unpack = msgspec.msgpack.Decoder().decode


class Archive:
    """Records of requests that are over, the oldest forgotten first.

    In a row and by no name: an index would be as cold as they are, for every request, and is missed only when somebody
    asks for one by name. Looking through all of them takes a millisecond.
    """

    __slots__ = ("_kept",)

    def __init__(self) -> None:
        self._kept: deque[bytes | Record] = deque(maxlen=KEPT_RECORDS)

    def keep(self, record: Record) -> None:
        """Nothing is changed in the record from here on."""
        self._kept.append(_pack(record) if _is_usual(record) else record)

    def find(self, request_id: str) -> Record | None:
        """Of several requests with one id the latest."""
        name = _pack(request_id)
        for kept in reversed(self._kept):
            if isinstance(kept, Record):
                if kept.request_id == request_id:
                    return kept
            elif kept.startswith(name, _NAME_AT):
                return _unpacked(kept)
        return None

    def recent(self, count: int) -> Iterator[Record]:
        """The newest first, as they are now. Each is unpacked when it is its turn, so that whoever wants thousands may
        pause in between: all at once hold up the loop for a tenth of a second, half of it for the collector."""
        newest = [kept for kept, _ in zip(reversed(self._kept), range(count), strict=False)]
        return (_unpacked(kept) if isinstance(kept, bytes) else kept for kept in newest)


def _is_usual(record: Record) -> bool:
    """Answered by the first endpoint it was sent to, and let in without a wait: then all that it holds are values."""
    tickets = record.tickets
    return (
        record.outcome == "ok"
        and not record.attempts
        and record.trace is None
        and (not tickets or (len(tickets) == 1 and tickets[0].rotation is None))
    )


def _unpacked(packed: bytes) -> Record:
    record: Any = Record(*_unpack(packed))  # all that it holds is in lists as yet
    record.attempts = record.steps = ()
    record.choices = msgspec.convert(record.choices, tuple[Choice, ...])
    record.tickets = tuple([Ticket(*values) for values in record.tickets])
    if record.promises is not None:
        record.promises = Promises(*record.promises)
    if record.tally is not None:
        record.tally = Tally(*record.tally)
    return cast(Record, record)

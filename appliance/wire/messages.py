"""The messages of the link as bytes: `{"type": WORD, "body": {...}}` in JSON, the body being the fields of a class in
`facts/link.py`.

Fields that are not known are passed over. A type that is not known raises `UnknownMessage`, after which the link goes
on; bytes that are no message raise `Malformed`, after which it must end.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

import attrs
import msgspec

from ..facts import link as facts
from ..facts.link import Message

MAX_MESSAGE_BYTES = 8 << 20
"""The largest message either side sends or takes. A registration of 200 shards with full tails has 4 MiB and 16 GPUs,
16 adapters of 256 addresses each have half a MiB."""

TAIL_BYTES = 16 << 10
"""Most of a report's log tail that is sent, as JSON; older lines are left out."""

TYPES: Mapping[str, type] = {
    "register": facts.Register,
    "look": facts.Look,
    "news": facts.News,
    "log_lines": facts.LogLines,
    "renew": facts.Renew,
    "welcome": facts.Welcome,
    "refused": facts.Refused,
    "start": facts.Start,
    "stop": facts.Stop,
    "forget": facts.Forget,
    "ask_log": facts.AskLog,
    "end_log": facts.EndLog,
    "renewed": facts.Renewed,
    "beat": facts.Beat,
    "trouble": facts.Trouble,
}
"""The word that stands for each class. A new message is a class there and a row here."""

_WORDS = {kind: word for word, kind in TYPES.items()}
_DECODERS: Mapping[str, msgspec.json.Decoder[Any]] = {word: msgspec.json.Decoder(kind) for word, kind in TYPES.items()}


class Malformed(Exception):
    """The peer sent what is no message. The link must end, and name this."""


class UnknownMessage(Exception):
    """The peer sent a message of a type that is not known here. Answer `Trouble` and go on."""


class Unsendable(Exception):
    """A message that cannot be sent, because it is too large or not text. A fault of whoever made it."""


class _Envelope(msgspec.Struct):
    type: str
    body: msgspec.Raw = msgspec.Raw(b"{}")


def encode(message: Message) -> bytes:
    """The bytes of a message. Long tails lose their older lines, and all lines where the whole is still too large.
    Raises Unsendable."""
    word = _WORDS[type(message)]
    try:
        data = msgspec.json.encode({"type": word, "body": _with_tails(message, TAIL_BYTES)})
        if len(data) > MAX_MESSAGE_BYTES:
            data = msgspec.json.encode({"type": word, "body": _with_tails(message, 0)})
    except UnicodeEncodeError as error:
        raise Unsendable(f"{word}: {error.object[error.start : error.end]!r} is not text") from None
    if len(data) > MAX_MESSAGE_BYTES:
        raise Unsendable(f"{word} has {len(data)} bytes, at most {MAX_MESSAGE_BYTES} can be sent")
    return data


def decode(data: bytes | bytearray | str) -> Message:
    """The message of these bytes. Raises UnknownMessage, Malformed."""
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
        decoder = _DECODERS.get(envelope.type)
        if decoder is None:
            raise UnknownMessage(f"there is no message of the type {envelope.type[:64]!r}")
        return cast(Message, decoder.decode(envelope.body))
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Malformed(f"not a message of the link: {str(error)[:400]}") from None


def _with_tails(message: Message, most: int) -> Message:
    """The message with no more than `most` bytes of tail in each report."""
    if not isinstance(message, facts.Register | facts.News) or not any(each.tail for each in message.reports):
        return message
    return attrs.evolve(
        message, reports=tuple(attrs.evolve(each, tail=_last(each.tail, most)) for each in message.reports)
    )


def _last(lines: tuple[str, ...], most: int) -> tuple[str, ...]:
    """As many of the last lines as fit in `most` bytes of JSON: an escaped character takes six."""
    taken = 0
    for number, line in enumerate(reversed(lines)):
        taken += len(msgspec.json.encode(line)) + 1
        if taken > most:
            return lines[len(lines) - number :]
    return lines

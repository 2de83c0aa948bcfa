"""Lines of engines' logs on their way from a node to whoever asked for them.

A node sends as fast as its log grows and cannot be slowed down here, since the same connection carries its reports. So
what waits for a reader is bounded: the oldest lines go, and the reader is told how many.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Protocol

import trio

from appliance.facts.errors import Refusal
from appliance.facts.link import AskLog, Down, EndLog, LogLines
from appliance.nursery.news import News

HELD_BYTES = 1 << 20
"""Most that waits for one reader, in characters."""

MOST_READERS = 64

ANSWER_S = 15.0
"""How long a node may take to send the first lines."""


class Sayable(Protocol):
    """The connection of a node, as far as it matters here."""

    name: str

    def say(self, message: Down) -> None: ...


class Reading:
    """One reader's lines. `ended` is why there will be no more, "" when that was all of them, None while there may."""

    def __init__(self, session: Sayable, request: str) -> None:
        self.session = session
        self.request = request
        self.answered = False
        self.ended: str | None = None
        self.news = News()
        self._lines: deque[str] = deque()
        self._held = 0
        self._dropped = 0

    def add(self, lines: tuple[str, ...]) -> None:
        self.answered = True
        for line in lines:
            self._lines.append(line)
            self._held += len(line) + 1
        while self._held > HELD_BYTES and len(self._lines) > 1:
            self._held -= len(self._lines.popleft()) + 1
            self._dropped += 1
        self.news.tell()

    def end(self, reason: str) -> None:
        if self.ended is None:
            self.ended = reason
        self.news.tell()

    def take(self) -> tuple[str, ...]:
        """All that waits, after a word about what was left out."""
        left_out = (f"[{self._dropped} lines left out: they came faster than they were read]",) if self._dropped else ()
        lines = (*left_out, *self._lines)
        self._lines.clear()
        self._held = self._dropped = 0
        return lines


class Logs:
    """All readers. Plain calls, but for `read`."""

    def __init__(self) -> None:
        self.readings: dict[str, Reading] = {}
        self._numbers = _numbers()

    def arrived(self, session: Sayable, message: LogLines) -> None:
        """Lines of a log. Those of a reader that has left are thrown away; the node was told."""
        reading = self.readings.get(message.request)
        if reading is None or reading.session is not session:
            return
        reading.add(message.lines)
        if message.ended:
            reading.end(message.reason)

    def parted(self, session: Sayable, reason: str) -> None:
        """The node has no connection any more."""
        for reading in self.readings.values():
            if reading.session is session:
                reading.end(reason)

    async def read(
        self, find: Callable[[], tuple[Sayable, str]], lines: int, follow: bool
    ) -> AsyncGenerator[tuple[str, ...], None]:
        """The last `lines` lines of a shard's log in pieces, with `follow` also later ones, until it ends.

        `find` gives the node's connection and the shard's id, or raises Refusal. Close the generator (`aclosing`): the
        node is told then. Raises Refusal, also where it ends before its time.
        """
        session, shard_id = find()
        if len(self.readings) >= MOST_READERS:
            raise Refusal(503, "too_many_readers", f"{MOST_READERS} logs are being read already; end one of them")
        reading = Reading(session, next(self._numbers))
        self.readings[reading.request] = reading
        try:
            session.say(AskLog(reading.request, shard_id, lines, follow))
            while True:
                piece = reading.take()
                if piece:
                    yield piece
                    continue
                if reading.ended is not None:
                    break
                with trio.move_on_after(float("inf") if reading.answered else ANSWER_S) as waiting:
                    await reading.news.wait()
                if waiting.cancelled_caught:
                    raise Refusal(504, "node_silent", f"{session.name} has sent nothing of the log for {ANSWER_S:g} s")
            if reading.ended:
                raise Refusal(502, "log_ended", reading.ended)
        finally:
            del self.readings[reading.request]
            if reading.ended is None:
                session.say(EndLog(reading.request))


def _numbers() -> Iterator[str]:
    number = 0
    while True:
        number += 1
        yield str(number)

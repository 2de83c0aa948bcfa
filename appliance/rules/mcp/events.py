"""Server-sent events read whole, however large: an answer of a tool may be megabytes in one data line.

(`wire/sse.py` watches streams that only pass by, and keeps the edges of what is large.)
"""

from __future__ import annotations

import attrs


class EventTooLarge(Exception):
    """An event, or a line that never ends, is larger than the bound."""


@attrs.frozen
class Event:
    """`data` is its lines joined by LF. `id` "" and `retry_ms` None where the event has none."""

    data: bytes
    type: str = "message"
    id: str = ""
    retry_ms: int | None = None


class Events:
    """Cuts a stream into events of at most `bound` bytes. Neither comments nor an unfinished end are events."""

    def __init__(self, bound: int) -> None:
        self._bound = bound
        self._buffer = bytearray()
        self._searched = 0
        self._first = True
        self._size = 0
        self._data: list[bytes] = []
        self._type = ""
        self._id = ""
        self._retry_ms: int | None = None

    def feed(self, piece: bytes) -> list[Event]:
        """The events that `piece` completes. Raises EventTooLarge."""
        self._buffer += piece
        found: list[Event] = []
        start = 0
        while (end := self._line_end(start)) is not None:
            line, start = bytes(self._buffer[start : end[0]]), end[1]
            event = self._line(line)
            if event is not None:
                found.append(event)
        del self._buffer[:start]
        self._searched = max(0, len(self._buffer) - 1)  # a CR at the very end waits for what follows it
        if len(self._buffer) + self._size > self._bound:
            raise EventTooLarge(f"an event of more than {self._bound} bytes")
        return found

    def _line_end(self, start: int) -> tuple[int, int] | None:
        """Where the next line ends and where the one after it begins."""
        buffer, search = self._buffer, max(start, self._searched)
        self._searched = 0
        feed = buffer.find(b"\n", search)
        carriage = buffer.find(b"\r", search, feed if feed >= 0 else len(buffer))
        if carriage < 0:
            return (feed, feed + 1) if feed >= 0 else None
        if carriage + 1 == len(buffer):
            return None
        return carriage, carriage + (2 if buffer[carriage + 1] == 0x0A else 1)

    def _line(self, line: bytes) -> Event | None:
        if self._first:
            self._first = False
            line = line.removeprefix(b"\xef\xbb\xbf")
        if not line:
            event = Event(b"\n".join(self._data), self._type or "message", self._id, self._retry_ms)
            told = bool(self._data or self._id) or self._retry_ms is not None
            self._clear()
            return event if told else None
        self._size += len(line)
        if self._size > self._bound:
            raise EventTooLarge(f"an event of more than {self._bound} bytes")
        name, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        match name:
            case b"data":
                self._data.append(value)
            case b"event":
                self._type = value.decode("utf-8", "replace")
            case b"id" if b"\0" not in value:
                self._id = value.decode("utf-8", "replace")
            case b"retry" if value.isdigit() and len(value) < 10:
                self._retry_ms = int(value)
        return None

    def _clear(self) -> None:
        self._size = 0
        self._data = []
        self._type = self._id = ""
        self._retry_ms = None

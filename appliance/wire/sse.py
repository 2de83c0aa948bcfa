"""Server-sent events: where one ends.

The bytes themselves are passed on untouched; this only watches. An event ends at an empty line; line ends may be LF,
CRLF or CR, and a cut may fall anywhere, also inside a code point or between CR and LF.
"""

from __future__ import annotations

import re

_BOUNDARY = re.compile(rb"(?>\r\n|\n|\r)(?>\r\n|\n|\r)")
_LINE_END = re.compile(rb"\r\n|\n|\r")

KEPT_EDGE_BYTES = 131072
"""Of an event larger than four times this only the first and the last part are kept for looking at: a generated picture
may be megabytes, and what is looked for (type, usage, error) stands at its edges."""

BOM = b"\xef\xbb\xbf"
PING = b": ping\n\n"
"""A comment, which every client ignores: keeps proxies and load balancers from ending a silent stream."""


class EventCutter:
    """Cuts a stream of payload pieces into events."""

    __slots__ = ("_held",)

    def __init__(self) -> None:
        self._held = b""

    @property
    def pending(self) -> bool:
        """An event has begun and not ended, so nothing may be put in here."""
        return bool(self._held.strip(b"\r\n"))

    def feed(self, piece: bytes) -> list[bytes]:
        """The events that `piece` completes, each with its empty line."""
        # The common case by far: one chunk is one event. Three C calls see that; the pattern would cost ten times more.
        if not self._held and piece.find(b"\n\n") == len(piece) - 2 and piece.find(b"\r") < 0 and len(piece) > 2:
            return [piece]
        return self._cut(piece)

    def finish(self) -> bytes:
        """What is left without an empty line after it, at the end of the stream."""
        rest, self._held = self._held, b""
        return rest

    def _cut(self, piece: bytes) -> list[bytes]:
        data = self._held + piece
        search = max(0, len(self._held) - 3)  # at most three bytes of an unfinished boundary can lie before the seam
        events: list[bytes] = []
        start = 0
        while match := _BOUNDARY.search(data, search):
            search = match.end()
            events.append(data[start:search])
            start = search
        held = data[start:]
        if len(held) > 4 * KEPT_EDGE_BYTES:
            held = held[:KEPT_EDGE_BYTES] + held[-KEPT_EDGE_BYTES:]
        self._held = held
        return events


def data_of(event: bytes) -> bytes:
    """The event's data, its lines joined by LF as the standard says; b"" for a comment or an event without any."""
    if event.startswith(b"data: ") and event.find(b"\n") >= len(event) - 2 and event.find(b"\r") < 0:
        return event[6:-2] if event.endswith(b"\n\n") else event[6:].rstrip(b"\r\n")
    lines = []
    for line in _LINE_END.split(event):
        if line.startswith(b"data:"):
            lines.append(line[6:] if line.startswith(b"data: ") else line[5:])
    return b"\n".join(lines)


def type_of(event: bytes) -> bytes:
    """The event's `event:` field; b"" when it has none."""
    found = b""
    for line in _LINE_END.split(event):
        if line.startswith(b"event:"):
            found = line[6:].strip(b" ")
    return found


def is_comment(event: bytes) -> bool:
    """Nothing in it but comments: keep-alives, which start no answer."""
    return all(not line or line.startswith(b":") for line in _LINE_END.split(event))

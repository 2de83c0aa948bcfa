"""Where bodies end: the chunked framing, read strictly and without copying more than needed."""

from __future__ import annotations

import re

MAX_SIZE_LINE_BYTES = 256
MAX_TRAILER_BYTES = 8192
_SIZE = re.compile(rb"([0-9A-Fa-f]{1,15})(?:[ \t]*;[\t\x20-\x7e\x80-\xff]*)?")
_SIZE_BEGINNING = re.compile(rb"(?:[0-9A-Fa-f]{1,15}(?:[ \t]*(?:;[\t\x20-\x7e\x80-\xff]*)?)?\r?)?")
_TRAILER = re.compile(rb"(?:[!#$%&'*+\-.^_`|~0-9A-Za-z]+:[\t\x20-\x7e\x80-\xff]*\r\n)*\r\n")


class BadFraming(Exception):
    """Bytes that are no chunked body."""


class Chunked:
    """Cuts a chunked body into its payload.

    `feed` returns the payload pieces in order. `done` is set when the last chunk and its trailers have been read;
    `rest` holds what came after. `held` is the beginning of a size line, or of the last chunk, that is not all there
    yet; `between` tells that what came before it ended a chunk, so that whoever passes the bytes on without what is
    held may put a chunk of its own in there. With `plain`, chunk extensions and trailers are refused: the bytes are
    passed on in this very framing, and both are hop-by-hop, not ours to pass on. (Nobody sends them unasked: trailers
    want `TE: trailers`.)
    """

    __slots__ = ("_left", "_plain", "done", "held", "last", "rest")

    def __init__(self, *, plain: bool = False) -> None:
        self.held = b""
        self._left = 0  # payload bytes still to come in this chunk, plus two for its CRLF
        self._plain = plain
        self.done = False
        self.last = b""
        self.rest = b""

    @property
    def between(self) -> bool:
        return self._left == 0

    @property
    def left(self) -> int:
        """How many bytes of payload are still to come in the present chunk."""
        return max(0, self._left - 2)

    def feed(self, data: bytes) -> list[bytes]:
        """Take the next bytes of the connection. Raises BadFraming; the body is lost then."""
        pieces: list[bytes] = []
        if self.held:
            data = self.held + data
            self.held = b""
        position, end = 0, len(data)
        left = self._left
        while position < end:
            if left > 2:
                piece = data[position : position + left - 2]
                pieces.append(piece)
                position += len(piece)
                left -= len(piece)
                continue
            if left:
                # left is 2: the CRLF after the payload
                if end - position < 2:
                    self._check_prefix(data[position:], b"\r\n")
                    self.held = data[position:]
                    break
                if data[position : position + 2] != b"\r\n":
                    raise BadFraming("a chunk longer than its size")
                position += 2
                left = 0
                continue
            line_end = data.find(b"\r\n", position, position + MAX_SIZE_LINE_BYTES)
            if line_end < 0:
                if end - position >= MAX_SIZE_LINE_BYTES:
                    raise BadFraming("a chunk size line without end")
                # Refuse at the first wrong byte, not when 256 have come: a peer that ends lines with a bare LF would
                # wait for us, and we for it.
                if _SIZE_BEGINNING.fullmatch(data, position) is None:
                    raise BadFraming("malformed chunk size")
                self.held = data[position:]
                break
            match = _SIZE.fullmatch(data, position, line_end)
            if match is None:
                raise BadFraming("malformed chunk size")
            if self._plain and match.end(1) != line_end:
                raise BadFraming("a chunk extension")
            size = int(match[1], 16)
            if size == 0:
                self._left = 0
                self._end(data, position, line_end)
                return pieces
            position = line_end + 2
            left = size + 2
        self._left = left
        return pieces

    def _end(self, data: bytes, start: int, line_end: int) -> None:
        """The last chunk has begun at `start`; it is held back whole until its trailers are there."""
        after = line_end + 2
        if data[after : after + 2] == b"\r\n":
            stop = after + 2
        else:
            stop = data.find(b"\r\n\r\n", after) + 4
            if stop < 4:
                if len(data) - after >= MAX_TRAILER_BYTES:
                    raise BadFraming("trailers without end")
                if self._plain and not b"\r".startswith(data[after:]):
                    raise BadFraming("a trailer")
                if data.count(b"\n", after) != data.count(b"\r\n", after):
                    raise BadFraming("malformed trailer")
                self.held = data[start:]
                return
        if self._plain and stop != after + 2:
            raise BadFraming("a trailer")
        if stop - after > MAX_TRAILER_BYTES:
            raise BadFraming("trailers without end")
        if _TRAILER.fullmatch(data, after, stop) is None:
            raise BadFraming("malformed trailer")
        self.done = True
        self.last = data[start:stop]
        self.rest = data[stop:]

    @staticmethod
    def _check_prefix(data: bytes, expected: bytes) -> None:
        if not expected.startswith(data):
            raise BadFraming("a chunk longer than its size")


def chunk(data: bytes) -> bytes:
    """`data`, not empty, as one chunk."""
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST_CHUNK = b"0\r\n\r\n"

"""An answer on a client's connection; the one place where a refusal becomes HTTP."""

from __future__ import annotations

import http
import math
import time
from email.utils import formatdate

from ..facts.call import Fields
from ..facts.errors import Refusal
from ..gateway.errors import error_body
from ..gateway.reply import ClientLeft
from ..nursery.sleeper import Sleeper
from ..wire import framing
from ..wire.line import Line

JSON = b"application/json"
_STATUS_LINES = {
    status.value: b"HTTP/1.1 %d %b\r\n" % (status.value, status.phrase.encode()) for status in http.HTTPStatus
}
_date: tuple[int, bytes] = (0, b"")
_MOST_KNOWN_LINES = 1024
_LONGEST_KNOWN_LINE = 512


class _Lines(dict[tuple[bytes, bytes], bytes]):
    """Header lines by field. Engines send the same ones again and again, or at least for a second."""

    def __missing__(self, field: tuple[bytes, bytes]) -> bytes:
        line = b"%b: %b\r\n" % field
        if len(line) <= _LONGEST_KNOWN_LINE:
            if len(self) >= _MOST_KNOWN_LINES:
                self.clear()
            self[field] = line
        return line


_lines = _Lines()


class HttpReply:
    """The answer to one request. `extra` is further header lines (CORS) that go on whatever is answered.

    `keep_alive` tells whether the connection may serve another request afterwards; anybody may set it to False before
    the head leaves. `until_close` tells that the body ends with the connection: where it breaks off, only a reset can
    say so.
    """

    __slots__ = (
        "_head", "_line", "_no_body", "anthropic", "chunked", "ended", "extra", "keep_alive", "line", "minor", "peer",
        "request_id", "sent_bytes", "sleeper", "stall_s", "started", "status", "until_close",
    )  # fmt: skip

    def __init__(
        self, line: Line, sleeper: Sleeper, minor: int, keep_alive: bool, request_id: bytes, stall_s: float
    ) -> None:
        self.line: Line | None = line
        self._line = line
        self.sleeper = sleeper
        self.minor = minor
        self.keep_alive = keep_alive
        self.request_id = request_id
        self.stall_s = stall_s
        self.chunked = minor == 1
        self.anthropic = False
        self.ended = False
        self.extra = b""
        self.peer = ""
        self.sent_bytes = 0
        self.started = False
        self.status = 0
        self.until_close = False
        self._head = b""
        self._no_body = False

    def without_body(self) -> None:
        """The request was a HEAD."""
        self._no_body = True

    def start(self, status: int, fields: Fields, length: int | None) -> None:
        self.status = status
        parts = [_STATUS_LINES.get(status) or b"HTTP/1.1 %d Unknown\r\n" % status]
        lines = _lines
        parts += [lines[field] for field in fields]
        parts.append(b"x-request-id: %b\r\n" % self.request_id)
        if length is not None:
            self.chunked = False
            if status != 204:
                parts.append(b"content-length: %d\r\n" % length)
        elif self.chunked:
            parts.append(b"transfer-encoding: chunked\r\n")
        else:
            self.keep_alive = False  # an HTTP/1.0 client learns the end of the body from the end of the connection
            self.until_close = True
        if not self.keep_alive:
            parts.append(b"connection: close\r\n")
        elif self.minor == 0:
            parts.append(b"connection: keep-alive\r\n")
        parts.append(self.extra)
        parts.append(b"\r\n")
        self._head = b"".join(parts)

    async def send(self, data: bytes, *, framed: bool = False) -> None:
        if self.chunked and not framed and data:
            data = framing.chunk(data)
        rest = self._hand_over(data)
        if rest:
            await self._send_rest(rest)

    def put(self, data: bytes) -> None:
        data = self._head + (framing.chunk(data) if self.chunked else data)
        self.started = True
        self.sent_bytes += len(data)
        try:
            self._head = data[self._line.try_send(data) :]
        except OSError:
            raise ClientLeft from None
        self.sent_bytes -= len(self._head)  # counted when it leaves, with the next piece

    async def end(self, last: bytes = b"", *, framed: bool = False) -> None:
        if self.chunked and not framed:
            last = framing.chunk(last) + framing.LAST_CHUNK if last else framing.LAST_CHUNK
        rest = self._hand_over(last)
        if rest:
            await self._send_rest(rest)
        self.ended = True

    def give_up(self) -> None:
        self.keep_alive = False

    async def whole(self, status: int, body: bytes, content_type: bytes = JSON, fields: Fields | None = None) -> None:
        """An answer of our own."""
        self.start(status, [(b"content-type", content_type), (b"date", _now()), *(fields or [])], len(body))
        await self.send(body)
        self.ended = True

    async def refuse(self, refusal: Refusal) -> None:
        """The answer is no: `docs/interface.md`, "Refusals"."""
        fields: Fields = [(b"x-appliance-reason", (refusal.reason or refusal.code).encode())]
        if refusal.retry_after_s is not None:
            fields.append((b"retry-after", b"%d" % max(1, math.ceil(refusal.retry_after_s))))
        if not refusal.should_retry:
            fields.append((b"x-should-retry", b"false"))
        fields += [
            (name.lower().encode("latin-1"), value.encode("latin-1", "replace")) for name, value in refusal.headers
        ]
        body = error_body(refusal.status, refusal.code, refusal.message, param=refusal.param, anthropic=self.anthropic)
        await self.whole(refusal.status, body, JSON, fields)

    def _hand_over(self, data: bytes) -> memoryview | None:
        """Give the head and `data` to the socket; what it does not take at once. Raises ClientLeft."""
        if self._no_body:
            data = b""
        if self._head:
            data = self._head + data
            self._head = b""
            self.started = True
        if not data:
            return None
        self.sent_bytes += len(data)
        try:
            sent = self._line.try_send(data)
        except OSError:
            raise ClientLeft from None
        return memoryview(data)[sent:] if sent < len(data) else None

    async def _send_rest(self, rest: memoryview) -> None:
        """The client does not take bytes as fast as they come. It has `stall_s` for each piece it does take. Raises
        ClientLeft, or a cut."""
        sleeper, line = self.sleeper, self._line
        due, name = sleeper.due, sleeper.due_name
        try:
            while rest:
                sleeper.arm(time.monotonic() + self.stall_s, "write_stall_s")
                sent = line.try_send(rest)
                rest = rest[sent:]
                if rest and not line.writable:
                    await sleeper.sleep()
                elif rest and not sent:
                    await line.flush()
        except OSError:
            raise ClientLeft from None
        sleeper.arm(due, name)


def _now() -> bytes:
    """The Date field, made once a second."""
    global _date
    now = int(time.time())
    if _date[0] != now:
        _date = (now, formatdate(now, usegmt=True).encode())
    return _date[1]

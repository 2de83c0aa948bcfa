"""One client's connection: requests in, answers out, one at a time and in order.

The task here reads requests and watches for the client's departure. It does not write the answers of the batch: the
engine's turn does (`Engine.turn`), straight into the socket, so that an event costs no switch of tasks. What the socket
does not take at once stays in `_unsent`, and this task, woken when there is room again, sends it on.
"""

from __future__ import annotations

from http import HTTPStatus

import trio

from ..nursery.sleeper import Cut, Sleeper
from ..wire.framing import LAST_CHUNK, BadFraming, Chunked
from ..wire.head import BadHead, RequestHead, end_of_head, read_request
from ..wire.line import Line
from .answer import JSON, Answer, error_body
from .engine import Engine
from .routes import Request, respond

MAX_BODY_BYTES = 256 * 1024 * 1024
CLOGGED_BYTES = 1024 * 1024
"""Unsent bytes of one client from which on words stay words: a reader that stalls must not cost its whole answer."""

_CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
_PHRASES = {status.value: status.phrase.encode() for status in HTTPStatus}


class Gone(Exception):
    """The client has left, or what it sends cannot be followed any further."""


class Stopped(Cut):
    """The engine ends."""


class Connection:
    """Serves one line until either side closes. Implements `answer.Outlet` for the request at hand."""

    def __init__(self, line: Line, sleeper: Sleeper, engine: Engine) -> None:
        self._line = line
        self._sleeper = sleeper
        self._engine = engine
        self._received = bytearray()
        self._unsent = bytearray()
        self._answer: Answer | None = None
        self._answering = False
        self._lost = False
        self._ending = ""  # "cut" or "reset": how the connection ends once everything is sent
        self._stopping = False
        self._chunked = False
        self._keep_alive = False
        self._request_id = b""
        self._http_10 = False

    async def serve(self) -> None:
        """Answer requests until the end; the line is closed then, and nothing of ours is left in the batch."""
        try:
            while await self._serve_one():
                pass
        except (OSError, Gone, Cut):
            pass
        finally:
            if self._answer is not None:
                self._engine.abandon(self._answer, trio.current_time())
                self._answer = None
            if self._ending == "reset":
                self._line.abort()
            else:
                self._line.close()

    def stop(self) -> None:
        """Answer nothing more; close as soon as what is under way has been sent."""
        self._stopping = True
        if not self._answering and not self._unsent:
            self._sleeper.cut(Stopped())

    def abort(self) -> None:
        """Reset the connection, as the kernel does for a process that died."""
        self._line.abort()
        self._lost = True
        self._sleeper.cut(Stopped())

    async def _serve_one(self) -> bool:
        """One request and its answer; whether another may follow."""
        try:
            head, body = await self._read()
        except BadHead as bad:
            self._refuse(bad.status, str(bad))
            return await self._answered(None)
        except BadFraming as bad:
            self._refuse(400, str(bad))
            return await self._answered(None)
        self._keep_alive = head.keep_alive
        self._http_10 = head.minor == 0
        self._request_id = head.by_name.get(b"x-request-id", b"")
        self._answering = True
        request = Request(head.method.decode(), head.path.decode(), head.by_name, body)
        return await self._answered(respond(self._engine, request, self, trio.current_time()))

    async def _answered(self, answer: Answer | None) -> bool:
        self._answer = answer
        self.flush()
        while (self._answering or self._unsent) and not self._lost:
            if self._line.hung_up:
                raise Gone
            await self._sleeper.sleep()
            self.flush()
            if self._answer is not None and not self.clogged:
                self._engine.catch_up(self._answer, trio.current_time())
                self.flush()
        self._answer = self._answer if self._lost else None
        return not self._lost and not self._ending and self._keep_alive and not self._stopping

    # -- reading ------------------------------------------------------------------------------------------------------

    async def _read(self) -> tuple[RequestHead, bytes]:
        self._keep_alive = False  # until a head says otherwise: a refusal of this one closes
        self._http_10 = False
        self._request_id = b""
        received = self._received
        keepalive_s = self._engine.settings.keepalive_s
        if keepalive_s > 0 and not received:
            self._sleeper.arm(trio.current_time() + keepalive_s, "keepalive_s")
        while (end := end_of_head(received)) < 0:
            await self._receive()
            self._sleeper.disarm()
        self._sleeper.disarm()
        head = read_request(bytes(received[:end]))
        del received[:end]
        if head.length > MAX_BODY_BYTES:
            raise BadHead(f"a body of more than {MAX_BODY_BYTES} bytes", status=413)
        if head.expects_continue and not received:
            self._unsent += _CONTINUE
            self.flush()
        if head.chunked:
            return head, await self._read_chunked()
        while len(received) < head.length:
            await self._receive()
        body = bytes(received[: head.length])
        del received[: head.length]
        return head, body

    async def _read_chunked(self) -> bytes:
        body, cutter = bytearray(), Chunked()
        while not cutter.done:
            if not self._received:
                await self._receive()
            for piece in cutter.feed(bytes(self._received)):
                body += piece
            self._received.clear()
            if len(body) > MAX_BODY_BYTES:
                raise BadHead(f"a body of more than {MAX_BODY_BYTES} bytes", status=413)
        self._received += cutter.rest
        return bytes(body)

    async def _receive(self) -> None:
        data = await self._line.recv()
        if not data:
            raise Gone
        self._received += data

    # -- the outlet ---------------------------------------------------------------------------------------------------

    @property
    def clogged(self) -> bool:
        return len(self._unsent) > CLOGGED_BYTES

    def head(self, status: int, content_type: str, length: int | None = None, headers: bytes = b"") -> None:
        self._chunked = length is None and not self._http_10
        if length is None and self._http_10:
            self._keep_alive = False
        framing = b"content-length: %d" % length if length is not None else b"transfer-encoding: chunked"
        lines = [
            b"HTTP/1.1 %d %b" % (status, _PHRASES.get(status, b"Status")),
            b"content-type: " + content_type.encode(),
        ]
        if length is not None or self._chunked:
            lines.append(framing)
        lines.append(b"x-sim-id: " + self._engine.name.encode())
        if self._request_id:
            lines.append(b"x-request-id: " + self._request_id)
        if not self._keep_alive:
            lines.append(b"connection: close")
        elif self._http_10:
            lines.append(b"connection: keep-alive")
        self._unsent += b"\r\n".join(lines) + b"\r\n" + headers + b"\r\n"

    def pieces(self, pieces: list[bytes]) -> None:
        unsent = self._unsent
        if self._chunked:
            for piece in pieces:
                unsent += b"%x\r\n%b\r\n" % (len(piece), piece)
        else:
            for piece in pieces:
                unsent += piece

    def raw(self, data: bytes) -> None:
        self._unsent += data

    def end(self) -> None:
        if self._chunked:
            self._unsent += LAST_CHUNK
            self._chunked = False
        self._answering = False
        self._sleeper.wake()

    def cut(self) -> None:
        self._ending = "cut"
        self._answering = False
        self._sleeper.wake()

    def reset(self) -> None:
        self._ending = "reset"
        self._answering = False
        self._sleeper.wake()

    def flush(self) -> None:
        if not self._unsent or self._lost:
            return
        try:
            with memoryview(self._unsent) as view:
                sent = self._line.try_send(view)
        except OSError:
            self._lost = True
            self._unsent.clear()
            self._sleeper.wake()
        else:
            del self._unsent[:sent]

    def _refuse(self, status: int, message: str) -> None:
        body = error_body(status, "BadRequestError", message)
        self.head(status, JSON, len(body))
        self._unsent += body

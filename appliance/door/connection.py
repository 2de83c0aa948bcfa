"""One client's connection: heads and bodies in order, answers in the same order.

    while the connection lives:
        a head within `head_s` of its first byte          -> 408, 431, 400 and close
        may it come in? (`Site.admit`, before any body)   -> a refusal
        the body, whole, its size reserved beforehand     -> 408, 413, 503
        the answer (`Site.answer`)                        -> bytes, or a refusal while nothing was sent

The task of the connection does all of it. A client that leaves during an answer cuts the task's sleep with `Left`, and
a FIN after the whole request counts as leaving (as in nginx and in Go's server): a client that half-closes its
connection to say "that was all" would otherwise be indistinguishable from one that is gone.
"""

from __future__ import annotations

import itertools
import secrets
import time
from collections.abc import Awaitable
from typing import Protocol

import attrs
import structlog

from ..facts.errors import Refusal
from ..gateway.reply import ClientLeft, Left
from ..nursery.sleeper import Cut, DeadlinePassed, Sleeper, breathe
from ..wire import framing, head
from ..wire.head import BadHead, RequestHead
from ..wire.line import UNACKNOWLEDGED_S, Line, silent_s
from .buffers import Buffers, Gathered
from .reply import HttpReply

LINGER_S = 2.0
"""How long input that nobody will read is thrown away before a connection is closed."""
IDLE_AT_STOP_S = 5.0
"""At a stop, how long a kept-alive connection may still bring its next request, which is then answered with
`Connection: close`: a client that is about to send one does not run into a closed socket."""
SLOWEST_BODY_BYTES_PER_S = 4096
"""A body may take `write_stall_s` plus its size at this rate; slower ones hold their reservation for nothing."""
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"

log = structlog.get_logger("door")
_process = secrets.token_hex(4).encode()
_requests = itertools.count(1)


@attrs.frozen
class Limits:
    """What a connection may take: seconds and bytes, named as in the configuration."""

    head_s: float
    keepalive_s: float
    write_stall_s: float
    max_body_bytes: int


class Site(Protocol):
    """What is served on a connection."""

    draining: bool
    carried: bool
    """Whether `answer` pauses (`nursery/carried`), and so uses Trio only after a checkpoint or a sleep."""

    def admit(self, head: RequestHead, reply: HttpReply, peer: str) -> object:
        """Look at the head before any of the body is read; what is returned is handed to `answer`. Raises Refusal."""

    def answer(self, plan: object, head: RequestHead, body: bytes, reply: HttpReply) -> Awaitable[None]:
        """Answer. Raises Refusal while nothing was sent, in the call or when it is awaited."""

    def record(self, head: RequestHead | None, reply: HttpReply, peer: str, started: float) -> None:
        """The request is over, whatever came of it."""


class Connection:
    """One accepted connection. `serve` runs until it ends, and closes the line. `limits` may be changed meanwhile."""

    __slots__ = (
        "_answering",
        "_buffer",
        "_buffers",
        "_reserved",
        "_sleeper",
        "_unread",
        "idle",
        "limits",
        "line",
        "peer",
        "site",
    )

    def __init__(self, line: Line, sleeper: Sleeper, peer: str, site: Site, limits: Limits, buffers: Buffers) -> None:
        self.line = line
        self.peer = peer
        self.site = site
        self.idle = True
        self._sleeper = sleeper
        self.limits = limits
        self._buffers = buffers
        self._buffer = b""
        self._reserved = 0
        self._unread = False
        self._answering = False
        line.on_hang_up = self._hung_up

    async def serve(self) -> None:
        """Never raises but for Trio's cancellation."""
        line, sleeper = self.line, self._sleeper
        requests = 0  # since the last pause
        blank = False  # an empty line was skipped before this request
        try:
            while True:
                while not self._buffer or self._buffer == b"\r":
                    keepalive_s = IDLE_AT_STOP_S if self.site.draining else self.limits.keepalive_s
                    sleeper.arm(time.monotonic() + keepalive_s, "keepalive_s")
                    while (data := line.try_recv()) is None:
                        await sleeper.pause()
                        requests = 0
                    if not data:
                        return
                    self._buffer += data
                # One empty line belongs to no request: some clients end a body with it (RFC 9112, 2.2).
                if not blank and self._buffer.startswith(b"\r\n"):
                    blank = True
                    self._buffer = self._buffer[2:]
                    continue
                self.idle = False
                if not await self._serve_one():
                    break
                blank = False
                self.idle = True
                requests += 1
                if requests & 15 == 0:
                    await breathe(requests)
            if not line.closed:
                await self._part()
        except (OSError, Cut, ClientLeft):
            return  # the client is gone or silent: nobody is left to tell
        finally:
            line.on_hang_up = None
            line.close()

    def go_idle_until(self, due: float) -> None:
        """A stop has begun: a connection that waits for its next request does so no longer than until `due`."""
        if self.idle and due < self._sleeper.due:
            self._sleeper.arm(due, "keepalive_s")

    def end_if_silent(self) -> None:
        """End it where the client's machine is gone: not even the kernel's probes are answered."""
        if silent_s(self.line.sock) > UNACKNOWLEDGED_S:
            self._sleeper.cut(Left())

    async def _serve_one(self) -> bool:
        """One request; whether another may follow."""
        limits, site, sleeper = self.limits, self.site, self._sleeper
        request: RequestHead | None = None
        reply: HttpReply | None = None
        started = 0.0
        whole = False  # the request was read to its end
        try:
            end = head.end_of_head(self._buffer)
            if end < 0:
                end = await self._rest_of_head()
            request = head.read_request(self._buffer[:end])
            self._buffer = self._buffer[end:]
            sleeper.disarm()  # what held until here must not strike in the middle of the answer
            started = time.monotonic()
            keep = request.keep_alive and not site.draining
            reply = HttpReply(self.line, sleeper, request.minor, keep, _request_id(request), limits.write_stall_s)
            if request.method == b"HEAD":
                reply.without_body()
            plan = site.admit(request, reply, self.peer)
            body = b""
            if request.length or request.chunked:
                body = self._body_at_hand(request) or await self._body(request)
            whole = True
            self._answering = True
            if self.line.hung_up:
                raise ClientLeft
            await site.answer(plan, request, body, reply)
        except BadHead as bad:
            self._unread = True
            code = "header_too_large" if bad.status == 431 else "bad_request"
            reply = await self._refuse(reply, Refusal(bad.status, code, str(bad)), keep=False)
        except DeadlinePassed as late:
            if late.name != "head_s":
                raise
            self._unread = True
            reply = await self._refuse(
                reply, Refusal(408, "request_timeout", "the request came too slowly", retry_after_s=1), keep=False
            )
        except Refusal as refusal:
            keep = not self._unread and (whole or self._skip_body(request))
            self._unread = not keep
            reply = await self._refuse(reply, refusal, keep=keep)
        except (Cut, ClientLeft):
            raise
        except Exception as error:
            if isinstance(error, OSError) and not self._answering:
                raise  # of the client's own socket; while answering, the reply has a word for that
            log.exception(
                "request failed inside the router",
                request_id=reply.request_id.decode() if reply else "",
                peer=self.peer,
            )
            if reply is not None and reply.started:
                return False
            self._unread = True
            reply = await self._refuse(
                reply, Refusal(500, "internal_error", "the router failed; its log names this request id"), keep=False
            )
        finally:
            self._answering = False
            sleeper.disarm()
            if self._reserved:
                self._buffers.release(self._reserved)
                self._reserved = 0
            if reply is not None:
                site.record(request, reply, self.peer, started)
                if reply.until_close and reply.started and not reply.ended:
                    self.line.abort()  # after an ordinary close the part that was sent would look whole
        return reply.keep_alive and reply.ended

    # -- head and body -----------------------------------------------------------------------------------------------

    async def _rest_of_head(self) -> int:
        """Wait for the rest of a head that has begun; where it ends in the buffer."""
        self._sleeper.arm(time.monotonic() + self.limits.head_s, "head_s")
        head.check_beginning(self._buffer)
        while True:
            data = await self.line.recv()
            if not data:
                raise BadHead("the connection ended within a request header")
            self._buffer += data
            end = head.end_of_head(self._buffer)
            if end >= 0:
                return end

    def _body_at_hand(self, request: RequestHead) -> bytes:
        """The body where it came with its head, as nearly all do; otherwise b"". Raises Refusal."""
        length, buffer = request.length, self._buffer
        if not length:
            return b""
        if length > self.limits.max_body_bytes:
            raise self._too_large()
        self._buffers.reserve(length)
        self._reserved = length
        have = len(buffer)
        if have < length:
            return b""
        if have == length:
            self._buffer = b""
            return buffer
        self._buffer = buffer[length:]
        return buffer[:length]

    async def _body(self, request: RequestHead) -> bytes:
        """A body still on its way; its length is reserved already. Raises Refusal; then some of it is unread."""
        self._unread = True
        try:
            if request.expects_continue and not self._buffer:
                self._sleeper.arm(time.monotonic() + self.limits.write_stall_s, "body")
                await self.line.send_all(CONTINUE)
            body = await (self._chunked_body() if request.chunked else self._sized_body(request.length))
        except DeadlinePassed:
            raise Refusal(408, "request_timeout", "the request body came too slowly", retry_after_s=1) from None
        self._unread = False
        return body

    async def _sized_body(self, length: int) -> bytes:
        body = Gathered()
        piece, self._buffer = self._buffer, b""
        begun = time.monotonic()
        while True:
            missing = length - body.size
            if len(piece) >= missing:
                # what the client sent right behind is its next request: that part waits
                body.add(piece[:missing])
                self._buffer = piece[missing:]
                return body.whole()
            body.add(piece)
            piece = await self._next_piece(begun, body.size)

    async def _chunked_body(self) -> bytes:
        cutter = framing.Chunked()
        body = Gathered()
        begun = time.monotonic()
        data, self._buffer = self._buffer, b""
        while True:
            if data:
                try:
                    piece = b"".join(cutter.feed(data))
                except framing.BadFraming as error:
                    raise Refusal(400, "bad_request", f"malformed chunked body: {error}") from None
                if body.size + len(piece) + cutter.left > self.limits.max_body_bytes:
                    raise self._too_large()
                self._buffers.reserve(len(piece))
                self._reserved += len(piece)
                body.add(piece)
                if cutter.done:
                    self._buffer = cutter.rest
                    return body.whole()
            data = await self._next_piece(begun, body.size)

    async def _next_piece(self, begun: float, received: int) -> bytes:
        self._sleeper.arm(begun + self.limits.write_stall_s + received / SLOWEST_BODY_BYTES_PER_S, "body")
        piece = await self.line.recv()
        if not piece:
            raise ClientLeft
        return piece

    def _too_large(self) -> Refusal:
        self._unread = True
        limit = self.limits.max_body_bytes
        return Refusal(
            413,
            "body_too_large",
            f"the request body is larger than {limit} bytes (server.max_body_bytes)",
            should_retry=False,
        )

    def _skip_body(self, request: RequestHead | None) -> bool:
        """After a refusal at the head: whether the body could be passed over, so that the connection stays in step."""
        if request is None or request.chunked or request.length > len(self._buffer):
            return False
        self._buffer = self._buffer[request.length :]
        return True

    # -- ends ---------------------------------------------------------------------------------------------------------

    async def _refuse(self, reply: HttpReply | None, refusal: Refusal, *, keep: bool) -> HttpReply:
        self._sleeper.disarm()
        if reply is None:
            reply = HttpReply(self.line, self._sleeper, 1, False, _fresh_id(), self.limits.write_stall_s)
        reply.keep_alive = reply.keep_alive and keep
        if reply.started:
            reply.give_up()
        else:
            await reply.refuse(refusal)
        return reply

    async def _part(self) -> None:
        """End the connection so that the client gets all it was sent."""
        line, sleeper = self.line, self._sleeper
        if line.unsent:
            sleeper.arm(time.monotonic() + self.limits.write_stall_s, "write_stall_s")
            await line.flush()
        if self._unread or self._buffer or line.readable:
            # Input that is not read makes a close a reset, and the client might lose what it has not read yet.
            sleeper.arm(time.monotonic() + LINGER_S, "linger")
            await line.part()

    def _hung_up(self) -> None:
        if self._answering:
            self._sleeper.cut(Left())


def _request_id(request: RequestHead) -> bytes:
    """The client's own id where it is harmless, else ours: a process prefix and a number, unique and no secret."""
    given = request.by_name.get(b"x-request-id")
    if (
        given is not None
        and 0 < len(given) <= 128
        and given.isascii()
        and given.decode().isprintable()
        and b" " not in given
    ):
        return given
    return _fresh_id()


def _fresh_id() -> bytes:
    return b"req-%b-%x" % (_process, next(_requests))

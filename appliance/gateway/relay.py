"""One attempt: a request to one endpoint, and its answer to the client.

Bytes go through as they are. What changes is written here: the hop's own header fields, an error body that is not in
the shape clients understand, and an engine's refusal of *our* key, which is no fault of the caller's.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs
import msgspec

from ..facts.call import Call, Fields
from ..nursery.sleeper import Sleeper
from ..wire import framing
from ..wire.head import ResponseHead
from ..wire.line import Line
from .reply import Reply
from .stream import Stream
from .upstream import Upstream, UpstreamFailed, read_head
from .usage import Tally

HELD_BYTES = 262144
"""An answer up to this size is collected before its head is passed on, so that one that breaks off is a 502, not a
truncated 200."""
ERROR_BYTES = 1048576
"""Of an error answer, at most this much is read."""
TAIL_BYTES = 16384
"""Of an answer too large to hold, the last part that is kept to find its usage in."""

_NOT_FROM_ENGINES = frozenset(
    (
        b"connection", b"keep-alive", b"proxy-authenticate", b"proxy-connection", b"te", b"trailer",
        b"transfer-encoding", b"upgrade", b"server", b"set-cookie", b"content-length", b"x-request-id",
        b"x-appliance-reason", b"alt-svc", b"strict-transport-security",
    )
)  # fmt: skip
_TO_ENGINES = (b"content-type", b"accept", b"traceparent", b"tracestate", b"user-agent")
_JSON: tuple[bytes, bytes] = (b"content-type", b"application/json")


@attrs.frozen
class Promises:
    """The deadlines of an exchange, in seconds; `stream_total_s` 0: none."""

    dial_s: float
    first_token_s: float
    idle_s: float
    total_s: float
    stream_total_s: float
    write_stall_s: float
    sse_ping_s: float


@attrs.define(eq=False)
class ErrorAnswer(Exception):
    """An engine's answer with an error status (400 and up), whole, before anything was passed on."""

    status: int
    fields: Fields
    body: bytes


class Attempt:
    """One try at one endpoint. `tally` counts the answer, `passed_on` tells that the client has got a part of it."""

    passed_on = False
    sent = False
    stream: Stream | None = None

    def __init__(
        self,
        call: Call,
        body: bytes,
        upstream: Upstream,
        reply: Reply,
        promises: Promises,
        dispatched_at: float,
        answered: Callable[[float], None],
    ) -> None:
        """`body` is what is sent (the call's own, or one with another model name); `answered` is called with the time
        at which the first of the answer is passed on."""
        self._call = call
        self._body = body
        self._answered = answered
        self._upstream = upstream
        self._reply = reply
        self._promises = promises
        self.dispatched_at = dispatched_at
        self.tally = Tally()
        if call.route.name == "responses":
            self.tally.wants_id = True

    async def run(self, now: float, *, fresh: bool = False) -> int:
        """Send the request and pass its answer on; returns the status passed on. `fresh` forbids an idle connection.

        Raises ErrorAnswer, FirstEventIsError, UpstreamFailed, ClientLeft, or a cut (a deadline, a lost endpoint). When
        it raises, the connection is gone, so the engine sees that nobody waits any more.
        """
        call, upstream, reply = self._call, self._upstream, self._reply
        sleeper = reply.sleeper
        line = None if fresh else upstream.take(sleeper, now)
        reused = line is not None
        if line is None:
            sleeper.arm(now + self._promises.dial_s, "dial_s")
            line = await upstream.dial(sleeper)
        keep = False
        try:
            if call.stream:
                sleeper.arm(self.dispatched_at + self._promises.first_token_s, "first_token_s")
            else:
                sleeper.arm(self.dispatched_at + self._promises.total_s, "total_s")
            request = self._request(now)
            try:
                taken = line.try_send(request)
                if taken < len(request):
                    await line.send_all(memoryview(request)[taken:])
            except OSError as error:
                # An engine that refuses a large body answers and closes while we still send: its answer is worth more
                # than our broken pipe. Without one, the request was not handed over whole.
                if not line.try_peek():
                    detail = f"connection lost while sending: {error.strerror or error}"
                    raise UpstreamFailed("reset", detail, reused=reused) from None
            self.sent = True
            head, rest = await read_head(line, reused=reused, to_head_request=call.method == b"HEAD")
            status = head.status
            if status >= 400:
                body, keep = await self._whole(line, head, rest, ERROR_BYTES)
                raise ErrorAnswer(status, head.fields, body)
            length = head.length
            if length is not None and length == len(rest) and not _is_stream(head):
                # the usual answer: small, and here already
                self.tally.body(rest, self._start(head, length))
                await reply.send(rest)
                await reply.end()
            elif _is_stream(head):
                await self._stream(line, head, rest)
            else:
                await self._long_body(line, head, rest)
            keep = head.keep_alive
        finally:
            if keep:
                upstream.give_back(line, now)
            else:
                line.abort()
        return status

    async def _stream(self, line: Line, head: ResponseHead, rest: bytes) -> None:
        promises, reply = self._promises, self._reply
        total_due = self.dispatched_at + promises.stream_total_s if promises.stream_total_s else float("inf")
        self.stream = stream = Stream(
            head,
            line,
            reply,
            self._call.route,
            self.tally,
            idle_s=promises.idle_s,
            total_due=total_due,
            ping_s=promises.sse_ping_s,
            stall_s=promises.write_stall_s,
        )
        if not self._call.stream:
            reply.sleeper.arm(self.dispatched_at + promises.first_token_s, "first_token_s")
        held = await stream.first_event(rest)
        # never the engine's content-length: a stream that turns out incomplete must be able to end improperly
        self._start(head, None)
        try:
            await stream.carry(held)
        except UpstreamFailed:
            # broken after the engine's own end: the answer is whole, only the framing is not
            if not (stream.complete and await stream.finish_for_engine()):
                raise

    async def _long_body(self, line: Line, head: ResponseHead, rest: bytes) -> None:
        """An answer that is still on its way: collected first if it is small, passed on as it comes otherwise."""
        reply = self._reply
        if self._call.stream:
            # asked for a stream, answered with a body: the rule for bodies holds from here
            reply.sleeper.arm(self.dispatched_at + self._promises.total_s, "total_s")
        if head.length is not None and head.length <= HELD_BYTES:
            body, _ = await self._whole(line, head, rest, HELD_BYTES)
            self.tally.body(body, self._start(head, head.length))
            await reply.send(body)
            await reply.end()
            return
        reader = BodyReader(line, head, rest)
        tail = b""
        while (piece := await reader.next()) is not None:
            if not self.passed_on:
                self._start(head, head.length)
            tail = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (tail + piece)[-TAIL_BYTES:]
            await reply.send(piece)
        if not self.passed_on:
            self._start(head, head.length)
        self.tally.body(tail, time.monotonic())
        await reply.end()

    def _request(self, now: float) -> bytes:
        """The bytes of the request. Raises UpstreamFailed when the endpoint's key cannot be read."""
        call = self._call
        get = call.headers.get
        fields = b"x-request-id: %b\r\n" % call.request_id
        for name in _TO_ENGINES:
            value = get(name)
            if value is not None:
                fields += b"%b: %b\r\n" % (name, value)
        body = self._body
        length = len(body) if body or call.method == b"POST" else -1
        return self._upstream.request_head(call.method, call.target, fields, length, now) + body

    def _start(self, head: ResponseHead, length: int | None) -> float:
        """Nothing can be tried again from here on. Answers with the time."""
        self._reply.start(head.status, kept_fields(head.fields), length)
        self.passed_on = True
        now = time.monotonic()
        self._answered(now)
        return now

    async def _whole(self, line: Line, head: ResponseHead, rest: bytes, bound: int) -> tuple[bytes, bool]:
        """A body of at most `bound` bytes, and whether its connection may serve again."""
        reader = BodyReader(line, head, rest)
        pieces: list[bytes] = []
        size = 0
        while (piece := await reader.next()) is not None:
            pieces.append(piece[: bound - size])
            size += len(pieces[-1])
            if size >= bound and not reader.ended:
                return b"".join(pieces), False
        return b"".join(pieces), head.keep_alive


class BodyReader:
    """Reads a response's body, whatever its framing."""

    __slots__ = ("_chunked", "_left", "_line", "_waiting", "ended")

    def __init__(self, line: Line, head: ResponseHead, rest: bytes) -> None:
        self._line = line
        self._chunked = framing.Chunked(plain=True) if head.chunked else None
        self._left = head.length
        self._waiting = rest
        self.ended = head.length == 0

    async def next(self) -> bytes | None:
        """The next piece of the payload, None after the last. Raises UpstreamFailed, or a cut."""
        while not self.ended:
            data, self._waiting = self._waiting, b""
            if not data:
                try:
                    data = await self._line.recv()
                except OSError as error:
                    raise UpstreamFailed(
                        "reset", f"connection lost: {error.strerror or error}", sent=True, answered=True
                    ) from None
                if not data:
                    if self._left is None and self._chunked is None:
                        self.ended = True
                        return None
                    raise UpstreamFailed("closed", "the answer broke off", sent=True, answered=True)
            if self._chunked is not None:
                try:
                    data = b"".join(self._chunked.feed(data))
                except framing.BadFraming as error:
                    raise UpstreamFailed("garbage", f"malformed answer: {error}", sent=True, answered=True) from None
                self.ended = self._chunked.done
            elif self._left is not None:
                data = data[: self._left]
                self._left -= len(data)
                self.ended = self._left == 0
            if data:
                return data
        return None


def _is_stream(head: ResponseHead) -> bool:
    return head.by_name.get(b"content-type", b"").startswith(b"text/event-stream")


def kept_fields(fields: Fields) -> Fields:
    """An engine's fields that go on to the client."""
    return [
        field for field in fields if field[0] not in _NOT_FROM_ENGINES and not field[0].startswith(b"access-control-")
    ]


def shaped_error(answer: ErrorAnswer, *, anthropic: bool) -> tuple[int, Fields, bytes]:
    """An engine's error as the client gets it: untouched where it has the route's shape, wrapped into it otherwise.

    A 401 or 403 speaks of our key for the engine, which the caller can do nothing about: it becomes a 502.
    """
    if answer.status in (401, 403):
        message = "the engine refused this router's key: set api_key_file of the endpoint"
        return 502, [_JSON], error_body(502, "upstream_failed", message, anthropic=anthropic)
    try:
        value = msgspec.json.decode(answer.body)
    except (msgspec.MsgspecError, UnicodeDecodeError):
        value = None
    fields = kept_fields(answer.fields)
    error = value.get("error") if isinstance(value, dict) else None
    if (
        isinstance(error, dict)
        and isinstance(error.get("message"), str)
        and (not anthropic or value.get("type") == "error")
    ):
        return answer.status, fields, answer.body
    source = error if isinstance(error, dict) else value if isinstance(value, dict) else {}
    message = (
        source.get("message")
        or (error if isinstance(error, str) else "")
        or source.get("detail")
        or answer.body.decode("utf-8", "replace")[:500]
    )
    if not isinstance(message, str):
        message = msgspec.json.encode(message).decode()
    code = source.get("code") if isinstance(source.get("code"), str) else None
    kept = [field for field in fields if field[0] not in (b"content-type", b"content-encoding", b"etag")]
    body = error_body(
        answer.status, code or "engine_error", message or f"the engine answered {answer.status}", anthropic=anthropic
    )
    return answer.status, [_JSON, *kept], body


_ANTHROPIC_TYPES = {
    400: "invalid_request_error", 401: "authentication_error", 403: "permission_error", 404: "not_found_error",
    413: "request_too_large", 429: "rate_limit_error", 503: "overloaded_error", 529: "overloaded_error",
}  # fmt: skip
_OPENAI_TYPES = {401: "authentication_error", 403: "permission_error", 429: "rate_limit_error"}


def error_body(status: int, code: str, message: str, *, param: str | None = None, anthropic: bool = False) -> bytes:
    """The refusal body of `docs/interface.md`; on `/v1/messages` Anthropic's."""
    if anthropic:
        kind = _ANTHROPIC_TYPES.get(status, "invalid_request_error" if status < 500 else "api_error")
        return msgspec.json.encode({"type": "error", "error": {"type": kind, "message": message}})
    kind = _OPENAI_TYPES.get(status, "invalid_request_error" if status < 500 else "server_error")
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": code}})


def error_event(status: int, code: str, message: str, *, anthropic: bool = False) -> bytes:
    """The same as a server-sent event, for a stream whose head has left."""
    body = error_body(status, code, message, anthropic=anthropic)
    return b"event: error\ndata: %b\n\n" % body if anthropic else b"data: %b\n\n" % body


async def fetch(
    upstream: Upstream,
    sleeper: Sleeper,
    target: bytes,
    *,
    within_s: float,
    bound: int,
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int, bytes]:
    """GET a small document from an endpoint: status and body. Raises UpstreamFailed, or a cut named "scrape"."""
    line: Line | None = None
    now = clock()
    sleeper.arm(now + within_s, "scrape")
    try:
        line = upstream.take(sleeper, now) or await upstream.dial(sleeper)
        head_bytes = upstream.request_head(b"GET", target, b"accept: */*\r\nuser-agent: appliance\r\n", -1, now)
        try:
            await line.send_all(head_bytes)
        except OSError as error:
            raise UpstreamFailed("reset", f"connection lost: {error.strerror or error}") from None
        head, rest = await read_head(line, reused=False)
        reader = BodyReader(line, head, rest)
        pieces: list[bytes] = []
        size = 0
        while (piece := await reader.next()) is not None:
            size += len(piece)
            if size > bound:
                raise UpstreamFailed(
                    "garbage", f"more than {bound} bytes where a small document was expected", sent=True, answered=True
                )
            pieces.append(piece)
        if head.keep_alive:
            upstream.give_back(line, clock())
            line = None
        return head.status, b"".join(pieces)
    finally:
        sleeper.disarm()
        if line is not None:
            line.abort()

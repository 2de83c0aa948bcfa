"""One exchange: a request to one endpoint, and its answer to the client.

Bytes go through as they are. What changes is written here: the hop's own header fields, an error body that is not in
the shape clients understand, and an engine's refusal of *our* key, which is no fault of the caller's.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Mapping

from ..facts.errors import Refusal
from ..nursery.sleeper import Cut, DeadlinePassed, breathe
from ..wire import sse, via
from ..wire.head import HEAD_END, MAX_HEAD_BYTES, ResponseHead
from ..wire.line import Line
from .answer import BodyReader, is_json, is_stream, kept
from .errand import Errand
from .errors import ErrorAnswer, error_event
from .promises import Promises
from .reply import ClientLeft, Left, Reply
from .stream import Stream
from .upstream import Upstream, UpstreamFailed, lost, read_head, whole_head
from .usage import Tally

HELD_BYTES = 262144
"""An answer up to this size is collected before its head is passed on, so that one that breaks off is a 502, not a
truncated 200."""
ERROR_BYTES = 1048576
"""Of an error answer, at most this much is read."""
TAIL_BYTES = 16384
"""Of an answer too large to hold, the last part that is kept to find its usage in."""

_TO_ENGINES = (b"content-type", b"accept", b"user-agent")
_TRACE_CONTEXT = (b"traceparent", b"tracestate")
_MOST_KNOWN_LINES = 512
_LONGEST_KNOWN_LINES = 512


class Exchange:
    """One try at one endpoint. `tally` counts the answer, `sent` tells that the whole request was handed over,
    `passed_on` that the client has got a part of the answer. `trace` are header lines that take the place of the
    client's trace context, b"" where nothing is traced."""

    __slots__ = (
        "_body", "_dispatched_at", "_errand", "_promises", "_upstream", "passed_on", "sent", "stream", "tally", "trace",
    )  # fmt: skip

    def __init__(self, errand: Errand, body: bytes, upstream: Upstream, promises: Promises) -> None:
        """`body` is what is sent: the call's own, or one with another model name."""
        self._errand = errand
        self._body = body
        self._upstream = upstream
        self._promises = promises
        self._dispatched_at = errand.record.dispatched_at
        self.passed_on = False
        self.sent = False
        self.stream: Stream | None = None
        self.tally = Tally()
        self.trace = b""
        if errand.call.route.name == "responses":
            self.tally.wants_id = True

    async def run(self, now: float, *, fresh: bool = False) -> int:
        """Send the request and pass its answer on; returns the status passed on. `fresh` forbids an idle connection.

        Raises ErrorAnswer, FirstEventIsError, UpstreamFailed, ClientLeft, or a cut (a deadline, a lost endpoint). When
        it raises, the connection is gone, so the engine sees that nobody waits any more.
        """
        upstream, call, reply = self._upstream, self._errand.call, self._errand.reply
        sleeper = reply.sleeper
        line = None if fresh else upstream.take(sleeper, now)
        reused = line is not None
        if line is None:
            sleeper.arm(now + self._promises.dial_s, "dial_s")
            line = await upstream.dial(sleeper)
        keep = clean = False
        try:
            if call.stream:
                self._await_first_event()
            else:
                sleeper.arm(self._dispatched_at + self._promises.total_s, "total_s")
            request = self._request(now)
            early = b""
            try:
                taken = line.try_send(request)
                if taken < len(request):
                    early = await self._send_rest(line, memoryview(request)[taken:])
            except OSError as error:
                if not line.try_peek():
                    detail = f"connection lost while sending: {error.strerror or error}"
                    raise UpstreamFailed("reset", detail, reused=reused) from None
            self.sent = True
            bare = call.method == b"HEAD"
            data: bytes | None = early
            try:
                while not data and (data := line.try_recv()) is None:
                    await sleeper.pause()
            except OSError as error:
                raise lost(error, reused=reused) from None
            head, rest = whole_head(data, to_head_request=bare) or await read_head(
                line, reused=reused, to_head_request=bare, early=data
            )
            status = head.status
            if status >= 400:
                body, clean = await self._whole(line, head, rest, ERROR_BYTES)
                keep = clean and head.keep_alive and not early
                raise ErrorAnswer(status, kept(head), body)
            length = head.length
            if length is not None and length == len(rest) and not bare and not is_stream(head):
                # the usual answer: small, and here already
                self.tally.body(rest, self._start(head, length))
                await reply.end(rest)
                clean = True
            elif bare:
                self._start(head, head.told_length)
                await reply.end()
                clean = not rest
            elif is_stream(head):
                clean = await self._stream(line, head, rest)
            else:
                clean = await self._long_body(line, head, rest)
            keep = clean and head.keep_alive and not early
        finally:
            if keep and upstream.endpoint.retries:  # else nobody would take it again
                upstream.give_back(line, time.monotonic())
            elif clean:
                line.close()  # all was said; a reset would make the engine log a fault
            else:
                line.abort()
        return status

    async def tell(self, what: Refusal | ErrorAnswer) -> None:
        """Something has left for the client already: say why it ends here where that is possible. Never raises."""
        event = error_event(what, anthropic=self._errand.call.route.anthropic)
        if self.stream is not None:
            await self.stream.tell(event)
        elif not self.passed_on:
            await tell_waiting(self._errand.reply, event)

    async def _send_rest(self, line: Line, rest: memoryview) -> bytes:
        """Send what the socket does not take at once. An engine that has enough answers before it has heard all: then
        the rest is not sent. Answers with what came; raises OSError, or a cut."""
        sleeper, early, turns = self._errand.reply.sleeper, b"", 0
        try:
            while rest:
                rest = rest[line.try_send(rest) :]
                if line.readable and (data := line.try_recv()) is not None:
                    early += data
                    if _is_final(early):
                        return early
                    if not data:
                        raise ConnectionResetError("closed by the peer")
                sleeper.check()
                turns += 1
                await breathe(turns)
                if rest and not line.writable and not line.readable:
                    await sleeper.sleep()
            await line.flush()
        except OSError:
            # An engine that refuses a large body may close as soon as it has answered: its answer is worth more than
            # our broken pipe. Without one, the request was not handed over whole.
            if not early and not line.try_peek():
                raise
        return early

    async def _stream(self, line: Line, head: ResponseHead, rest: bytes) -> bool:
        """Whether the connection is clean afterwards, as in `_long_body` and `_whole`."""
        promises, reply = self._promises, self._errand.reply
        first_due, total_due = self._await_first_event()
        self.stream = stream = Stream(
            head,
            line,
            reply,
            self._errand.call.route,
            self.tally,
            idle_s=promises.idle_s,
            first_due=first_due,
            total_due=total_due,
            ping_s=promises.sse_ping_s,
            stall_s=promises.write_stall_s,
        )
        held = await stream.first_event(rest)
        # never the engine's content-length: a stream that turns out incomplete must be able to end improperly
        self._start(head, None)
        try:
            await stream.carry(held)
        except (UpstreamFailed, DeadlinePassed):
            # broken, or silent, after the engine's own end: the answer is whole, only the framing is not
            if not stream.delivered:
                raise
            if not await stream.finish_for_engine():
                reply.give_up()
            return False
        except (ClientLeft, Left):
            # official clients leave at the end they know, without waiting for that of the body
            if not stream.delivered:
                raise
            self.tally.whole = not stream.error
            return False
        return not stream.surplus

    async def _long_body(self, line: Line, head: ResponseHead, rest: bytes) -> bool:
        """An answer that is still on its way. A JSON document is of no use before its end, so a small one is collected
        first; anything else is passed on as it comes."""
        reply = self._errand.reply
        if self._errand.call.stream:
            # asked for a stream, answered with a body: the rule for bodies holds from here
            reply.sleeper.arm(self._dispatched_at + self._promises.total_s, "total_s")
        reader = BodyReader(line, head, rest)
        length = head.length
        most = HELD_BYTES if is_json(head) or (length is not None and length <= HELD_BYTES) else 0
        held = bytearray()
        while len(held) <= most and (piece := await reader.next()) is not None:
            held += piece
        if reader.ended:
            body = bytes(held)
            self.tally.body(body, self._start(head, len(body)))
            await reply.end(body)
            return not reader.surplus
        self._start(head, length)
        tail = bytes(held[-TAIL_BYTES:])
        await reply.send(bytes(held))
        del held
        while (piece := await reader.next()) is not None:
            tail = piece[-TAIL_BYTES:] if len(piece) >= TAIL_BYTES else (tail + piece)[-TAIL_BYTES:]
            await reply.send(piece)
        self.tally.body(tail, time.monotonic())
        await reply.end()
        return not reader.surplus

    def _await_first_event(self) -> tuple[float, float]:
        """Arm what holds until a stream begins; answers with the times for its first event and for all of it."""
        promises = self._promises
        first_due = self._dispatched_at + promises.first_token_s
        total_due = self._dispatched_at + promises.stream_total_s if promises.stream_total_s else math.inf
        if first_due <= total_due:
            self._errand.reply.sleeper.arm(first_due, "first_token_s")
        else:
            self._errand.reply.sleeper.arm(total_due, "stream_total_s")
        return first_due, total_due

    def _request(self, now: float) -> bytes:
        """The bytes of the request. Raises UpstreamFailed when the endpoint's key cannot be read."""
        call, body = self._errand.call, self._body
        headers = call.headers
        lines = b"x-request-id: %b\r\n%b" % (call.request_id, _lines_to_engines(headers))
        if self.trace:
            lines += self.trace
        elif b"traceparent" in headers or b"tracestate" in headers:
            lines += _lines(_TRACE_CONTEXT, headers)
        if call.marks or self._upstream.endpoint.announced:
            lines += b"via: %b\r\n" % via.value(call.marks).encode()
        if not self._upstream.endpoint.retries:  # each request has a connection of its own
            lines += b"connection: close\r\n"
        length = len(body) if body or call.method == b"POST" else -1
        return self._upstream.request_head(call.method, call.target, lines, length, now) + body

    def _start(self, head: ResponseHead, length: int | None) -> float:
        """Nothing can be tried again from here on. Answers with the time. Raises UpstreamFailed where comments have
        begun a stream and this is none."""
        reply = self._errand.reply
        reply.sleeper.on_sweep = None  # whatever silence comes now is no longer ours to fill
        if not reply.started:
            reply.start(head.status, kept(head), length)
        elif self.stream is None:
            raise UpstreamFailed("garbage", "no event stream, though one was asked for", sent=True, answered=True)
        self.passed_on = True
        now = time.monotonic()
        self._errand.began(now, streamed=self.stream is not None)
        return now

    async def _whole(self, line: Line, head: ResponseHead, rest: bytes, bound: int) -> tuple[bytes, bool]:
        """A body, its first `bound` bytes if it has more, and whether its connection is clean afterwards."""
        reader = BodyReader(line, head, rest)
        body = bytearray()
        while (piece := await reader.next()) is not None:
            body += piece
            if len(body) >= bound and not reader.ended:
                return bytes(body[:bound]), False
        return bytes(body), not reader.surplus


_known_lines: dict[tuple[bytes | None, ...], bytes] = {}


def _lines_to_engines(headers: Mapping[bytes, bytes]) -> bytes:
    """The client's header lines that go on to an engine. Clients send few different ones."""
    get = headers.get
    values = get(b"content-type"), get(b"accept"), get(b"user-agent")  # of _TO_ENGINES
    known = _known_lines.get(values)
    if known is None:
        known = _lines(_TO_ENGINES, headers)
        if len(known) <= _LONGEST_KNOWN_LINES:
            if len(_known_lines) >= _MOST_KNOWN_LINES:
                _known_lines.clear()
            _known_lines[values] = known
    return known


def _lines(names: tuple[bytes, ...], headers: Mapping[bytes, bytes]) -> bytes:
    return b"".join([b"%b: %b\r\n" % (name, headers[name]) for name in names if name in headers])


def _is_final(early: bytes) -> bool:
    """Whether the first bytes of an answer are more than interim (1xx) heads."""
    while early[:7] == b"HTTP/1." and early[8:10] == b" 1" and len(early) <= MAX_HEAD_BYTES:
        end = early.find(HEAD_END)
        if end < 0:
            return False
        early = early[end + len(HEAD_END) :]
    return len(early) >= 10


def ping_while_silent(reply: Reply, every_s: float, now: float) -> None:
    """Until an answer begins, send a comment after each `every_s`; the first one brings a head of our own.

    The sweeper's `on_sweep` does it; whoever begins the answer takes that away, and so must the caller in the end.
    """
    due = now + every_s

    def ping(at: float) -> None:
        nonlocal due
        if at < due:
            return
        due = at + every_s
        if not reply.started:
            reply.start(200, [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")], None)
        try:
            reply.put(sse.PING)
        except ClientLeft:
            reply.sleeper.cut(Left())

    reply.sleeper.on_sweep = ping


async def tell_waiting(reply: Reply, event: bytes) -> None:
    """Only comments have left for a client: tell it by an event that nothing more comes. Never raises."""
    reply.sleeper.on_sweep = None
    reply.sleeper.disarm()
    with contextlib.suppress(ClientLeft, Cut):
        await reply.send(event)

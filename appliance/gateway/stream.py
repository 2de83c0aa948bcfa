"""A stream of server-sent events on its way from an engine to a client.

The head is held until the first event that is no comment, so that a failure before it is still an HTTP status. From
then on the pump carries the bytes: called by the poller when the engine's socket has news, it reads, looks, and writes
to the client's socket in the same breath, while the task that owns the stream sleeps. The task is woken when the stream
ends, when the client does not take the bytes as fast as they come, or by a cut. So an event costs two system calls and
the look.

A stream is complete when the engine's own end for its route came (`data: [DONE]`, `response.completed`,
`message_stop`). Anything else is a failure, told to the client by an error event and by a body that does not end
properly.
"""

from __future__ import annotations

import time

from ..facts.call import DONE, Route
from ..nursery.sleeper import Cut
from ..wire import framing, sse
from ..wire.head import ResponseHead
from ..wire.line import Line
from .events import ends_stream, is_response_failed, tells_failure
from .reply import ClientLeft, Reply
from .upstream import UpstreamFailed
from .usage import Tally

PUMP_TURNS = 8
"""Reads from one engine's socket before the others get their turn."""
MOST_HELD_BYTES = 1 << 20
"""What is held at most for the sake of the first event. More is passed on: an engine that sends only comments, or one
event that has no end, must not fill the memory."""
END_S = 2.0
"""Once the engine's own end has come, how long its body may take to end as well. The client has all it waits for."""


class FirstEventIsError(Exception):
    """The stream began with an error, and nothing has been passed on yet. `data` is the event's data."""

    def __init__(self, data: bytes) -> None:
        super().__init__("the stream began with an error")
        self.data = data


class Stream:
    """The body of one event stream. Made by the relay once the response's head is known; used by one task.

    `complete` tells that the engine's own end came, `error` is the data of an event that said the request failed (b""
    while none did), `surplus` that bytes came after the body's end.
    """

    __slots__ = (
        "_carrying", "_chunked", "_cutter", "_ends", "_ends_done", "_failure", "_first_due", "_held_back", "_idle_s",
        "_last_due", "_last_name", "_last_passed", "_left", "_line", "_moved", "_news", "_passes_framing", "_ping_s",
        "_reply", "_spoke_at", "_stall_s", "_tally", "_torn", "_unsent", "_wraps", "body_ended", "complete", "error",
        "surplus",
    )  # fmt: skip

    def __init__(
        self, head: ResponseHead, line: Line, reply: Reply, route: Route, tally: Tally, *,
        idle_s: float, first_due: float, total_due: float, ping_s: float, stall_s: float,
    ) -> None:  # fmt: skip
        self._line = line
        self._reply = reply
        self._ends = route.stream_ends
        self._ends_done = route.stream_ends == (DONE,)
        self._tally = tally
        self._chunked = framing.Chunked(plain=True) if head.chunked else None
        self._left = head.length  # None: until the connection ends
        self._passes_framing = head.chunked and reply.chunked
        self._wraps = reply.chunked and not head.chunked
        self._cutter = sse.EventCutter()
        self._idle_s = idle_s
        self._first_due = first_due
        self._last_due = total_due
        self._last_name = "stream_total_s"
        self._ping_s = ping_s
        self._stall_s = stall_s
        self._spoke_at = 0.0
        self._unsent: bytes | memoryview = b""
        self._held_back = b""
        self._last_passed = False
        self._failure: Exception | None = None
        self._news = False
        self._carrying = False
        self._torn = False
        self._moved = 0
        self.body_ended = self._left == 0 and self._chunked is None
        self.complete = False
        self.error = b""
        self.surplus = False

    @property
    def error_seen(self) -> bool:
        return bool(self.error)

    @property
    def delivered(self) -> bool:
        """The client has got all of a complete stream; what is missing is at most the end of its body."""
        return self.complete and self._carrying and not self._unsent

    # -- the task's side ---------------------------------------------------------------------------------------------

    async def first_event(self, data: bytes) -> bytes:
        """Wait for the first complete event that is no comment; `data` is what came with the head.

        Returns what is to be passed on. Raises FirstEventIsError, UpstreamFailed, or a cut.
        """
        held = self._take(data) if data else b""
        if self._tally.events or self.complete:
            return held
        more = bytearray(held)
        while not self._tally.events and not self.complete and len(more) < MOST_HELD_BYTES:
            if self.body_ended:
                raise UpstreamFailed("closed", "the stream ended before its first event", sent=True, answered=True)
            more += self._take(await self._recv())
        return bytes(more)

    async def carry(self, held: bytes) -> None:
        """Pass `held` on, then everything up to the end of the body. Raises UpstreamFailed, ClientLeft, or a cut."""
        reply, sleeper = self._reply, self._reply.sleeper
        self._carrying = True
        self._unsent = held
        await reply.send(held, framed=self._passes_framing)
        self._unsent = b""
        self._touch(time.monotonic())
        try:
            if reply.line is None:
                await self._carry_by_hand()
            else:
                sleeper.on_sweep = self._maybe_ping
                while not self.body_ended:
                    await self._sleep_beside_the_pump()
                    if self._failure is not None:
                        raise self._failure
                    if self._unsent:
                        await self._push()
        finally:
            sleeper.on_sweep = None
            reply.sent_bytes += self._moved
        if self._ends and not self.complete:
            raise UpstreamFailed("closed", "the stream ended without its end", sent=True, answered=True)
        self._tally.whole = not self.error
        await reply.end(framed=self._last_passed)

    async def _carry_by_hand(self) -> None:
        """Where the client is no socket: piece by piece, through the reply."""
        while not self.body_ended:
            data = self._take(await self._recv())
            self._touch(time.monotonic())
            if data:
                self._unsent = data
                await self._reply.send(data, framed=self._passes_framing)
                self._unsent = b""

    async def tell(self, event: bytes) -> None:
        """Say why the stream ends here, if an event may be put in at this place and the engine has not said so itself.
        Never raises: the client may be gone.
        """
        reply = self._reply
        if self.error or not self._may_put_in() or not reply.started:
            return
        reply.sleeper.disarm()
        try:
            await reply.send(event)
        except (ClientLeft, Cut, OSError):
            return

    async def finish_for_engine(self) -> bool:
        """The engine's end came, but not the body's: end the body properly. False where the framing stands in the
        middle of a chunk.
        """
        self._tally.whole = not self.error
        if not self._may_put_in():
            return False
        await self._reply.end()
        return True

    def _may_put_in(self) -> bool:
        """Whether bytes of ours may follow what the client has got: no event and no chunk of the engine's is open."""
        if not self._carrying:
            return True
        if self._cutter.pending or self._torn or self._unsent:
            return False
        return not self._passes_framing or self._chunked is None or self._chunked.between

    async def _sleep_beside_the_pump(self) -> None:
        sleeper = self._reply.sleeper
        self._news = False
        self._line.on_news = self._pump
        try:
            self._pump()  # what came before the pump was set makes no news of its own
            while not self._news:
                await sleeper.sleep()
        finally:
            self._line.on_news = None

    async def _recv(self) -> bytes:
        # an engine that never pauses would otherwise never let this task sleep, and a cut only strikes a sleeper
        self._reply.sleeper.check()
        try:
            return await self._line.recv()
        except OSError as error:
            raise _reset(error) from None

    async def _push(self) -> None:
        """The client is slower than the engine: the engine waits, for as long as the client keeps taking something."""
        client, sleeper = self._reply.line, self._reply.sleeper
        assert client is not None
        try:
            while self._unsent:
                sleeper.arm(time.monotonic() + self._stall_s, "write_stall_s")
                sent = client.try_send(self._unsent)
                self._moved += sent
                self._unsent = self._unsent[sent:]
                if self._unsent and not client.writable:
                    await sleeper.sleep()
        except OSError:
            raise ClientLeft from None
        self._touch(time.monotonic())

    # -- the poller's side -------------------------------------------------------------------------------------------

    def _pump(self) -> None:
        """Move what has come. Called by the poller, so it notes failures and wakes the task instead of raising."""
        client, line = self._reply.line, self._line
        assert client is not None
        moved = False
        for _ in range(PUMP_TURNS):
            try:
                data = line.try_recv()
                if data is None:
                    if moved:
                        self._touch(time.monotonic())
                    return
                data = self._take(data)
            except OSError as error:
                return self._stop(_reset(error))
            except (
                Exception
            ) as failure:  # whatever an engine's bytes provoke is this stream's failure, not the poller's
                return self._stop(failure)
            moved = True
            if self._wraps and data:
                data = framing.chunk(data)
            try:
                sent = client.try_send(data) if data else 0
            except OSError:
                self._unsent = data
                return self._stop(ClientLeft())
            self._moved += sent
            if sent < len(data):
                self._unsent = memoryview(data)[sent:]
                return self._stop(None)
            if self.body_ended:
                return self._stop(None)
        self._touch(time.monotonic())
        line.poller.postpone(line)

    def _stop(self, failure: Exception | None) -> None:
        """The task's turn."""
        self._failure = failure
        self._news = True
        self._line.on_news = None
        self._reply.sleeper.wake()

    def _maybe_ping(self, now: float) -> None:
        """Called by the sweeper: keep a silent stream's connection known to the boxes in between."""
        if now - self._spoke_at < self._ping_s or self._line.on_news is None or not self._may_put_in():
            return
        client = self._reply.line
        assert client is not None
        self._spoke_at = now
        ping = framing.chunk(sse.PING) if self._reply.chunked else sse.PING
        try:
            sent = client.try_send(ping)
        except OSError:
            return self._stop(ClientLeft())
        self._moved += sent
        if 0 < sent < len(ping):
            self._unsent = memoryview(ping)[sent:]
            self._stop(None)

    # -- what both do --------------------------------------------------------------------------------------------------

    def _take(self, data: bytes) -> bytes:
        """Follow the framing, look at the events; returns what goes to the client. Raises UpstreamFailed,
        FirstEventIsError.
        """
        chunked = self._chunked
        if chunked is not None:
            if not data:
                raise UpstreamFailed("closed", "the stream broke off", sent=True, answered=True)
            try:
                pieces = chunked.feed(data)
            except framing.BadFraming as error:
                raise UpstreamFailed("garbage", f"malformed stream: {error}", sent=True, answered=True) from None
            for piece in pieces:
                for event in self._cutter.feed(piece):
                    self._see(event)
            if chunked.done:
                self._ended(bool(chunked.rest))
            if not self._passes_framing:
                return b"".join(pieces)
            # Bytes that may yet turn out to be the last chunk are held back: whether the body ends properly is ours to
            # say, once it is known that the stream was complete.
            if self._held_back:
                data = self._held_back + data
            self._held_back = chunked.held
            if chunked.held:
                return data[: -len(chunked.held)]
            if chunked.done:
                data = data[: len(data) - len(chunked.rest) - len(chunked.last)]
                if self.complete or not self._ends:
                    self._last_passed = True
                    return data + framing.LAST_CHUNK
            return data
        if not data:
            if self._left is not None:
                raise UpstreamFailed("closed", "the stream broke off", sent=True, answered=True)
            self._ended(False)
            return b""
        surplus = False
        if self._left is not None:
            surplus = len(data) > self._left
            data = data[: self._left]
            self._left -= len(data)
        for event in self._cutter.feed(data):
            self._see(event)
        if self._left == 0:
            self._ended(surplus)
        return data

    def _ended(self, surplus: bool) -> None:
        """The body is over. An end that lacks only its empty line is one; any other unfinished event is torn."""
        self.body_ended = True
        self.surplus = surplus
        rest = self._cutter.finish()
        if rest.strip(b"\r\n"):
            self._torn = True
            self.complete = self.complete or ends_stream(rest, self._ends)

    def _see(self, event: bytes) -> None:
        """Look at one event: does it end the stream, does it tell a failure, what does it count?"""
        if not self._carrying and event.startswith(sse.BOM):
            event = event[len(sse.BOM) :]  # a stream may begin with it, and every client passes over it
        if self._ends_done:
            if b"[DONE]" in event and ends_stream(event, self._ends):
                self._complete()
                return
        elif self._ends and ends_stream(event, self._ends):
            self._complete()
        if event[:1] in (b":", b"\n", b"\r") and sse.is_comment(event):
            return
        if (b"error" in event or b"failed" in event) and tells_failure(event):
            if not self._tally.events and not self._carrying:
                raise FirstEventIsError(sse.data_of(event))
            self.error = sse.data_of(event) or event
            if is_response_failed(event):
                self._complete()  # the route's own way to end a request that failed
        self._tally.event(event, time.monotonic())

    def _complete(self) -> None:
        self.complete = True
        due = time.monotonic() + END_S
        if due < self._last_due:
            self._last_due, self._last_name = due, "idle_s"

    def _touch(self, now: float) -> None:
        """Something moved: the silence starts again, but for the one before the first event."""
        self._spoke_at = now
        due, name = now + self._idle_s, "idle_s"
        if not self._tally.events and not self.complete:
            due, name = self._first_due, "first_token_s"
        if due < self._last_due:
            self._reply.sleeper.arm(due, name)
        else:
            self._reply.sleeper.arm(self._last_due, self._last_name)


def _reset(error: OSError) -> UpstreamFailed:
    return UpstreamFailed("reset", f"connection lost: {error.strerror or error}", sent=True, answered=True)

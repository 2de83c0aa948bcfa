"""Traces: which requests are traced, under which ids, and what waits to be told to the collector.

    begin (ids, sampled?) -> attempt (a span id for each, sent along) -> finish (the record waits for delivery)

On the road a trace is a few random ids and a time per attempt. Spans are made of the finished record, later and off the
road (`spans.py`), by the task that delivers them (`otlp.py`). What waits is bounded: when the collector is slower than
the requests, the oldest records give way and are counted, and no request ever waits.

None of these three files is imported while tracing is off.
"""

from __future__ import annotations

import time
from collections import deque
from random import Random
from typing import TYPE_CHECKING

import trio

from ..wire import traceparent

if TYPE_CHECKING:
    from ..facts.call import Call
    from ..facts.endpoint import Endpoint
    from .meters import Meters
    from .record import Record

MOST_WAITING = 2048
"""Records that wait for delivery: a second or two of what one collector takes, and a few megabytes."""
BATCH = 256
"""Records delivered together: about 300 kB."""
FLUSH_S = 1.0
"""Seconds after which a batch leaves that is not full."""


class Try:
    """One attempt: the id of its span, when it began (`time.monotonic`), where it went, and how many choices of an
    endpoint had been made by then."""

    __slots__ = ("choices", "endpoint", "span_id", "started")

    def __init__(self, span_id: bytes, started: float, endpoint: Endpoint, choices: int) -> None:
        self.span_id = span_id
        self.started = started
        self.endpoint = endpoint
        self.choices = choices


MOST_STATE_BYTES = 1024
"""Of a client's tracestate; W3C Trace Context asks for at least 512 to be carried."""


class Trace:
    """The trace of one request. `parent_id` is b"" where the trace begins here; `span_id` is the server span's, or the
    parent's where nothing is recorded. `method` and `target` are the request's."""

    __slots__ = ("method", "parent_id", "sampled", "span_id", "state", "target", "trace_id", "tries")

    def __init__(
        self, trace_id: bytes, parent_id: bytes, span_id: bytes, sampled: bool, state: bytes, method: bytes,
        target: bytes,
    ) -> None:  # fmt: skip
        self.trace_id = trace_id
        self.parent_id = parent_id
        self.span_id = span_id
        self.sampled = sampled
        self.state = state
        self.method = method
        self.target = target
        self.tries: list[Try] = []


class Tracer:
    """Made once per process. Called by the road in plain steps; `batch` and `end` belong to the delivering task."""

    def __init__(self, sample_ratio: float, meters: Meters, rng: Random) -> None:
        self._below = round(sample_ratio * 2**64)
        self._meters = meters
        self._rng = rng
        self._waiting: deque[Record] = deque()
        self._some = trio.Event()
        self._many = trio.Event()
        self.ending = trio.Event()

    # -- the road's side -----------------------------------------------------------------------------------------------

    def begin(self, call: Call) -> Trace:
        """A request has come. Its client's decision to record holds; without one, the ratio decides by the trace id,
        as every other service with the same ratio would."""
        headers = call.headers
        given = headers.get(b"traceparent")
        parent = traceparent.read(given) if given else None
        if parent is None:
            trace_id = fresh_id(self._rng, 16)
            sampled = int.from_bytes(trace_id[8:], "big") < self._below
            return Trace(trace_id, b"", fresh_id(self._rng, 8), sampled, b"", call.method, call.target)
        span_id = fresh_id(self._rng, 8) if parent.sampled else parent.span_id
        state = headers.get(b"tracestate", b"")
        if len(state) > MOST_STATE_BYTES:
            state = b""  # thousands of records keep it; the standard lets a participant drop what it cannot carry
        return Trace(parent.trace_id, parent.span_id, span_id, parent.sampled, state, call.method, call.target)

    def attempt(self, record: Record, endpoint: Endpoint) -> bytes:
        """An attempt begins; answers with the header lines that go to the endpoint in place of the client's.

        They are sent for a request that is not recorded too: the engine is not to start a trace of its own for it.
        """
        trace = record.trace
        assert trace is not None, "begun"
        span_id = trace.span_id
        if trace.sampled:
            span_id = fresh_id(self._rng, 8)
            trace.tries.append(Try(span_id, time.monotonic(), endpoint, len(record.choices)))
        lines = b"traceparent: %b\r\n" % traceparent.write(trace.trace_id, span_id, trace.sampled)
        return lines + b"tracestate: %b\r\n" % trace.state if trace.state else lines

    def finish(self, record: Record) -> None:
        """The record is settled. Exactly once per record."""
        if record.trace is None or not record.trace.sampled:
            return
        waiting = self._waiting
        if len(waiting) >= MOST_WAITING:
            self.drop(waiting.popleft())
        waiting.append(record)
        self._some.set()
        if len(waiting) >= BATCH:
            self._many.set()

    # -- the delivering task's side ------------------------------------------------------------------------------------

    async def batch(self) -> list[Record]:
        """The next records to deliver; none once `end` was called and nothing waits any more."""
        while not self._waiting and not self.ending.is_set():
            self._some = trio.Event()
            await self._some.wait()
        if not self.ending.is_set():
            with trio.move_on_after(FLUSH_S):
                await self._many.wait()
        waiting = self._waiting
        taken = [waiting.popleft() for _ in range(min(BATCH, len(waiting)))]
        if len(waiting) < BATCH and not self.ending.is_set():
            self._many = trio.Event()
        return taken

    def drop(self, *records: Record) -> None:
        """Nobody will be told of these."""
        self._meters.trace_dropped += sum(span_count(record) for record in records)

    def drop_waiting(self) -> None:
        """Give up all that waits."""
        self.drop(*self._waiting)
        self._waiting.clear()

    def end(self) -> None:
        """No more requests will come: deliver what is there, and let `batch` come to its end."""
        self.ending.set()
        self._some.set()
        self._many.set()


def fresh_id(rng: Random, size: int) -> bytes:
    """A new id of `size` bytes, never all zeros: that one means "none"."""
    return (rng.getrandbits(8 * size) or 1).to_bytes(size, "big")


def span_count(record: Record) -> int:
    """How many spans a record makes (`spans.spans_of`)."""
    assert record.trace is not None, "traced"
    return 1 + len(record.tickets) + len(record.choices) + len(record.trace.tries)

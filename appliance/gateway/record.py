"""The books: one record per request, whatever became of it.

Settling is synchronous, so neither a deadline nor a cancellation can lose it. The last few thousand records stay in
memory for `ctl requests` and `ctl explain request`; they hold no prompt, no answer and no key.
"""

from __future__ import annotations

import time
from collections import OrderedDict
from typing import TYPE_CHECKING

from ..facts.call import Call
from ..facts.choice import Attempt, Choice
from ..facts.errors import Refusal
from ..nursery.sleeper import Sleeper
from ..rules.admission.ticket import Ticket
from ..rules.scheduling.retry import Step
from .meters import Meters
from .promises import Promises
from .reply import Cancelled
from .usage import Tally

if TYPE_CHECKING:
    from .trace import Trace

KEPT_RECORDS = 4000
LONGEST_NAME = 200
"""How much of the name asked for is kept, in characters: it comes from clients, and no model has a longer one."""
CLIENT_LEFT = 499
"""The code in our books for a client that left before its answer was whole, as nginx writes it."""


class Record:
    """What happened to one request. Times are seconds of `time.monotonic`, 0.0 for what did not happen; `began_at` is
    wall-clock time. `outcome` is one of "running", "ok", "refused", "failed", "cut", "client left", "cancelled".

    `attempts` are those that failed, in order; `steps` tell when each of them was over and what was done next (a client
    that left ends the last one without a step). `promises` are the deadlines that held, None before the first dispatch.
    `tickets` are its places in line, one per model that was asked. `trace` is None where tracing is off.

    Slots, and tuples that mostly stay empty or hold one: what a record is made of is let go of thousands of requests
    later, when no cache holds it any more, and was a twelfth of the road's time as dictionaries and lists.
    """

    __slots__ = (
        "arrived", "attempts", "band", "began_at", "choices", "code", "dispatched_at", "ended_at", "endpoint",
        "estimated", "first_byte_at", "message", "model", "outcome", "promises", "reason", "request_id", "route",
        "sleeper", "steps", "stream", "tally", "tenant", "tickets", "trace", "wanted",
    )  # fmt: skip

    def __init__(self, call: Call, sleeper: Sleeper) -> None:
        caller = call.caller
        self.request_id = call.request_id.decode("latin-1")
        self.route = call.route.name
        self.wanted = call.model[:LONGEST_NAME]
        self.band = caller.band
        self.tenant = caller.tenant
        self.stream = call.stream
        self.began_at = time.time()
        self.arrived = call.arrived
        self.choices: tuple[Choice, ...] = ()
        self.attempts: tuple[Attempt, ...] = ()
        self.steps: tuple[tuple[float, Step], ...] = ()
        self.tickets: tuple[Ticket, ...] = ()
        self.sleeper: Sleeper | None = sleeper
        self.code = 0
        self.dispatched_at = 0.0
        self.ended_at = 0.0
        self.endpoint = ""
        self.estimated = False
        self.first_byte_at = 0.0
        self.message = ""
        self.model = ""
        self.outcome = "running"
        self.promises: Promises | None = None
        self.reason = ""
        self.tally: Tally | None = None
        self.trace: Trace | None = None

    @property
    def queue_wait_s(self) -> float:
        """Seconds in the queue, over its model and the fallbacks."""
        end = self.ended_at or time.monotonic()
        return sum(ticket.wait_s(end) for ticket in self.tickets)

    def refused(self, refusal: Refusal, outcome: str = "refused") -> None:
        self.outcome = outcome
        self.code = refusal.status
        self.reason = refusal.reason or refusal.code
        self.message = refusal.detail or refusal.message

    def cancel(self) -> bool:
        """End a running request; False when it is over."""
        if self.sleeper is None:
            return False
        self.sleeper.cut(Cancelled("cancelled by the operator"))
        return True


class Books:
    """Live and past requests, and what is counted of them."""

    def __init__(self, meters: Meters) -> None:
        self.meters = meters
        self.live: dict[str, Record] = {}
        self._past: OrderedDict[str, Record] = OrderedDict()

    def open(self, record: Record) -> None:
        # a client may use an id twice at a time; the later one is found under it, both are counted
        self.live[record.request_id] = record

    def settle(self, record: Record, body_bytes: int) -> None:
        """The request is over. Exactly once per record."""
        now = time.monotonic()
        record.ended_at = now
        record.sleeper = None
        if self.live.get(record.request_id) is record:
            del self.live[record.request_id]
        past = self._past
        past[record.request_id] = record
        if len(past) > KEPT_RECORDS:
            past.popitem(last=False)
        meters = self.meters.model(record.model or Meters.UNKNOWN)
        key = (record.band, record.code)
        meters.requests[key] = meters.requests.get(key, 0) + 1
        meters.duration.observe(now - record.arrived)
        for ticket in record.tickets:
            if ticket.number:  # it waited, or was displaced while it did
                self.meters.waited(record.band, ticket.wait_s(now))
        if record.outcome == "refused":
            rejection = (record.band, record.reason)
            self.meters.rejections[rejection] = self.meters.rejections.get(rejection, 0) + 1
        tally = record.tally
        if tally is None or not record.first_byte_at:
            return
        record.estimated = tally.estimate(body_bytes)
        meters.prompt_tokens += tally.prompt_tokens
        meters.completion_tokens += tally.completion_tokens
        meters.cached_tokens += tally.cached_tokens
        if record.stream and tally.first_content_at:
            meters.first_token.observe(tally.first_content_at - record.dispatched_at)
            gaps = tally.content_events - 1
            if gaps > 0:
                # the mean gap, counted as often as there were gaps: the clock is read per event anyway, a histogram's
                # bisection per event would be a tenth of what an event costs
                meters.inter_token.observe((tally.last_content_at - tally.first_content_at) / gaps, gaps)

    def find(self, request_id: str) -> Record | None:
        return self.live.get(request_id) or self._past.get(request_id)

    def recent(self, count: int) -> list[Record]:
        """Live requests, then past ones, newest first."""
        past = [record for record, _ in zip(reversed(self._past.values()), range(count), strict=False)]
        return (sorted(self.live.values(), key=lambda record: -record.arrived) + past)[:count]

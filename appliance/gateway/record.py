"""The record of one request: what was decided for it, and what became of it. It holds no prompt, answer or key."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import msgspec

from ..facts.call import Call
from ..facts.choice import Attempt, Choice
from ..facts.errors import Refusal
from ..nursery.sleeper import Sleeper
from ..rules.admission.ticket import Ticket
from ..rules.scheduling.retry import Step
from .promises import Promises
from .reply import Cancelled
from .usage import Tally

if TYPE_CHECKING:
    from .trace import Trace

LONGEST_NAME = 200
"""How much of the name asked for is kept, in characters: it comes from clients, and no model has a longer one."""
CLIENT_LEFT = 499
"""The code in our books for a client that left before its answer was whole, as nginx writes it."""


class Record(msgspec.Struct, array_like=True, eq=False):
    """What happened to one request. Times are seconds of `time.monotonic`, 0.0 for what did not happen; `began_at` is
    wall-clock time. `outcome` is one of "running", "ok", "refused", "failed", "cut", "client left", "cancelled".

    `attempts` are those that failed, in order; `steps` tell when each of them was over and what was done next (a client
    that left ends the last one without a step). `promises` are the deadlines that held, None before the first dispatch.
    `tickets` are its places in line, one per model that was asked. `trace` is None where tracing is off. `sleeper` is
    None once it is over.

    A msgspec struct, like the tickets, tallies and choices in it: one is made for every request, and packed when it is
    over (`archive`).
    """

    request_id: str
    route: str
    wanted: str
    band: str
    tenant: str
    stream: bool
    began_at: float
    arrived: float
    sleeper: Sleeper | None
    attempts: tuple[Attempt, ...] = ()
    choices: tuple[Choice, ...] = ()
    code: int = 0
    dispatched_at: float = 0.0
    ended_at: float = 0.0
    endpoint: str = ""
    estimated: bool = False
    first_byte_at: float = 0.0
    message: str = ""
    model: str = ""
    outcome: str = "running"
    promises: Promises | None = None
    reason: str = ""
    steps: tuple[tuple[float, Step], ...] = ()
    tally: Tally | None = None
    tickets: tuple[Ticket, ...] = ()
    trace: Trace | None = None

    @classmethod
    def of(cls, call: Call, sleeper: Sleeper) -> Record:
        caller = call.caller
        return cls(
            call.request_id.decode("latin-1"),
            call.route.name,
            call.model[:LONGEST_NAME],
            caller.band,
            caller.tenant,
            call.stream,
            time.time(),
            call.arrived,
            sleeper,
        )

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

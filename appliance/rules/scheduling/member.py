"""What the router knows about one endpoint while it serves: load, health, and what became of requests there.

Gates are stored as they change and not computed when asked: `up` is one attribute read per candidate and request.
"""

from __future__ import annotations

from itertools import count
from random import Random

from ...facts.choice import Outcome
from ...facts.endpoint import Endpoint, Sample
from .breaker import Breaker

STALE_FLOOR_S = 3.0
STALE_SCRAPES = 3.0
"""A sample is believed for three scrapes, and for three seconds at least."""
FULL_S = 10.0
"""How long an endpoint whose metrics went silent counts as full."""

FAILURE_PENALTY = 0.6
BACKPRESSURE_PENALTY = 0.3
PENALTY_HALF_S = 5.0
PENALTY_GONE = 0.02

ASSUMED_SLOTS = 16
MOST_SLOTS = 32
"""Requests in flight that make an endpoint busy for *choosing*: its batch where known, but never above 32, because
every request in a batch slows its neighbours long before the batch is full."""

_identities = count(1)


class Member:
    """An endpoint in the table. Everything but the underscored names may be read by anybody; it changes by the methods.

    `in_flight` counts leases out (`begin` to `Lease.finish`). `failing` is "" or one short word that clients may read
    ("loading", "unreachable"); `draining` True keeps new requests away. `capacity` is how many requests it is known to
    run at once (configured, published, or told by `tell_capacity`), 0 when unknown; `learnt` is what admission learnt
    instead; `batch` is the better of the two. `heard` are the names it says it serves, None before it said anything.
    `prefix_id` stands for its KV cache in prefix trees: a new one is a forgotten cache, so no tree has to be searched.
    """

    __slots__ = (
        "_excess",
        "_told",
        "batch",
        "breaker",
        "capacity",
        "draining",
        "endpoint",
        "failing",
        "foreign",
        "fresh_until",
        "full_until",
        "heard",
        "id",
        "in_flight",
        "kv",
        "kv_free",
        "learnt",
        "penalised_at",
        "penalty",
        "per_slot",
        "prefix_id",
        "sample",
        "up",
        "waiting",
    )

    def __init__(self, endpoint: Endpoint) -> None:
        self.id = endpoint.id
        self.in_flight = 0
        self.breaker = Breaker()
        self.failing = ""
        self.draining = False
        self.up = True
        """Not failing, not draining, breaker closed: eligible without a look at the clock."""
        self.heard: tuple[str, ...] | None = None
        self.penalty = 0.0
        self.penalised_at = 0.0
        self.prefix_id = next(_identities)
        self.learnt = 0
        self._told = 0
        self.sample: Sample | None = None
        self.kv: float | None = None
        self._excess = 0
        self.forget_load()
        self.configure(endpoint)

    # -- settings and discovery ------------------------------------------------------------------------------------

    def configure(self, endpoint: Endpoint) -> None:
        """The same endpoint under changed settings."""
        self.endpoint = endpoint
        self._weigh()

    def tell_capacity(self, requests: int) -> None:
        """The engine's own word outside its metrics (llama.cpp's slots in `/props`); 0 takes it back."""
        self._told = requests
        self._weigh()

    def learn_capacity(self, requests: int) -> None:
        """What admission learnt by watching; 0 forgets it. Never overrides a known capacity."""
        self.learnt = requests
        self._weigh()

    def set_failing(self, word: str) -> None:
        """`word` "" is good news. The word reaches clients in refusals: no addresses."""
        self.failing = word
        self._gate()

    def set_draining(self, draining: bool) -> None:
        self.draining = draining
        self._gate()

    def forget_cache(self) -> None:
        """Its KV cache is empty (a restart, a reset): no prefix speaks for it any more."""
        self.prefix_id = next(_identities)

    # -- load ------------------------------------------------------------------------------------------------------

    def hear(self, sample: Sample, every_s: float) -> bool:
        """A good sample, taken `every_s` after the one before. True when the engine has restarted since: its cache and
        what was learnt of its capacity are forgotten."""
        restarted = self.sample is not None and sample.generation != self.sample.generation
        if restarted:
            self.forget_cache()
            self.learnt = 0
        self.sample = sample
        self.fresh_until = sample.at + max(STALE_FLOOR_S, STALE_SCRAPES * every_s)
        self.full_until = self.fresh_until + FULL_S
        self.waiting = sample.waiting
        self.kv = sample.kv
        # Unknown is neither free nor full; where nobody publishes it, all candidates are equal in this.
        self.kv_free = 0.5 if sample.kv is None else min(1.0, max(0.0, 1.0 - sample.kv))
        # What other routers brought. The smaller of two looks, because the engine counts a request that has just ended
        # here for a moment longer.
        excess = max(0, sample.running + sample.waiting - self.in_flight)
        self.foreign = min(excess, self._excess)
        self._excess = excess
        self._weigh()
        return restarted

    def forget_load(self) -> None:
        """Judge it by what we have in flight, as an endpoint that was never scraped."""
        self.sample = None
        self.fresh_until = float("inf")
        self.full_until = float("-inf")
        self.waiting = 0
        self.foreign = 0
        self._excess = 0
        self.kv = None
        self.kv_free = 0.5

    # -- requests --------------------------------------------------------------------------------------------------

    def begin(self, now: float) -> Lease:
        """A request is dispatched here. Call it in the step that chose, before anything is awaited, or two requests
        may both be the breaker's one probe; `Lease.finish` ends it on every path."""
        self.in_flight += 1
        return Lease(self, False if self.up else self.breaker.begin(now))

    def penalised(self, now: float) -> float:
        """0..1: how much less it is wanted for what it did lately; halves every `PENALTY_HALF_S`."""
        if not self.penalty:
            return 0.0
        left = self.penalty * 0.5 ** max(0.0, (now - self.penalised_at) / PENALTY_HALF_S)
        if left < PENALTY_GONE:
            self.penalty = 0.0
            return 0.0
        return float(left)

    def _penalise(self, amount: float, now: float) -> None:
        self.penalty = min(1.0, self.penalised(now) + amount)
        self.penalised_at = now

    def _gate(self) -> None:
        self.up = not self.failing and not self.draining and not self.breaker.open_until

    def _weigh(self) -> None:
        published = self.sample.capacity if self.sample is not None else None
        self.capacity = self.endpoint.capacity or published or self._told or 0
        self.batch = self.capacity or self.learnt
        self.per_slot = 1.0 / min(self.batch or ASSUMED_SLOTS, MOST_SLOTS)


class Lease:
    """A request at a member, from dispatch to its end. `finish` exactly counts once, however often it is called."""

    __slots__ = ("member", "open", "probe")

    def __init__(self, member: Member, probe: bool) -> None:
        self.member = member
        self.probe = probe
        self.open = True

    def answered(self, now: float) -> None:
        """First content came. A probe that streams for ten minutes proves within a second that the engine is back, and
        must not keep everybody else out until its end."""
        if self.probe:
            self.probe = False
            self.member.breaker.succeed(now, True)
            self.member._gate()

    def finish(self, outcome: Outcome, now: float, rng: Random, cause: int = 0) -> bool:
        """The attempt is over. True when this failure opened the breaker; `cause` as of `Breaker.fail`. Later calls do
        nothing."""
        if not self.open:
            return False
        self.open = False
        member = self.member
        member.in_flight -= 1
        opened = False
        if outcome is Outcome.SUCCESS:
            member.breaker.succeed(now, self.probe)
        elif outcome is Outcome.FAILURE:
            member._penalise(FAILURE_PENALTY, now)
            opened = member.breaker.fail(now, rng, self.probe, cause)
        else:
            if outcome is Outcome.BACKPRESSURE:
                member._penalise(BACKPRESSURE_PENALTY, now)
            member.breaker.release(self.probe)
        member._gate()
        return opened

"""The room at one endpoint: what is in flight there, what its engine says, how many requests it can run at once.

An engine runs a batch and queues the rest, first come first served. Everything sent beyond the batch waits there,
behind strangers and out of our reach; everything held back below it is throughput given away. So the size of the batch
is the figure that matters, and there are three ways to know it:

1. *known*: configured, or told by the engine (`--max-num-seqs`, llama.cpp's slots);
2. *learnt*: `PINS` samples in a row show requests waiting while the running ones stay at their high-water mark, though
   at least one of ours has ended in between. The last condition tells a full batch from a long prefill, which holds
   the queue up just the same but lets more run afterwards;
3. *unknown*: it grows with what is proven. At most `UNPROVEN` requests beyond those that have run at once (high-water
   mark of the samples) or are seen running (their first content has come) are let in, whatever the band. Each proof
   opens a place, so a batch of 8 never has more than 2 waiting, and one of 256 fills at 2 per first token.

What was learnt may be wrong: the mark was taken with long prompts, or by accident. So while requests of ours wait and
the engine reports none waiting, it is doubted after `DOUBT_S`, which lets 2 beyond it in until the samples pin it down
again; each doubt that ends the same way doubles the time to the next. Never doubting would keep a wrong small figure
for ever, since a pool held below it cannot show more.

First contents are not kept as a mark: ends of answers and first contents of the next arrive in any order, so there can
be more of them than the batch holds, and remembering that would let ever more wait. Of an endpoint that is not scraped,
ends are kept, since clients that do not stream give no other proof. An answer cannot have been made faster than the
fastest was (`_pace`, seconds per token), so it ran for certain during so long a time before its end. At the beginning
of that time these ran together with it:

- those that have ended since, and ran for certain at that moment by the same measure. This tells a batch from a queue
  even when answers come in the order of their requests: in a batch of 8 they are together, behind one slot they are an
  answer's length apart;
- those that have not ended and whose first content had come by then, or that were sent clearly before it: engines start
  requests in the order they come, but what is sent at one moment comes in any order.

It errs to the safe side: an engine that is slower the more it does proves less than it runs, so one that is not
scraped, and whose clients do not stream, may stay below its batch until somebody tells its `capacity`. An answer of
less than about 0.1 s proves nothing, because its end and those before it may be read in any order; nor does one without
tokens (embeddings). Where nothing can be proven it can only be tried: each such answer lets one more in than before.
What answers that fast does not drown, and holding embeddings to two at a time for ever would be worse than a queue.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from appliance.facts.endpoint import Sample

if TYPE_CHECKING:
    from appliance.rules.admission.lane import Lane
    from appliance.rules.admission.ticket import Ticket

QUEUE_LIMIT = 5.0
"""Requests waiting at one engine that count as its healthy limit."""
KV_LIMIT = 0.8
"""Share of KV blocks in use that counts as the healthy limit."""
UNPROVEN = 2
"""Requests beyond those proven running that an endpoint of unknown capacity takes."""
OVERHANG = 2
"""Requests behind a full batch that affinity may send there while another endpoint has room."""
SILENCE_S = 10.0
"""How long an endpoint that went silent counts as full."""
PINS = 3
"""Samples in a row that pin the high-water mark down as the capacity."""
DOUBT_S = 30.0
DOUBT_MOST_S = 3600.0
CERTAIN = 0.85
"""Share of the shortest possible time of an answer for which it is believed to have run; twice `LATE_S` at least, or it
proves nothing."""
LATE_S = 0.05
"""How late an end may be read when the router is busy: until then it looks like an answer that still runs."""
REMEMBERED_ENDS = 512


def saturation(waiting: int, kv: float, running: int, capacity: int) -> float:
    """How full an endpoint is; 1.0 is the healthy limit. `running` counts leases too; `capacity` 0 is unknown.

    The queue is the larger of what the engine reports and what cannot be in its batch: a report is up to a scrape old.
    """
    figure = kv / KV_LIMIT
    if capacity:
        batches = running / capacity
        if batches > figure:
            figure = batches
        if batches > 1.0 and running - capacity > waiting:
            waiting = running - capacity
    queue = waiting / QUEUE_LIMIT
    return figure if figure > queue else queue


class Load:
    """One endpoint's load. Changed by `Admission` alone; `gateway` and scheduling may read it.

    `inflight` are requests sent and not ended, `leased` grants booked here and not sent yet, `proven` those in flight
    that are known to run. `foreign` are requests of others (another router, the one before a restart, clients that left
    while their engine has not noticed): what a sample shows beyond the most we had in flight since the sample before.
    That maximum and not the present figure, because requests that end while a scrape is under way are still in it.
    `saturation` is the endpoint's own figure, `open` tells whether one more request may come as far as an unknown
    capacity is concerned, `crowded` whether a request with a place elsewhere should stay away, however much of it is
    known there. All are kept up to date by every change, because they are read far more often.
    """

    __slots__ = (
        "_doubt_at",
        "_doubt_s",
        "_ended",
        "_pace",
        "_peak",
        "_pins",
        "_said",
        "_seen",
        "_turned",
        "blind",
        "capacity",
        "crowded",
        "elastic",
        "fixed",
        "foreign",
        "full",
        "generation",
        "heard_at",
        "id",
        "inflight",
        "kv",
        "lanes",
        "leased",
        "mark",
        "open",
        "place",
        "saturation",
        "silent_until",
        "unproven",
        "waiting",
    )

    def __init__(self, id: str, capacity: int = 0, elastic: bool = False) -> None:
        self.id = id
        self.fixed = capacity
        self.elastic = elastic
        self.place: object = None  # what tells its engine from another
        self.blind = True  # no sample of it is to be expected
        self.lanes: tuple[Lane, ...] = ()  # the models it serves; none once it has left the table
        self.inflight = 0
        self.leased = 0
        self._seen: dict[Ticket, None] = {}  # known to run
        self.unproven: dict[Ticket, None] = {}  # in the order they were sent
        self.waiting = 0
        self.kv = 0.0
        self.mark = 0
        self.full = False
        self.generation: int | None = None
        self.heard_at: float | None = None
        self.silent_until: float | None = None
        self.foreign = 0
        self._peak = 0
        self._said = 0
        self._pins = 0
        self._turned = False
        self._doubt_s = DOUBT_S
        self._doubt_at = 0.0
        self._ended: deque[tuple[float, float]] = deque(maxlen=REMEMBERED_ENDS)  # since when it ran for certain, end
        self._pace = float("inf")
        self.capacity = capacity
        self.saturation = 0.0
        self.open = True
        self.crowded = False

    @property
    def proven(self) -> int:
        return len(self._seen)

    @property
    def idle(self) -> bool:
        """Nothing of ours is there or on its way."""
        return not self.inflight and not self.leased

    @property
    def learnt(self) -> bool:
        """Whether `capacity` comes from watching alone."""
        return self.full and not self.fixed and not self._said

    @property
    def limit(self) -> int | None:
        """How many requests it holds at most for now: its capacity, or what is proven and a little more; None where it
        has no batch to overfill."""
        if self.capacity or self.elastic:
            return self.capacity or None
        return max(self.mark, len(self._seen)) + UNPROVEN

    def after(self) -> float:
        """What `saturation` would be with one request more."""
        return saturation(self.waiting, self.kv, self.inflight + self.leased + self.foreign + 1, self.capacity)

    def configure(self, capacity: int, elastic: bool, place: object = None, blind: bool = True) -> None:
        """Take what the table says now. `capacity` 0 is unknown; an `elastic` endpoint has no batch to overfill; of a
        `blind` one there are no samples.

        Another `place` is another engine under the same name: what was heard and learnt of the old one is forgotten.
        Requests that still run there count on until they end.
        """
        if place != self.place:
            if self.place is not None:
                self._forget()
                self.end_silence()
                self.generation = None
                self.waiting = self.foreign = 0
                self.kv = 0.0
                self._pace = float("inf")
                self._ended.clear()
            self.place = place
            self.blind = blind
        self.fixed = capacity
        self.elastic = elastic
        self._recount()

    # -- our own requests: the callers see to it that each comes once ------------------------------------------------

    def lease(self) -> None:
        self.leased += 1
        self._weigh()

    def unlease(self) -> None:
        self.leased -= 1
        self._weigh()

    def send(self, ticket: Ticket, now: float) -> None:
        self._send(ticket, now)
        self._weigh()

    def send_leased(self, ticket: Ticket, now: float) -> None:
        """Send a request whose lease is booked here: the sum stays, so nothing has to be weighed."""
        self.leased -= 1
        self._send(ticket, now)

    def _send(self, ticket: Ticket, now: float) -> None:
        self.inflight += 1
        if self.inflight > self._peak:
            self._peak = self.inflight
        ticket.sent_at = now
        self.unproven[ticket] = None

    def prove(self, ticket: Ticket, now: float) -> None:
        """The ticket is known to run. Does nothing the second time."""
        if ticket in self.unproven:
            del self.unproven[ticket]
            ticket.proven_at = now
            self._seen[ticket] = None
            self._weigh()

    def end(self, ticket: Ticket, now: float, answered: bool, tokens: int = 0) -> None:
        """Take a request out. `answered`: the engine gave its whole answer, of so many `tokens` (0: not known)."""
        self.inflight -= 1
        if answered and not self.capacity and not self.elastic and self._unheard():
            self._learn_of_end(ticket, now, tokens)
        if ticket in self._seen:
            del self._seen[ticket]
        else:
            del self.unproven[ticket]
        # Whoever ended either waited there or made way for one that did.
        if self.waiting:
            self.waiting -= 1
        self._turned = True
        self._weigh()

    def _unheard(self) -> bool:
        """Whether ends have to tell what samples do not. Not where the first sample comes in a moment: a router that
        has just started reads everything late."""
        return self.heard_at is None and (self.blind or self.generation is not None)

    def _learn_of_end(self, ticket: Ticket, now: float, tokens: int) -> None:
        """Raise the mark to what a complete answer proves (see above), the ticket itself included."""
        certain_s = 0.0
        if tokens:
            self._pace = min(self._pace, (now - ticket.sent_at) / tokens)
            certain_s = CERTAIN * self._pace * tokens
        if certain_s < 2 * LATE_S:
            if self.inflight >= self.mark:
                self.mark += 1
            return
        ran_at = now - certain_s
        together = 1
        for since, until in reversed(self._ended):
            if until <= ran_at + LATE_S:
                break
            together += since <= ran_at
        for other in self._seen:
            together += other.proven_at <= ran_at and other is not ticket
        for other in self.unproven:
            if other.sent_at > ticket.sent_at - LATE_S:
                break
            together += 1
        self._ended.append((ran_at, now))
        self.mark = max(self.mark, together)

    # -- what the engine says ----------------------------------------------------------------------------------------

    def hear(self, sample: Sample, pressed: bool) -> None:
        """Take a sample; one older than the last is ignored. `pressed`: requests of ours wait for this endpoint."""
        if self.heard_at is not None and sample.at < self.heard_at:
            return
        if self.generation is not None and sample.generation != self.generation:
            self._forget()
        self.generation = sample.generation
        self.heard_at = sample.at
        self.silent_until = None
        if sample.capacity is not None:
            self._said = sample.capacity
        self.foreign = max(0, sample.running + sample.waiting - self._peak)
        self._peak = self.inflight
        self.waiting = sample.waiting
        self.kv = sample.kv or 0.0
        self._learn(sample, pressed)
        self._recount()

    def tell(self, capacity: int) -> None:
        """The engine's word outside its samples; 0 takes it back. It ends when the engine starts again."""
        self._said = capacity
        self._recount()

    def _forget(self) -> None:
        """The engine started again, perhaps with other arguments: nothing learnt of the old one holds."""
        self.mark = 0
        self.full = False
        self._said = 0
        self._pins = 0
        self._doubt_s = DOUBT_S

    def _learn(self, sample: Sample, pressed: bool) -> None:
        if sample.running > self.mark:
            self.mark = sample.running
            self.full = False
            self._pins = 0
            self._doubt_s = DOUBT_S
        elif not sample.waiting or sample.running < self.mark:
            self._pins = 0
            if self.full and pressed and not sample.waiting and sample.at >= self._doubt_at:
                self.full = False
                self._doubt_s = min(self._doubt_s * 2, DOUBT_MOST_S)
        elif self.full:
            self._doubt_at = sample.at + self._doubt_s
        else:
            if not self._pins:
                self._turned = False
            self._pins += 1
            if self._pins >= PINS and self._turned:
                self.full = True
                self._doubt_at = sample.at + self._doubt_s

    def fall_silent(self, now: float) -> bool:
        """Scrapes fail. True when the endpoint counts as full from now on, until a sample or `end_silence`.

        What it said last is dropped: it is old, and the pool says `full` for it (unless all are silent).
        """
        if self.heard_at is None or self.silent_until is not None:
            return False
        self.silent_until = now + SILENCE_S
        self.waiting = 0
        self.foreign = 0
        self.kv = 0.0
        self._pins = 0
        self._weigh()
        return True

    def end_silence(self) -> None:
        """Full for long enough: from here on only what we have in flight counts, as if it had never been scraped."""
        self.silent_until = None
        self.heard_at = None

    # -- figures -----------------------------------------------------------------------------------------------------

    def _recount(self) -> None:
        self.capacity = self.fixed or self._said or (self.mark if self.full else 0)
        self._weigh()

    def _weigh(self) -> None:
        running = self.inflight + self.leased + self.foreign
        capacity = self.capacity
        if running <= capacity and not self.waiting and not self.kv:
            # what `saturation` comes to here: the usual case of an engine that keeps up, three times a request
            self.saturation = running / capacity if capacity else 0.0
        else:
            self.saturation = saturation(self.waiting, self.kv, running, capacity)
        if capacity:
            self.open = True
            self.crowded = running >= capacity + OVERHANG
        else:
            self.open = self.elastic or running < max(self.mark, len(self._seen)) + UNPROVEN
            self.crowded = not self.open

"""Admission: who may proceed now. One plain object, whose methods are transactions.

The problem. An engine serves first come, first served, and knows no tenants: once a batch job is in its queue, no
choice of endpoint rescues the person behind it. So requests wait here instead, where their order can still be changed,
and enter an engine only while there is room for their band.

The algorithm. A request asks for a place in the pools of its model. It gets one at once if nobody of its own or a
higher band waits for the same model and the pool's saturation, with this request counted, stays under the ceiling of
its band (`pools`). Otherwise it waits, and every event that can make room (an end, a first content, a sample, a change
of the table) gives places out: the highest band first, within a band by turns (`fairness`). After each method this
holds: *for no model does the next in line of any band wait while there is room for it*. Ceilings fall from band to
band, so when the highest band that waits finds no room, no lower one can, and one look is enough.

What a lower band gets while higher ones are waiting: nothing. A waiting platinum request means that its pool is beyond
1.2, so there is no room under 0.7 either; bronze waits until that is over, or until its time limit. Bands share out an
overload by sending it all to the bottom. Fairness is between tenants of one band, never between bands.

Why leases. Between its grant and the moment it is sent, a request is visible to no one: not in flight, not in a
sample. So a grant is booked at once, at the endpoint where it would fit best, and the booking moves to the endpoint it
is really sent to. Without this a burst of 300 would find an idle pool 300 times.

Every ticket that asked must be given back by `finished` or `leave`; both may be called in any state, and count once.
The methods that make room return the tickets that have left the queue (granted, or refused with a reason), whose tasks
the caller must wake; a ticket is returned once. Nothing here blocks, reads a clock, or calls back.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence

from appliance.facts.bands import AdmissionSettings
from appliance.facts.endpoint import Endpoint, Sample
from appliance.facts.errors import Refusal
from appliance.rules.admission import refusals
from appliance.rules.admission.capacity import Load
from appliance.rules.admission.lane import Lane
from appliance.rules.admission.lines import BandFigures, Lines
from appliance.rules.admission.pools import Pool, pools_of
from appliance.rules.admission.ticket import Ticket
from appliance.rules.engines.metrics import scraped

NOBODY: tuple[Ticket, ...] = ()


class Admission:
    """All that waits, is granted and runs, for all models. Times are seconds of one clock that never runs backwards.

    `loads` (by endpoint) may be read by scheduling, pages and metrics; everything is changed by the methods alone.
    """

    def __init__(self, settings: AdmissionSettings, wake_wait_s: float = 120.0) -> None:
        """`wake_wait_s` is how long a request waits for a model that is scaled to zero."""
        self.settings = settings
        self.wake_wait_s = wake_wait_s
        self.waits: Mapping[str, float] = {}
        """By model: how long a request waits for it where that is another time."""
        self.lines = Lines(settings)
        self.lanes: dict[str, Lane] = {}
        self.loads: dict[str, Load] = {}
        self.leased: set[Ticket] = set()
        self._silent: dict[str, Load] = {}
        self._numbers = 0

    # -- a request's way ---------------------------------------------------------------------------------------------

    def ask(self, ticket: Ticket, now: float) -> Ticket | None:
        """Ask for a place, once per ticket; it is granted, waiting or refused afterwards. Returns whom it displaced.

        Raises KeyError for a band that does not exist: whoever reads the caller's band answers for that.
        """
        rank = ticket.rank = self.lines.ranks[ticket.band]
        ceiling = ticket.ceiling = self.lines.ceilings[rank]
        ticket.asked_at = now
        lane = self.lanes.get(ticket.model)
        if lane is None or not (lane.pools or lane.wakes):
            _refuse(ticket, refusals.not_ready(ticket.model), now)
            return None
        if rank < lane.top and lane.pools:
            found = lane.place(ceiling) if self.settings.enabled else lane.anywhere()
            if found is not None:
                self._grant(ticket, found, now)
                return None
        return self._queue(ticket, lane, now)

    def dispatched(self, ticket: Ticket, endpoint: str, now: float) -> Sequence[Ticket]:
        """The request goes to this endpoint: call in the step that chooses it, before anything is awaited.

        Call again for each further attempt. Raises ValueError for a ticket that holds no place.
        """
        old = ticket.load
        if old is None:
            raise ValueError(f"a ticket that is {ticket.state} holds no place to dispatch from")
        load = self.loads.get(endpoint)
        if load is None:  # it left the table between the choice and this call
            load = self.loads[endpoint] = Load(endpoint)
        if ticket.state == "granted":
            ticket.state = "running"
            self.leased.discard(ticket)
            if old is load:
                load.send_leased(ticket, now)
                return NOBODY
            old.unlease()
        else:
            old.end(ticket, now, answered=False)
        ticket.load = load
        load.send(ticket, now)
        return self._freed(old, now)

    def began(self, ticket: Ticket, now: float) -> Sequence[Ticket]:
        """The first content came, so the request runs. Harmless when called again, or late."""
        load = ticket.load
        if load is None or ticket.state != "running":
            return NOBODY
        load.prove(ticket, now)
        return NOBODY if load.capacity else self._fill(load.lanes, now)

    def finished(
        self, ticket: Ticket, now: float, answered: bool = True, work: int | None = None, tokens: int = 0
    ) -> Sequence[Ticket]:
        """The request is over. `answered`: the engine gave its whole answer, of so many `tokens` (0: not known);
        `work`: what it really cost, if known.

        Every ticket that asked is given back by this or by `leave`; whichever comes first counts, the rest do nothing.
        """
        load = ticket.load
        if load is None or ticket.state != "running":
            return self.leave(ticket, now)
        ticket.state = "ended"
        ticket.load = None
        load.end(ticket, now, answered, tokens)
        if work is not None and ticket.rotation is not None:
            ticket.rotation.settle(ticket, work)
        return self._freed(load, now)

    def leave(self, ticket: Ticket, now: float) -> Sequence[Ticket]:
        """The request gives up: its caller left, or no endpoint was chosen. Gives back what it holds, in any state."""
        load = ticket.load
        if ticket.state == "waiting":
            self._unqueue(ticket, now)
            ticket.state = "ended"
            return NOBODY  # whoever stood behind it lacked room, not a turn
        if load is None:
            return NOBODY
        if ticket.state == "running":
            return self.finished(ticket, now, answered=False)
        # Granted. Among these are callers that left in the very step in which they got their place: the task sees the
        # cancellation, the ticket says granted. Without this branch that place would be lost for good.
        ticket.state = "ended"
        ticket.load = None
        self.leased.discard(ticket)
        load.unlease()
        if ticket.rotation is not None:
            ticket.rotation.settle(ticket, 0)
        return self._freed(load, now)

    # -- what is heard -----------------------------------------------------------------------------------------------

    def sampled(self, endpoint: str, sample: Sample, now: float) -> Sequence[Ticket]:
        """An engine was scraped. A sample older than the last one, or of an endpoint that is gone, changes nothing."""
        load = self.loads.get(endpoint)
        if load is None or not load.lanes:
            return NOBODY
        load.hear(sample, self.pressed(endpoint))
        if self._silent and load.silent_until is None and self._silent.pop(endpoint, None) is not None:
            self._count_silent(load)
        return self._fill(load.lanes, now)

    def told(self, endpoint: str, capacity: int, now: float) -> Sequence[Ticket]:
        """The engine said elsewhere how many requests it can run at once (llama.cpp's slots); 0 takes it back."""
        load = self.loads.get(endpoint)
        if load is None:
            return NOBODY
        load.tell(capacity)
        return self._fill(load.lanes, now)

    def unheard(self, endpoint: str) -> None:
        """A scrape brought no sample. Where there never was one, none is to be waited for."""
        load = self.loads.get(endpoint)
        if load is not None:
            load.blind = True

    def silent(self, endpoint: str, now: float) -> Sequence[Ticket]:
        """An endpoint's scrapes fail. It counts as full until it is heard again, for `capacity.SILENCE_S` at most."""
        load = self.loads.get(endpoint)
        if load is None or not load.lanes or not load.fall_silent(now):
            return NOBODY
        self._silent[endpoint] = load
        self._count_silent(load)
        return self._fill(load.lanes, now)  # once the last of a pool falls silent, none of them counts as full

    def table(
        self,
        models: Mapping[str, Sequence[Endpoint]],
        now: float,
        *,
        waking: Collection[str] = (),
        elastic: Collection[str] = (),
    ) -> Sequence[Ticket]:
        """Take the whole table anew: for each model the endpoints that may be sent requests now.

        That is: ready, not draining, breaker not open; what scheduling would drop would count as room here. `waking`
        names models scaled to zero, whose requests wait. `elastic` names endpoints without a batch to overfill
        (outside providers). What is known of an endpoint is kept while it is in the table or has requests in flight.
        Waiters of a model that has no endpoint left are refused, so that their fallbacks can be tried.
        """
        for load in self.loads.values():
            load.lanes = ()
        for endpoint in (endpoint for endpoints in models.values() for endpoint in endpoints):
            if endpoint.id not in self.loads:
                self.loads[endpoint.id] = Load(endpoint.id)
            place = (endpoint.host, endpoint.port, endpoint.tls, endpoint.base, endpoint.engine)
            load = self.loads[endpoint.id]
            load.configure(endpoint.capacity, endpoint.id in elastic, place, not scraped(endpoint.engine))
            if load.silent_until is None:
                self._silent.pop(load.id, None)
        for model in (*models, *waking):
            if model not in self.lanes:
                self.lanes[model] = Lane(model, len(self.lines), self.settings.fairness == "work")
        woken: list[Ticket] = []
        for model, lane in list(self.lanes.items()):
            lane.supply(pools_of(models.get(model, ()), self.loads), model in waking)
            if not lane.pools and not lane.wakes:
                woken.extend(self._strand(lane, now))
                if model not in models:
                    del self.lanes[model]
        self._rebook()
        for load in list(self.loads.values()):
            self._forget_if_gone(load)
        woken.extend(self.grants(now))
        return woken

    def configure(self, settings: AdmissionSettings, now: float, wake_wait_s: float | None = None) -> Sequence[Ticket]:
        """Take new settings. Waiters keep their order; those of a band that is gone wait in the default band."""
        waiters = self.lines.tickets()
        for ticket in waiters:
            self._unqueue(ticket, now)
        self.settings = settings
        self.wake_wait_s = self.wake_wait_s if wake_wait_s is None else wake_wait_s
        self.lines = Lines(settings)
        for lane in self.lanes.values():
            lane.clear(len(self.lines), settings.fairness == "work")
        for ticket in waiters:
            if ticket.band not in self.lines.ranks:
                ticket.band = settings.default_band
            ticket.rank = self.lines.ranks[ticket.band]
            ticket.ceiling = self.lines.ceilings[ticket.rank]
            self._enqueue(ticket, self.lanes[ticket.model], now)
        return self.grants(now)

    def expire(self, now: float) -> Sequence[Ticket]:
        """Refuse those whose time is up, and end silences that lasted long enough. Call it at `next_deadline`."""
        woken: list[Ticket] = []
        for ticket in self.lines.expired(now):
            self._time_out(ticket, now)
            woken.append(ticket)
        for load in list(self._silent.values()):
            if load.silent_until is not None and load.silent_until <= now:
                load.end_silence()
                del self._silent[load.id]
                self._count_silent(load)
                woken.extend(self._fill(load.lanes, now))
        return woken

    def next_deadline(self) -> float:
        """When `expire` has something to do next; infinity while nobody waits and nothing is silent."""
        silences = [load.silent_until for load in self._silent.values() if load.silent_until is not None]
        return min([self.lines.next_expiry(), *silences])

    def grants(self, now: float) -> Sequence[Ticket]:
        """Give out every place there is. The methods above do this for what they touch; this one looks everywhere."""
        return self._fill(self.lanes.values(), now)

    # -- figures -----------------------------------------------------------------------------------------------------

    def pressed(self, endpoint: str) -> bool:
        """Whether requests wait for a model that this endpoint serves: the time to scrape it more often."""
        load = self.loads.get(endpoint)
        return load is not None and any(lane.top < len(self.lines) for lane in load.lanes)

    def crowded(self, ticket: Ticket) -> tuple[str, ...]:
        """Endpoints that the choice should pass over for this ticket, which has its place at another: those that have
        no room by themselves, though their pool has. Affinity would else heap up requests behind one full batch while
        others have free slots."""
        lane = self.lanes.get(ticket.model)
        if lane is None or len(lane.loads) < 2 or not self.settings.enabled:
            return ()
        place = ticket.load
        return tuple([load.id for load in lane.loads if load.crowded and load is not place])

    def depth(self, band: str) -> int:
        """Requests of a band that wait, over all models."""
        return len(self.lines[self.lines.ranks[band]])

    def bands(self, now: float) -> list[BandFigures]:
        """All bands as they stand, the highest first."""
        return self.lines.figures(now)

    def saturations(self) -> list[tuple[str, str, float]]:
        """(model, pool, saturation), leases included; a pool of which no endpoint may be sent requests has none."""
        return [(lane.model, pool.name, pool.saturation) for lane in self.lanes.values() for pool in lane.pools]

    # -- steps of the above ------------------------------------------------------------------------------------------

    def _grant(self, ticket: Ticket, found: tuple[Pool, Load], now: float) -> None:
        pool, load = found
        ticket.state = "granted"
        ticket.left_queue_at = now
        ticket.pool = pool.name
        ticket.load = load
        self.leased.add(ticket)
        load.lease()

    def _freed(self, load: Load, now: float) -> Sequence[Ticket]:
        """Something of ours left this endpoint: give the room out, or forget an endpoint that has left the table."""
        if load.lanes:
            return self._fill(load.lanes, now) if self.lines.count else NOBODY
        self._forget_if_gone(load)
        return NOBODY

    def _forget_if_gone(self, load: Load) -> None:
        if not load.lanes and load.idle:
            self.loads.pop(load.id, None)
            self._silent.pop(load.id, None)

    def _fill(self, lanes: Iterable[Lane], now: float) -> Sequence[Ticket]:
        """Give the waiters of these lanes the places there are; returns them.

        Lanes meet here because they share an endpoint: the highest band of any of them goes first, and among equals the
        model whose last grant is longest ago.
        """
        if not self.lines.count:
            return NOBODY
        nobody = len(self.lines)
        active = [lane for lane in lanes if lane.top < nobody and lane.pools]
        woken: list[Ticket] = []
        while active:
            lane = active[0] if len(active) == 1 else min(active, key=lambda lane: (lane.top, lane.turn))
            found = lane.place(self.lines.ceilings[lane.top]) if self.settings.enabled else lane.anywhere()
            if found is None:
                active.remove(lane)  # grants to the others only leave less room
                continue
            ticket = lane.take(now)
            self.lines.drop(ticket)
            self._grant(ticket, found, now)
            lane.turn = self._next_number()
            woken.append(ticket)
            if lane.top >= nobody:
                active.remove(lane)
        return woken

    def _queue(self, ticket: Ticket, lane: Lane, now: float) -> Ticket | None:
        """Put a newcomer in line, or refuse it. Returns whom it displaced."""
        band, waiting = self.lines[ticket.rank].band, len(self.lines[ticket.rank])
        retry_s = 0.0
        if waiting >= band.capacity:
            retry_s = self._retry_s(lane, ticket.rank, now)
            _refuse(ticket, refusals.queue_full(band, waiting, False, retry_s), now)
            return None
        victim = None
        if self.lines.count >= self.lines.total:
            victim = self.lines.victim(ticket.rank)
            if victim is None:
                retry_s = self._retry_s(lane, ticket.rank, now)
                _refuse(ticket, refusals.queue_full(band, self.lines.count, True, retry_s), now)
                return None
            self._unqueue(victim, now)
            retry_s = self._retry_s(self.lanes[victim.model], victim.rank, now)
            _refuse(victim, refusals.displaced(self.lines[victim.rank].band, band, retry_s), now)
        ticket.number = self._next_number()
        ticket.state = "waiting"
        ticket.ahead = lane.ahead(ticket.rank)
        ticket.blocker, ticket.saturation = lane.blocker()
        self._enqueue(ticket, lane, now)
        return victim

    def _enqueue(self, ticket: Ticket, lane: Lane, now: float) -> None:
        if ticket.blocker == "loading":
            limit_s = self.waits.get(ticket.model, self.wake_wait_s)
        else:
            limit_s = self.lines[ticket.rank].band.ttl_s
        ticket.expires_at = ticket.asked_at + limit_s
        lane.add(ticket, now)
        self.lines.add(ticket)

    def _unqueue(self, ticket: Ticket, now: float) -> None:
        ticket.left_queue_at = now
        self.lanes[ticket.model].drop(ticket, now)
        self.lines.drop(ticket)

    def _time_out(self, ticket: Ticket, now: float) -> None:
        lane = self.lanes[ticket.model]
        self._unqueue(ticket, now)
        waited_s = now - ticket.asked_at
        if ticket.blocker == "loading" and not lane.pools:
            _refuse(ticket, refusals.not_woken(ticket.model, waited_s), now)
        else:
            band, retry_s = self.lines[ticket.rank].band, self._retry_s(lane, ticket.rank, now)
            _refuse(ticket, refusals.queue_timeout(band, ticket.model, waited_s, retry_s), now)

    def _strand(self, lane: Lane, now: float) -> list[Ticket]:
        """Refuse everybody who waits for a model that has no endpoint left."""
        lost = [ticket for ticket in self.lines.tickets() if ticket.model == lane.model] if len(lane) else []
        for ticket in lost:
            self._unqueue(ticket, now)
            _refuse(ticket, refusals.not_ready(lane.model), now)
        return lost

    def _rebook(self) -> None:
        """Move leases from endpoints that left a model's pools to those that will be sent these requests now."""
        for ticket in self.leased:
            lane, load = self.lanes.get(ticket.model), ticket.load
            if load is None or lane is None or not lane.pools or lane in load.lanes:
                continue
            load.unlease()
            pool, ticket.load = lane.anywhere()
            ticket.pool = pool.name
            ticket.load.lease()

    def _count_silent(self, load: Load) -> None:
        for lane in load.lanes:
            for pool in lane.pools:
                pool.count_silent()

    def _retry_s(self, lane: Lane, rank: int, now: float) -> float:
        return refusals.retry_after_s(lane.ahead(rank), lane.pace.per_second(now), self.lines[rank].band.ttl_s)

    def _next_number(self) -> int:
        self._numbers += 1
        return self._numbers


def _refuse(ticket: Ticket, refusal: Refusal, now: float) -> None:
    ticket.state = "refused"
    ticket.refusal = refusal
    ticket.left_queue_at = now

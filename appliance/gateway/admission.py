"""Waiting for a place: the Trio side of `rules/admission`.

The rules decide; here tasks sleep and are woken. Every call that can make room answers with the tickets that have left
the queue, and all of their tasks are woken at once: nothing is polled but the time limits, a few times a second.

A ticket is given back by `end` on every path, whatever the task was doing when it was cut. That covers the case that
looks harmless and is not: a caller leaves in the very step in which it was granted its place, so its task sees the cut
while its ticket says granted.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NoReturn

import attrs
import trio

from ..facts.bands import AdmissionSettings
from ..facts.call import Call
from ..facts.endpoint import Endpoint, Sample
from ..nursery.sleeper import SWEEP_S, Sleeper
from ..rules.admission.estimates import Typical, estimate, spent
from ..rules.admission.queue import Admission
from ..rules.admission.ticket import Ticket
from ..rules.scheduling.filters import gate
from ..rules.scheduling.member import Member
from ..rules.scheduling.table import Entry, Table
from .identity import answer_bound, answer_count, prompt_bytes
from .usage import Tally


class Gate:
    """Admission as the request road sees it."""

    def __init__(self, settings: AdmissionSettings, table: Table, wake_wait_s: float) -> None:
        self.rules = Admission(settings, wake_wait_s)
        self._table = table
        self._typical: dict[str, Typical] = {}
        self._open: tuple[tuple[str, bool], ...] = ()
        self.missed_wait_s = 0.0
        """How long a request waits for a model that a group served before."""

    # -- a request's way ---------------------------------------------------------------------------------------------

    def ask(self, entry: Entry, call: Call, sleeper: Sleeper, now: float) -> Ticket:
        """Ask for a place; what came of it stands in the ticket. The caller must give it back with `end`, whatever
        happens."""
        caller, band = call.caller, call.caller.band
        if band not in self.rules.lines.ranks:
            band = self.rules.settings.default_band  # a reload took its band away on its way to a fallback
        ticket = Ticket(entry.name, band, caller.tenant, 1, sleeper)
        displaced = self.rules.ask(ticket, now)
        if ticket.state == "waiting":
            ask, typical = call.ask, self._typical.setdefault(entry.name, Typical())
            ticket.work = estimate(prompt_bytes(ask), typical, max_tokens=answer_bound(ask), choices=answer_count(ask))
        if displaced is not None:
            _wake((displaced,))
        return ticket

    async def wait(self, ticket: Ticket, sleeper: Sleeper) -> None:
        """Sleep until the ticket is granted or refused. Raises the reason of a cut."""
        while ticket.state == "waiting":
            await sleeper.sleep()
        sleeper.check()  # cut in the step that woke it: do not begin for a client that has left

    def dispatched(self, ticket: Ticket, member: Member, now: float) -> None:
        """The request goes to `member`. Called in the step that chose it, before anything is awaited."""
        woken = self.rules.dispatched(ticket, member.id, now)
        if woken:
            _wake(woken)

    def began(self, ticket: Ticket, now: float) -> None:
        """The first of the answer came: the request runs."""
        woken = self.rules.began(ticket, now)
        if woken:
            _wake(woken)

    def end(self, ticket: Ticket, call: Call, answered: bool, tally: Tally | None, now: float) -> None:
        """Give the ticket back. `answered`: the engine gave its whole answer, and `tally` counted it."""
        work: int | None = None
        tokens = 0
        if answered and tally is not None:
            tokens = tally.content_events
            if tally.reported:
                tokens = tally.completion_tokens // answer_count(call.ask)
            if tally.reported and ticket.rotation is not None:
                # Only those that waited are charged, so only they teach what requests of this model cost.
                typical = self._typical.setdefault(ticket.model, Typical())
                typical.learn(prompt_bytes(call.ask), tally.prompt_tokens, tokens)
                work = spent(tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens)
        woken = self.rules.finished(ticket, now, answered, work, tokens)
        if woken:
            _wake(woken)

    def crowded(self, ticket: Ticket) -> tuple[str, ...]:
        """Endpoints that the choice should pass over for this ticket."""
        return self.rules.crowded(ticket)

    # -- what is heard -----------------------------------------------------------------------------------------------

    def sampled(self, member: Member, sample: Sample) -> None:
        now = time.monotonic()
        _wake(self.rules.sampled(member.id, sample, now))
        load = self.rules.loads.get(member.id)
        if load is not None:
            member.learn_capacity(load.capacity if load.learnt else 0)

    def unheard(self, member: Member) -> None:
        self.rules.unheard(member.id)

    def told_capacity(self, member: Member, slots: int) -> None:
        _wake(self.rules.told(member.id, slots, time.monotonic()))

    def pressed(self, member: Member) -> bool:
        return self.rules.pressed(member.id)

    def admits(self, member: Member, now: float) -> bool:
        """Whether it may be sent requests."""
        return not gate(member, now)

    def depth(self, model: str) -> int:
        """Requests that wait for a model, in all bands."""
        lane = self.rules.lanes.get(model)
        return 0 if lane is None else len(lane)

    def configure(self, settings: AdmissionSettings, wake_wait_s: float) -> None:
        if settings != self.rules.settings or wake_wait_s != self.rules.wake_wait_s:
            _wake(self.rules.configure(settings, time.monotonic(), wake_wait_s))

    def publish(self) -> None:
        """Tell the rules which endpoints may be sent requests now, and which models can be waited for without: after
        every change of names and settings."""
        now = time.monotonic()
        self._open = self._shape(now)
        served = {}
        for name, entry in self._table.entries.items():
            endpoints = [_as_it_is(member) for member in entry.members if not gate(member, now)]
            if endpoints:
                served[name] = endpoints
        missed = self._table.missed
        self.rules.waits = dict.fromkeys(missed.keys() - self._table.waking.keys(), self.missed_wait_s)
        waking = {**self._table.waking, **missed} if missed else self._table.waking
        _wake(self.rules.table(served, now, waking=waking))
        for name in self._typical.keys() - self._table.entries.keys():
            del self._typical[name]

    def health_changed(self, now: float) -> None:
        """Something happened that may open or shut an endpoint's gate. Cheap when it did not."""
        if self._shape(now) != self._open:
            self.publish()

    async def run(self) -> NoReturn:
        """Enforce the time limits, notice silence, and let endpoints back in whose breaker is due for a probe."""
        while True:
            await trio.sleep(SWEEP_S)
            self.sweep(time.monotonic())

    def sweep(self, now: float) -> None:
        """One look at the clock."""
        for member in self._table.members.values():
            # The choice's own measure, so that both count the same endpoints as full: what the choice avoids and
            # admission counts as room would overfill the others.
            if member.fresh_until <= now:
                woken = self.rules.silent(member.id, now)
                if woken:
                    _wake(woken)
        if self.rules.next_deadline() <= now:
            _wake(self.rules.expire(now))
        self.health_changed(now)

    def _shape(self, now: float) -> tuple[tuple[str, bool], ...]:
        """Who may be sent requests, and who of them only a probe."""
        return tuple(
            [(member.id, member.up) for member in self._table.members.values() if member.up or not gate(member, now)]
        )


def _as_it_is(member: Member) -> Endpoint:
    """The endpoint with the room that it has: one whose breaker is half-open takes a single request, whatever its
    batch. Counting all of its slots would let in a burst of which all but the probe go to its neighbours."""
    return member.endpoint if member.up else attrs.evolve(member.endpoint, capacity=1)


def _wake(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        sleeper = ticket.waiter
        assert isinstance(sleeper, Sleeper)
        sleeper.wake()

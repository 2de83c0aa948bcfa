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

import trio

from ..facts.bands import AdmissionSettings
from ..facts.call import Call
from ..facts.endpoint import Sample
from ..nursery.sleeper import SWEEP_S, Sleeper
from ..rules.admission.estimates import Typical, estimate, spent
from ..rules.admission.queue import Admission
from ..rules.admission.ticket import Ticket
from ..rules.engines.metrics import scraped
from ..rules.scheduling.filters import gate
from ..rules.scheduling.member import Member
from ..rules.scheduling.table import Entry, Table
from .identity import answer_bound, answer_count, prompt_bytes
from .usage import Tally


class Gate:
    """Admission as the request road sees it."""

    def __init__(self, settings: AdmissionSettings, table: Table) -> None:
        self.rules = Admission(settings)
        self._table = table
        self._typical: dict[str, Typical] = {}
        self._open: tuple[str, ...] = ()

    # -- a request's way ---------------------------------------------------------------------------------------------

    def ask(self, entry: Entry, call: Call, sleeper: Sleeper, now: float) -> Ticket:
        """Ask for a place; what came of it stands in the ticket. The caller must give it back with `end`, whatever
        happens."""
        caller = call.caller
        ticket = Ticket(entry.name, caller.band, caller.tenant, 1, sleeper)
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
        if answered and tally is not None and tally.reported and ticket.rotation is not None:
            # Only those that waited are charged, so only they teach what requests of this model cost.
            typical = self._typical.setdefault(ticket.model, Typical())
            typical.learn(
                prompt_bytes(call.ask), tally.prompt_tokens, tally.completion_tokens // answer_count(call.ask)
            )
            work = spent(tally.prompt_tokens, tally.cached_tokens, tally.completion_tokens)
        woken = self.rules.finished(ticket, now, answered, work)
        if woken:
            _wake(woken)

    def closed(self, entry: Entry, ticket: Ticket) -> tuple[str, ...]:
        """Endpoints of unknown capacity that hold as many unproven requests as they may; none where the one that the
        ticket is booked at has a known one, which is when its siblings do as well."""
        if ticket.load is None or ticket.load.capacity:
            return ()
        loads = self.rules.loads
        return tuple([member.id for member in entry.members if member.id in loads and not loads[member.id].open])

    # -- what is heard -----------------------------------------------------------------------------------------------

    def sampled(self, member: Member, sample: Sample) -> None:
        now = time.monotonic()
        _wake(self.rules.sampled(member.id, sample, now))
        load = self.rules.loads.get(member.id)
        if load is not None:
            member.learn_capacity(load.capacity if load.learnt else 0)

    def silent(self, member: Member) -> None:
        _wake(self.rules.silent(member.id, time.monotonic()))

    def told_capacity(self, member: Member, slots: int) -> None:
        _wake(self.rules.told(member.id, slots, time.monotonic()))

    def pressed(self, member: Member) -> bool:
        return self.rules.pressed(member.id)

    def configure(self, settings: AdmissionSettings) -> None:
        if settings != self.rules.settings:
            _wake(self.rules.configure(settings, time.monotonic()))

    def publish(self) -> None:
        """Tell the rules which endpoints may be sent requests now: after every change of names, settings or health."""
        now = time.monotonic()
        self._open = self._shape(now)
        models = {
            name: [member.endpoint for member in entry.members if not gate(member, now)]
            for name, entry in self._table.entries.items()
        }
        # An endpoint that is never scraped and whose capacity nobody set is believed to take what comes, like a provider:
        # non-streaming answers that come in the order of their requests prove nothing about its batch, and holding it to
        # the 2 requests of the cold rule for ever would be worse than not holding it at all.
        elastic = [
            member.id
            for member in self._table.members.values()
            if not scraped(member.endpoint.engine) and not member.endpoint.capacity
        ]
        served = {name: endpoints for name, endpoints in models.items() if endpoints}
        _wake(self.rules.table(served, now, elastic=elastic))
        for name in self._typical.keys() - self._table.entries.keys():
            del self._typical[name]

    async def run(self) -> NoReturn:
        """Enforce the time limits, and let endpoints back in whose breaker is due for a probe."""
        while True:
            await trio.sleep(SWEEP_S)
            now = time.monotonic()
            if self.rules.next_deadline() <= now:
                _wake(self.rules.expire(now))
            if self._shape(now) != self._open:
                self.publish()

    def _shape(self, now: float) -> tuple[str, ...]:
        return tuple([member.id for member in self._table.members.values() if member.up or not gate(member, now)])


def _wake(tickets: Sequence[Ticket]) -> None:
    for ticket in tickets:
        sleeper = ticket.waiter
        assert isinstance(sleeper, Sleeper)
        sleeper.wake()

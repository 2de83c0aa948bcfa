"""Admission under whatever may happen, against a second opinion that counts everything anew after each step."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import pytest
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from appliance.facts.bands import AdmissionSettings, Band
from appliance.facts.endpoint import Endpoint, Sample
from appliance.rules.admission.capacity import saturation
from appliance.rules.admission.queue import Admission
from appliance.rules.admission.ticket import Ticket

BANDS = ("platinum", "gold", "silver", "bronze")
SMALL = AdmissionSettings(
    bands=(
        Band("platinum", 1.2, 8, 30.0),
        Band("gold", 1.0, 8, 60.0),
        Band("silver", 0.9, 12, 60.0),
        Band("bronze", 0.7, 16, 300.0),
    ),
    queue_capacity_total=24,
)
LARGE = AdmissionSettings()
CAPACITIES = {"a": 8, "b": 0, "c": 1, "d": 0, "e": 4}
"""Endpoints; 0 is unknown."""
SLACK = 1e-6
MODELS = {"one": "ab", "two": "bc", "three": "d", "four": "ead"}


def in_order(tickets: Iterable[Ticket]) -> list[Ticket]:
    """As they asked: sets have no order of their own, and a failure must be found again."""
    return sorted(tickets, key=lambda ticket: int(str(ticket.waiter)))


class House:
    """An admission and its own books about it: who is where, told only by what was asked and answered."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.admission = Admission(settings)
        self.now = 0.0
        self.waiting: set[Ticket] = set()
        self.granted: set[Ticket] = set()
        self.running: dict[Ticket, str] = {}
        self.begun: set[Ticket] = set()
        self.up: set[str] = set(CAPACITIES)
        self.asked = 0
        self.refused = 0
        self.overhang = 0  # waiters at the last reload, which may have lowered the bound below them
        self.generations = dict.fromkeys(CAPACITIES, 0)
        self.table()

    def woken(self, tickets: Iterable[Ticket]) -> None:
        """Tickets that were returned: each had been waiting, and does no more."""
        for ticket in tickets:
            self.waiting.remove(ticket)
            if ticket.state == "granted":
                assert ticket.refusal is None
                self.granted.add(ticket)
            else:
                assert ticket.state == "refused"
                assert ticket.refusal is not None
                assert (ticket.refusal.retry_after_s or 0) >= 1
                self.refused += 1

    def ask(self, model: str, band: str, tenant: str, work: int) -> Ticket:
        self.asked += 1
        ticket = Ticket(model, band, tenant, work, waiter=self.asked)
        ceiling = next(b.ceiling for b in self.admission.settings.bands if b.name == band)
        room = self.room([id for id in MODELS[model] if id in self.up], ceiling, SLACK)
        displaced = self.admission.ask(ticket, self.now)
        if displaced is not None:
            assert displaced.rank > ticket.rank
            assert displaced.refusal is not None
            assert displaced.refusal.code == "displaced"
            self.woken([displaced])
        match ticket.state:
            case "granted":
                assert room
                self.granted.add(ticket)
            case "waiting":
                self.waiting.add(ticket)
            case state:
                assert (state, displaced) == ("refused", None)
                self.refused += 1
        return ticket

    def send(self, ticket: Ticket, endpoint: str) -> None:
        self.granted.discard(ticket)
        self.begun.discard(ticket)
        self.running[ticket] = endpoint
        self.woken(self.admission.dispatched(ticket, endpoint, self.now))

    def begin(self, ticket: Ticket) -> None:
        self.begun.add(ticket)
        self.woken(self.admission.began(ticket, self.now))

    def finish(self, ticket: Ticket, answered: bool, work: int | None, tokens: int = 0) -> None:
        del self.running[ticket]
        self.begun.discard(ticket)
        self.woken(self.admission.finished(ticket, self.now, answered, work, tokens))

    def leave(self, ticket: Ticket) -> None:
        self.waiting.discard(ticket)
        self.granted.discard(ticket)
        self.running.pop(ticket, None)
        self.begun.discard(ticket)
        self.woken(self.admission.leave(ticket, self.now))

    def sample(self, endpoint: str, running: int, waiting: int, kv: float | None, age_s: float) -> None:
        sample = Sample(self.now - age_s, running, waiting, kv, generation=self.generations[endpoint])
        self.woken(self.admission.sampled(endpoint, sample, self.now))

    def table(self) -> None:
        models = {
            model: [Endpoint(id, "h", 1, capacity=CAPACITIES[id]) for id in ids if id in self.up]
            for model, ids in MODELS.items()
        }
        self.woken(self.admission.table(models, self.now))

    def expire(self) -> None:
        self.woken(self.admission.expire(self.now))

    # -- the second opinion ------------------------------------------------------------------------------------------

    def check_books(self) -> None:
        subject = self.admission
        assert subject.leased == self.granted
        assert subject.lines.count == len(self.waiting) == sum(subject.depth(band) for band in BANDS)
        assert sum(len(lane) for lane in subject.lanes.values()) == len(self.waiting)
        for model, lane in subject.lanes.items():
            for rank, rotation in enumerate(lane.rotations):
                assert len(rotation) == sum(1 for t in self.waiting if t.model == model and t.rank == rank)
        for id, load in subject.loads.items():
            here = [ticket for ticket, endpoint in self.running.items() if endpoint == id]
            assert load.inflight == len(here)
            assert load.proven == sum(ticket in self.begun for ticket in here)
            assert set(load.unproven) == {ticket for ticket in here if ticket not in self.begun}
            assert load.leased == sum(ticket.load is load for ticket in self.granted)
            busy = load.inflight + load.leased + load.foreign
            assert load.saturation == saturation(load.waiting, load.kv, busy, load.capacity)
        assert set(self.running.values()) <= set(subject.loads)
        assert len(self.waiting) <= max(subject.lines.total, self.overhang)

    def check_nobody_waits_while_there_is_room(self) -> None:
        for model, ids in MODELS.items():
            for rank, band in enumerate(self.admission.settings.bands):
                if any(ticket.model == model and ticket.rank == rank for ticket in self.waiting):
                    assert not self.room([id for id in ids if id in self.up], band.ceiling, -SLACK), (model, band.name)

    def room(self, ids: list[str], ceiling: float, slack: float) -> bool:
        """Whether one more fits under this ceiling (give or take `slack`), from the rules' own words."""
        loads = [self.admission.loads[id] for id in ids]
        count = {load.id: load.inflight + load.leased + load.foreign for load in loads}
        silent = [load for load in loads if load.silent_until is not None]
        some = 0 < len(silent) < len(loads)

        def full(load: object, extra: int) -> float:
            assert load in loads
            n, c = count[load.id] + extra, load.capacity  # type: ignore[attr-defined]
            queue = max(load.waiting, n - c if c else 0)  # type: ignore[attr-defined]
            return max(queue / 5, load.kv / 0.8, n / c if c else 0.0)  # type: ignore[attr-defined]

        def shown(load: object) -> float:
            return max(1.0, full(load, 0)) if some and load in silent else full(load, 0)

        takers = [
            load
            for load in loads
            if not (some and load in silent) and (load.capacity or count[load.id] < max(load.mark, load.proven) + 2)
        ]
        if not takers:
            return False
        taker = min(takers, key=lambda load: full(load, 0))
        before = sum(map(shown, loads)) / len(loads)
        after = before + (full(taker, 1) - full(taker, 0)) / len(loads)
        if after <= ceiling + slack or (ceiling > 1 and before < ceiling + slack):
            return True
        return not any(load.inflight + load.leased for load in loads) and taker.waiting / 5 <= ceiling + slack

    def close(self) -> None:
        """Everybody goes; nothing may be left of anybody."""
        for ticket in [*self.waiting, *self.granted, *self.running]:
            self.leave(ticket)
        while self.granted:  # those that got the places of the others
            self.leave(next(iter(self.granted)))
        self.check_books()
        subject = self.admission
        assert (subject.lines.count, len(subject.leased), len(self.waiting)) == (0, 0, 0)
        assert all(load.idle and not load.proven and not load.unproven for load in subject.loads.values())
        assert all(rotation.tenants == 0 for lane in subject.lanes.values() for rotation in lane.rotations)
        self.up.clear()
        self.table()
        assert subject.loads == {}
        assert all(len(lane) == 0 and not lane.pools for lane in subject.lanes.values())


class Machine(RuleBasedStateMachine):
    """What may happen, in any order."""

    house: House

    @initialize(small=st.booleans())
    def open(self, small: bool) -> None:
        self.house = House(SMALL if small else LARGE)

    def pick(self, tickets: Iterable[Ticket], which: int) -> Ticket:
        ordered = in_order(tickets)
        return ordered[which % len(ordered)]

    @rule(
        model=st.sampled_from(sorted(MODELS)),
        band=st.sampled_from(BANDS),
        tenant=st.sampled_from("xyz"),
        work=st.integers(1, 5000),
        times=st.integers(1, 12),
    )
    def ask(self, model: str, band: str, tenant: str, work: int, times: int) -> None:
        for _ in range(times):
            self.house.ask(model, band, tenant, work)

    @precondition(lambda self: self.house.granted)
    @rule(which=st.integers(0, 99), endpoint=st.sampled_from(sorted(CAPACITIES)), hint=st.booleans())
    def send(self, which: int, endpoint: str, hint: bool) -> None:
        ticket = self.pick(self.house.granted, which)
        assert ticket.load is not None
        self.house.send(ticket, ticket.load.id if hint else endpoint)

    @rule()
    def send_all(self) -> None:
        for ticket in in_order(self.house.granted):
            assert ticket.load is not None
            self.house.send(ticket, ticket.load.id)

    @precondition(lambda self: self.house.running)
    @rule(which=st.integers(0, 99), endpoint=st.sampled_from(sorted(CAPACITIES)))
    def try_again_elsewhere(self, which: int, endpoint: str) -> None:
        self.house.send(self.pick(self.house.running, which), endpoint)

    @precondition(lambda self: self.house.running)
    @rule(which=st.integers(0, 99))
    def begin(self, which: int) -> None:
        self.house.begin(self.pick(self.house.running, which))

    @precondition(lambda self: self.house.running)
    @rule(
        which=st.integers(0, 99),
        answered=st.booleans(),
        work=st.none() | st.integers(1, 9000),
        tokens=st.sampled_from([0, 1, 40, 1000]),
    )
    def finish(self, which: int, answered: bool, work: int | None, tokens: int) -> None:
        self.house.finish(self.pick(self.house.running, which), answered, work, tokens)

    @rule(which=st.integers(0, 99), granted=st.booleans())
    def cancel(self, which: int, granted: bool) -> None:
        tickets = self.house.granted if granted else self.house.waiting
        if tickets:
            self.house.leave(self.pick(tickets, which))

    @rule(
        endpoint=st.sampled_from(sorted(CAPACITIES)),
        running=st.integers(0, 12),
        waiting=st.integers(0, 8),
        kv=st.none() | st.floats(0, 1),
        age_s=st.sampled_from([0.0, 0.0, 0.5, 30.0]),
        restarted=st.sampled_from([False, False, False, True]),
    )
    def sample(
        self, endpoint: str, running: int, waiting: int, kv: float | None, age_s: float, restarted: bool
    ) -> None:
        self.house.generations[endpoint] += restarted
        self.house.sample(endpoint, running, waiting, kv, age_s)

    @rule(endpoint=st.sampled_from(sorted(CAPACITIES)))
    def fall_silent(self, endpoint: str) -> None:
        self.house.woken(self.house.admission.silent(endpoint, self.house.now))

    @rule(endpoint=st.sampled_from(sorted(CAPACITIES)))
    def come_or_go(self, endpoint: str) -> None:
        self.house.up ^= {endpoint}
        self.house.table()

    @rule(seconds=st.floats(0.01, 40.0))
    def wait(self, seconds: float) -> None:
        self.house.now += seconds
        self.house.expire()

    @rule(which=st.sampled_from([SMALL, LARGE]))
    def reload(self, which: AdmissionSettings) -> None:
        self.house.woken(self.house.admission.configure(which, self.house.now))
        self.house.overhang = len(self.house.waiting)

    @invariant()
    def books_agree(self) -> None:
        if hasattr(self, "house"):
            self.house.check_books()

    @invariant()
    def nobody_waits_while_there_is_room(self) -> None:
        if hasattr(self, "house"):
            self.house.check_nobody_waits_while_there_is_room()

    def teardown(self) -> None:
        if hasattr(self, "house"):
            self.house.close()


TestMachine = Machine.TestCase
TestMachine.settings = hypothesis_settings(max_examples=150, stateful_step_count=70, deadline=None)


STORM = {"ask": 30, "send": 30, "begin": 20, "finish": 26, "cancel": 6, "sample": 4, "silent": 1, "table": 0.2}
"""What happens in the storm below, and how often."""


def happen(house: House, what: str, rng: Random) -> None:
    match what:
        case "ask":
            for _ in range(rng.choice((1, 1, 1, 1, 40))):
                house.ask(rng.choice(sorted(MODELS)), rng.choice(BANDS), rng.choice("abcdefgh"), rng.randint(1, 4000))
        case "send" if house.granted:
            for ticket in rng.sample(in_order(house.granted), min(5, len(house.granted))):
                assert ticket.load is not None
                house.send(ticket, ticket.load.id if rng.random() < 0.7 else rng.choice(sorted(CAPACITIES)))
        case "begin" if house.running:
            house.begin(rng.choice(list(house.running)))
        case "finish" if house.running:
            for ticket in rng.sample(list(house.running), min(3, len(house.running))):
                house.finish(ticket, rng.random() < 0.9, rng.choice((None, rng.randint(1, 9000))), rng.choice((0, 300)))
        case "cancel":
            tickets = in_order([*house.waiting, *house.granted, *house.running])
            if tickets:
                house.leave(rng.choice(tickets))
        case "sample":
            endpoint = rng.choice(sorted(CAPACITIES))
            house.generations[endpoint] += rng.random() < 0.05
            waiting, kv = rng.choice((0, 0, 0, 2, 6)), rng.choice((None, 0.3, 0.85))
            house.sample(endpoint, rng.randint(0, 10), waiting, kv, age_s=rng.choice((0.0, 9.0)))
        case "silent":
            house.woken(house.admission.silent(rng.choice(sorted(CAPACITIES)), house.now))
        case "table":
            house.up ^= {rng.choice(sorted(CAPACITIES))}
            house.table()


@pytest.mark.parametrize(("seed", "settings"), [(1, SMALL), (2, LARGE), (3, LARGE)])
def test_10_000_arrivals_leave_nothing_behind(seed: int, settings: AdmissionSettings) -> None:
    rng = Random(seed)
    house = House(settings)
    most = 0
    while house.asked < 10_000:
        house.now += rng.expovariate(20.0)
        happen(house, rng.choices(list(STORM), list(STORM.values()))[0], rng)
        house.expire()
        most = max(most, len(house.waiting))
        if rng.random() < 0.1:
            house.check_books()
        if rng.random() < 0.2:
            house.check_nobody_waits_while_there_is_room()
    assert most == settings.total  # it was a storm
    house.close()

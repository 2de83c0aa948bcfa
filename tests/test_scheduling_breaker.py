"""When an endpoint is left alone after failures, and that exactly one request probes it."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from appliance.facts.choice import Outcome
from appliance.facts.endpoint import Endpoint
from appliance.rules.scheduling.breaker import FIRST_OPEN_S, IN_A_ROW, JITTER, LONGEST_OPEN_S, Breaker
from appliance.rules.scheduling.member import Lease, Member

RNG = Random(1)


def opened(at: float = 100.0) -> Breaker:
    breaker = Breaker()
    for _ in range(IN_A_ROW):
        breaker.fail(at, RNG, breaker.begin(at))
    assert not breaker.closed
    return breaker


def test_five_failures_in_a_row_open_it_and_four_do_not() -> None:
    breaker = Breaker()
    assert [breaker.fail(1.0, RNG, False) for _ in range(5)] == [False, False, False, False, True]
    assert breaker.state(1.0) == "open" and not breaker.allows(1.0)


def test_a_success_breaks_the_row() -> None:
    breaker = Breaker()
    for _ in range(3):
        breaker.succeed(1.0, False)
    for _ in range(4):
        breaker.fail(1.0, RNG, False)
    breaker.succeed(1.0, False)
    assert not breaker.fail(1.0, RNG, False)


def test_every_other_request_failing_opens_it_too() -> None:
    breaker = Breaker()
    for turn in range(20):
        if turn % 2:
            breaker.fail(1.0, RNG, False)
        else:
            breaker.succeed(1.0, False)
    assert not breaker.closed


def test_one_failure_in_four_is_left_to_retries() -> None:
    breaker = Breaker()
    for turn in range(400):
        if turn % 4:
            breaker.succeed(1.0, False)
        else:
            breaker.fail(1.0, RNG, False)
    assert breaker.closed


def test_an_answered_failure_counts_once_for_a_request() -> None:
    breaker = Breaker()
    for _ in range(100):
        for cause in (7, 8, 9):
            assert not breaker.fail(1.0, RNG, False, cause)
    assert (breaker.known, breaker.closed) == (3, True)
    assert not breaker.fail(1.0, RNG, False, 10)
    assert breaker.fail(1.0, RNG, False, 11), "five different ones"


def test_a_probe_counts_whatever_failed_before_and_what_was_shut_in_begins_anew() -> None:
    breaker = Breaker()
    for cause in range(1, 6):
        breaker.fail(1.0, RNG, False, cause)
    now = breaker.open_until
    assert breaker.begin(now) and breaker.fail(now, RNG, True, 5)
    now = breaker.open_until
    breaker.succeed(now, breaker.begin(now))
    assert [breaker.fail(now, RNG, False, cause) for cause in range(1, 6)] == [False] * 4 + [True]


def test_without_an_answer_each_failure_counts() -> None:
    breaker = Breaker()
    assert [breaker.fail(1.0, RNG, False, 0) for _ in range(5)][-1]


def test_the_forty_that_die_with_an_engine_open_it_once() -> None:
    breaker = Breaker()
    assert sum(breaker.fail(1.0, RNG, False) for _ in range(40)) == 1
    assert breaker.open_until <= 1.0 + FIRST_OPEN_S * (1 + JITTER)


def test_it_stays_open_for_longer_each_time_and_no_longer_than_the_longest() -> None:
    breaker = opened(0.0)
    now = 0.0
    lengths = [breaker.open_until]
    for _ in range(8):
        now = breaker.open_until
        assert breaker.begin(now)
        breaker.fail(now, RNG, True)
        lengths.append(breaker.open_until - now)
    for trip, length in enumerate(lengths):
        nominal = min(LONGEST_OPEN_S, FIRST_OPEN_S * 2**trip)
        assert nominal * (1 - JITTER) <= length <= nominal * (1 + JITTER)


def test_two_that_open_together_are_not_probed_together() -> None:
    assert opened().open_until != opened().open_until


def test_a_successful_probe_closes_it() -> None:
    breaker = opened()
    now = breaker.open_until
    assert breaker.state(now) == "half-open"
    assert breaker.begin(now) and not breaker.allows(now) and not breaker.begin(now)
    breaker.succeed(now, True)
    assert breaker.closed
    assert not breaker.fail(now, RNG, False), "old failures are forgotten"


def test_an_old_stream_that_ends_well_proves_nothing() -> None:
    breaker = opened()
    breaker.succeed(101.0, False)
    assert breaker.state(101.0) == "open"


def test_a_probe_that_says_nothing_leaves_the_place_to_the_next() -> None:
    breaker = opened()
    now = breaker.open_until
    assert breaker.begin(now)
    breaker.release(True)
    assert breaker.state(now) == "half-open" and breaker.begin(now)


def test_opening_again_soon_goes_on_where_it_was_and_after_a_calm_starts_over() -> None:
    def lengths(calm_s: float) -> float:
        breaker = opened(0.0)
        now = breaker.open_until
        breaker.begin(now)
        breaker.succeed(now, True)
        now += calm_s
        for _ in range(IN_A_ROW):
            breaker.fail(now, RNG, False)
        return breaker.open_until - now

    assert lengths(1.0) >= 2 * FIRST_OPEN_S * (1 - JITTER)
    assert lengths(1000.0) <= FIRST_OPEN_S * (1 + JITTER)


@pytest.mark.parametrize("outcome", [Outcome.NEUTRAL, Outcome.BACKPRESSURE])
def test_fifty_of_these_in_a_row_do_not_touch_it(outcome: Outcome) -> None:
    member = Member(Endpoint("a", "10.0.0.1", 8000))
    for _ in range(50):
        member.begin(1.0).finish(outcome, 1.0, RNG)
    assert member.up and member.breaker.history == 0


def test_a_probe_that_streams_closes_it_with_its_first_content() -> None:
    member = Member(Endpoint("a", "10.0.0.1", 8000))
    for _ in range(IN_A_ROW):
        member.begin(0.0).finish(Outcome.FAILURE, 0.0, RNG)
    assert not member.up
    now = member.breaker.open_until
    probe = member.begin(now)
    assert probe.probe and not member.breaker.allows(now)
    probe.answered(now + 1.0)
    assert member.up
    probe.finish(Outcome.FAILURE, now + 600.0, RNG)
    assert member.up, "a cut ten minutes later is one failure among successes"


class Probing(RuleBasedStateMachine):
    """Any order of dispatches, outcomes and time: one probe at most, and no lease counted twice or lost."""

    def __init__(self) -> None:
        super().__init__()
        self.now = 0.0
        self.rng = Random(3)
        self.member = Member(Endpoint("a", "10.0.0.1", 8000))
        self.leases: list[Lease] = []

    @rule(seconds=st.floats(0.0, 90.0))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @rule()
    def dispatch(self) -> None:
        breaker = self.member.breaker
        if not breaker.allows(self.now):
            return
        half_open = not breaker.closed
        lease = self.member.begin(self.now)
        assert lease.probe == half_open
        self.leases.append(lease)
        if half_open:
            assert not breaker.allows(self.now), "a second request got through a half-open breaker"

    @rule(outcome=st.sampled_from(Outcome), which=st.integers(0, 99), again=st.booleans())
    def end(self, outcome: Outcome, which: int, again: bool) -> None:
        if self.leases:
            lease = self.leases.pop(which % len(self.leases))
            lease.finish(outcome, self.now, self.rng)
            if again:
                lease.finish(Outcome.FAILURE, self.now, self.rng)

    @rule(which=st.integers(0, 99))
    def answer(self, which: int) -> None:
        if self.leases:
            self.leases[which % len(self.leases)].answered(self.now)

    @invariant()
    def counts_hold(self) -> None:
        assert self.member.in_flight == len(self.leases)
        probes = [lease for lease in self.leases if lease.probe]
        assert len(probes) <= 1
        assert self.member.breaker.probing == bool(probes)
        assert self.member.up == self.member.breaker.closed
        assert 0.0 <= self.member.penalised(self.now) <= 1.0


TestProbing = Probing.TestCase


@given(st.lists(st.sampled_from([Outcome.SUCCESS, Outcome.NEUTRAL, Outcome.BACKPRESSURE]), max_size=100))
def test_only_failures_open_it(outcomes: list[Outcome]) -> None:
    member = Member(Endpoint("a", "10.0.0.1", 8000))
    for outcome in outcomes:
        assert not member.begin(1.0).finish(outcome, 1.0, RNG)
        assert member.up

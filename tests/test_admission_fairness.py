"""Turns within a band: round robin, charged by work, settled afterwards, within bounds; and guesses of that work."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.bands import AdmissionSettings, Band, faults
from appliance.facts.endpoint import Endpoint
from appliance.rules.admission.estimates import OUTPUT_TOKENS, Typical, estimate, spent
from appliance.rules.admission.fairness import FORGET_S, REMEMBERED, Rotation
from appliance.rules.admission.queue import Admission
from appliance.rules.admission.refusals import Pace, retry_after_s
from appliance.rules.admission.ticket import Ticket


def queue(rotation: Rotation, tenant: str, *works: int, now: float = 0.0) -> list[Ticket]:
    tickets = [Ticket("m", "bronze", tenant, work) for work in works]
    for ticket in tickets:
        rotation.add(ticket, now)
    return tickets


def order(rotation: Rotation, count: int) -> str:
    return "".join(rotation.take(0.0).tenant for _ in range(count))


# -- turns -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("by_work", [True, False])
def test_equal_requests_take_turns(by_work: bool) -> None:
    rotation = Rotation(by_work)
    for tenant in "abc":
        queue(rotation, tenant, 100, 100, 100)
    assert order(rotation, 9) == "abcabcabc"


def test_a_tenants_own_requests_keep_their_order() -> None:
    rotation = Rotation(True)
    tickets = queue(rotation, "a", 5, 500, 1, 50)
    assert [rotation.take(0.0) for _ in tickets] == tickets


def test_the_five_finish_among_the_first_ten() -> None:
    subject = Admission(AdmissionSettings())
    subject.table({"m": [Endpoint("e", "h", 1, capacity=8)]}, 0.0)
    running = []
    for _ in range(1005):
        ticket = Ticket("m", "bronze", "many")
        subject.ask(ticket, 0.0)
        if ticket.state == "granted":
            subject.dispatched(ticket, "e", 0.0)
            running.append(ticket)
    assert (len(running), subject.depth("bronze")) == (5, 1000)
    few = [Ticket("m", "bronze", "few") for _ in range(5)]
    for ticket in few:
        subject.ask(ticket, 1.0)
    granted: list[Ticket] = []
    for i in range(20):
        for ticket in subject.finished(running.pop(0), 2.0 + i):
            subject.dispatched(ticket, "e", 2.0 + i)
            running.append(ticket)
            granted.append(ticket)
    assert max(granted.index(ticket) for ticket in few) < 10


def test_long_requests_are_charged_by_their_length() -> None:
    rotation = Rotation(True)
    queue(rotation, "L", *[1000] * 5)
    queue(rotation, "s", *[100] * 40)
    first = order(rotation, 33)
    assert Counter(first) == {"L": 3, "s": 30}
    assert first.startswith("Ls")  # and nobody has to save up first


def test_plain_counting_does_not_care_how_long_they_are() -> None:
    rotation = Rotation(False)
    queue(rotation, "L", *[1000] * 5)
    queue(rotation, "s", *[100] * 5)
    assert order(rotation, 10) == "LsLsLsLsLs"


def test_coming_late_earns_nothing_and_costs_nothing() -> None:
    rotation = Rotation(True)
    queue(rotation, "a", *[10] * 20)
    order(rotation, 10)
    queue(rotation, "b", *[10] * 5)
    assert order(rotation, 10) in ("ab" * 5, "ba" * 5)


def test_leaving_and_coming_back_does_not_clear_a_debt() -> None:
    rotation = Rotation(True)
    queue(rotation, "s", *[10] * 100)
    queue(rotation, "L", 1000)
    assert order(rotation, 2) == "sL"
    queue(rotation, "L", 1000)
    assert "L" not in order(rotation, 95)
    assert "L" in order(rotation, 5)


def test_debts_are_forgiven_after_a_quiet_minute() -> None:
    rotation = Rotation(True)
    queue(rotation, "L", 1000)
    rotation.take(0.0)
    queue(rotation, "L", 1000, now=FORGET_S + 1)
    queue(rotation, "s", *[10] * 5, now=FORGET_S + 1)
    assert order(rotation, 2) == "Ls"


# -- settling --------------------------------------------------------------------------------------------------------


def test_the_real_cost_replaces_the_guess() -> None:
    rotation = Rotation(True)
    queue(rotation, "a", *[10] * 30)
    queue(rotation, "b", *[10] * 30)
    first = rotation.take(0.0)
    assert first.tenant == "a"
    rotation.settle(first, 110)  # eleven times the guess: b makes up for it
    assert order(rotation, 12) == "b" * 11 + "a"


def test_the_real_cost_of_an_absent_tenant_is_remembered() -> None:
    rotation = Rotation(True)
    queue(rotation, "b", *[10] * 30)
    (ticket,) = queue(rotation, "a", 10)
    assert order(rotation, 2) == "ba"
    rotation.settle(ticket, 110)
    queue(rotation, "a", 10)
    assert order(rotation, 12) == "b" * 10 + "ab"


def test_what_did_not_run_is_given_back() -> None:
    rotation = Rotation(True)
    tickets = queue(rotation, "a", 1000, 10, 10)
    queue(rotation, "b", 10, 10, 10)
    assert rotation.take(0.0) is tickets[0]
    rotation.settle(tickets[0], 0)
    assert order(rotation, 4) in ("abab", "baba")


def test_a_place_that_was_given_back_is_not_charged() -> None:
    subject = Admission(AdmissionSettings())
    subject.table({"m": [Endpoint("e", "h", 1, capacity=1)]}, 0.0)
    running = Ticket("m", "gold", "x")
    subject.ask(running, 0.0)
    subject.dispatched(running, "e", 0.0)
    waiting = [Ticket("m", "gold", "a", 1000)]
    waiting += [Ticket("m", "gold", tenant, 10) for tenant in "aaabbb"]
    for ticket in waiting:
        subject.ask(ticket, 0.0)
    (granted,) = subject.finished(running, 1.0)
    assert granted is waiting[0]
    (granted,) = subject.leave(granted, 1.0)  # its client left in time: a owes nothing
    turns = ""
    for _ in range(6):
        turns += granted.tenant
        subject.dispatched(granted, "e", 1.0)
        granted = next(iter(subject.finished(granted, 1.0)), granted)
    assert turns == "bababa"


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_a_tenant_without_waiters_leaves_the_rotation() -> None:
    rotation = Rotation(True)
    for i in range(3000):
        (ticket,) = queue(rotation, f"tenant {i}", 10)
        if i % 2:
            rotation.drop(ticket, 0.0)
        else:
            rotation.take(0.0)
    assert (len(rotation), rotation.tenants) == (0, 0)
    assert rotation.remembered <= REMEMBERED
    assert len(rotation._heap) == 0


def test_void_entries_do_not_pile_up() -> None:
    rotation = Rotation(True)
    (ticket,) = queue(rotation, "a", 10)
    queue(rotation, "a", *[10] * 5)
    rotation.take(0.0)
    for i in range(10_000):
        rotation.settle(ticket, 10 + (i % 2))
    assert len(rotation._heap) < 32


def test_an_empty_rotation_has_no_next() -> None:
    with pytest.raises(IndexError):
        Rotation(True).take(0.0)


# -- whatever comes --------------------------------------------------------------------------------------------------

STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), st.integers(0, 4), st.integers(1, 500)),
        st.tuples(st.just("take"), st.just(0), st.just(0)),
        st.tuples(st.just("drop"), st.integers(0, 1000), st.just(0)),
        st.tuples(st.just("settle"), st.integers(0, 1000), st.integers(0, 800)),
    ),
    max_size=200,
)


@given(STEPS, st.booleans())
def test_every_ticket_comes_out_once_and_in_its_tenants_order(steps: list[tuple[str, int, int]], by_work: bool) -> None:
    rotation = Rotation(by_work)
    waiting: dict[str, list[Ticket]] = {}
    taken: list[Ticket] = []
    for what, which, work in steps:
        everybody = [ticket for tickets in waiting.values() for ticket in tickets]
        match what:
            case "add":
                (ticket,) = queue(rotation, str(which), work)
                waiting.setdefault(str(which), []).append(ticket)
            case "take" if everybody:
                ticket = rotation.take(0.0)
                assert waiting[ticket.tenant].pop(0) is ticket
                taken.append(ticket)
            case "drop" if everybody:
                ticket = everybody[which % len(everybody)]
                rotation.drop(ticket, 0.0)
                waiting[ticket.tenant].remove(ticket)
            case "settle" if taken:
                rotation.settle(taken.pop(which % len(taken)), work)
        assert len(rotation) == sum(map(len, waiting.values()))
        assert rotation.tenants == sum(1 for tickets in waiting.values() if tickets)
    while len(rotation):
        ticket = rotation.take(0.0)
        assert waiting[ticket.tenant].pop(0) is ticket


@given(
    st.dictionaries(st.sampled_from("abcde"), st.lists(st.integers(1, 1000), min_size=30, max_size=30), min_size=2),
    st.integers(1, 30),
)
def test_nobody_who_waits_gets_more_than_one_longest_request_ahead(works: dict[str, list[int]], turns: int) -> None:
    """Over any time in which all of them wait, two tenants' shares differ by two of the longest requests at most."""
    rotation = Rotation(True)
    for tenant, costs in works.items():
        queue(rotation, tenant, *costs)
    got = dict.fromkeys(works, 0)
    for _ in range(turns):
        ticket = rotation.take(0.0)
        got[ticket.tenant] += ticket.work
    longest = max(max(costs) for costs in works.values())
    assert max(got.values()) - min(got.values()) <= 2 * longest


# -- guesses ---------------------------------------------------------------------------------------------------------


def test_work_is_uncached_prompt_plus_expected_answer() -> None:
    typical = Typical()
    assert estimate(4000, typical) == 1000 + OUTPUT_TOKENS
    assert estimate(4000, typical, cached_bytes=3600) == 100 + OUTPUT_TOKENS
    assert estimate(4000, typical, max_tokens=16, choices=3) == 1000 + 48
    assert estimate(4000, typical, max_tokens=1_000_000) == 1000 + OUTPUT_TOKENS
    assert estimate(0, typical, max_tokens=0, choices=0) == 1
    assert spent(1000, 900, 50) == 150
    assert spent(0, 0, 0) == 1


def test_guesses_follow_what_the_model_does() -> None:
    typical = Typical()
    for _ in range(200):
        typical.learn(prompt_bytes=3000, prompt_tokens=1000, output_tokens=20)
    typical.learn(prompt_bytes=3000, prompt_tokens=0, output_tokens=20)  # an engine without usage
    assert typical.bytes_per_token == pytest.approx(3.0, rel=0.01)
    assert typical.output_tokens == pytest.approx(20, rel=0.01)


# -- how soon to come back -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("per_second", [0.2, 1.0, 40.0])
def test_pace_is_right_from_the_first_seconds_on(per_second: float) -> None:
    pace = Pace()
    assert pace.per_second(0.0) == 0.0
    for i in range(2000):
        pace.note(i / per_second)
        if i in (20, 200, 1999):
            assert pace.per_second(i / per_second) == pytest.approx(per_second, rel=0.25)


def test_pace_falls_while_nothing_moves() -> None:
    pace = Pace()
    for i in range(100):
        pace.note(i / 10)
    assert pace.per_second(10.0 + 60.0) < 0.3


def test_retry_after_is_never_below_a_second_nor_above_the_limit() -> None:
    assert retry_after_s(0, 100.0, 60.0) == 1.0
    assert retry_after_s(1000, 1.0, 60.0) == 60.0
    assert retry_after_s(9, 2.0, 60.0) == 5.0
    assert retry_after_s(9, 0.0, 60.0) == 60.0


# -- what an operator may set ----------------------------------------------------------------------------------------


def test_the_bands_as_delivered_add_up() -> None:
    assert faults(AdmissionSettings()) == ()


def test_faults_of_bands_are_all_found_and_say_where() -> None:
    settings = AdmissionSettings(
        default_band="tin",
        bands=(Band("low", 0.7, 1, 1.0), Band("high", 1.2, 1, 1.0), Band("low", 0.5, 1, 1.0)),
    )
    assert [fault.path for fault in faults(settings)] == [
        "admission.bands[1].ceiling",
        "admission.bands[2].name",
        "admission.default_band",
    ]

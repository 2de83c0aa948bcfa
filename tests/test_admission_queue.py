"""Admission: places, bands, bounds, displacement, time limits, and what happens when the table changes underneath."""

from __future__ import annotations

import pytest

from appliance.facts.bands import AdmissionSettings, Band
from appliance.facts.endpoint import Endpoint, Sample
from appliance.rules.admission.queue import Admission
from appliance.rules.admission.ticket import Ticket


def endpoint(id: str, capacity: int = 8, priority: int = 0) -> Endpoint:
    return Endpoint(id, "127.0.0.1", 1, capacity=capacity, pool=f"p{priority}", pool_priority=priority)


def admission(*endpoints: Endpoint, settings: AdmissionSettings | None = None) -> Admission:
    """One model `m` on these endpoints; a single one of 8 slots when none are given."""
    subject = Admission(settings or AdmissionSettings())
    subject.table({"m": endpoints or (endpoint("e"),)}, 0.0)
    return subject


def ask(subject: Admission, band: str = "silver", *, tenant: str = "t", model: str = "m", now: float = 0.0) -> Ticket:
    ticket = Ticket(model, band, tenant)
    assert subject.ask(ticket, now) is None, "nobody was to be displaced"
    return ticket


def run(
    subject: Admission, band: str, count: int, *, on: str = "e", tenant: str = "t", model: str = "m"
) -> list[Ticket]:
    """Ask `count` times and send what is granted to `on`; returns all tickets."""
    tickets = [ask(subject, band, tenant=tenant, model=model) for _ in range(count)]
    for ticket in tickets:
        if ticket.state == "granted":
            subject.dispatched(ticket, on, 0.0)
    return tickets


def states(tickets: list[Ticket]) -> str:
    """One letter each: w(aiting), g(ranted), r(unning), e(nded); refused ones as x."""
    return "".join("x" if ticket.state == "refused" else ticket.state[0] for ticket in tickets)


def bands(**capacities: int) -> AdmissionSettings:
    """The four bands with these capacities instead of their own."""
    whole = AdmissionSettings()
    return AdmissionSettings(
        bands=tuple(Band(b.name, b.ceiling, capacities.get(b.name, b.capacity), b.ttl_s) for b in whole.bands),
        queue_capacity_total=capacities.get("total", 0),
    )


# -- room ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("band", "places"), [("bronze", 5), ("silver", 7), ("gold", 8), ("platinum", 10)])
def test_of_8_slots_each_band_gets_its_share(band: str, places: int) -> None:
    subject = admission()
    assert states(run(subject, band, 20)) == "r" * places + "w" * (20 - places)


@pytest.mark.parametrize("band", ["bronze", "silver", "gold", "platinum"])
def test_an_engine_of_one_slot_serves_every_band(band: str) -> None:
    subject = admission(endpoint("e", 1))
    first = run(subject, band, 1)
    assert states(first) == "r"


def test_higher_bands_get_in_where_lower_ones_wait() -> None:
    subject = admission()
    assert states(run(subject, "bronze", 6)) == "rrrrrw"
    assert states(run(subject, "silver", 3)) == "rrw"
    assert states(run(subject, "gold", 2)) == "rw"
    assert states(run(subject, "platinum", 3)) == "rrw"


def test_a_freed_place_goes_to_the_highest_band_first() -> None:
    subject = admission()
    running = run(subject, "platinum", 10)
    low, high = ask(subject, "gold"), ask(subject, "platinum")
    assert states([low, high]) == "ww"
    assert subject.finished(running[0], 1.0) == [high]
    # Two more must go before gold fits: 8 slots, of which 9 are taken once platinum has had its place.
    subject.dispatched(high, "e", 1.0)
    assert [list(subject.finished(ticket, 1.0)) for ticket in running[1:4]] == [[], [], [low]]


def test_a_burst_is_held_back_by_its_own_leases() -> None:
    subject = admission()
    burst = [ask(subject) for _ in range(300)]
    assert states(burst) == "g" * 7 + "w" * 293
    assert subject.loads["e"].leased == 7


def test_256_slots_of_known_capacity_are_filled_in_one_go() -> None:
    subject = admission(endpoint("e", 256))
    assert states([ask(subject, "gold") for _ in range(300)]).count("g") == 256


def test_a_waiting_engine_counts_though_few_are_in_flight() -> None:
    subject = admission(endpoint("e", 64))
    subject.sampled("e", Sample(0.0, running=8, waiting=5), 0.0)
    run(subject, "gold", 1)
    assert ask(subject, "silver").state == "waiting"
    assert ask(subject, "gold").state == "granted"


def test_kv_use_counts_and_an_engine_without_the_figure_is_not_held_back_by_it() -> None:
    subject = admission()
    run(subject, "silver", 1)
    subject.sampled("e", Sample(0.0, running=1, waiting=0, kv=0.75), 0.0)
    waiting = ask(subject, "silver")
    assert waiting.state == "waiting"
    assert waiting.saturation == pytest.approx(0.75 / 0.8)
    assert subject.sampled("e", Sample(1.0, running=1, waiting=0, kv=None), 1.0) == [waiting]


def test_a_pool_is_as_full_as_the_mean_of_its_endpoints() -> None:
    subject = admission(endpoint("a"), endpoint("b"))
    tickets = [ask(subject, "bronze") for _ in range(20)]
    assert states(tickets).count("g") == 11  # 0.7 of 16
    assert {load.leased for load in subject.loads.values()} == {5, 6}


@pytest.mark.parametrize("slots", [3, 7, 10, 13])
@pytest.mark.parametrize("endpoints", [1, 3, 6, 7])
def test_the_last_place_is_not_lost_to_rounding(endpoints: int, slots: int) -> None:
    subject = admission(*(endpoint(f"e{i}", slots) for i in range(endpoints)))
    tickets = [ask(subject, "gold") for _ in range(endpoints * slots + 5)]
    assert states(tickets).count("g") == endpoints * slots


def test_pools_are_filled_in_order_and_only_platinum_waits_in_the_first_when_all_are_full() -> None:
    subject = admission(endpoint("a", 8, priority=1), endpoint("b", 8, priority=0))
    tickets = [ask(subject, "platinum") for _ in range(20)]
    assert [ticket.pool for ticket in tickets[:16]] == ["p1"] * 8 + ["p0"] * 8
    assert [ticket.pool for ticket in tickets[16:]] == ["p1", "p1", "p0", "p0"]


def test_sent_elsewhere_a_lease_moves_along() -> None:
    subject = admission(endpoint("a"), endpoint("b"))
    ticket = ask(subject)
    booked = ticket.load
    assert booked is not None
    other = "b" if booked.id == "a" else "a"
    subject.dispatched(ticket, other, 0.0)
    assert (booked.leased, booked.inflight, subject.loads[other].inflight) == (0, 0, 1)


def test_a_further_attempt_moves_the_request_and_frees_the_first_endpoint() -> None:
    subject = admission(endpoint("a", 1), endpoint("b", 1))
    ticket = ask(subject, "gold")
    subject.dispatched(ticket, "a", 0.0)
    second = ask(subject, "gold")
    subject.dispatched(second, "a", 0.0)  # the choice is scheduling's: two on one, none on the other
    waiting = ask(subject, "gold")
    assert waiting.state == "waiting"
    assert subject.dispatched(second, "b", 0.0) == []
    assert [subject.loads[id].inflight for id in "ab"] == [1, 1]
    assert subject.finished(second, 1.0) == [waiting]


def test_turned_off_everything_is_let_in_and_counted() -> None:
    subject = admission(settings=AdmissionSettings(enabled=False))
    tickets = run(subject, "bronze", 100)
    assert states(tickets) == "r" * 100
    assert subject.loads["e"].inflight == 100
    for ticket in tickets:
        subject.finished(ticket, 1.0)
    assert subject.loads["e"].inflight == 0


# -- bounds ----------------------------------------------------------------------------------------------------------


def test_a_full_band_refuses_its_own_only() -> None:
    subject = admission(settings=bands(bronze=3))
    run(subject, "bronze", 8)
    refused = ask(subject, "bronze")
    assert refused.refusal is not None
    assert (refused.state, refused.refusal.status, refused.refusal.code) == ("refused", 503, "queue_full")
    assert refused.refusal.retry_after_s == 300.0  # nothing has moved yet: the band's own limit
    assert ask(subject, "silver").state == "granted"


def test_the_total_displaces_the_newest_of_the_lowest_band_for_somebody_higher() -> None:
    subject = admission(settings=bands(total=4))
    run(subject, "platinum", 10)
    silver, old, new = ask(subject, "silver"), ask(subject, "bronze", now=1.0), ask(subject, "bronze", now=2.0)
    gold = ask(subject, "gold")
    platinum = Ticket("m", "platinum")
    assert subject.ask(platinum, 3.0) is new
    assert states([platinum, silver, old, new, gold]) == "wwwxw"
    assert new.refusal is not None
    assert (new.refusal.status, new.refusal.code) == (503, "displaced")
    assert new.refusal.retry_after_s is not None
    assert new.refusal.retry_after_s >= 1
    assert new.left_queue_at == 3.0


def test_the_total_refuses_when_nobody_lower_waits() -> None:
    subject = admission(settings=bands(total=2))
    run(subject, "platinum", 10)
    waiting = [ask(subject, "silver"), ask(subject, "gold")]
    late = ask(subject, "silver")  # nobody is below silver, and it does not displace its own
    assert late.refusal is not None
    assert (late.state, late.refusal.code) == ("refused", "queue_full")
    assert states(waiting) == "ww"


def test_no_total_means_half_of_all_bands() -> None:
    assert AdmissionSettings().total == (256 + 256 + 512 + 1024) // 2


def test_displacement_reaches_over_models_and_capacity_counts_over_all_of_them() -> None:
    subject = Admission(bands(total=2, bronze=2))
    subject.table({"a": (endpoint("x", 1),), "b": (endpoint("y", 1),)}, 0.0)
    for model, on in (("a", "x"), ("b", "y")):
        run(subject, "platinum", 2, on=on, model=model)
    first, second = ask(subject, "bronze", model="a"), ask(subject, "bronze", model="b")
    assert ask(subject, "bronze", model="a").state == "refused"
    assert subject.depth("bronze") == 2
    platinum = Ticket("a", "platinum")
    assert subject.ask(platinum, 0.0) is second
    assert states([first, platinum]) == "ww"


def test_a_wait_ends_at_its_bands_limit() -> None:
    subject = admission()
    run(subject, "platinum", 10)
    bronze, gold = ask(subject, "bronze", now=5.0), ask(subject, "gold", now=10.0)
    assert subject.next_deadline() == 70.0
    assert subject.expire(69.9) == []
    assert subject.expire(70.0) == [gold]
    assert gold.refusal is not None
    assert (gold.refusal.status, gold.refusal.code, gold.wait_s(99.0)) == (504, "queue_timeout", 60.0)
    assert subject.next_deadline() == 305.0
    assert subject.expire(305.0) == [bronze]
    assert subject.next_deadline() == float("inf")
    assert subject.lines.count == 0


def test_retry_after_follows_the_pace_of_the_queue() -> None:
    subject = admission(settings=bands(silver=20))
    running = run(subject, "silver", 27)[:7]
    for second in range(1, 11):  # one place each second
        for ticket in subject.finished(running.pop(0), float(second)):
            subject.dispatched(ticket, "e", float(second))
            running.append(ticket)
    assert subject.depth("silver") == 10
    for _ in range(10):
        ask(subject, now=10.0)
    late = ask(subject, now=10.0)
    assert late.refusal is not None
    assert late.refusal.retry_after_s == pytest.approx(21, rel=0.25)


# -- giving back -----------------------------------------------------------------------------------------------------


def test_a_cancelled_waiter_leaves_at_once() -> None:
    subject = admission()
    running = run(subject, "silver", 7)
    first, second = ask(subject), ask(subject)
    assert subject.leave(first, 1.0) == ()
    assert (first.state, subject.depth("silver"), subject.lines.count) == ("ended", 1, 1)
    assert subject.finished(running[0], 2.0) == [second]


def test_cancel_then_grant_in_one_tick_loses_no_place() -> None:
    subject = admission()
    running = run(subject, "silver", 7)
    leaving, behind = ask(subject), ask(subject)
    # The client of `leaving` goes, its task is told so, and before the task can run a place is granted to it.
    assert subject.finished(running[0], 1.0) == [leaving]
    assert leaving.state == "granted"
    # Now the task runs, sees its cancellation, and gives back: the place is there for whoever is next.
    assert subject.leave(leaving, 1.0) == [behind]
    assert subject.leave(leaving, 1.0) == ()
    assert subject.finished(leaving, 1.0) == ()
    subject.dispatched(behind, "e", 1.0)
    assert (subject.loads["e"].inflight, subject.loads["e"].leased) == (7, 0)


@pytest.mark.parametrize("state", ["waiting", "granted", "running"])
def test_giving_back_counts_once_whatever_is_called_how_often(state: str) -> None:
    subject = admission()
    running = run(subject, "silver", 7 if state == "waiting" else 0)
    ticket = ask(subject)
    if state == "running":
        subject.dispatched(ticket, "e", 0.0)
    assert ticket.state == state
    for _ in range(2):
        subject.finished(ticket, 1.0)
        subject.leave(ticket, 1.0)
    assert subject.loads["e"].inflight == len(running)
    assert subject.loads["e"].leased == 0
    assert subject.lines.count == 0
    assert not subject.leased
    with pytest.raises(ValueError, match="holds no place"):
        subject.dispatched(ticket, "e", 1.0)


# -- models ----------------------------------------------------------------------------------------------------------


def test_a_saturated_model_holds_up_no_other() -> None:
    subject = Admission(AdmissionSettings())
    subject.table({"a": (endpoint("x"),), "b": (endpoint("y"),)}, 0.0)
    assert states(run(subject, "platinum", 200, on="x", model="a")).count("w") == 190
    assert states(run(subject, "bronze", 5, on="y", model="b")) == "r" * 5


def test_models_on_one_endpoint_share_it_band_by_band_and_turn_by_turn() -> None:
    subject = Admission(AdmissionSettings())
    subject.table({"a": (endpoint("x", 4),), "b": (endpoint("x", 4),)}, 0.0)
    running = run(subject, "gold", 4, on="x", model="a")
    for model in "aaaabb":
        ask(subject, "silver", model=model)
    ask(subject, "gold", model="b")
    order = []
    subject.finished(running.pop(), 1.0)
    while subject.lines.count or running:
        for ticket in list(subject.leased):
            order.append((ticket.band, ticket.model))
            subject.dispatched(ticket, "x", 1.0)
            running.append(ticket)
        if running:
            subject.finished(running.pop(0), 1.0)
    assert order[0] == ("gold", "b")
    assert [model for _, model in order[1:5]] in (["a", "b", "a", "b"], ["b", "a", "b", "a"])


def test_models_on_one_endpoint_do_not_overtake_each_others_bands() -> None:
    subject = Admission(AdmissionSettings())
    subject.table({"a": (endpoint("x"),), "b": (endpoint("x"),)}, 0.0)
    run(subject, "silver", 1, on="x", model="a")
    subject.sampled("x", Sample(0.0, running=1, waiting=0, kv=1.0), 0.0)
    low = [ask(subject, "silver", model="a") for _ in range(2)]
    high = [ask(subject, "gold", model="b") for _ in range(2)]
    assert subject.sampled("x", Sample(1.0, running=1, waiting=0, kv=0.1), 1.0) == high + low


def test_an_unknown_model_and_one_without_endpoints_are_refused_at_once() -> None:
    subject = Admission(AdmissionSettings())
    subject.table({"empty": ()}, 0.0)
    for model in ("nobody", "empty"):
        ticket = ask(subject, model=model)
        assert ticket.refusal is not None
        assert (ticket.state, ticket.refusal.status, ticket.refusal.code) == ("refused", 503, "model_not_ready")


def test_a_model_scaled_to_zero_is_waited_for() -> None:
    subject = Admission(AdmissionSettings(), wake_wait_s=120.0)
    subject.table({}, 0.0, waking={"m"})
    tickets = [ask(subject, "gold", now=1.0) for _ in range(3)]
    assert states(tickets) == "www"
    assert {ticket.blocker for ticket in tickets} == {"loading"}
    assert subject.expire(100.0) == []  # longer than gold's own limit
    assert subject.table({"m": (endpoint("e", 2),)}, 110.0) == tickets[:2]
    assert subject.expire(121.0) == [tickets[2]]
    assert tickets[2].refusal is not None
    assert tickets[2].refusal.code == "queue_timeout"


def test_a_model_that_does_not_wake_in_time() -> None:
    subject = Admission(AdmissionSettings(), wake_wait_s=10.0)
    subject.table({}, 0.0, waking={"m"})
    ticket = ask(subject, now=1.0)
    assert subject.expire(11.0) == [ticket]
    assert ticket.refusal is not None
    assert (ticket.refusal.status, ticket.refusal.code) == (503, "model_not_ready")


# -- the table -------------------------------------------------------------------------------------------------------


def test_an_endpoint_that_comes_makes_room() -> None:
    subject = admission()
    run(subject, "silver", 7)
    waiting = [ask(subject) for _ in range(9)]
    assert subject.table({"m": (endpoint("e"), endpoint("f"))}, 1.0) == waiting[:7]  # 14 of 16


def test_an_endpoint_vanishing_with_50_granted_leaks_nothing() -> None:
    subject = admission(endpoint("a", 64), endpoint("b", 64))
    granted = [ask(subject, "gold") for _ in range(128)]
    waiting = [ask(subject, "gold") for _ in range(10)]
    on_a = [ticket for ticket in granted if ticket.load is subject.loads["a"]]
    assert (states(granted), len(on_a)) == ("g" * 128, 64)
    for ticket in granted:
        if ticket not in on_a[:50]:
            assert ticket.load is not None
            subject.dispatched(ticket, ticket.load.id, 0.0)
    # Gone, with 50 that hold a grant and 14 that run there.
    assert subject.table({"m": (endpoint("b", 64),)}, 1.0) == []
    b = subject.loads["b"]
    assert (b.inflight, b.leased) == (64, 50)  # the 50 will be sent to what is left
    for ticket in on_a[:25]:
        subject.dispatched(ticket, "b", 1.0)
    for ticket in on_a[25:50]:
        subject.leave(ticket, 1.0)
    for ticket in on_a[50:]:
        subject.finished(ticket, 1.0, answered=False)
    assert "a" not in subject.loads
    done = [ticket for ticket in granted if ticket.state == "running"]
    woken = [other for ticket in done for other in subject.finished(ticket, 2.0)]
    assert woken == waiting
    for ticket in woken:
        subject.leave(ticket, 3.0)
    assert (b.inflight, b.leased, b.proven, len(b.unproven), subject.lines.count) == (0, 0, 0, 0, 0)


def test_the_last_endpoint_vanishing_sends_the_waiters_away_and_forgets_itself() -> None:
    subject = admission()
    tickets = run(subject, "silver", 10)
    assert subject.table({"m": ()}, 1.0) == tickets[7:]
    assert all(ticket.refusal is not None and ticket.refusal.code == "model_not_ready" for ticket in tickets[7:])
    assert subject.loads["e"].inflight == 7
    for ticket in tickets[:7]:
        assert subject.finished(ticket, 1.0) == ()
    assert subject.loads == {}
    assert subject.table({}, 2.0) == []
    assert subject.lanes == {}


def test_an_endpoint_that_comes_back_still_has_what_runs_there() -> None:
    subject = admission()
    run(subject, "silver", 7)
    subject.table({"m": ()}, 1.0)
    subject.table({"m": (endpoint("e"),)}, 2.0)
    assert ask(subject, now=2.0).state == "waiting"


def test_sent_to_an_endpoint_that_has_just_left_the_table() -> None:
    subject = admission()
    ticket = ask(subject)
    subject.table({"m": (endpoint("f"),)}, 1.0)
    subject.dispatched(ticket, "e", 1.0)
    assert subject.loads["e"].inflight == 1
    assert subject.loads["f"].leased == 0
    subject.finished(ticket, 2.0)
    assert set(subject.loads) == {"f"}


# -- silence ---------------------------------------------------------------------------------------------------------


def test_a_silent_endpoint_counts_as_full_for_10_s_at_most() -> None:
    subject = admission(endpoint("a"), endpoint("b"))
    subject.sampled("a", Sample(0.0, running=0, waiting=0), 0.0)
    assert subject.silent("a", 1.0) == ()
    tickets = [ask(subject, "bronze", now=1.0) for _ in range(9)]
    assert states(tickets) == "ggg" + "w" * 6  # (1.0 + 3/8) / 2 is 0.69
    assert {ticket.load for ticket in tickets[:3]} == {subject.loads["b"]}
    assert subject.next_deadline() == 11.0
    assert subject.expire(11.0) == tickets[3:]
    assert subject.next_deadline() == float("inf")


def test_all_endpoints_silent_block_nothing() -> None:
    subject = admission()
    subject.sampled("e", Sample(0.0, running=8, waiting=9, kv=0.9), 0.0)
    waiting = ask(subject)
    assert waiting.state == "waiting"
    assert subject.silent("e", 1.0) == [waiting]
    assert states([ask(subject, now=1.0) for _ in range(20)]).count("g") == 6


def test_an_endpoint_never_scraped_cannot_fall_silent() -> None:
    subject = admission(endpoint("a"), endpoint("b"))
    subject.silent("a", 1.0)
    assert subject.next_deadline() == float("inf")
    assert states([ask(subject, "gold", now=1.0) for _ in range(20)]).count("g") == 16


def test_heard_again_before_the_time_is_up() -> None:
    subject = admission(endpoint("a"), endpoint("b"))
    subject.sampled("a", Sample(0.0, running=0, waiting=0), 0.0)
    subject.silent("a", 1.0)
    waiting = [ask(subject, "bronze", now=1.0) for _ in range(5)][3:]
    assert subject.sampled("a", Sample(2.0, running=0, waiting=0), 2.0) == waiting
    assert subject.next_deadline() == float("inf")


# -- settings and figures --------------------------------------------------------------------------------------------


def test_new_settings_keep_the_waiters_and_their_order() -> None:
    subject = admission()
    run(subject, "platinum", 10)
    tickets = [ask(subject, band, now=float(i)) for i, band in enumerate(("bronze", "gold", "bronze", "silver"))]
    wider = AdmissionSettings(bands=(Band("gold", 1.5, 10, 20.0), Band("silver", 0.9, 10, 20.0)), fairness="requests")
    assert subject.configure(wider, 5.0) == [tickets[1]]
    assert [ticket.band for ticket in tickets] == ["silver", "gold", "silver", "silver"]
    assert subject.next_deadline() == 20.0
    assert subject.expire(23.0) == [tickets[0], tickets[2], tickets[3]]


def test_turning_admission_off_lets_everybody_in() -> None:
    subject = admission()
    tickets = run(subject, "bronze", 30)
    assert subject.configure(AdmissionSettings(enabled=False), 1.0) == tickets[5:]


def test_a_ticket_says_why_it_waited() -> None:
    subject = admission()
    run(subject, "gold", 8)
    ask(subject, "silver", tenant="other", now=1.0)
    ticket = ask(subject, "silver", tenant="mine", now=2.0)
    why = ticket.explain(5.0)
    assert (why.band, why.tenant, why.state, why.ahead, why.wait_s) == ("silver", "mine", "waiting", 1, 3.0)
    assert (why.blocker, why.saturation, why.ceiling) == ("saturation", 1.0, 0.9)


def test_bands_as_they_stand() -> None:
    subject = admission()
    run(subject, "silver", 9)
    platinum, gold, silver, bronze = subject.bands(4.0)
    assert (silver.name, silver.waiting, silver.oldest_s, silver.models) == ("silver", 2, 4.0, {"m": 2})
    assert platinum.waiting == gold.waiting == bronze.waiting == 0
    assert subject.saturations() == [("m", "p0", 7 / 8)]
    assert subject.pressed("e")
    assert not subject.pressed("nowhere")


def test_a_band_nobody_knows() -> None:
    with pytest.raises(KeyError):
        admission().ask(Ticket("m", "tin"), 0.0)

"""How full endpoints and pools are, and what silence of the metrics means."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.endpoint import Endpoint, Sample
from appliance.rules.scheduling.filters import narrow
from appliance.rules.scheduling.member import FULL_S, STALE_FLOOR_S, Member
from appliance.rules.scheduling.saturation import pool_saturation, saturation


def member(capacity: int = 0, name: str = "a", in_flight: int = 0) -> Member:
    made = Member(Endpoint(name, "10.0.0.1", 8000, engine="vllm", capacity=capacity))
    for _ in range(in_flight):
        made.begin(0.0)
    return made


@pytest.mark.parametrize(
    ("capacity", "in_flight", "sample", "expected"),
    [
        (0, 0, None, 0.0),
        (0, 40, None, 0.0),
        (8, 4, None, 0.5),
        (8, 10, None, 1.25),
        (8, 15, None, 1.875),
        (8, 8, Sample(0.0, 8, 0), 1.0),
        (8, 8, Sample(0.0, 6, 2), 1.0),
        (0, 0, Sample(0.0, 3, 5), 1.0),
        (0, 0, Sample(0.0, 3, 0, kv=0.4), 0.5),
        (0, 0, Sample(0.0, 3, 0, kv=0.8), 1.0),
        (0, 12, Sample(0.0, 3, 0, capacity=4), 3.0),
        (256, 128, Sample(0.0, 100, 0, kv=0.1), 0.5),
    ],
)
def test_saturation(capacity: int, in_flight: int, sample: Sample | None, expected: float) -> None:
    one = member(capacity, in_flight=in_flight)
    if sample is not None:
        one.hear(sample, 1.0)
    assert saturation(one, 0.5) == pytest.approx(expected)


def test_leases_count_as_in_flight() -> None:
    one = member(8, in_flight=4)
    assert saturation(one, 0.0, leases=4) == 1.0
    assert pool_saturation([one, member(8, "b")], 0.0, leases=8) == pytest.approx((1.0 + 0.5) / 2)


def test_learnt_capacity_is_a_batch_but_no_limit() -> None:
    one = member(in_flight=10)
    one.learn_capacity(8)
    assert saturation(one, 0.0) == pytest.approx(2 / 5)
    one.tell_capacity(20)
    assert saturation(one, 0.0) == pytest.approx(0.5), "what is known wins"


def test_a_restart_forgets_what_was_learnt_and_the_cache() -> None:
    one = member()
    one.hear(Sample(0.0, 1, 0), 1.0)
    one.learn_capacity(64)
    before = one.prefix_id
    assert not one.hear(Sample(1.0, 1, 0), 1.0)
    assert (one.learnt, one.prefix_id) == (64, before)
    assert one.hear(Sample(2.0, 1, 0, generation=1), 1.0)
    assert one.learnt == 0 and one.prefix_id != before


def test_one_that_goes_silent_is_full_for_ten_seconds_and_then_what_we_have_there() -> None:
    one = member(8, in_flight=2)
    one.hear(Sample(100.0, 2, 0), 1.0)
    silent = 100.0 + STALE_FLOOR_S
    assert saturation(one, silent - 0.1) == 0.25
    assert saturation(one, silent) == 1.0
    assert saturation(one, silent + FULL_S - 0.1) == 1.0
    assert saturation(one, silent + FULL_S) == 0.25


def test_a_slow_scrape_has_longer_to_be_missed() -> None:
    one = member(8)
    one.hear(Sample(100.0, 8, 0), 2.5)
    assert saturation(one, 107.0) == 0.0
    assert saturation(one, 108.0) == 1.0


def test_one_that_was_never_scraped_is_what_we_have_there_at_once() -> None:
    assert saturation(member(8, in_flight=4), 1e6) == 0.5


def test_all_silent_never_blocks() -> None:
    members = [member(8, name) for name in "abc"]
    for one in members:
        one.hear(Sample(100.0, 8, 9), 1.0)
    assert pool_saturation(members, 101.0) >= 1.0
    assert pool_saturation(members, 100.0 + STALE_FLOOR_S) == 0.0
    left, drops = narrow(members, 100.0 + STALE_FLOOR_S, (), "")
    assert left == members and drops == ()


def test_a_silent_one_is_left_out_while_others_report() -> None:
    members = [member(8, name) for name in "abc"]
    members[0].hear(Sample(100.0, 0, 0), 1.0)
    left, drops = narrow(members, 104.0, (), "")
    assert left == members[1:] and drops == (("a", "fresh"),)
    left, drops = narrow(members, 100.0 + STALE_FLOOR_S + FULL_S, (), "")
    assert left == members and drops == ()


def test_what_other_routers_brought_counts_when_it_was_seen_twice() -> None:
    one = member(in_flight=2)
    one.hear(Sample(0.0, 6, 0), 1.0)
    assert one.foreign == 0, "may be requests that have just ended"
    one.hear(Sample(1.0, 7, 0), 1.0)
    assert one.foreign == 4
    one.hear(Sample(2.0, 2, 0), 1.0)
    assert one.foreign == 0


@given(
    st.integers(0, 300),
    st.integers(0, 64),
    st.integers(0, 300),
    st.integers(0, 300),
    st.none() | st.floats(0.0, 1.0),
    st.floats(0.0, 50.0),
)
def test_it_is_never_negative_and_more_work_never_makes_it_less(
    in_flight: int, capacity: int, running: int, waiting: int, kv: float | None, now: float
) -> None:
    one = member(capacity, in_flight=in_flight)
    one.hear(Sample(0.0, running, waiting, kv=kv), 1.0)
    before = saturation(one, now)
    assert before >= 0.0
    one.begin(now)
    assert saturation(one, now) >= before
    assert saturation(one, now, leases=3.0) >= saturation(one, now)

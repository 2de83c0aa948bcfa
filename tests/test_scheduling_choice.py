"""The pipeline: filters, pools, scorers, penalties and pickers, and that a choice tells all of it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.facts.choice import DROPPED, FILTERS, PREFIX, SCORERS, Outcome
from appliance.facts.endpoint import Endpoint, Sample
from appliance.facts.settings import Model, Prefix, Scheduling, Weights
from appliance.rules.scheduling import scorers
from appliance.rules.scheduling.member import Member
from appliance.rules.scheduling.pickers import best, weighted
from appliance.rules.scheduling.pipeline import (
    ALL_SATURATED,
    NOT_SATURATED,
    ONLY_POOL,
    Policy,
    choose,
    has_another,
    not_ready,
)
from appliance.rules.scheduling.table import Entry, Table

POLICY = Policy()
LONG = b'[{"role":"system","content":"' + b"You answer in verse. " * 200


def entry_of(*endpoints: Endpoint) -> Entry:
    table = Table(Prefix())
    table.replace(endpoints, [Model("m")])
    return table.resolve("m")


def replicas(count: int = 3, capacity: int = 0) -> Entry:
    return entry_of(
        *(
            Endpoint(name, "10.0.0.1", 8000 + index, models=("m",), engine="vllm", capacity=capacity)
            for index, name in enumerate("abcdefgh"[:count])
        )
    )


def load(member: Member, count: int) -> None:
    for _ in range(count):
        member.begin(0.0)


def spread(entry: Entry, count: int = 300, **asked: object) -> Counter[str]:
    """Where `count` choices go that each end at once."""
    rng = Random(5)
    went: Counter[str] = Counter()
    for _ in range(count):
        member, _ = choose(entry, POLICY, 0.0, rng, **asked)
        assert member is not None
        went[member.id] += 1
    return went


# -- filters ---------------------------------------------------------------------------------------------------------


def test_equals_share_by_chance() -> None:
    went = spread(replicas())
    assert set(went) == {"a", "b", "c"} and min(went.values()) > 60


def test_each_gate_drops_and_is_told() -> None:
    entry = replicas(6)
    failing, draining, broken, silent, tried, _ = entry.members
    failing.set_failing("loading")
    draining.set_draining(True)
    for _ in range(5):
        broken.begin(0.0).finish(Outcome.FAILURE, 0.0, Random(1))
    silent.hear(Sample(-5.0, 0, 0), 1.0)
    member, choice = choose(entry, POLICY, 0.0, Random(1), tried=[tried.id])
    assert member is not None and member.id == choice.endpoint == "f"
    assert dict(choice.drops) == {"a": "ready", "b": "draining", "c": "breaker", "d": "fresh", "e": "tried"}
    assert choice.candidates == ("f",)


def test_a_pinned_request_goes_home_or_nowhere() -> None:
    entry = replicas()
    assert spread(entry, 20, only="b") == {"b": 20}
    entry.members[1].set_draining(True)
    member, choice = choose(entry, POLICY, 0.0, Random(1), only="b")
    assert member is None and choice.endpoint == ""
    assert dict(choice.drops) == {"a": "pinned", "b": "draining", "c": "pinned"}


def test_with_nobody_the_choice_says_why_and_the_refusal_names_the_gates() -> None:
    entry = replicas()
    a, b, c = entry.members
    a.set_failing("loading")
    b.set_draining(True)
    for _ in range(5):
        c.begin(0.0).finish(Outcome.FAILURE, 0.0, Random(1))
    member, choice = choose(entry, POLICY, 0.5, Random(1))
    assert member is None and choice.picked == -1
    assert "no endpoint could take it" in choice.tell()
    refusal = not_ready(entry, 0.5)
    assert (refusal.status, refusal.code) == (503, "model_not_ready")
    for word in ("1 loading", "1 draining", "1 stopped after failures"):
        assert word in refusal.message
    assert refusal.retry_after_s == pytest.approx(max(1.0, c.breaker.open_until - 0.5))
    assert not has_another(entry, 0.5, [])


def test_another_is_one_that_is_up_and_was_not_tried() -> None:
    entry = replicas()
    entry.members[2].set_draining(True)
    assert has_another(entry, 0.0, ["a"])
    assert not has_another(entry, 0.0, ["a", "b"])


# -- pools -----------------------------------------------------------------------------------------------------------


def two_pools() -> Entry:
    return entry_of(
        Endpoint("a", "10.0.0.1", 1, models=("m",), pool="main", pool_priority=1, capacity=4),
        Endpoint("b", "10.0.0.1", 2, models=("m",), pool="main", pool_priority=1, capacity=4),
        Endpoint("c", "10.0.0.1", 3, models=("m",), pool="spill", capacity=4),
    )


def test_one_pool_is_the_only_one() -> None:
    _, choice = choose(replicas(), POLICY, 0.0, Random(1))
    assert (choice.pool, choice.why) == ("main", ONLY_POOL)


def test_the_preferred_pool_serves_until_it_is_saturated() -> None:
    entry = two_pools()
    a, b, c = entry.members
    load(a, 4)
    load(b, 3)
    member, choice = choose(entry, POLICY, 0.0, Random(1))
    assert member is b and (choice.pool, choice.why) == ("main", NOT_SATURATED)
    assert choice.drops == (("c", "pool"),)
    load(b, 1)
    member, choice = choose(entry, POLICY, 0.0, Random(1))
    assert member is c and (choice.pool, choice.why) == ("spill", NOT_SATURATED)
    assert choice.drops == (("a", "pool"), ("b", "pool"))
    load(c, 9)
    member, choice = choose(entry, POLICY, 0.0, Random(1))
    assert member in (a, b) and choice.why == ALL_SATURATED


def test_a_pool_without_a_ready_member_is_passed_over() -> None:
    entry = two_pools()
    for member in entry.members[:2]:
        member.set_failing("unreachable")
    member, choice = choose(entry, POLICY, 0.0, Random(1))
    assert member is entry.members[2] and choice.pool == "spill"
    member, choice = choose(two_pools(), POLICY, 0.0, Random(1), tried=["a", "b"])
    assert member is not None and member.id == "c"


# -- load ------------------------------------------------------------------------------------------------------------


def test_an_idle_replica_comes_first() -> None:
    entry = replicas()
    load(entry.members[0], 1)
    load(entry.members[1], 1)
    assert spread(entry, 50) == {"c": 50}
    assert spread(entry, 50, text=LONG) == {"c": 50}, "also for a prompt that nobody has seen"


def test_what_waits_in_an_engine_counts() -> None:
    entry = replicas()
    for member, waiting in zip(entry.members, (3, 0, 3), strict=True):
        member.hear(Sample(0.0, 8, waiting), 1.0)
    assert spread(entry, 50) == {"b": 50}


def test_what_is_in_flight_beyond_a_batch_waits_whatever_an_old_sample_says() -> None:
    member = Member(Endpoint("a", "10.0.0.1", 1, capacity=4))
    load(member, 6)
    member.hear(Sample(0.0, 4, 0), 1.0)
    queue, _, _ = scorers.by_load([member])
    assert queue == [pytest.approx(0.6)]


def test_an_old_sample_is_forgotten_after_a_long_silence() -> None:
    entry = replicas()
    entry.members[0].hear(Sample(-100.0, 30, 30, kv=1.0), 1.0)
    assert spread(entry)["a"] > 60


def test_what_other_routers_send_counts() -> None:
    entry = replicas()
    for at in (0.0, 0.5):
        entry.members[0].hear(Sample(at, 9, 0), 1.0)
        entry.members[1].hear(Sample(at, 3, 0), 1.0)
        entry.members[2].hear(Sample(at, 9, 0), 1.0)
    assert spread(entry, 50) == {"b": 50}


def test_a_big_engine_gets_more_than_a_small_one() -> None:
    entry = entry_of(
        Endpoint("big", "10.0.0.1", 1, models=("m",), capacity=24),
        Endpoint("small", "10.0.0.1", 2, models=("m",), capacity=8),
    )
    rng = Random(1)
    for _ in range(16):
        member, _ = choose(entry, POLICY, 0.0, rng)
        assert member is not None
        member.begin(0.0)
    big, small = entry.members
    assert big.in_flight == 12 and small.in_flight == 4


def test_a_replica_that_fails_in_a_millisecond_does_not_win() -> None:
    """Two replicas have work, the third refuses everything and is therefore always idle."""
    entry = replicas()
    for member in entry.members[:2]:
        load(member, 12)
        member.hear(Sample(0.0, 12, 2, kv=0.7), 1.0)
    broken = entry.members[2]
    broken.hear(Sample(0.0, 0, 0, kv=0.0), 1.0)
    rng = Random(1)
    now = 0.0
    asked = 0
    for _ in range(1000):
        now += 0.002
        member, _ = choose(entry, POLICY, now, rng)
        assert member is not None
        lease = member.begin(now)
        asked += member is broken
        lease.finish(Outcome.FAILURE if member is broken else Outcome.SUCCESS, now + 0.001, rng)
    print(f"the broken replica got {asked} of 1000 requests in {now:.0f} s")
    assert asked <= 3
    assert broken.breaker.closed, "kept away by its score, before the breaker had reason to open"


def test_a_penalty_fades_and_a_single_endpoint_is_still_used() -> None:
    entry = replicas(2)
    a, _ = entry.members
    a.begin(0.0).finish(Outcome.FAILURE, 0.0, Random(1))
    assert spread(entry, 50) == {"b": 50}
    rng = Random(1)
    later = {choose(entry, POLICY, 60.0, rng)[1].endpoint for _ in range(50)}
    assert later == {"a", "b"}
    entry = replicas(1)
    for _ in range(4):
        entry.members[0].begin(0.0).finish(Outcome.FAILURE, 0.0, Random(1))
    assert spread(entry, 5) == {"a": 5}


def test_one_that_failed_a_moment_ago_attracts_nothing_it_knows() -> None:
    entry = replicas()
    rng = Random(1)
    home, _ = choose(entry, POLICY, 0.0, rng, session="s")
    assert home is not None
    home.begin(0.0).finish(Outcome.FAILURE, 0.0, rng)
    _, choice = choose(entry, POLICY, 0.0, rng, session="s")
    assert choice.guarded == (home.id,)


def test_backpressure_sends_the_next_elsewhere_for_a_while() -> None:
    entry = replicas(2)
    entry.members[0].begin(0.0).finish(Outcome.BACKPRESSURE, 0.0, Random(1))
    assert spread(entry, 50) == {"b": 50}


# -- affinity --------------------------------------------------------------------------------------------------------


def test_a_prompt_returns_to_where_its_head_is_known() -> None:
    entry = replicas()
    rng = Random(1)
    heads = [bytes(rng.choices(b"abcdefg ", k=2000)) for _ in range(12)]
    homes = [choose(entry, POLICY, 0.0, rng, text=head + b"first")[1].endpoint for head in heads]
    for _ in range(5):
        for head, home in zip(heads, homes, strict=True):
            _, choice = choose(entry, POLICY, 0.0, rng, text=head + bytes(rng.choices(b"xyz", k=50)))
            assert choice.endpoint == home and choice.prefix == "hit"
            assert choice.matched_bytes >= 2000
    assert Counter(homes) == {"a": 4, "b": 4, "c": 4}, "new heads settle where the fewest live"


def test_one_busy_neighbour_does_not_break_affinity_and_an_overloaded_home_does() -> None:
    entry = replicas()
    rng = Random(1)
    heads = [bytes(rng.choices(b"abcdefg ", k=2000)) for _ in range(12)]
    home = {head: choose(entry, POLICY, 0.0, rng, text=head)[1].endpoint for head in heads}
    a = entry.members[0]
    load(a, 3)
    assert all(choose(entry, POLICY, 0.0, rng, text=head + b"?")[1].endpoint == home[head] for head in heads)
    load(a, 27)
    for head in heads:
        member, choice = choose(entry, POLICY, 0.0, rng, text=head + b"!")
        assert choice.guarded == ("a",)
        assert member is not a
        assert home[head] == "a" or choice.endpoint == home[head], "the others keep theirs"


def test_when_all_are_as_busy_nobody_is_guarded() -> None:
    entry = replicas()
    for member in entry.members:
        load(member, 40)
    rng = Random(1)
    home = choose(entry, POLICY, 0.0, rng, text=LONG)[1].endpoint
    other = bytes(rng.choices(b"abcdefg ", k=2000))
    for number in range(30):
        choose(entry, POLICY, 0.0, rng, text=other + b"%d" % number)
    _, choice = choose(entry, POLICY, 0.0, rng, text=LONG)
    assert choice.guarded == () and choice.endpoint == home


def test_a_short_prompt_is_not_looked_up() -> None:
    entry = replicas()
    _, choice = choose(entry, POLICY, 0.0, Random(1), text=b"x" * 255)
    assert choice.prefix == "off" and len(entry.tree) == 0


def test_a_session_returns_unless_its_home_is_overloaded() -> None:
    entry = replicas()
    rng = Random(1)
    home, _ = choose(entry, POLICY, 0.0, rng, session="s1")
    assert home is not None
    load(home, 4)
    assert all(choose(entry, POLICY, 0.0, rng, session="s1")[0] is home for _ in range(20))
    load(home, 40)
    moved, choice = choose(entry, POLICY, 0.0, rng, session="s1")
    assert moved is not home and choice.guarded == (home.id,)
    assert choose(entry, POLICY, 0.0, rng, session="s1")[0] is moved, "and stays where it went"


def test_a_restarted_engine_has_forgotten_its_prompts() -> None:
    entry = replicas(2)
    rng = Random(1)
    for number in range(30):
        choose(entry, POLICY, 0.0, rng, text=bytes(rng.choices(b"abcdefg ", k=900)) + b"%d" % number)
    home, _ = choose(entry, POLICY, 0.0, rng, text=LONG)
    assert home is not None
    assert choose(entry, POLICY, 0.0, rng, text=LONG)[1].scores[3][entry.members.index(home)] > 0.9
    home.forget_cache()
    other = entry.members[1 - entry.members.index(home)]
    _, choice = choose(entry, POLICY, 0.0, rng, text=LONG)
    assert choice.prefix == "spread"
    assert other.prefix_id != home.prefix_id


# -- settings and telling --------------------------------------------------------------------------------------------


def test_weights_and_picker_come_from_the_settings() -> None:
    policy = Policy.of(Scheduling(picker="weighted", weights=Weights(queue=0.5, prefix=0.0)))
    assert (policy.queue, policy.prefix, policy.picker) == (0.5, 0.0, weighted)
    entry = replicas()
    _, choice = choose(entry, policy, 0.0, Random(1), text=LONG)
    assert choice.prefix == "off" and len(entry.tree) == 0


def test_a_choice_tells_everything_in_a_screenful() -> None:
    entry = two_pools()
    rng = Random(1)
    entry.members[0].begin(0.0).finish(Outcome.BACKPRESSURE, 0.0, rng)
    choose(entry, POLICY, 0.0, rng, text=LONG)
    _, choice = choose(entry, POLICY, 0.0, rng, text=LONG + b"more", session="s")
    lines = choice.tell()
    print("\n".join(lines))
    assert len(lines) <= 12 and all(len(line) <= 110 for line in lines)
    text = "\n".join(lines)
    assert all(name in text for name in SCORERS)
    assert text.count("<- picked") == 1
    assert "pool main" in text and DROPPED["pool"] in text and "bytes of the prompt" in text


# -- whatever comes --------------------------------------------------------------------------------------------------

MEMBERS = st.fixed_dictionaries(
    {
        "failing": st.sampled_from(["", "", "", "loading"]),
        "draining": st.sampled_from([False, False, False, True]),
        "failures": st.integers(0, 6),
        "in_flight": st.integers(0, 60),
        "capacity": st.sampled_from([0, 0, 1, 8, 256]),
        "learnt": st.sampled_from([0, 5]),
        "heard": st.none()
        | st.tuples(st.floats(-20.0, 0.0), st.integers(0, 300), st.integers(0, 50), st.none() | st.floats(0.0, 1.0)),
        "pool": st.sampled_from(["main", "main", "spill"]),
    }
)


@settings(max_examples=300)
@given(
    st.lists(MEMBERS, min_size=1, max_size=5),
    st.lists(st.sampled_from("abcde"), max_size=3),
    st.sampled_from(["", "", "", "a", "z"]),
    st.sampled_from([b"", b"short", LONG, LONG[:400], LONG + b"tail"]),
    st.sampled_from(["", "s1", "s2"]),
    st.sampled_from(["best", "weighted"]),
    st.integers(0, 2**32),
)
def test_whatever_the_state_a_choice_is_sound(
    states: list[dict], tried: list[str], only: str, text: bytes, session: str, picker: str, seed: int
) -> None:
    entry = entry_of(
        *(
            Endpoint(name, "10.0.0.1", 1, models=("m",), pool=state["pool"], capacity=state["capacity"])
            for name, state in zip("abcde", states, strict=False)
        )
    )
    rng = Random(seed)
    by_id = {member.id: member for member in entry.members}
    for name, state in zip("abcde", states, strict=False):
        member = by_id[name]
        load(member, state["in_flight"])
        for _ in range(state["failures"]):
            member.begin(-1.0).finish(Outcome.FAILURE, -1.0, rng)
        member.set_failing(state["failing"])
        member.set_draining(state["draining"])
        member.learn_capacity(state["learnt"])
        if state["heard"] is not None:
            at, running, waiting, kv = state["heard"]
            member.hear(Sample(at, running, waiting, kv=kv), 1.0)
    policy = Policy.of(Scheduling(picker=picker))
    for now in (0.0, 0.5, 4.0, 40.0):
        picked, choice = choose(entry, policy, now, rng, text=text, session=session, tried=tried, only=only)
        dropped = [name for name, _ in choice.drops]
        assert sorted([*dropped, *choice.candidates]) == sorted(by_id), "each is a candidate or was dropped, once"
        assert all(reason in FILTERS and reason in DROPPED for _, reason in choice.drops)
        assert choice.prefix in PREFIX
        assert choice.tell()
        possible = [
            member
            for member in entry.members
            if not member.failing
            and not member.draining
            and member.breaker.allows(now)
            and member.id not in tried
            and only in ("", member.id)
        ]
        assert (picked is not None) == bool(possible), "somebody could take it and nobody was picked, or the reverse"
        assert has_another(entry, now, tried) or not possible
        if picked is None:
            continue
        assert picked in possible and picked.id == choice.endpoint
        assert picked.id in choice.candidates and picked.id not in dropped
        assert len(choice.scores) == len(SCORERS)
        for column in choice.scores:
            assert len(column) == len(choice.candidates)
            assert all(0.0 <= score <= 1.0 for score in column)
        assert len(choice.totals) == len(choice.candidates)
        if picker == "best":
            assert choice.totals[choice.picked] >= max(choice.totals) - 1e-6
        lease = picked.begin(now)
        assert not (lease.probe and picked.breaker.allows(now))
        lease.finish(rng.choice(list(Outcome)), now, rng)


@given(st.lists(st.floats(-10.0, 10.0), min_size=1, max_size=8), st.integers(0, 2**32))
def test_pickers_pick_one_that_is_there(totals: list[float], seed: int) -> None:
    assert totals[best(totals, Random(seed))] >= max(totals) - 1e-6
    assert 0 <= weighted(totals, Random(seed)) < len(totals)


def test_the_weighted_picker_follows_the_weights() -> None:
    rng = Random(1)
    picks = Counter(weighted([3.0, 1.0, -5.0], rng) for _ in range(4000))
    assert picks[0] == pytest.approx(3000, rel=0.1)
    assert picks[2] <= 10


@given(st.lists(st.tuples(st.integers(0, 400), st.integers(0, 64)), min_size=1, max_size=6))
def test_scorers_stay_in_bounds_and_follow_load(states: list[tuple[int, int]]) -> None:
    members = []
    for index, (in_flight, capacity) in enumerate(states):
        member = Member(Endpoint(str(index), "10.0.0.1", 1, capacity=capacity))
        load(member, in_flight)
        members.append(member)
    queue, kv, scores = scorers.by_load(members)
    loads = [member.in_flight * member.per_slot for member in members]
    order = sorted(range(len(members)), key=loads.__getitem__)
    assert scores[order[0]] == 1.0
    assert all(scores[one] >= scores[other] for one, other in pairwise(order))
    for score in (*scores, *queue, *kv):
        assert 0.0 <= score <= 1.0

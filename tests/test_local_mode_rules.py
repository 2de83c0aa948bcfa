"""What one node does by itself: which GPUs a replica gets, how long a failure is waited for, what starts and stops."""

from __future__ import annotations

import math
from collections.abc import Mapping
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.facts.catalog import Model, Profile, Scaling
from appliance.facts.hardware import GIB, Gpu, Hindrance, Inventory
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.rules.fleet.alone import Alone, Decision
from appliance.rules.fleet.backoff import FIRST_S, LONGEST_S, STEADY_S, Backoff, failed
from appliance.rules.fleet.room import NoRoom, choose_gpus

SIM = Profile("cpu", "sim", gpus_per_node=0)
NODE = Inventory(node="box", address="10.0.0.1")
BAD = (Hindrance("ecc", "2 uncorrected memory errors"),)


def gpu(number: int, kind: str = "l40s-45g", **more: Any) -> Gpu:
    return Gpu(f"GPU-{number}", number, kind, kind, 45 * GIB, **more)


def with_gpus(*gpus: Gpu) -> Inventory:
    return attrs.evolve(NODE, gpus=gpus)


def on_gpus(count: int, name: str = "gpu", **more: Any) -> Profile:
    return Profile(name, "sim", gpus_per_node=count, tensor_parallel=count, **more)


def model(name: str = "m", *profiles: Profile, replicas: int = 1) -> Model:
    return Model(name, scaling=Scaling(replicas), profiles=profiles or (SIM,))


def report(shard: Shard, state: str = "ready", since: float = 0.0, **more: Any) -> Report:
    return Report(shard, state, since, **more)  # type: ignore[arg-type]


def running(decision: Decision, state: str = "ready", since: float = 0.0) -> dict[str, Report]:
    return {shard.id: report(shard, state, since) for shard in decision.starts}


def alone(*models: Model, address: str = "") -> Alone:
    made = Alone()
    made.configure(models, address)
    return made


# -- GPUs --------------------------------------------------------------------------------------------------------------


def indices(profile: Profile, inventory: Inventory, taken: Mapping[str, str] | None = None) -> list[int]:
    return [each.index for each in choose_gpus(profile, inventory, taken or {})]


def why_not(profile: Profile, inventory: Inventory, taken: Mapping[str, str] | None = None) -> str:
    with pytest.raises(NoRoom) as none:
        choose_gpus(profile, inventory, taken or {})
    return str(none.value)


def test_the_lowest_free_ones_are_taken() -> None:
    node = with_gpus(gpu(3), gpu(1), gpu(0, hindrances=BAD), gpu(2))
    assert indices(on_gpus(2), node, {"GPU-1": "a.1"}) == [2, 3]
    assert indices(SIM, node) == []


def test_those_joined_by_nvlink_go_together_and_the_larger_group_stays_whole() -> None:
    four = [gpu(number, nvlink_domain=0) for number in range(4)]
    node = with_gpus(*four, gpu(4, nvlink_domain=1), gpu(5, nvlink_domain=1))
    assert indices(on_gpus(2), node) == [4, 5]
    assert indices(on_gpus(3), node) == [0, 1, 2]
    assert indices(on_gpus(5), node) == [0, 1, 2, 3, 4]


def test_classes_are_never_mixed_and_the_scarcer_one_that_does_is_taken() -> None:
    node = with_gpus(*(gpu(number) for number in range(4)), gpu(4, "a100-80g"), gpu(5, "a100-80g"))
    assert indices(on_gpus(2), node) == [4, 5]
    assert indices(on_gpus(3), node) == [0, 1, 2]
    assert indices(on_gpus(1, gpu_class="l40s-45g"), node) == [0]
    assert why_not(on_gpus(5), node) == "it needs 5 GPUs of one class, and 4 of 6 are free"


@pytest.mark.parametrize(
    ("profile", "node", "told"),
    [
        (on_gpus(1), NODE, "it needs 1 GPU, and this node has none"),
        (
            on_gpus(1),
            attrs.evolve(NODE, partial=True),
            "it needs 1 GPU, and this node has none, as far as could be seen",
        ),
        (
            on_gpus(1, gpu_class="h100-80g"),
            with_gpus(gpu(0)),
            "it needs 1 GPU of class h100-80g, and the GPUs here are l40s-45g",
        ),
        (
            on_gpus(2),
            with_gpus(gpu(0), gpu(1, hindrances=BAD), gpu(2)),
            "it needs 2 GPUs of one class, and 1 of 3 are free"
            " (GPU 2 has a.1; GPU 1: ecc: 2 uncorrected memory errors)",
        ),
        (
            Profile("two", "vllm", nodes=2, tensor_parallel=2),
            NODE,
            "it needs 2 nodes, and this agent runs replicas on one node only",
        ),
    ],
)
def test_why_there_is_no_room(profile: Profile, node: Inventory, told: str) -> None:
    assert why_not(profile, node, {"GPU-2": "a.1"}) == told


# -- backoff -----------------------------------------------------------------------------------------------------------


def test_waits_grow_to_a_bound_and_differ() -> None:
    backoff, now, waits = Backoff(), 0.0, []
    for _ in range(40):
        backoff = failed(backoff, "no", now, Random(1))
        waits.append(backoff.until - now)
        now = backoff.until
    assert FIRST_S / 2 <= waits[0] <= FIRST_S
    assert all(wait <= LONGEST_S for wait in waits)
    assert waits[-1] >= LONGEST_S / 2
    assert len({failed(Backoff(), "no", 0.0, Random(seed)).until for seed in range(20)}) == 20


def test_failures_during_a_wait_are_of_the_same_trouble() -> None:
    first = failed(Backoff(), "no", 0.0, Random(1))
    assert failed(first, "other", first.until - 0.1, Random(2)) == first
    assert failed(first, "other", first.until, Random(2)).failures == 2


# -- what is decided ---------------------------------------------------------------------------------------------------


def test_each_replica_has_a_place_with_a_name_that_stays() -> None:
    rules = alone(model(replicas=2), Model("names-only"))
    decision = rules.decide({}, NODE, 0.0, Random(1))
    assert [shard.id for shard in decision.starts] == ["m.1/0", "m.2/0"]
    assert {(shard.node, shard.address, shard.key) for shard in decision.starts} == {("box", "10.0.0.1", "")}
    there = running(decision)
    assert rules.decide(there, NODE, 1.0, Random(1)) == Decision()
    del there["m.1/0"]
    assert [shard.id for shard in rules.decide(there, NODE, 2.0, Random(1)).starts] == ["m.1/0"]


def test_a_failure_is_waited_for_and_told_and_counted_once() -> None:
    rules = alone(model())
    (shard,) = rules.decide({}, NODE, 0.0, Random(1)).starts
    broken = {shard.id: report(shard, "failed", 10.0, reason="it exited while it loaded")}
    decision = rules.decide(broken, NODE, 10.0, Random(1))
    (waiting,) = decision.waiting
    assert decision.starts == ()
    assert waiting.reason == "it exited while it loaded"
    assert 11.0 <= waiting.again_at <= 12.0
    assert decision.again_at == waiting.again_at
    assert rules.decide(broken, NODE, 10.5, Random(1)).waiting == (waiting,)
    assert rules.decide(broken, NODE, waiting.again_at, Random(1)).starts == (shard,)
    assert rules.failures == {"m": 1}
    again = {shard.id: report(shard, "failed", 20.0, reason="again")}
    (waiting,) = rules.decide(again, NODE, 20.0, Random(1)).waiting
    assert 22.0 <= waiting.again_at <= 24.0


def test_a_model_that_is_gone_is_remembered_nowhere() -> None:
    rules = alone(model("a"), model("b"))
    started = rules.decide({}, NODE, 0.0, Random(1)).starts
    broken = {shard.id: report(shard, "failed", 5.0) for shard in started}
    rules.decide(broken, NODE, 5.0, Random(1))
    rules.configure((model("b"),))
    assert rules.decide(broken, NODE, 6.0, Random(1)).forgets == ("a.1/0",)
    assert set(rules.failures) == set(rules.backoffs) == {"b"}


def test_a_wait_belongs_to_its_model() -> None:
    rules = alone(model("a", replicas=2), model("b"))
    started = {shard.id: shard for shard in rules.decide({}, NODE, 0.0, Random(1)).starts}
    reports = {identity: report(shard) for identity, shard in started.items()}
    reports["a.1/0"] = report(started["a.1/0"], "failed", 5.0)
    reports["b.1/0"] = report(started["b.1/0"], "stopped", 5.0)
    decision = rules.decide(reports, NODE, 5.0, Random(1))
    assert [shard.id for shard in decision.starts] == ["b.1/0"]
    assert [each.replica for each in decision.waiting] == ["a.1"]


def test_a_model_that_served_steadily_has_recovered() -> None:
    rules = alone(model())
    (shard,) = rules.decide({}, NODE, 0.0, Random(1)).starts
    for at in (10.0, 20.0, 40.0):
        rules.decide({shard.id: report(shard, "failed", at)}, NODE, at, Random(1))
    assert rules.backoffs["m"].failures == 3
    ready = {shard.id: report(shard, "ready", 100.0)}
    decision = rules.decide(ready, NODE, 101.0, Random(1))
    assert decision.again_at == 100.0 + STEADY_S
    rules.decide(ready, NODE, 100.0 + STEADY_S, Random(1))
    assert rules.backoffs == {}
    assert rules.decide(ready, NODE, 200.0, Random(1)).again_at == math.inf


def test_one_that_serves_does_not_excuse_another_one_that_always_fails() -> None:
    rules = alone(model(replicas=2))
    good, bad = rules.decide({}, NODE, 0.0, Random(1)).starts
    for number, at in enumerate((100.0, 110.0, 120.0), start=1):
        there = {good.id: report(good, "ready", 1.0), bad.id: report(bad, "failed", at)}
        for look_at in (at, at + 0.1):
            decision = rules.decide(there, NODE, look_at, Random(1))
            assert decision.starts == ()
        assert rules.backoffs["m"].failures == number
    there[bad.id] = report(bad, "ready", 200.0)
    assert rules.decide(there, NODE, 201.0, Random(1)).again_at == 200.0 + STEADY_S
    rules.decide(there, NODE, 200.0 + STEADY_S, Random(1))
    assert rules.backoffs == {}


def test_a_changed_model_is_tried_at_once_and_others_wait_on() -> None:
    rules = alone(model("a"), model("b"))
    broken = {
        shard.id: report(shard, "failed", 10.0, reason="no") for shard in rules.decide({}, NODE, 0.0, Random(1)).starts
    }
    assert rules.decide(broken, NODE, 10.0, Random(1)).starts == ()
    changed = Profile("cpu", "sim", gpus_per_node=0, args=("--kv-blocks=9",))
    rules.configure((model("a", changed), model("b")))
    decision = rules.decide(broken, NODE, 10.1, Random(1))
    assert [(shard.id, shard.profile) for shard in decision.starts] == [("a.1/0", changed)]
    assert decision.forgets == ("a.1/0",)
    assert [each.replica for each in decision.waiting] == ["b.1"]


def test_what_nobody_wants_is_stopped_once_and_forgotten_when_it_has_ended() -> None:
    rules = alone(model(replicas=2))
    reports = running(rules.decide({}, NODE, 0.0, Random(1)))
    rules.configure((model(replicas=1),))
    (stop,) = rules.decide(reports, NODE, 1.0, Random(1)).stops
    assert (stop.shard_id, stop.reason) == ("m.2/0", "it is no longer in the configuration")
    shard = reports["m.2/0"].shard
    for state in ("draining", "stopping"):
        assert rules.decide(reports | {"m.2/0": report(shard, state)}, NODE, 1.0, Random(1)) == Decision()
    assert rules.decide(reports | {"m.2/0": report(shard, "stopped")}, NODE, 1.0, Random(1)).forgets == ("m.2/0",)


@pytest.mark.parametrize(
    ("configured", "told"),
    [
        (model("m", Profile("cpu", "sim", gpus_per_node=0, args=("--x",))), "its profile cpu has been changed"),
        (attrs.evolve(model(), context_tokens=99), "context_tokens of the model has been changed"),
    ],
)
def test_a_changed_replica_is_stopped_before_it_is_started_anew(configured: Model, told: str) -> None:
    rules = alone(model())
    reports = running(rules.decide({}, NODE, 0.0, Random(1)))
    rules.configure((configured,))
    decision = rules.decide(reports, NODE, 1.0, Random(1))
    assert decision.starts == ()
    assert decision.stops[0].reason.startswith(told)
    ended = {"m.1/0": report(reports["m.1/0"].shard, "stopped")}
    decision = rules.decide(ended, NODE, 2.0, Random(1))
    assert decision.forgets == ("m.1/0",)
    assert decision.starts[0].profile == configured.profiles[0]


def test_only_an_address_that_was_set_moves_what_runs() -> None:
    rules = alone(model())
    reports = running(rules.decide({}, NODE, 0.0, Random(1)))
    assert rules.decide(reports, attrs.evolve(NODE, address="10.0.0.9"), 1.0, Random(1)) == Decision()
    rules.configure((model(),), "10.0.0.9")
    assert "agent.address is 10.0.0.9" in rules.decide(reports, NODE, 1.0, Random(1)).stops[0].reason


def test_the_profile_of_the_highest_priority_that_fits_is_taken() -> None:
    rules = alone(
        model("m", attrs.evolve(SIM, priority=1), on_gpus(4, "four", priority=5), on_gpus(2, "two", priority=3))
    )
    decision = rules.decide({}, with_gpus(gpu(0), gpu(1), gpu(2)), 0.0, Random(1))
    assert decision.starts[0].profile.name == "two"
    assert decision.starts[0].gpus == ("GPU-0", "GPU-1")
    assert decision.starts[0].gpu_class == "l40s-45g"


def test_every_profile_that_does_not_fit_says_why() -> None:
    rules = alone(model("m", on_gpus(4, "four"), Profile("two", "vllm", nodes=2, tensor_parallel=2)))
    (waiting,) = rules.decide({}, with_gpus(gpu(0)), 0.0, Random(1)).waiting
    assert waiting.reason == (
        "four: it needs 4 GPUs of one class, and 1 of 1 are free;"
        " two: it needs 2 nodes, and this agent runs replicas on one node only"
    )


PROFILES = st.builds(
    lambda count, kind, priority: (
        on_gpus(count, f"p{count}{kind}", gpu_class=kind, priority=priority)
        if count
        else attrs.evolve(SIM, priority=priority)
    ),
    st.integers(0, 4),
    st.sampled_from(["", "l40s-45g", "a100-80g"]),
    st.integers(0, 3),
)
MODELS = st.lists(
    st.builds(
        lambda name, profiles, replicas: model(name, *profiles, replicas=replicas),
        st.sampled_from(["a", "b", "c", "org/d"]),
        st.lists(PROFILES, min_size=1, max_size=3, unique_by=lambda each: each.name),
        st.integers(0, 3),
    ),
    max_size=4,
    unique_by=lambda each: each.name,
)
NODES = st.lists(
    st.tuples(st.sampled_from(["l40s-45g", "a100-80g"]), st.booleans(), st.sampled_from([None, 0, 1])),
    max_size=8,
).map(
    lambda rows: with_gpus(
        *(
            gpu(number, kind, hindrances=BAD if bad else (), nvlink_domain=domain)
            for number, (kind, bad, domain) in enumerate(rows)
        )
    )
)
STATES = st.sampled_from(["starting", "loading", "ready", "ready", "failed", "stopped"])


@settings(max_examples=60, deadline=None)
@given(
    st.lists(MODELS, min_size=1, max_size=3), NODES, st.lists(STATES, max_size=40), st.randoms(use_true_random=False)
)
def test_no_gpu_twice_none_that_is_not_free_no_class_mixed_and_all_room_used(
    plans: list[list[Model]], node: Inventory, states: list[str], rng: Random
) -> None:
    """A node through several configurations and any fate of its shards, one minute a step."""
    rules, reports, now = Alone(), dict[str, Report](), 0.0
    fates = iter(states)
    for models in plans:
        rules.configure(models)
        by_name = {each.name: each for each in models}
        for _ in range(6):
            now += 60.0
            decision = rules.decide(reports, node, now, rng)
            for stop in decision.stops:
                reports[stop.shard_id] = attrs.evolve(reports[stop.shard_id], state="stopped", since=now)
            for shard_id in decision.forgets:
                assert reports.pop(shard_id).ended
            for shard in decision.starts:
                assert shard.id not in reports or reports[shard.id].ended
                reports[shard.id] = report(shard, "starting", now)
                found = [node.gpu(uuid) for uuid in shard.gpus]
                assert all(each is not None and each.placeable for each in found)
                assert len({each.gpu_class for each in found if each}) <= 1
                assert len(shard.gpus) == shard.profile.gpus_per_node
            held = [uuid for each in reports.values() if not each.ended for uuid in each.shard.gpus]
            assert len(held) == len(set(held))
            wanted = {f"{each.name}.{number + 1}" for each in models for number in range(each.scaling.min_replicas)}
            there = {each.shard.replica for each in reports.values() if not each.ended}
            waiting = {each.replica for each in decision.waiting}
            assert not there & waiting
            stopped = {stop.shard_id.rpartition("/")[0] for stop in decision.stops}
            assert there | waiting | (wanted & stopped) == wanted
            for each in decision.waiting:
                assert each.reason
                assert each.again_at == 0.0 or each.again_at > now
                for profile in () if each.again_at or decision.stops else by_name[each.model].profiles:
                    why_not(profile, node, dict.fromkeys(held, "somebody"))
            for shard_id, each in list(reports.items()):
                if not each.ended and (fate := next(fates, "")):
                    reports[shard_id] = attrs.evolve(each, state=fate, since=now)

"""Which changes of the file stop an engine, and which take hold while it goes on."""

from __future__ import annotations

from pathlib import Path
from random import Random
from typing import Any

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.catalog import Adapter, External, Model, Profile, Scaling
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.rules.engines.plan import plan
from appliance.rules.fleet.alone import Alone
from appliance.rules.fleet.written import IN_PLACE, as_written, why_not_written
from tests.fleet_scene import Scene, inventory, model
from tests.shard_on_site import shard, site

ENGINES = ("vllm", "sglang", "llamacpp", "sim")
OTHER: dict[str, Any] = {
    "engine": "sglang",
    "source": "/models/y",
    "nodes": 2,
    "gpus_per_node": 2,
    "tensor_parallel": 2,
    "pipeline_parallel": 2,
    "dtype": "bfloat16",
    "quantization": "awq",
    "launch_mode": "ray",
    "args": ("--seed=1",),
    "env": {"A": "b"},
}
"""Another value for each key of a profile that an engine notices."""

ELSEWHERE: dict[str, Any] = {
    "aliases": ("chat",),
    "fallbacks": ("small",),
    "groups": True,
    "scaling": Scaling(0, 5, 60.0),
    "external": External("https://example.com"),
    "adapters": (Adapter("legal", "/x"),),
}
"""The same of a model, of keys that no engine notices. (Adapters and external models are refused as yet.)"""

DOCS = Path(__file__).parents[1] / "docs" / "operations.md"


def ran(**more: Any) -> Shard:
    return attrs.evolve(shard("vllm", **more), gpu_class="h100-80g")


def model_of(*profiles: Profile, **more: Any) -> Model:
    return Model("llama", profiles=profiles, **more)


# -- the rule


def test_every_key_is_one_that_an_engine_notices_or_one_that_is_named() -> None:
    names = {field.name for field in attrs.fields(Profile)}
    assert names == set(OTHER) | set(IN_PLACE)
    assert {field.name for field in attrs.fields(Model)} == {*ELSEWHERE, "name", "context_tokens", "profiles"}


@pytest.mark.parametrize("key", OTHER)
def test_a_key_that_an_engine_notices_is_another_engine(key: str) -> None:
    there = (ran(source="/models/x"),)
    old = there[0].profile
    assert as_written(model_of(old), there) == old
    changed = model_of(attrs.evolve(old, **{key: OTHER[key]}))
    assert as_written(changed, there) is None
    assert why_not_written(changed, there) == "its profile p has been changed or taken out"


@pytest.mark.parametrize("key", ELSEWHERE)
def test_a_key_of_the_model_that_none_notices_is_none(key: str) -> None:
    there = (ran(),)
    assert as_written(model_of(there[0].profile, **{key: ELSEWHERE[key]}), there) == there[0].profile


@pytest.mark.parametrize("engine", ENGINES)
@given(priority=st.integers(-9, 9), name=st.sampled_from(["p", "other"]), kind=st.sampled_from(["", "h100-80g"]))
def test_what_takes_hold_in_place_is_in_no_launch(engine: str, priority: int, name: str, kind: str) -> None:
    """The list is right: by every engine's own plan, nothing of it is in the command or its environment."""
    before = attrs.evolve(shard(engine), gpu_class="h100-80g")
    new = attrs.evolve(before.profile, priority=priority, name=name, gpu_class=kind)
    assert as_written(model_of(new), (before,)) == new
    assert plan(attrs.evolve(before, profile=new), site()) == plan(before, site())


@pytest.mark.parametrize("engine", ENGINES)
@given(old=st.tuples(*[st.sampled_from([0, 512, 1024])] * 2), new=st.tuples(*[st.sampled_from([0, 512, 1024])] * 2))
def test_the_context_is_what_it_comes_to(engine: str, old: tuple[int, int], new: tuple[int, int]) -> None:
    before = attrs.evolve(shard(engine), context_tokens=old[0])
    before = attrs.evolve(before, profile=attrs.evolve(before.profile, context_tokens=old[1]))
    profile = attrs.evolve(before.profile, context_tokens=new[1])
    after = attrs.evolve(before, profile=profile, context_tokens=new[0])
    stays = as_written(model_of(profile, context_tokens=new[0]), (before,)) is not None
    same = plan(after, site()) == plan(before, site())
    assert same if stays else not same or engine == "sim"  # which takes any context


def test_another_context_says_whose() -> None:
    there = (ran(),)
    old = there[0].profile
    assert why_not_written(model_of(old, context_tokens=99), there) == "context_tokens of the model has been changed"
    changed = model_of(attrs.evolve(old, context_tokens=99))
    assert why_not_written(changed, there) == "context_tokens of its profile p has been changed"


def test_a_class_that_the_gpus_are_of_is_no_change_and_another_one_is() -> None:
    there = (ran(),)
    for kind, stays in (("", True), ("h100-80g", True), ("l40s-45g", False)):
        assert (as_written(model_of(attrs.evolve(there[0].profile, gpu_class=kind)), there) is not None) == stays, kind
    on_cpus = (shard("vllm", gpus_per_node=0),)
    assert as_written(model_of(attrs.evolve(on_cpus[0].profile, gpu_class="l40s-45g")), on_cpus) is not None


def test_of_two_that_are_alike_it_keeps_its_own() -> None:
    there = (ran(),)
    old = there[0].profile
    first, renamed = attrs.evolve(old, name="first"), attrs.evolve(old, priority=3)
    assert as_written(model_of(first, renamed), there) == renamed
    assert as_written(model_of(first, old), there) == old
    assert as_written(model_of(first), there) == first


def test_the_docs_name_every_key() -> None:
    text = DOCS.read_text()
    table = text[text.index("## What a reload does to engines") :].split("\n## ")[0]
    rolled, kept = [row for row in table.splitlines() if row.startswith("| `")]
    for key in OTHER:
        assert f"`{key}`" in rolled, key
    for key in (*ELSEWHERE, "name", "priority"):
        assert f"`{key}`" in kept, key
    for key in ("context_tokens", "gpu_class"):
        assert f"`{key}`" in rolled and f"`{key}`" in kept, key


# -- the fleet


def test_nothing_is_said_to_an_agent_and_what_is_told_is_new() -> None:
    scene = Scene([inventory("a")], [model(least=2)])
    scene.connect()
    scene.run(40)
    before = scene.ready("llama")
    new = attrs.evolve(model(least=2).profiles[0], name="new", priority=7, gpu_class="l40s-45g")
    scene.configure(attrs.evolve(model(least=2), profiles=(new,), aliases=("chat",)))
    assert scene.run(30) == 0
    assert scene.ready("llama") == before
    assert all(scene.world.replicas[name].profile == new for name in before)
    scene.restart()
    scene.connect()
    assert scene.run(40) == 0, "agents tell of the old profile, and it is the same engine"
    assert scene.ready("llama") == before
    assert all(scene.world.replicas[name].profile.name == "new" for name in before)


def test_one_that_fails_after_such_a_change_waits_as_ever() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.connect()
    scene.run(40)
    [shard_id] = scene.running
    scene.configure(attrs.evolve(model(), profiles=(attrs.evolve(model().profiles[0], priority=7),)))
    agent = scene.agents["a"]
    agent.become(shard_id, "failed", scene.now, reason="the engine ended")
    scene.deliver(agent)
    scene.step()
    assert scene.fleet.history.backoffs["llama"].failures == 1


def test_an_agent_by_itself_stops_nothing_for_it_either() -> None:
    node, rng = inventory("a"), Random(1)
    alone = Alone((model(),))
    [shard] = alone.decide({}, node, 0.0, rng).starts
    reports = {shard.id: Report(shard, "ready", 1.0)}
    alone.configure((attrs.evolve(model(), profiles=(attrs.evolve(model().profiles[0], priority=7, name="new"),)),))
    assert alone.decide(reports, node, 2.0, rng).stops == ()

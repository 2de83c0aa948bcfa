"""Room that is there in pieces: which nodes to drain for a replica that fits nowhere, and that it then does fit."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from appliance.facts.catalog import Model
from appliance.rules.fleet.moving import MOST_TRIED, to_drain
from tests.fleet_scene import Scene, inventory, model

SMALL, HALF = model("small"), model("half", gpus_per_node=2, tensor_parallel=2)
WHOLE = model("whole", gpus_per_node=4, tensor_parallel=4)
PAIR = model("pair", nodes=2, gpus_per_node=4, tensor_parallel=8)


def wanting(models: Iterable[Model], name: str, count: int) -> tuple[Model, ...]:
    return tuple(
        attrs.evolve(each, scaling=attrs.evolve(each.scaling, min_replicas=count)) if each.name == name else each
        for each in models
    )


def scattered(*names: str, late: Model, fabric: str = "", settled: Model = SMALL) -> Scene:
    """On each node one replica of `settled`, and one of `late` that finds no place."""
    scene = Scene([inventory(name, 4, fabric) for name in names], [])
    scene.connect()
    scene.run(25)
    for number, name in enumerate(names, 1):
        scene.configure(*wanting([settled], settled.name, number))
        for other in names:
            scene.world.uncordon(other) if other == name else scene.world.cordon(other)
        scene.run(15)
    for name in names:
        scene.world.uncordon(name)
    scene.configure(*wanting([settled], settled.name, len(names)), late)
    scene.run(15)
    assert not scene.ready(late.name)
    return scene


def drained(scene: Scene, late: Model) -> tuple[str, ...]:
    return to_drain(scene.world, scene.fleet.models, late.profiles[0])


def test_a_node_whose_replicas_have_a_place_elsewhere_is_named() -> None:
    scene = scattered("a", "b", late=WHOLE)
    assert drained(scene, WHOLE) == ("a",)
    scene.world.drain("a", scene.now)
    scene.run(40)
    assert not scene.agents["a"].live
    scene.world.uncordon("a")
    scene.run(40)
    assert len(scene.ready("whole")) == 1 and len(scene.ready("small")) == 2


def test_none_is_named_where_what_runs_has_no_other_place() -> None:
    assert drained(scattered("a", "b", late=WHOLE, settled=model("three", gpus_per_node=3)), WHOLE) == ()


def test_the_node_with_the_least_to_move_comes_first() -> None:
    scene = scattered("a", "b", "c", late=WHOLE)
    scene.world.cordon("a")
    assert drained(scene, WHOLE) == ("b",), "a cordoned one takes nothing, whoever leaves it"
    scene.configure(*wanting([SMALL], "small", 4), WHOLE)
    scene.run(20)
    [busy] = [name for name, agent in scene.agents.items() if len(agent.live) == 2]
    scene.world.uncordon("a")
    assert drained(scene, WHOLE) != (busy,)


def test_what_ends_anyway_is_waited_for_and_not_moved() -> None:
    scene = scattered("a", "b", late=WHOLE)
    scene.busy = True
    scene.configure(WHOLE)
    scene.tick()
    assert drained(scene, WHOLE) == ()


def test_of_a_fabric_as_many_as_it_takes_are_named() -> None:
    scene = scattered("a", "b", "c", late=PAIR, fabric="x")
    named = drained(scene, PAIR)
    assert len(named) == 2
    for name in named:
        scene.world.drain(name, scene.now)
    scene.run(40)
    for name in named:
        scene.world.uncordon(name)
    scene.run(40)
    assert len(scene.ready("pair")) == 1 and len(scene.ready("small")) == 3


def test_a_large_cluster_is_looked_at_in_part() -> None:
    scene = Scene([inventory(f"n{number}", 1) for number in range(MOST_TRIED + 10)], [model("one", MOST_TRIED + 10)])
    scene.connect()
    scene.run(25)
    scene.run(15)
    assert drained(scene, SMALL) == ()


@settings(max_examples=60, deadline=None)
@given(
    sizes=st.lists(st.sampled_from([4, 4, 4, 2]), min_size=2, max_size=4),
    counts=st.tuples(st.integers(1, 4), st.integers(0, 2)),
    cordons=st.lists(st.integers(0, 3), min_size=4, max_size=6),
    late=st.sampled_from([WHOLE, WHOLE, PAIR, PAIR, HALF]),
)
def test_whoever_drains_what_is_named_gets_the_replica(
    sizes: list[int], counts: tuple[int, int], cordons: list[int], late: Model
) -> None:
    names = [f"n{number}" for number in range(len(sizes))]
    scene = Scene([inventory(name, size, "x") for name, size in zip(names, sizes, strict=True)], [])
    scene.connect()
    scene.run(25)
    others = [each for each in (SMALL, HALF) if each.name != late.name]
    # Placed one at a time, past nodes that are cordoned at that moment: so they come to lie in pieces.
    for turn in range(1, 5):
        for name in names:
            scene.world.uncordon(name)
        for which in cordons[turn - 1 : turn + 1]:
            scene.world.cordon(names[which % len(names)])
        wanted = [wanting([each], each.name, min(turn, count)) for each, count in zip(others, counts, strict=False)]
        scene.configure(*(each for several in wanted for each in several if each.scaling.min_replicas))
        scene.run(14)
    for name in names:
        scene.world.uncordon(name)
    scene.run(14)
    before = scene.models
    scene.configure(*before, late)
    scene.run(14)
    assume(not scene.ready(late.name) and "no node has room" in scene.fleet.explain(late.name, scene.now).missing)
    named = drained(scene, late)
    if not named:
        return
    serving = {each.name: len(scene.ready(each.name)) for each in before}
    for name in named:
        scene.world.drain(name, scene.now)
    scene.run(40)
    assert not any(scene.agents[name].live for name in named)
    for name in named:
        scene.world.uncordon(name)
    scene.run(40)
    assert len(scene.ready(late.name)) == 1
    assert {each.name: len(scene.ready(each.name)) for each in before} == serving

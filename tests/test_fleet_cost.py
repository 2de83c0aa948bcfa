"""What a pass costs, counted in calls and not in time: one in which nothing has changed looks at no replica."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

from appliance.rules.fleet.rooming import Plan
from tests.fleet_scene import Scene, inventory, model


def calls(work: Callable[[], object]) -> int:
    """How many Python functions are entered."""
    count = 0

    def note(frame: FrameType, event: str, arg: object) -> None:
        nonlocal count
        count += event == "call"

    sys.setprofile(note)
    try:
        work()
    finally:
        sys.setprofile(None)
    return count


def settled(nodes: int) -> Scene:
    """A cluster whose nodes are all full."""
    scene = Scene([inventory(f"node-{number}") for number in range(nodes)], [model(least=4 * nodes)])
    scene.check = lambda: None  # type: ignore[method-assign]
    scene.load_s = 0
    scene.connect()
    scene.run(26)
    assert len(scene.ready("llama")) == 4 * nodes
    return scene


def idle(scene: Scene) -> int:
    scene.now += 0.5
    for name in scene.agents:
        scene.world.heard(name, scene.now)
    return calls(lambda: scene.fleet.step({}, scene.now, scene.rng))


def test_a_pass_without_a_change_costs_the_same_for_ten_times_the_replicas() -> None:
    assert idle(settled(30)) <= idle(settled(3)) + 10


def test_endpoints_are_made_once_for_each_change() -> None:
    scene = settled(3)
    scene.fleet.endpoints()
    assert calls(scene.fleet.endpoints) < 5
    scene.part("node-0")
    assert calls(scene.fleet.endpoints) > 12


def test_a_change_of_one_node_renews_the_room_of_one_node() -> None:
    costs = []
    for scene in (settled(3), settled(30)):
        plan = Plan()
        plan.renew(scene.world)
        scene.world.looked("node-0", scene.world.nodes["node-0"].inventory, scene.now)
        costs.append(calls(partial(plan.renew, scene.world)))
    assert costs[1] <= costs[0] + 10

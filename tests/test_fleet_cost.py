"""What a pass costs, counted in calls and not in time: one in which nothing has changed looks at no replica."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

from appliance.rules.fleet.reconcile import EXPLAIN_S, EXPLAINED
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


def hopeless(nodes: int, models: int) -> Scene:
    """A cluster in which so many models fit nowhere, and something changes."""
    wide = [model(f"wide-{number}", gpus_per_node=16, tensor_parallel=16) for number in range(models)]
    scene = Scene([inventory(f"node-{number:03d}") for number in range(nodes)], [*wide, model()])
    scene.check = lambda: None  # type: ignore[method-assign]
    scene.connect()
    scene.run(30)
    assert len(scene.fleet.unplaced) == models
    return scene


def changing(scene: Scene) -> int:
    """The dearest of some passes, each with a change, over the time in which every reason is renewed."""
    costs = []
    for _ in range(30):
        scene.now += EXPLAIN_S / 10
        for name in scene.agents:
            scene.world.heard(name, scene.now)
        scene.world.looked("node-000", scene.agents["node-000"].inventory, scene.now)
        costs.append(calls(lambda: scene.fleet.step({}, scene.now, scene.rng)))
    return max(costs)


def test_models_without_a_place_cost_no_look_at_every_node() -> None:
    assert changing(hopeless(60, 30)) < 1.5 * changing(hopeless(6, 30))


def test_a_pass_renews_a_few_reasons_however_many_models_have_no_place() -> None:
    few, many = changing(hopeless(6, EXPLAINED)), changing(hopeless(6, 10 * EXPLAINED))
    # Each model costs a try; what a reason costs on top is many times that, and comes EXPLAINED times in both.
    assert many - few < 10 * EXPLAINED * 120


def test_every_reason_is_renewed_in_the_end() -> None:
    scene = hopeless(6, 5 * EXPLAINED)
    scene.world.cordon("node-000")
    scene.run(EXPLAIN_S + 3, 0.25)
    assert all("node-000: it is cordoned" in reason for reason in scene.fleet.unplaced.values())
    assert not scene.told("overslept")

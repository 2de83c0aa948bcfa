"""Much at once: agents that flap, a file that changes each second, more models than there is room for."""

from __future__ import annotations

import attrs

from appliance.facts.link import Start, Stop
from tests.fleet_scene import Scene, inventory, model


def test_an_agent_that_flaps_for_a_minute_loses_nothing_and_is_told_nothing() -> None:
    scene = Scene([inventory("a"), inventory("b")], [model(least=3)])
    scene.connect()
    scene.run(40)
    before, running = scene.ready("llama"), scene.running
    scene.events.clear()
    said = 0
    for turn in range(60):
        scene.part("a") if turn % 2 else scene.connect("a")
        said += scene.tick()
        assert scene.ready("llama") == before
    assert said == 0 and scene.running == running
    assert not scene.events, "the log of connections tells of them, and nothing has changed"


def test_one_that_flaps_gets_what_is_due_all_the_same() -> None:
    scene = Scene([inventory("a")], [model(least=2)])
    for turn in range(120):
        scene.part("a") if turn % 2 else scene.connect("a")
        scene.tick()
    scene.connect("a")
    scene.run(30)
    assert len(scene.ready("llama")) == 2
    starts = [each.shard.id for each in scene.agents["a"].seen if isinstance(each, Start)]
    assert len(set(starts)) == 2, "said again on each connection, and never a third replica"


def test_a_profile_that_changes_each_second_keeps_those_that_serve_until_it_rests() -> None:
    scene = Scene([inventory("a"), inventory("b")], [model(least=2)])
    scene.connect()
    scene.run(40)
    first = scene.ready("llama")
    for turn in range(90):
        profile = attrs.evolve(model().profiles[0], args=(f"--seed={turn}",))
        scene.configure(attrs.evolve(model(least=2), profiles=(profile,)))
        scene.tick()
        assert scene.ready("llama") == first, "a new one never gets to serve before it is old"
        assert len(scene.running) <= 2 + 2, "those two, the next, and what is just ending"
    scene.run(120)
    last = scene.ready("llama")
    assert len(last) == 2 and not set(last) & set(first)
    assert all(scene.world.replicas[name].profile.args == ("--seed=89",) for name in last)
    assert sorted(scene.running) == [f"{name}/0" for name in last]
    assert not scene.told("replica_failed"), "whoever changes the file is no fault of the model"


def test_two_hundred_models_that_fit_nowhere_leave_the_others_their_places() -> None:
    wide = [model(f"wide-{number}", gpus_per_node=16, tensor_parallel=16) for number in range(190)]
    small = [model(f"small-{number}") for number in range(10)]
    scene = Scene([inventory(name, 4) for name in ("a", "b", "c")], [*wide, *small])
    scene.connect()
    scene.run(40)
    assert all(len(scene.ready(each.name)) == 1 for each in small)
    assert len(scene.told("no_place")) == 190, "each once"
    scene.agents["a"].become(scene.agents["a"].live[0].shard.id, "failed", scene.now, reason="the engine ended")
    scene.run(40)
    assert all(len(scene.ready(each.name)) == 1 for each in small)
    assert len(scene.told("no_place")) == 190
    assert not any(isinstance(each, Stop) and not each.reason for agent in scene.agents.values() for each in agent.seen)

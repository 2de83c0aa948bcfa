"""Nodes that call, fall silent, are given up and come back; and a control plane that starts again among them."""

from __future__ import annotations

from collections.abc import Iterable

import attrs
import pytest

from appliance.facts.control import ControlSettings
from appliance.facts.link import Forget, Start, Stop
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from tests.fleet_scene import Scene, inventory, model

WIDE = model("wide", nodes=2, gpus_per_node=4, tensor_parallel=4, pipeline_parallel=2)


def scene_of(*names: str, models: Iterable[object] = (model(),), fabric: str = "") -> Scene:
    scene = Scene([inventory(name, fabric=fabric) for name in names], models)  # type: ignore[arg-type]
    scene.connect()
    return scene


def where(scene: Scene, replica: str) -> str:
    return scene.world.replicas[replica].nodes[0]


def test_a_silent_node_gets_nothing_new_and_keeps_its_endpoints() -> None:
    scene = scene_of("a")
    scene.run(40)
    before = scene.ready("llama")
    scene.cut("a")
    scene.configure(model(least=2))
    scene.run(19)
    assert scene.world.nodes["a"].state == "ready"
    scene.run(3)
    assert scene.world.nodes["a"].state == "unreachable"
    assert scene.ready("llama") == before
    assert [event.fields["node"] for event in scene.told("node_unreachable")] == ["a"]
    assert "unreachable" in scene.fleet.explain("llama", scene.now).rejections[0].reason
    scene.connect("a")
    scene.run(20)
    assert len(scene.ready("llama")) == 2


def test_what_ran_on_a_lost_node_is_rebuilt_and_its_return_leaves_nothing_twice() -> None:
    scene = scene_of("a", "b")
    scene.run(40)
    [first] = scene.ready("llama")
    home = where(scene, first)
    other = "b" if home == "a" else "a"
    scene.cut(home)
    scene.run(58)
    assert scene.ready("llama") == [first]
    scene.run(5)
    assert scene.ready("llama") == []
    scene.run(15)
    [second] = scene.ready("llama")
    assert where(scene, second) == other
    scene.run(300)
    scene.connect(home)
    scene.run(10)
    assert scene.running == [f"{second}/0"]
    assert scene.agents[home].shards == {}
    # It takes no request again, nor does anybody wait for it to finish some.
    [stop] = [each for each in scene.agents[home].seen if isinstance(each, Stop)]
    assert (stop.drain_s, stop.reason) == (0.0, "it was replaced while this node was away")
    assert scene.world.tombs == {}
    assert scene.run(60) == 0


def test_a_replica_on_two_nodes_dies_with_one_of_them_and_moves_to_the_fabric_that_holds_all_of_it() -> None:
    nodes = [inventory(name, fabric=fabric) for name, fabric in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "y"))]
    scene = Scene(nodes, [WIDE])
    scene.connect()
    scene.run(40)
    [first] = scene.ready("wide")
    assert scene.world.replicas[first].nodes == ("a", "b")
    scene.cut("b")
    scene.run(80)
    [second] = scene.ready("wide")
    assert set(scene.world.replicas[second].nodes) == {"c", "d"}
    assert scene.agents["a"].live == []
    shards = scene.world.replicas[second].shards
    assert len({shard.rendezvous_port for shard in shards.values()}) == 1
    assert 20000 <= shards[0].rendezvous_port <= 24999
    assert len({shard.key for shard in shards.values()}) == 1 and len(shards[0].key) == 64
    assert scene.told("replica_given_up")[0].fields["reason"] == "b is lost"
    assert "wide" not in scene.fleet.history.backoffs


def test_a_lost_node_that_comes_back_with_nothing_is_remembered_for_nothing() -> None:
    scene = scene_of("a", "b")
    scene.run(40)
    home = where(scene, scene.ready("llama")[0])
    scene.cut(home)
    scene.agents[home].shards.clear()
    scene.run(80)
    assert scene.world.tombs != {}
    scene.connect(home)
    assert scene.world.tombs == {}


def test_a_lost_node_that_returns_while_its_replacement_loads_is_still_superseded() -> None:
    scene = scene_of("a", "b")
    scene.run(40)
    [first] = scene.ready("llama")
    home = where(scene, first)
    scene.cut(home)
    scene.run(63)
    scene.connect(home)
    assert scene.ready("llama") == []
    scene.run(20)
    [second] = scene.ready("llama")
    assert second != first
    assert scene.running == [f"{second}/0"]


def test_the_clock_of_silence_goes_on_when_the_connection_closes() -> None:
    scene = scene_of("a")
    scene.run(40)
    scene.cut("a")
    scene.run(15)
    scene.part("a")
    scene.run(6)
    assert scene.world.nodes["a"].state == "unreachable"


def test_an_agent_that_starts_anew_within_a_second_changes_nothing() -> None:
    scene = scene_of("a", "b")
    scene.run(40)
    before = scene.running
    scene.part("a", "b")
    assert scene.tick() == 0
    assert len(scene.ready("llama")) == 1
    scene.connect()
    assert scene.run(100) == 0
    assert scene.running == before


def test_a_node_is_given_nothing_while_its_agent_is_away() -> None:
    scene = scene_of("a", "b")
    scene.run(15)
    scene.part("a")
    scene.run(6)
    assert scene.world.nodes["a"].state == "ready"
    [placed] = scene.world.replicas.values()
    assert placed.nodes == ("b",)


def test_nothing_is_started_before_the_agents_had_time_to_call() -> None:
    scene = scene_of("a", "b", models=[model(least=2)])
    assert scene.run(19) == 0
    assert scene.run(21) == 2
    before = scene.ready("llama")
    scene.restart()
    # One calls at once, the other 15 seconds late.
    scene.connect("a")
    scene.run(15)
    scene.connect("b")
    assert scene.run(60) == 0
    assert scene.ready("llama") == before
    assert all(placed.adopted for placed in scene.world.replicas.values())


def test_nothing_is_started_while_an_expected_node_may_still_call() -> None:
    scene = scene_of("a", "b", models=[model(gpus_per_node=3)])
    scene.run(40)
    [first] = scene.ready("llama")
    home = where(scene, first)
    other = "b" if home == "a" else "a"
    scene.restart()
    scene.connect(other)
    assert scene.run(59) == 0
    assert home in scene.fleet.waking(scene.now)["llama"]
    scene.run(20)
    assert scene.world.nodes[home].state == "lost"
    [second] = scene.ready("llama")
    assert where(scene, second) == other
    # It was away for longer than anybody waits: one of the two is too many.
    scene.connect(home)
    scene.run(20)
    assert len(scene.running) == 1
    assert scene.run(60) == 0


def test_a_node_that_never_calls_is_given_up_and_holds_nobody_up_for_longer() -> None:
    scene = Scene([inventory("a"), inventory("b")], [model()])
    scene.connect("a")
    scene.run(59)
    assert not scene.fleet.settled
    scene.run(3)
    assert scene.fleet.settled
    assert scene.world.nodes["b"].state == "lost"


def test_a_node_that_is_expected_later_holds_up_nothing() -> None:
    scene = scene_of("a")
    scene.run(25)
    scene.world.expect("z", scene.now)
    scene.run(20)
    assert len(scene.ready("llama")) == 1
    assert scene.fleet.settled


def test_endpoints_are_there_again_with_the_first_registration() -> None:
    scene = scene_of("a", "b", models=[WIDE], fabric="x")
    scene.run(40)
    [first] = scene.ready("wide")
    leader = scene.world.replicas[first].shards[0].node
    scene.restart()
    scene.connect(leader)
    assert scene.ready("wide") == [first]
    assert not scene.fleet.settled


def test_a_replica_in_part_waits_for_the_rest_while_a_node_may_still_come() -> None:
    scene = scene_of("a", "b", "c", models=[WIDE], fabric="x")
    scene.run(40)
    [first] = scene.ready("wide")
    rest = scene.world.replicas[first].nodes[1]
    scene.load_s = 1e9
    scene.restart(expecting=False)
    scene.run(25)
    assert scene.fleet.settled
    scene.connect(*[name for name in scene.agents if name != rest])
    # The node of the other rank holds a certificate and has not called.
    scene.world.expect(rest, scene.now)
    scene.run(50)
    assert not scene.world.replicas[first].complete
    scene.connect(rest)
    assert scene.run(40) == 0
    assert scene.ready("wide") == [first]


def test_a_replica_in_part_whose_rest_is_nowhere_is_given_up() -> None:
    scene = scene_of("a", "b", "c", models=[WIDE], fabric="x")
    scene.load_s = 1e9
    scene.run(40)
    [first] = scene.world.replicas
    rest = scene.world.replicas[first].nodes[1]
    scene.cut(rest)
    scene.agents[rest].shards.clear()
    scene.restart(expecting=False)
    scene.connect()
    scene.run(20)
    assert [event.fields["reason"] for event in scene.told("replica_given_up")] == ["no node has its rank 1"]
    scene.load_s = 10
    scene.run(60)
    [second] = scene.ready("wide")
    assert second != first
    assert {each.split("/")[0] for each in scene.running} == {second}


def test_a_start_that_was_lost_with_its_connection_is_said_again() -> None:
    scene = scene_of("a")
    scene.run(19)
    scene.now += 1
    assert scene.step() == 1
    scene.part("a")
    scene.connect("a")
    scene.run(20)
    assert len(scene.ready("llama")) == 1
    assert [type(each) for each in scene.agents["a"].seen] == [Start]


def test_a_command_is_said_once_per_connection() -> None:
    scene = scene_of("a")
    scene.run(19)
    scene.now += 1
    assert scene.step() == 1
    assert [scene.step() for _ in range(5)] == [0] * 5
    scene.part("a")
    assert scene.step() == 0
    scene.connect("a")
    assert [scene.step() for _ in range(3)] == [1, 0, 0]


def test_nothing_is_said_to_a_node_that_is_away() -> None:
    scene = scene_of("a")
    scene.run(40)
    scene.part("a")
    scene.configure()
    assert scene.run(5) == 0
    scene.connect("a")
    assert scene.step() == 1
    scene.run(10)
    assert scene.running == []


def test_a_second_registration_on_top_of_the_first_is_taken_as_a_new_connection() -> None:
    scene = scene_of("a", "b")
    scene.run(40)
    before = scene.running
    for _ in range(3):
        scene.connect("a")
    assert scene.run(30) == 0
    assert scene.running == before
    assert scene.world.nodes["a"].session == 4


def test_shards_that_an_agent_has_lost_are_started_elsewhere_as_a_failure() -> None:
    scene = scene_of("a")
    scene.run(40)
    [first] = scene.ready("llama")
    scene.agents["a"].shards.clear()
    scene.connect("a")
    scene.run(30)
    [second] = scene.ready("llama")
    assert second != first
    assert scene.fleet.history.backoffs["llama"].failures == 1


def test_a_cordoned_node_gets_nothing_even_before_it_was_heard_of() -> None:
    scene = Scene([inventory("a"), inventory("b")], [model(least=2)])
    scene.restart(expecting=False)
    scene.world.cordon("a")
    scene.connect()
    scene.run(40)
    assert {where(scene, each) for each in scene.ready("llama")} == {"b"}
    scene.connect("a")
    assert scene.world.nodes["a"].cordoned
    scene.world.uncordon("a")
    scene.configure(model(least=5))
    scene.run(30)
    assert {where(scene, each) for each in scene.ready("llama")} == {"a", "b"}


def test_what_runs_on_a_node_that_was_taken_out_is_replaced() -> None:
    scene = scene_of("a", "b")
    scene.run(40)
    [first] = scene.ready("llama")
    home = where(scene, first)
    scene.cut(home)
    scene.world.forget(home, scene.now)
    assert scene.ready("llama") == []
    scene.run(20)
    [second] = scene.ready("llama")
    assert where(scene, second) != home
    assert home not in scene.world.nodes


def test_a_control_plane_that_was_held_up_takes_nobody_for_lost() -> None:
    scene = scene_of("a", "b")
    scene.run(40)
    before = scene.running
    scene.now += 600
    assert scene.step() == 0
    assert {node.state for node in scene.world.nodes.values()} == {"ready"}
    scene.run(60)
    assert scene.running == before


def test_of_two_replicas_on_one_gpu_the_one_that_does_not_serve_ends() -> None:
    scene = scene_of("a", models=[model(gpus_per_node=4)])
    scene.run(40)
    [first] = scene.ready("llama")
    real = scene.world.replicas[first].shards[0]
    foreign: Shard = attrs.evolve(real, replica="llama.zzzzz")
    scene.agents["a"].shards[foreign.id] = Report(foreign, "loading", 0.0)
    scene.check = lambda: None  # type: ignore[method-assign]
    scene.connect("a")
    scene.run(5)
    assert [event.fields["stopped"] for event in scene.told("gpu_has_two_replicas")] == ["llama.zzzzz"]
    assert scene.running == [f"{first}/0"]
    assert scene.agents["a"].shards.keys() == {f"{first}/0"}
    assert scene.run(30) == 0


def test_one_replica_reported_by_two_nodes_runs_on_one_of_them() -> None:
    scene = scene_of("a", "b")
    scene.run(40)
    [first] = scene.ready("llama")
    home = where(scene, first)
    other = "b" if home == "a" else "a"
    scene.agents[other].shards.update(scene.agents[home].shards)
    scene.connect(other)
    scene.run(10)
    assert scene.agents[other].shards == {}
    assert len(scene.agents[home].shards) == 1
    assert scene.run(60) == 0


def test_what_was_called_a_stray_stays_one_when_its_double_is_gone() -> None:
    scene = scene_of("a", "b")
    scene.run(40)
    [first] = scene.ready("llama")
    home = where(scene, first)
    other = "b" if home == "a" else "a"
    scene.agents[other].shards.update(scene.agents[home].shards)
    [report] = scene.agents[home].live
    scene.connect(other)
    scene.world.forget(home, scene.now)
    scene.tick(0.1)
    scene.world.bury(scene.world.replicas[first]) if first in scene.world.replicas else None
    scene.world.report(other, [attrs.evolve(report, state="stopping")], (), scene.now)
    assert first not in scene.world.replicas


def test_a_lost_node_counts_again_only_when_it_registers() -> None:
    scene = scene_of("a")
    scene.run(40)
    shards = list(scene.agents["a"].shards.values())
    scene.cut("a")
    scene.run(62)
    assert scene.world.nodes["a"].state == "lost"
    assert not scene.world.nodes["a"].connected
    scene.world.heard("a", scene.now)
    scene.world.report("a", shards, (), scene.now)
    assert scene.world.nodes["a"].state == "lost"
    assert scene.world.nodes["a"].reports == {}


def test_ended_shards_are_forgotten_once_they_were_noted() -> None:
    scene = scene_of("a")
    scene.run(40)
    scene.configure()
    scene.run(10)
    agent = scene.agents["a"]
    assert [type(each) for each in agent.seen] == [Start, Stop, Forget]
    assert agent.shards == {}
    assert scene.world.replicas == {}


@pytest.mark.parametrize("lost_after_s", [5.0, 20.0])
def test_lost_never_comes_before_unreachable(lost_after_s: float) -> None:
    settings = ControlSettings(unreachable_after_s=20, lost_after_s=lost_after_s)
    scene = Scene([inventory("a")], [model()], settings)
    scene.connect()
    scene.run(30)
    scene.cut("a")
    scene.run(19)
    assert scene.world.nodes["a"].state == "ready"


def test_a_gpu_that_two_nodes_announce_is_used_by_the_first_until_it_is_lost() -> None:
    two = [inventory("a", 2), attrs.evolve(inventory("a", 2), node="b")]
    scene = Scene(two, [model(least=4)])
    scene.connect("a", "b")
    scene.run(40)
    assert [where(scene, each) for each in scene.ready("llama")] == ["a", "a"]
    [told] = scene.told("gpus_of_two_nodes")
    assert (told.level, told.fields["node"], told.fields["gpus"]) == ("error", "b", 2)
    [reason] = [each.reason for each in scene.fleet.explain("llama", scene.now).rejections if each.candidate == "b"]
    assert "a has announced the same GPU: do two agents run on that machine?" in reason

    scene.cut("a")  # the card was moved to b, it turns out
    scene.run(100)
    assert [where(scene, each) for each in scene.ready("llama")] == ["b", "b"]
    assert [each.level for each in scene.told("gpus_of_two_nodes")] == ["error", "info"]

    scene.connect("a")
    scene.run(40)
    assert [where(scene, each) for each in scene.ready("llama")] == ["b", "b"], "and what a still had is stopped"
    assert not scene.agents["a"].live
    scene.world.forget("b", scene.now)
    scene.run(40)
    assert [where(scene, each) for each in scene.ready("llama")] == ["a", "a"]


def test_a_card_that_is_announced_no_more_is_the_other_nodes() -> None:
    two = [inventory("a", 2), attrs.evolve(inventory("a", 2), node="b")]
    scene = Scene(two, [model(least=1)])
    scene.connect("b", "a")
    scene.world.looked("b", attrs.evolve(two[1], gpus=two[1].gpus[:1]), scene.now)
    free = {
        name: [gpu.index for gpu in node.inventory.gpus if gpu.placeable] for name, node in scene.world.nodes.items()
    }
    assert free == {"b": [0], "a": [1]}

"""Replicas that fail, are drained away, rolled to another profile, stopped: who can be served is served meanwhile."""

from __future__ import annotations

from collections.abc import Iterable
from random import Random

import attrs

from appliance.facts.catalog import Model, Profile
from appliance.facts.control import ControlSettings
from appliance.facts.link import Start, Stop
from appliance.facts.report import Report
from appliance.rules.fleet.backoff import STEADY_S
from appliance.rules.fleet.reconcile import EXPLAIN_S
from tests.fleet_scene import Scene, inventory, model

WIDE = model("wide", nodes=2, gpus_per_node=4, tensor_parallel=4, pipeline_parallel=2)


def scene_of(*names: str, models: Iterable[Model] = (model(),), fabric: str = "", gpus: int = 4) -> Scene:
    scene = Scene([inventory(name, gpus, fabric) for name in names], models)
    scene.connect()
    scene.run(40)
    return scene


def changed(old: Model, *args: str) -> Model:
    return attrs.evolve(old, profiles=(attrs.evolve(old.profiles[0], args=args),))


def where(scene: Scene, replica: str) -> str:
    return scene.world.replicas[replica].nodes[0]


def fewest_ready(scene: Scene, seconds: int, name: str = "llama") -> int:
    fewest = 99
    for _ in range(seconds):
        scene.tick()
        fewest = min(fewest, len(scene.ready(name)))
    return fewest


# -- failures


def test_a_failed_shard_takes_its_replica_along_and_the_model_waits() -> None:
    scene = scene_of("a", "b", models=[WIDE], fabric="x")
    [first] = scene.ready("wide")
    worker = scene.world.replicas[first].shards[1]
    agent = scene.agents[worker.node]
    agent.become(worker.id, "failed", scene.now, reason="the engine ended", exit="signal SIGKILL", tail=("boom ", " "))
    scene.deliver(agent)
    scene.step()
    assert scene.ready("wide") == []
    assert scene.fleet.waking(scene.now) == {}
    assert 1.0 <= scene.fleet.history.backoffs["wide"].until - scene.now <= 2.0
    [failure] = scene.fleet.history.failures["wide"]
    assert (failure.node, failure.rank, failure.exit, failure.line) == (worker.node, 1, "signal SIGKILL", "boom")
    assert "the engine ended on" in scene.fleet.troubles(scene.now)["wide"]
    [event] = scene.told("replica_failed")
    assert event.fields["replica"] == first and event.fields["exit"] == "signal SIGKILL"
    scene.run(30)
    [second] = scene.ready("wide")
    assert second != first
    assert {each.split("/")[0] for each in scene.running} == {second}


def test_of_shards_that_failed_the_first_one_is_to_blame() -> None:
    scene = scene_of("a", "b", models=[WIDE], fabric="x")
    [first] = scene.ready("wide")
    worker, leader = scene.world.replicas[first].shards[1], scene.world.replicas[first].shards[0]
    for shard, reason in ((worker, "the cause"), (leader, "the consequence")):
        scene.now += 0.1
        scene.agents[shard.node].become(shard.id, "failed", scene.now, reason=reason)
        scene.deliver(scene.agents[shard.node])
    scene.step()
    assert [failure.reason for failure in scene.fleet.history.failures["wide"]] == ["the cause", "the consequence"]
    assert str(scene.told("replica_failed")[0].fields["reason"]).startswith("the cause")


def test_one_failure_is_counted_once() -> None:
    scene = scene_of("a", "b", models=[WIDE], fabric="x")
    for agent in scene.agents.values():
        for report in agent.live:
            agent.become(report.shard.id, "failed", scene.now, reason="x")
    scene.run(5)
    assert scene.fleet.history.total == {"wide": 1}
    assert scene.fleet.history.backoffs["wide"].failures == 1


def test_the_wait_grows_with_each_failure_and_is_forgotten_after_a_while_of_service() -> None:
    scene = scene_of("a")
    scene.breaks = lambda report: True
    scene.configure(changed(model(), "--one"), model("other"))
    waits: list[object] = []
    for _ in range(200):
        scene.tick()
        failures = [event.fields for event in scene.told("replica_failed") if event.fields["model"] == "other"]
        waits += [fields["retry_in_s"] for fields in failures]
        scene.events.clear()
    assert waits == sorted(waits, key=lambda each: float(str(each)))
    assert len(waits) > 4
    assert scene.fleet.history.backoffs["llama"].failures >= 4
    scene.breaks = lambda report: False
    scene.run(400)
    assert len(scene.ready("llama")) == len(scene.ready("other")) == 1
    assert scene.fleet.history.backoffs == {}
    assert scene.fleet.history.avoided == {}


def test_a_model_has_recovered_only_after_serving_for_a_while() -> None:
    scene = scene_of("a")
    scene.load_s = 30
    scene.agents["a"].become(scene.running[0], "failed", scene.now, reason="x")
    scene.run(40)
    assert len(scene.ready("llama")) == 1
    scene.run(STEADY_S - 10)
    assert "llama" in scene.fleet.history.backoffs
    scene.run(10)
    assert scene.fleet.history.backoffs == {}


def test_one_that_serves_does_not_excuse_another_one_that_always_fails() -> None:
    scene = Scene([inventory("a", gpus=1), inventory("b", gpus=1)], [model(least=2)])
    scene.breaks = lambda report: report.shard.node == "b"
    scene.load_s = 2 * STEADY_S
    scene.connect()
    scene.run(1000)
    assert len(scene.ready("llama")) == 1
    assert scene.fleet.history.backoffs["llama"].failures > 4


def test_a_failure_of_what_is_going_anyway_holds_the_new_one_up_in_nothing() -> None:
    scene = scene_of("a", gpus=1)
    scene.busy = True
    scene.configure(changed(model(), "--new"), model("other", gpus_per_node=9))
    scene.world.cordon("a")
    scene.restart()
    scene.connect()
    [old] = scene.ready("llama")
    scene.run(15)
    scene.agents["a"].become(f"{old}/0", "failed", scene.now, reason="x")
    scene.run(30)
    assert scene.fleet.history.total == {"llama": 1}
    assert scene.fleet.history.backoffs == {}


def test_a_model_that_failed_on_a_node_tries_another_one_first() -> None:
    scene = Scene([inventory("a", gpus=1), inventory("b", gpus=4)], [model()])
    scene.breaks = lambda report: report.shard.node == "a"
    scene.connect()
    scene.run(60)
    [ready] = scene.ready("llama")
    assert [event.fields["node"] for event in scene.told("replica_failed")] in ([], ["a"])
    # The fuller node is the first choice, or this would prove nothing.
    assert [event.fields["nodes"] for event in scene.told("replica_placed")] == ["a", "b"]
    assert where(scene, ready) == "b"


def test_a_changed_model_is_tried_at_once() -> None:
    scene = scene_of("a")
    scene.breaks = lambda report: True
    scene.configure(changed(model(), "--one"))
    scene.run(200)
    scene.breaks = lambda report: False
    scene.configure(changed(model(), "--two"))
    scene.run(15)
    assert len(scene.ready("llama")) == 1


def test_a_node_that_is_lost_is_no_failure_of_the_model() -> None:
    scene = scene_of("a", "b")
    scene.cut(where(scene, scene.ready("llama")[0]))
    scene.run(80)
    assert len(scene.ready("llama")) == 1
    assert scene.fleet.history.total == {}


# -- drains


def test_a_drained_replica_goes_when_its_replacement_serves() -> None:
    scene = scene_of("a", "b")
    [first] = scene.ready("llama")
    home = where(scene, first)
    scene.world.drain(home, scene.now)
    assert fewest_ready(scene, 30) == 1
    [second] = scene.ready("llama")
    assert where(scene, second) != home
    assert scene.agents[home].shards == {}
    assert [event.fields["node"] for event in scene.told("node_drained")] == [home]
    [stop] = [each for each in scene.agents[home].seen if isinstance(each, Stop)]
    assert 550 < stop.drain_s <= 600 and stop.reason == f"{home} is drained"
    scene.run(30)
    assert len(scene.told("node_drained")) == 1


def test_draining_the_only_node_ends_with_the_grace_period_and_says_why() -> None:
    scene = scene_of("a")
    scene.world.drain("a", scene.now)
    scene.run(598)
    assert len(scene.ready("llama")) == 1
    scene.run(4)
    assert scene.ready("llama") == []
    assert scene.running == []
    [event] = scene.told("drain_grace_over")
    assert "a: it is being drained" in str(event.fields["no_replacement"])
    assert "it is being drained" in scene.fleet.troubles(scene.now)["llama"]
    scene.world.uncordon("a")
    scene.run(20)
    assert len(scene.ready("llama")) == 1


def test_a_drain_that_is_undone_leaves_all_as_it_was() -> None:
    scene = scene_of("a")
    before = scene.ready("llama")
    scene.world.drain("a", scene.now)
    scene.run(30)
    scene.world.uncordon("a")
    assert scene.run(700) == 0
    assert scene.ready("llama") == before


def test_all_of_a_drained_node_is_replaced_at_once() -> None:
    scene = scene_of("a", "b", models=[model(least=4)])
    full = where(scene, scene.ready("llama")[0])
    assert {where(scene, each) for each in scene.ready("llama")} == {full}
    scene.world.drain(full, scene.now)
    assert fewest_ready(scene, 25) == 4
    assert {where(scene, each) for each in scene.ready("llama")} != {full}
    assert scene.agents[full].shards == {}


def test_the_leader_of_a_replica_on_two_nodes_drains_before_the_others_stop() -> None:
    scene = scene_of("a", "b", models=[WIDE], fabric="x")
    [first] = scene.ready("wide")
    lead, rest = scene.world.replicas[first].nodes
    scene.busy = True
    scene.configure()
    scene.run(100)
    assert scene.ready("wide") == []
    assert [report.state for report in scene.agents[lead].live] == ["draining"]
    assert [report.state for report in scene.agents[rest].live] == ["ready"]
    scene.busy = False
    scene.run(10)
    assert scene.running == []
    assert scene.told("replica_failed") == []


def test_a_draining_replica_whose_other_node_is_lost_ends_at_once() -> None:
    scene = scene_of("a", "b", models=[WIDE], fabric="x")
    [first] = scene.ready("wide")
    lead, rest = scene.world.replicas[first].nodes
    scene.busy = True
    scene.configure()
    scene.run(5)
    scene.cut(rest)
    scene.run(65)
    assert scene.agents[lead].live == []


def test_an_endpoint_leaves_before_its_replica_is_told() -> None:
    scene = scene_of("a", models=[model(least=2)])
    scene.configure(model(least=1))
    assert scene.step() == 1
    assert len(scene.ready("llama")) == 1
    [command] = scene.agents["a"].inbox
    assert isinstance(command, Stop) and command.drain_s == 600
    assert command.shard_id.split("/")[0] not in scene.ready("llama")


def test_what_does_not_serve_yet_goes_before_what_serves_on_a_cordoned_node() -> None:
    scene = scene_of("a", "b", gpus=1)
    kept = scene.ready("llama")
    scene.world.cordon(where(scene, kept[0]))
    scene.configure(model(least=2))
    scene.run(5)
    assert len(scene.running) == 2
    scene.configure(model())
    scene.run(10)
    assert scene.ready("llama") == kept
    assert len(scene.running) == 1


def test_no_two_replicas_have_one_id() -> None:
    class Twice(Random):
        """Says everything twice."""

        said: str = ""

        def choice(self, seq: str) -> str:  # type: ignore[override]
            self.said += seq[len(self.said) // 10]
            return self.said[-1]

    scene = Scene([inventory("a")], [model(least=2)])
    scene.rng = Twice(7)
    scene.connect()
    scene.run(40)
    assert scene.ready("llama") == ["llama.aaaaa", "llama.bbbbb"]
    assert len(scene.told("replica_placed")) == 2


def test_a_drain_goes_on_over_a_restart_of_the_control_plane() -> None:
    scene = scene_of("a", models=[model(least=2)])
    scene.busy = True
    scene.configure(model(least=1))
    scene.run(5)
    [kept] = scene.ready("llama")
    scene.restart()
    scene.connect()
    scene.run(30)
    assert scene.ready("llama") == [kept]
    assert len(scene.running) == 2
    scene.busy = False
    scene.run(5)
    assert scene.running == [f"{kept}/0"]


# -- changes of the configuration


def test_a_changed_profile_is_rolled_one_by_one_where_there_is_room() -> None:
    scene = scene_of("a", "b", models=[model(least=3)])
    old = set(scene.ready("llama"))
    scene.configure(changed(model(least=3), "--new"))
    most = 0
    for _ in range(80):
        scene.tick()
        assert len(scene.ready("llama")) >= 3
        most = max(most, sum(placed.stage == "running" for placed in scene.world.replicas.values()))
    assert most == 4
    assert not old & set(scene.ready("llama"))
    assert len(scene.running) == 3


def test_without_room_one_goes_first() -> None:
    scene = scene_of("a", gpus=2, models=[model(least=2)])
    old = set(scene.ready("llama"))
    scene.configure(changed(model(least=2), "--new"))
    assert fewest_ready(scene, 60) == 1
    assert len(scene.ready("llama")) == 2
    assert not old & set(scene.ready("llama"))
    assert any("no room for both" in str(event.fields["reason"]) for event in scene.told("replica_leaves"))


def test_nothing_goes_for_a_profile_that_fits_nowhere() -> None:
    scene = scene_of("a", gpus=2, models=[model(least=2)])
    before = scene.ready("llama")
    scene.configure(model(least=2, gpus_per_node=3))
    scene.run(100)
    assert scene.ready("llama") == before
    assert "needs 3 GPUs" in str(scene.told("no_place")[0].fields["reason"])
    assert len(scene.told("no_place")) == 1


def test_the_reason_for_no_place_is_of_now_and_told_once() -> None:
    scene = Scene([inventory("a", gpus=2), inventory("b", gpus=2)], [model(gpus_per_node=3)])
    scene.connect()
    scene.run(30)
    assert "cordoned" not in scene.fleet.troubles(scene.now)["llama"]
    scene.world.cordon("a")
    scene.run(2)
    assert "a: it is cordoned" in scene.fleet.troubles(scene.now)["llama"]
    scene.world.cordon("b")
    scene.run(EXPLAIN_S + 1)
    assert "b: it is cordoned" in scene.fleet.troubles(scene.now)["llama"]
    assert len(scene.told("no_place")) == 1


def test_a_new_profile_that_fails_leaves_the_old_ones_where_they_are() -> None:
    scene = scene_of("a", models=[model(least=2)])
    before = scene.ready("llama")
    scene.breaks = lambda report: "--new" in report.shard.profile.args
    scene.configure(changed(model(least=2), "--new"))
    scene.run(300)
    assert scene.ready("llama") == before
    assert scene.fleet.history.failures["llama"][0].line == "no such file"


def test_another_context_is_a_change_too() -> None:
    scene = scene_of("a")
    [first] = scene.ready("llama")
    scene.configure(attrs.evolve(model(), context_tokens=4096))
    assert fewest_ready(scene, 30) == 1
    [second] = scene.ready("llama")
    assert second != first
    assert scene.world.replicas[second].shards[0].context_tokens == 4096


def test_an_equal_configuration_changes_nothing() -> None:
    scene = scene_of("a")
    scene.configure(attrs.evolve(model(), aliases=("other",)))
    assert scene.run(30) == 0


def test_a_model_that_is_gone_is_drained_and_an_unknown_one_too() -> None:
    scene = scene_of("a", models=[model(), model("other")])
    scene.configure(model("other"))
    scene.run(10)
    assert [each.split(".")[0] for each in scene.running] == ["other"]
    scene.restart()
    scene.configure(model("third"))
    scene.connect()
    scene.run(40)
    assert [each.split(".")[0] for each in scene.running] == ["third"]


def test_the_profile_of_the_highest_priority_that_fits_is_taken() -> None:
    best = Profile("best", "sim", priority=5, gpus_per_node=4, tensor_parallel=4)
    plain = Profile("plain", "sim", gpus_per_node=1)
    scene = scene_of("a", models=[attrs.evolve(model(least=2), profiles=(plain, best))], gpus=5)
    profiles = sorted(placed.profile.name for placed in scene.world.replicas.values())
    assert profiles == ["best", "plain"]


def test_what_a_model_must_have_comes_before_what_load_asks_for() -> None:
    greedy = model("greedy", 1, 8)
    scene = scene_of("a", gpus=2, models=[greedy])
    scene.fleet.scale("greedy", 8, scene.now)
    scene.configure(greedy, model("modest"))
    scene.run(30)
    assert (len(scene.ready("greedy")), len(scene.ready("modest"))) == (1, 1)


def test_a_shard_that_was_stopped_by_somebody_else_is_replaced_without_a_wait() -> None:
    scene = scene_of("a")
    [first] = scene.ready("llama")
    scene.agents["a"].become(f"{first}/0", "stopped", scene.now)
    scene.run(15)
    [second] = scene.ready("llama")
    assert second != first
    assert scene.fleet.history.backoffs == {}


def test_a_start_that_crossed_a_stop_leaves_nothing_behind() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.connect()
    scene.run(19)
    scene.now += 1
    scene.step()
    scene.configure()
    scene.step()
    assert [type(each) for each in scene.agents["a"].inbox] == [Start, Stop]
    scene.run(10)
    assert scene.running == []
    assert scene.world.replicas == {}
    assert scene.agents["a"].shards == {}


def test_a_report_of_a_failure_before_our_time_is_noted_and_forgotten() -> None:
    scene = scene_of("a")
    [first] = scene.ready("llama")
    dead = attrs.evolve(scene.world.replicas[first].shards[0], replica="llama.older")
    scene.agents["a"].shards[dead.id] = Report(
        dead, "failed", 0.0, "out of memory", "exit status 1", ("a", "CUDA error")
    )
    scene.restart()
    scene.connect()
    scene.run(30)
    assert scene.agents["a"].shards.keys() == {f"{first}/0"}
    assert scene.fleet.history.failures["llama"][0].line == "CUDA error"


def test_drain_grace_bounds_the_whole_drain() -> None:
    scene = Scene([inventory("a"), inventory("b")], [model()], ControlSettings(drain_grace_s=20))
    scene.connect()
    scene.run(40)
    home = where(scene, scene.ready("llama")[0])
    scene.busy = True
    scene.world.drain(home, scene.now)
    scene.run(25)
    assert scene.agents[home].live == []

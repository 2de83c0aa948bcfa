"""What clients, operators and the log are told of the fleet."""

from __future__ import annotations

import attrs
import pytest

from appliance.facts.catalog import Profile
from appliance.facts.demand import Demand
from appliance.facts.report import Report
from appliance.rules.fleet.reports import phase
from tests.fleet_scene import Scene, inventory, model

WIDE = model("wide", nodes=2, gpus_per_node=4, tensor_parallel=4, pipeline_parallel=2)


def test_an_endpoint_says_where_and_by_which_key() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.connect()
    scene.run(40)
    [there] = scene.fleet.endpoints()
    shard = scene.world.replicas[there.id].shards[0]
    assert (there.host, there.port, there.tls, there.base) == (shard.address, 20000, False, "")
    assert (there.engine, there.models, there.api_key) == ("sim", ("llama",), shard.key)
    assert len(shard.key) == 64 and shard.key not in repr(there)


def test_an_address_of_the_new_kind_is_an_endpoint_too() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.connect()
    scene.run(40)
    agent = scene.agents["a"]
    agent.become(scene.running[0], "ready", scene.now, url="http://[fd00::1]:20001")
    scene.tick()
    assert [(each.host, each.port) for each in scene.fleet.endpoints()] == [("fd00::1", 20001)]


def test_only_leaders_that_serve_are_endpoints() -> None:
    scene = Scene([inventory("a", fabric="x"), inventory("b", fabric="x")], [WIDE])
    scene.connect()
    seen = set()
    for _ in range(40):
        scene.tick()
        ready = {
            report.shard.rank for agent in scene.agents.values() for report in agent.live if report.state == "ready"
        }
        seen.add((0 in ready, 1 in ready, len(scene.ready("wide"))))
    assert (True, True, 1) in seen
    assert all(count == leads for leads, _, count in seen)


def test_an_endpoint_ends_with_the_first_sign_that_another_rank_ends() -> None:
    scene = Scene([inventory("a", fabric="x"), inventory("b", fabric="x")], [WIDE])
    scene.connect()
    scene.run(40)
    [replica] = scene.ready("wide")
    worker = scene.world.replicas[replica].shards[1]
    scene.agents[worker.node].become(worker.id, "stopping", scene.now, reason="it ended")
    scene.deliver(scene.agents[worker.node])
    assert scene.ready("wide") == []
    assert phase(scene.world, scene.world.replicas[replica]) == "stopping"


def test_clients_are_told_how_far_it_is() -> None:
    scene = Scene([inventory("a", fabric="x"), inventory("b", fabric="x")], [WIDE])
    scene.load_s = 60.0
    scene.connect("a")
    told = []
    for _ in range(100):
        scene.tick()
        sentence = scene.fleet.waking(scene.now).get("wide", "")
        if scene.now == 1030.0:
            scene.connect("b")
        told.append(sentence)
    assert told[0] == "the control plane started 1 s ago and waits for b to call"
    assert "it is being started on a and b, for 0 s" in told
    assert "it is loading on a and b, for 40 s" in told
    assert told[-1] == ""


def test_a_sentence_names_the_node_that_is_away() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.load_s = 60.0
    scene.connect()
    scene.run(30)
    scene.part("a")
    scene.tick()
    assert scene.fleet.waking(scene.now) == {"llama": "it is loading on a, for 9 s (a is not connected)"}


def test_after_a_restart_no_more_is_claimed_than_is_known() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.load_s = 600.0
    scene.connect()
    scene.run(100)
    scene.restart()
    scene.connect()
    scene.run(30)
    assert scene.fleet.waking(scene.now) == {"llama": "it is loading on a, for at least 30 s"}


def test_explain_names_every_node_and_why() -> None:
    names = ("a", "b", "c", "d", "e")
    scene = Scene([inventory(name, gpus=2) for name in names], [model(gpus_per_node=3, tensor_parallel=3)])
    scene.world.cordon("a")
    scene.world.drain("b", scene.now)
    scene.connect("a", "b", "d", "e")
    scene.run(50)
    scene.cut("d")
    scene.run(30)
    why = scene.fleet.explain("llama", scene.now)
    reasons = {each.candidate: each.reason for each in why.rejections}
    assert reasons["a"] == "it is cordoned"
    assert reasons["b"] == "it is drained"
    assert reasons["c"] == "it has been lost for 20 s"
    assert reasons["d"] == "it has been unreachable for 10 s"
    assert reasons["e"].startswith("it needs 3 GPUs")
    assert (why.wanted, why.serving, why.starting, why.because) == (1, 0, 0, "min_replicas is 1")
    scene.part("e")
    scene.tick(3)
    assert scene.fleet.explain("llama", scene.now).rejections[4].reason == "its agent is not connected, for 3 s"
    assert why.missing.startswith("no node has room for it: a: it is cordoned; b: it is drained;")
    assert why.missing.endswith("and 2 more reasons")


def test_explain_of_what_runs_says_that_nothing_is_missing() -> None:
    scene = Scene([inventory("a"), inventory("b")], [model()])
    scene.connect()
    scene.run(40)
    why = scene.fleet.explain("llama", scene.now)
    assert (why.missing, why.serving, why.retry_in_s) == ("", 1, 0.0)
    with pytest.raises(KeyError):
        scene.fleet.explain("nothing", scene.now)


def test_explain_of_a_model_that_fails_says_what_its_log_said_last() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.breaks = lambda report: True
    scene.connect()
    scene.run(32)
    why = scene.fleet.explain("llama", scene.now)
    assert "it failed once: the engine ended on a (no such file); it is tried again in " in why.missing
    assert 0 < why.retry_in_s <= 2
    [failure] = why.failures
    assert (failure.node, failure.exit, failure.line, failure.profile) == ("a", "exit status 1", "no such file", "only")


def test_a_rollout_in_progress_is_said() -> None:
    scene = Scene([inventory("a")], [model(least=2)])
    scene.connect()
    scene.run(40)
    scene.configure(attrs.evolve(model(least=2), profiles=(Profile("next", "sim", args=("--next",)),)))
    scene.tick()
    assert scene.fleet.explain("llama", scene.now).missing == "a changed profile is rolled out one replica at a time"


def test_phases_go_from_starting_to_ready_to_draining() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.connect()
    seen = []
    for _ in range(40):
        scene.tick()
        seen += [phase(scene.world, placed) for placed in scene.world.replicas.values()]
    scene.busy = True
    scene.configure()
    for _ in range(5):
        scene.tick()
        seen += [phase(scene.world, placed) for placed in scene.world.replicas.values()]
    scene.busy = False
    for _ in range(5):
        scene.tick()
        seen += [phase(scene.world, placed) for placed in scene.world.replicas.values()]
    assert list(dict.fromkeys(seen)) == ["starting", "loading", "ready", "draining", "stopping"]


def test_changes_are_told_once() -> None:
    scene = Scene([inventory("a"), inventory("b")], [model(), model("huge", gpus_per_node=9)])
    scene.connect()
    scene.run(40)
    scene.cut("b")
    scene.run(100)
    scene.connect("b")
    scene.run(20)
    counts = {name: len(scene.told(name)) for name in dict.fromkeys(event.name for event in scene.events)}
    assert counts["no_place"] == 1
    assert (counts["node_unreachable"], counts["node_lost"]) == (1, 1)
    assert counts["node_registered"] == 3
    scene.events.clear()
    scene.run(100)
    assert scene.events == []


def test_keys_are_in_no_event() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.connect()
    scene.run(40)
    [there] = scene.fleet.endpoints()
    scene.agents["a"].become(scene.running[0], "failed", scene.now, reason="x")
    scene.run(5)
    assert there.api_key not in repr(scene.events)


def test_a_report_without_an_address_is_no_endpoint() -> None:
    scene = Scene([inventory("a")], [model()])
    scene.connect()
    scene.run(40)
    shard = scene.world.replicas[scene.ready("llama")[0]].shards[0]
    scene.world.report("a", [Report(shard, "ready", 0.0)], (), scene.now)
    assert scene.fleet.endpoints() == ()


def test_what_is_heard_of_while_settling_is_told_as_serving_and_as_wanted() -> None:
    scene = Scene([inventory("a"), inventory("b")], [model(least=0, most=2)])
    scene.connect()
    scene.demand["llama"] = Demand(asked_at=scene.now)
    scene.run(40)
    scene.restart()
    assert (scene.fleet.stand("llama", scene.now).wanted, scene.fleet.stand("llama", scene.now).serving) == (0, 0)
    scene.connect("a", "b")
    scene.tick()
    assert not scene.fleet.settled
    why = scene.fleet.stand("llama", scene.now)
    assert (why.wanted, why.because, why.serving, why.missing) == (1, "as many were running", 1, "")

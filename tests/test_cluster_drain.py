"""Nodes are drained and profiles changed while clients stream: the replacement serves before the old one goes."""

from __future__ import annotations

import re
from pathlib import Path

import trio

from tests.cluster import cluster, inventory, sim_model
from tests.cluster_load import Streams

SPEED = "gpus_per_node = 1\nargs = ['--decode-tokens-per-second=100']"


async def test_a_drained_node_is_empty_and_nobody_noticed(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model(replicas=1, profile=SPEED))
        await made.begin()
        await made.add_all({node: inventory(node, 1) for node in ("a", "b")})
        (first,) = await made.ready("m")
        home = first["shards"][0]["node"]
        load = Streams(made.door_port)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.more(40)
            told = await made.control.run("ctl", "drain", home)
            await load.more(40)
            load.end()
        assert not load.harmed, load.harmed
        (second,) = await made.ready("m")
        assert second["id"] != first["id"]
        assert second["shards"][0]["node"] != home
        assert not made.nodes[home].engines(), told
        assert (await made.node(home))["cordoned"], "a drained node gets nothing new until it is uncordoned"


async def test_the_only_possible_node_is_drained_when_its_time_is_over(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model(replicas=1, profile=SPEED), drain_grace_s=3)
        await made.begin()
        await made.add("a", inventory("a", 1))
        await made.ready("m")
        (replica,) = await made.ready("m")
        told = await made.control.run("ctl", "drain", "a")
        assert "a is drained, not everything with a replacement, since the grace was over" in told, told
        # By the pass in which it was given up, or by the next one.
        assert re.search("m: 1 missing: no node has room for it: a: it is (being )?drained", told), told
        explained = await made.control.run("ctl", "explain", "placement", "m")
        assert re.search("^ *a +it is drained$", explained, re.MULTILINE), explained
        assert made.control.process is not None
        line = await made.control.process.logged('event="drain grace over"')
        assert f"replica={replica['id']}" in line and "no_replacement=" in line, line
        assert not made.nodes["a"].engines()
        await made.control.run("ctl", "uncordon", "a")
        await made.ready("m")


async def test_a_drain_goes_on_when_the_router_starts_again(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model(replicas=1, profile=SPEED), drain_grace_s=120)
        await made.begin()
        await made.add("a", inventory("a", 1))
        (first,) = await made.ready("m")
        await made.add("b", inventory("b", 1))
        await made.control.run("ctl", "cordon", "b")
        assert "a drains" in await made.control.run("ctl", "drain", "a", "--no-wait")
        made.control.kill(engines=False)
        await made.serve()
        node = await made.node_is("a", "ready")
        assert node["draining"] and 60 < node["drain_left_s"] < 119.9, "what was left of it"
        assert "drains already" in await made.control.run("ctl", "drain", "a", "--no-wait")
        await made.control.run("ctl", "uncordon", "b")
        (second,) = await made.come(
            lambda: made.replicas("m"),
            lambda found: [each["state"] for each in found] == ["ready"] and found[0]["id"] != first["id"],
            "it is elsewhere",
        )
        assert second["nodes"] == ["b"] and not made.nodes["a"].engines()
        told = await made.control.run("ctl", "nodes")
        assert re.search("^a +ready, drained ", told, re.MULTILINE), told
        assert "cordoned: a; drained: a" in await made.control.run("ctl", "status")
        audit = [(each["action"], each["target"]) for each in await made.ask("/audit")]
        assert audit.count(("drain", "a")) == 1


async def test_a_changed_profile_is_rolled(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model(replicas=2, profile=SPEED))
        await made.begin()
        await made.add("a", inventory("a", 3))
        before = await made.ready("m", 2)
        load = Streams(made.door_port)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.more(40)
            await made.reload(sim_model(replicas=2, profile=SPEED.replace("=100", "=120")))
            old = {each["id"] for each in before}
            after = await made.come(
                lambda: made.replicas("m"),
                lambda found: (
                    len(found) == 2 and all(each["state"] == "ready" and each["id"] not in old for each in found)
                ),
                "both are new",
            )
            await load.more(40)
            load.end()
        assert not load.harmed, load.harmed
        assert len(made.nodes["a"].engines()) == len(after) == 2


async def test_a_change_that_no_engine_notices_leaves_every_process(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model(replicas=2, profile=SPEED))
        await made.begin()
        await made.add("a", inventory("a", 3))
        ids = {each["id"] for each in await made.ready("m", 2)}
        before = made.engines()
        load = Streams(made.door_port)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.more(40)
            new = SPEED + "\npriority = 7\ngpu_class = 'h100-80g'"
            text = sim_model(replicas=2, profile=new, scaling="max_replicas = 3").replace("name = 'p'", "name = 'new'")
            await made.reload(text.replace("[[models.profiles]]", "aliases = ['chat']\n[[models.profiles]]"))
            await load.more(80)
            replicas = await made.ready("m", 2)
            assert {each["id"] for each in replicas} == ids
            assert {each["profile"] for each in replicas} == {"new"}, "what is told is what is written now"
            explained = await made.ctl("explain", "placement", "chat")
            assert explained["profiles"][0]["priority"] == 7
            load.end()
        assert not load.harmed, load.harmed
        assert made.engines() == before, "the same processes"

"""Four nodes on two fabrics, eight GPUs each: where replicas of two nodes land, and where they go when one dies."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from tests.cluster import Cluster, cluster, inventory, sim_model

TWO_NODES = "nodes = 2\ngpus_per_node = 4\ntensor_parallel = 8"
ALL_OF_TWO = "nodes = 2\ngpus_per_node = 8\ntensor_parallel = 16"
FABRICS = {"a": "blue", "b": "blue", "c": "red", "d": "red"}


async def four_nodes(made: Cluster, profile: str) -> list[dict[str, Any]]:
    """Two replicas of the profile, wanted only when all four nodes are there to choose from."""
    made.configure(sim_model(replicas=0, profile=profile))
    await made.begin()
    await made.add_all({node: inventory(node, 8, fabric) for node, fabric in FABRICS.items()})
    await made.reload(sim_model(replicas=2, profile=profile))
    return await made.ready("m", 2)


def nodes_of(replica: dict[str, Any]) -> list[str]:
    return [shard["node"] for shard in replica["shards"]]


def fabric_of(replica: dict[str, Any]) -> str:
    (fabric,) = {FABRICS[node] for node in nodes_of(replica)}
    return fabric


async def test_one_replica_on_each_fabric_and_both_on_the_one_that_is_left(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        replicas = await four_nodes(made, TWO_NODES)
        assert sorted(fabric_of(each) for each in replicas) == ["blue", "red"]
        for each in replicas:
            assert len(set(nodes_of(each))) == 2
            leader, worker = each["shards"]
            assert leader["url"] and not worker["url"], "only the leader listens"
        endpoints = await made.ask("/endpoints")
        assert {each["id"] for each in endpoints} == {each["id"] for each in replicas}

        made.nodes["b"].kill()
        await made.node_is("b", "unreachable")
        await made.node_is("b", "lost")
        after = await made.ready("m", 2)
        assert [fabric_of(each) for each in after] == ["red", "red"], "never across two"
        kept = next(each for each in replicas if fabric_of(each) == "red")
        assert kept["id"] in {each["id"] for each in after}, "what still ran was left alone"
        await made.come(
            lambda: made.ask("/endpoints"),
            lambda found: {each["id"] for each in found} == {each["id"] for each in after},
            "the endpoints are those replicas",
        )
        engines = made.engines()
        assert not engines["a"] and not engines["b"], "nothing is left of the one that lost a node"
        assert len(engines["c"]) == len(engines["d"]) == 2


async def test_what_no_fabric_can_hold_waits_and_says_why(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        await four_nodes(made, ALL_OF_TWO)
        made.nodes["d"].kill()
        await made.node_is("d", "lost")
        (left,) = await made.ready("m", 1)
        assert fabric_of(left) == "blue"
        told = await made.control.run("ctl", "explain", "placement", "m")
        for node in FABRICS:
            assert node in told
        assert "red" in told
        await made.start("d")
        assert sorted(fabric_of(each) for each in await made.ready("m", 2)) == ["blue", "red"]

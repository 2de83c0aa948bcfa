"""A node dies while clients stream: only what ran on it ends, and each of those is told so."""

from __future__ import annotations

from pathlib import Path

import trio

from tests.cluster import Cluster, cluster, inventory, sim_model
from tests.cluster_load import Streams

ROUNDS = 3
REQUESTS = 300
SPEED = "gpus_per_node = 1\nargs = ['--decode-tokens-per-second=100']"


async def test_nodes_are_killed_under_streams(tmp_path: Path) -> None:
    """Four nodes, three replicas: whichever node dies, the fourth takes its place; it comes back as the next fourth."""
    async with cluster(tmp_path) as made:
        made.configure(sim_model(replicas=3, profile=SPEED))
        await made.begin()
        await made.add_all({node: inventory(node, 1) for node in ("a", "b", "c", "d")})
        cut = [await kill_one(made) for _ in range(ROUNDS)]
        assert sum(cut), "nobody streamed from any of them"


async def kill_one(made: Cluster) -> int:
    """How many streams it cut."""
    replicas = await made.ready("m", 3)
    doomed = replicas[0]["shards"][0]
    node, engine = doomed["node"], f"sim-{doomed['url'].rpartition(':')[2]}"
    load = Streams(made.door_port)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.run)
        await load.more(40)
        made.nodes[node].kill()
        await load.more(REQUESTS)
        await made.node_is(node, "lost")
        after = await made.ready("m", 3)
        await load.more(40)
        load.end()
    assert node not in {each["shards"][0]["node"] for each in after}
    assert load.whole >= REQUESTS
    assert all(each.how == "error event" and each.engine == engine for each in load.harmed), load.harmed
    assert len(load.harmed) <= load.clients
    assert not made.nodes[node].engines()
    print(f"{load.whole} whole, {len(load.harmed)} cut, all of them on {node}")
    await made.start(node)
    await made.node_is(node, "ready")
    return len(load.harmed)

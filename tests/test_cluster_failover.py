"""A node dies while clients stream: only what ran on it ends, and each of those is told so."""

from __future__ import annotations

from pathlib import Path

import pytest
import trio

from tests.cluster import cluster, inventory, sim_model
from tests.cluster_load import Streams

REQUESTS = 300
SPEED = "gpus_per_node = 1\nargs = ['--decode-tokens-per-second=100']"


@pytest.mark.parametrize("run", range(3))
async def test_a_node_is_killed_under_streams(tmp_path: Path, run: int) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model(replicas=3, profile=SPEED))
        await made.begin()
        for node in ("a", "b", "c"):
            await made.add(node, inventory(node, 1))
        replicas = await made.ready("m", 3)
        doomed = next(each for each in replicas if each["shards"][0]["node"] == "b")
        port = doomed["shards"][0]["url"].rpartition(":")[2]
        load = Streams(made.door_port)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.more(40)
            made.nodes["b"].kill()
            await load.more(REQUESTS)
            await made.node_is("b", "lost")
            # "b" was the only other place: its replica comes back with it
            await made.add("d", inventory("d", 1))
            after = await made.ready("m", 3)
            await load.more(40)
            load.end()
        assert {each["shards"][0]["node"] for each in after} == {"a", "c", "d"}
        assert load.whole >= REQUESTS
        assert all(each.how == "error event" and each.engine == f"sim-{port}" for each in load.harmed), load.harmed
        assert 1 <= len(load.harmed) <= load.clients
        assert not made.nodes["b"].engines()

"""A node without power, and one that comes back: machines in network namespaces, whose cables are pulled."""

from __future__ import annotations

import time
from pathlib import Path

import trio

from tests.cluster import cluster, inventory, sim_model
from tests.cluster_load import Streams
from tests.namespaces import machine

SPEED = "gpus_per_node = 1\nargs = ['--decode-tokens-per-second=50']"


async def test_a_node_loses_its_power_and_comes_back(tmp_path: Path) -> None:
    with machine() as far:
        async with cluster(tmp_path, host=far.here) as made:
            made.configure(sim_model(replicas=1, profile=SPEED))
            await made.begin()
            await made.add("far", inventory("far", 1), far.there, ("ip", "netns", "exec", far.name))
            (first,) = await made.ready("m")
            await made.add("near", inventory("near", 1), far.here)
            load = Streams(made.door_port, words=2000, host=far.here)
            async with trio.open_nursery() as nursery:
                nursery.start_soon(load.run)
                await trio.sleep(1)
                began = time.monotonic()
                far.pull_the_cable()
                await load.more(load.clients)
                assert time.monotonic() - began < 30
                load.end()
                assert all(each.how == "error event" for each in load.outcomes), load.outcomes
                await made.node_is("far", "lost")
                (second,) = await made.ready("m")
                nursery.cancel_scope.cancel()
            assert second["shards"][0]["node"] == "near"
            assert made.nodes["far"].engines(), "nobody could tell it to stop"

            far.plug_the_cable_in()
            await made.node_is("far", "ready")
            await made.come(
                lambda: trio.to_thread.run_sync(made.nodes["far"].engines),
                lambda engines: not engines,
                "what was superseded is stopped",
            )
            (third,) = await made.ready("m")
            assert third["id"] == second["id"] != first["id"]

"""The control plane, each agent, and all of them at once are restarted under load: no engine notices."""

from __future__ import annotations

import signal
from pathlib import Path

import trio

from tests.cluster import Cluster, cluster, inventory, sim_model
from tests.cluster_load import Streams

SPEED = "gpus_per_node = 1\nargs = ['--decode-tokens-per-second=100']"


async def three_nodes(made: Cluster) -> None:
    # A busy machine starts an agent in seconds, and none of them is to be taken for lost.
    made.configure(sim_model(replicas=2, profile=SPEED), lost_after_s=20)
    await made.begin()
    await made.add_all({node: inventory(node, 1) for node in ("a", "b", "c")})
    await made.ready("m", 2)


async def test_no_engine_restarts_and_cordons_remain(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        await three_nodes(made)
        free = next(node for node, pids in made.engines().items() if not pids)
        await made.control.run("ctl", "cordon", free)
        before, ids = made.engines(), {each["id"] for each in await made.ready("m", 2)}
        load = Streams(made.door_port)
        async with trio.open_nursery() as nursery:
            nursery.start_soon(load.run)
            await load.more(40)

            # each agent, one after the other: the road does not pass through them
            for number, node in enumerate(made.nodes.values()):
                assert node.process is not None
                if number:
                    node.process.kill()
                else:
                    assert await node.process.stop() == 0
                await made.start(node.name)
                await load.more(40)
            assert not load.harmed, load.harmed

            # the control plane, which is the door too: only what it served or refused meanwhile is hurt
            assert made.control.process is not None
            await made.control.process.stop()
            await made.serve()
            harmed = len(load.harmed)
            assert all(each.how == "refused" for each in load.harmed), "its stop lets streams end"
            await load.more(60)

            # all at once, without a last word
            for place in (made.control, *made.nodes.values()):
                place.kill(engines=False)
            async with trio.open_nursery() as starts:
                starts.start_soon(made.serve)
                for node in made.nodes:
                    starts.start_soon(made.start, node)
            cut = [each for each in load.harmed[harmed:] if "refused" not in (each.how,)]
            assert len(cut) <= load.clients, cut
            after = len(load.harmed)
            await load.more(100)
            assert len(load.harmed) <= after + load.clients, "those that met the door while it was down"
            settled = len(load.harmed)
            await trio.sleep(4)  # more than settle_s and unreachable_after_s: what it does then it would do now
            await load.more(40)
            assert len(load.harmed) == settled, load.harmed[settled:]
            load.end()
        assert made.engines() == before, "the same processes"
        assert {each["id"] for each in await made.ready("m", 2)} == ids
        assert (await made.node(free))["cordoned"]


async def test_agents_that_come_back_late_find_no_second_copy(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        await three_nodes(made)
        before = made.engines()
        for place in (made.control, *made.nodes.values()):
            place.kill(engines=False)
        await made.serve()
        await trio.sleep(3.5)  # settle_s is over, lost_after_s is not
        async with trio.open_nursery() as starts:
            for node in made.nodes:
                starts.start_soon(made.start, node)
        await made.ready("m", 2)
        await trio.sleep(3)
        assert made.engines() == before


async def test_a_stopped_serve_leaves_engines_and_a_second_one_finds_them(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        await three_nodes(made)
        before = made.engines()
        assert made.control.process is not None
        made.control.process.popen.send_signal(signal.SIGINT)
        await made.control.process.stop()
        await trio.sleep(1)
        assert made.engines() == before
        await made.serve()
        await made.ready("m", 2)
        assert made.engines() == before

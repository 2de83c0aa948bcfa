"""What the control plane decides reaches agents, log and router, in as few passes as will do."""

from __future__ import annotations

import attrs
import pytest
import structlog.testing
import trio
import trio.testing

from appliance.facts.demand import Demand
from appliance.facts.link import Beat, Forget, News, Start, Stop
from appliance.rules.fleet.actions import Actions, Event
from tests.control_scene import SETTINGS, WALL, control, next_of, register, report, shard

Clock = trio.testing.MockClock


async def test_commands_go_to_their_nodes_in_order_and_events_to_the_log(autojump_clock: Clock) -> None:
    async with control() as scene:
        a, b = await scene.join(), await scene.join(register("node-b"))
        commands = (
            ("node-a", Start(shard())),
            ("node-b", Stop("m.zzzzz/0", 5.0, "scaled down")),
            ("node-x", Start(shard())),
            ("node-a", Forget("m.yyyyy/0")),
        )
        events = (Event("warning", "replica_failed", {"replica": "m.abcde", "reason": "it left"}),)
        scene.fleet.next = Actions(commands, events)
        with structlog.testing.capture_logs() as lines:
            scene.plane.wake()
            assert await next_of(a, Start) == Start(shard())
            assert await next_of(a, Forget) == Forget("m.yyyyy/0")
            assert await next_of(b, Stop) == Stop("m.zzzzz/0", 5.0, "scaled down")
        assert {"event": "replica failed", "log_level": "warning", "replica": "m.abcde", "reason": "it left"} in lines


async def test_the_loop_wakes_for_news_and_when_a_wait_is_over_and_not_else(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.join()
        await scene.pass_over()
        steps = scene.fleet.steps
        count = len(steps)
        await link.send(Beat(WALL))
        await trio.sleep(1)
        assert len(steps) == count
        await link.send(News((report(),)))
        await trio.sleep(1)
        assert len(steps) == count + 1
        scene.fleet.next = Actions(again_at=trio.current_time() + 7.0)
        await scene.pass_over()
        before, count = steps[-1], len(steps)
        await trio.sleep(6.0)
        assert len(steps) == count
        await trio.sleep(2.0)
        assert len(steps) == count + 1 and steps[-1] == pytest.approx(before + 7.0, abs=0.03)


async def test_many_changes_make_few_passes(autojump_clock: Clock) -> None:
    async with control() as scene:
        links = [await scene.join(register(f"node-{number}")) for number in range(50)]
        await scene.pass_over()
        count = len(scene.fleet.steps)
        for link in links:
            await link.send(News((report(),)))
        await trio.sleep(1)
        assert len(scene.fleet.steps) - count <= 2


async def test_a_fault_in_deciding_is_survived_and_told_once(autojump_clock: Clock) -> None:
    async with control() as scene:
        with structlog.testing.capture_logs() as lines:
            scene.fleet.fault = KeyError("m")
            scene.plane.wake()
            await trio.sleep(11)
            assert 4 <= len(scene.fleet.steps) <= 8
            scene.fleet.fault = None
            link = await scene.join()
            scene.fleet.next = Actions((("node-a", Start(shard())),))
            await trio.sleep(3)
            await next_of(link, Start)
        assert [each["log_level"] for each in lines if "decid" in each["event"] or "decis" in each["event"]] == [
            "error",
            "info",
        ]


async def test_demand_and_a_reload_reach_the_decision(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.demand["m"] = Demand(waiting=3)
        await scene.pass_over()
        assert scene.fleet.demands[-1] == {"m": Demand(waiting=3)}
        count = len(scene.fleet.steps)
        scene.plane.configure(attrs.evolve(SETTINGS, models=()))
        await trio.sleep(1)
        assert scene.fleet.models == {} and len(scene.fleet.steps) == count + 1


async def test_the_router_is_told_of_endpoints_and_waking_models_and_not_of_seconds(
    autojump_clock: Clock,
) -> None:
    from appliance.facts.endpoint import Endpoint

    async with control() as scene:
        told = 0

        async def listen() -> None:
            nonlocal told
            while True:
                await scene.plane.published.wait()
                told += 1

        scene.nursery.start_soon(listen)
        await scene.pass_over()
        assert told == 0
        one, two = Endpoint("m.aaaaa", "10.0.0.1", 20000), Endpoint("m.bbbbb", "10.0.0.2", 20000)
        for ready, awake, expected in (
            ((one,), {}, 1),
            ((one,), {}, 1),
            ((one, two), {}, 2),
            ((two, one), {}, 2),
            ((two, one), {"m": "since 1 s"}, 3),
            ((two, one), {"m": "since 2 s"}, 3),
            ((two, one), {}, 4),
            ((attrs.evolve(one, port=20001), two), {}, 5),
        ):
            scene.fleet.ready, scene.fleet.awake = ready, awake
            await scene.pass_over()
            assert told == expected, (ready, awake)
            assert set(scene.plane.endpoints()) == set(ready) and scene.plane.waking() == awake
        scene.fleet.awake = {"m": "it is loading"}
        await scene.pass_over()
        assert scene.plane.why_not("m") == "it is loading"
        assert scene.plane.why_not("n") == "no node has room" and scene.plane.why_not("o") == ""
        scene.fleet.awake = {"m": "it is warming up"}
        assert scene.plane.why_not("m") == "it is loading"  # asked for by every request that is refused
        await trio.sleep(1.1)
        assert scene.plane.why_not("m") == "it is warming up"


async def test_a_model_is_waking_until_the_pass_that_gives_it_an_endpoint(autojump_clock: Clock) -> None:
    """Who looks between the report of a replica and the pass after it must not see neither: those who wait for the
    model would be refused in the moment in which it serves."""
    from appliance.facts.endpoint import Endpoint

    async with control() as scene:
        scene.fleet.awake = {"m": "it is loading, for 1 s"}
        await scene.pass_over()
        one = Endpoint("m.aaaaa", "10.0.0.1", 20000)
        scene.fleet.awake = {"m": "it is loading, for 2 s"}
        assert scene.plane.waking() == {"m": "it is loading, for 2 s"}
        scene.fleet.ready, scene.fleet.awake = (one,), {}
        assert scene.plane.endpoints() == () and set(scene.plane.waking()) == {"m"}
        await scene.pass_over()
        assert scene.plane.endpoints() == (one,) and scene.plane.waking() == {}
        scene.fleet.ready, scene.fleet.awake = (), {"m": "it is about to be started"}
        assert scene.plane.endpoints() == (one,) and scene.plane.waking() == {}

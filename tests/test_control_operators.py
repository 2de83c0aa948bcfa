"""What operators decide: it is in the store before it holds, and holds over restarts."""

from __future__ import annotations

import pytest
import structlog.testing
import trio
import trio.testing

from appliance.control.attendance import PAPERS_S
from appliance.facts import link as say
from appliance.facts.errors import Refusal
from appliance.facts.link import Beat, Refused, Start
from appliance.store.failed import StoreFailed
from appliance.wire.link import LinkClosed
from tests.control_scene import SETTINGS, WALL, Scene, claim, control, next_of, register

Clock = trio.testing.MockClock


async def test_what_operators_decided_before_holds_from_the_start(autojump_clock: Clock) -> None:
    from random import Random

    from appliance.control.plane import Plane
    from tests.control_scene import FakeStore

    store = FakeStore()
    await store.cordon("node-a", "olga", WALL)
    store.give("node-a")
    store.give("node-b", revoked=True)
    store.give("node-c", until=WALL - 1)
    plane = Plane(SETTINGS, store, Random(1), trio.current_time, wall=lambda: WALL)  # type: ignore[arg-type]
    async with trio.open_nursery() as nursery:
        await nursery.start(plane.run)
        assert set(plane.world.nodes) == {"node-a"} and plane.world.nodes["node-a"].cordoned
        assert plane.world.nodes["node-a"].state == "expected"
        nursery.cancel_scope.cancel()
    store.failed = "the disk is full"
    plane = Plane(SETTINGS, store, Random(1), trio.current_time, wall=lambda: WALL)  # type: ignore[arg-type]
    with pytest.raises(StoreFailed):
        await plane.run()


async def test_cordons_and_drains_are_in_the_store_before_they_hold(autojump_clock: Clock) -> None:
    async with control() as scene:
        await scene.join()
        world, store = scene.plane.world, scene.store
        assert await scene.plane.cordon("node-a", "olga") and not await scene.plane.cordon("node-a", "olga")
        assert world.nodes["node-a"].cordoned and store.cordoned["node-a"].by == "olga"
        assert await scene.plane.uncordon("node-a", "olga") and not await scene.plane.uncordon("node-a", "olga")
        assert not world.nodes["node-a"].cordoned
        assert await scene.plane.drain("node-a", "olga") and not await scene.plane.drain("node-a", "olga")
        assert world.nodes["node-a"].draining_since is not None and "node-a" in store.cordoned
        assert ("olga", "drain", "node-a", "") in store.lines
        store.failed = "the disk is full"
        with pytest.raises(StoreFailed):
            await scene.plane.uncordon("node-a", "olga")
        assert world.nodes["node-a"].cordoned


async def test_a_client_that_leaves_does_not_part_the_store_from_the_world(autojump_clock: Clock) -> None:
    async with control() as scene:
        await scene.join()
        scene.store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            client = await nursery.start(asking, scene)
            await trio.testing.wait_all_tasks_blocked()
            client.cancel()
            await trio.testing.wait_all_tasks_blocked()
            scene.store.gate.set()
        assert "node-a" in scene.store.cordoned and scene.plane.world.nodes["node-a"].cordoned


async def asking(scene: Scene, task_status: trio.TaskStatus[trio.CancelScope]) -> None:
    with trio.CancelScope() as client:
        task_status.started(client)
        await scene.plane.cordon("node-a", "olga")


async def test_a_database_that_does_not_answer_is_waited_for_with_a_bound(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.gate = trio.Event()
        with pytest.raises(StoreFailed, match="not answered for 30 s"):
            await scene.plane.cordon("node-a", "olga")


async def test_scaling_by_hand_is_written_down(autojump_clock: Clock) -> None:
    async with control() as scene:
        await scene.plane.scale("m", 3, "olga")
        await scene.plane.scale("m", None, "olga")
        assert scene.fleet.scaled == [("m", 3), ("m", None)]
        assert [line[1:] for line in scene.store.lines] == [("scale", "m", "3 replicas"), ("scale", "m", "by demand")]
        with pytest.raises(Refusal, match="no model"):
            await scene.plane.scale("x", 1, "olga")


async def test_a_stop_goes_ahead_where_it_cannot_be_noted_and_the_log_has_it(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.failed = "the disk is full"
        with structlog.testing.capture_logs() as logs:
            assert await scene.plane.scale("m", 0, "olga") == "the disk is full"
        assert scene.fleet.scaled == [("m", 0)]
        [line] = [each for each in logs if each["log_level"] == "error"]
        assert (line["by"], line["action"], line["target"], line["detail"]) == ("olga", "scale", "m", "0 replicas")
        assert line["reason"] == "the disk is full"
        scene.store.failed = ""
        assert await scene.plane.scale("m", None, "olga") == ""


async def test_a_stop_waits_for_no_database_that_does_not_answer(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.gate = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(scene.plane.scale, "m", 0, "olga")
            await trio.testing.wait_all_tasks_blocked()
            assert scene.fleet.scaled == [("m", 0)], "at once"
            nursery.cancel_scope.cancel()
        assert trio.current_time() < 100, "and the client with its question is answered some time"


async def test_a_control_plane_that_has_ended_promises_nothing(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.nursery.cancel_scope.cancel()
    plane = scene.plane
    for asked in (
        lambda: plane.scale("m", 0, "olga"),
        lambda: plane.cordon("node-a", "olga"),
        lambda: plane.uncordon("node-a", "olga"),
        lambda: plane.drain("node-a", "olga"),
        lambda: plane.revoke("node-a", "olga"),
    ):
        with pytest.raises(Refusal, match="takes over from it: ask again"):
            await asked()
    assert scene.fleet.scaled == []


async def test_a_revoked_node_hears_why_and_is_forgotten(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        link = await scene.join(proof=claim())
        before = trio.current_time()
        assert await scene.plane.revoke("node-a", "olga") == [claim().serial]
        refused = await next_of(link, Refused)
        assert trio.current_time() == before
        assert refused.code == "revoked" and "certificate says node-a" in refused.message
        with pytest.raises(LinkClosed):
            await link.receive()
        assert "node-a" not in scene.plane.world.nodes and not scene.plane.sessions
        assert (await scene.refused(proof=claim())).code == "revoked"


async def test_the_node_of_this_process_is_not_thrown_out_with_a_token_for_its_name(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        await scene.join()
        assert scene.plane.own("node-a") and not scene.plane.own("node-b")
        await scene.plane.revoke("node-a", "olga")
        assert scene.plane.world.nodes["node-a"].connected and "node-a" in scene.plane.sessions


async def test_papers_that_others_changed_are_seen_soon(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        scene.store.give("node-b", until=WALL + 5)
        a, b = await scene.join(proof=claim()), await scene.join(register("node-b"), claim("node-b"))
        scene.store.give("node-c")
        scene.store.take_back("node-a")
        scene.wall[0] += 10
        await trio.sleep(PAPERS_S + 1)
        assert scene.plane.world.nodes["node-c"].state == "expected"
        assert (await next_of(a, Refused)).code == "revoked"
        assert not scene.plane.sessions
        with pytest.raises(LinkClosed):
            await next_of(b, Start)
        assert "node-a" not in scene.plane.world.nodes and "node-b" in scene.plane.world.nodes


async def test_a_fault_in_looking_at_papers_is_survived_and_told_once(
    autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with control() as scene:
        with structlog.testing.capture_logs() as logs, monkeypatch.context() as patched:
            patched.setattr(scene.plane.attendance, "compare", lambda certificates: 1 / 0)
            await trio.sleep(3 * PAPERS_S + 1)
        assert [each["event"] for each in logs] == ["a fault in looking at the certificates"]
        scene.store.give("node-b")
        await trio.sleep(PAPERS_S + 1)
        assert "node-b" in scene.plane.world.nodes, "and it goes on"


async def test_an_agent_of_this_process_needs_no_papers(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a", revoked=True)
        await scene.join()
        await trio.sleep(PAPERS_S + 1)
        assert scene.plane.world.nodes["node-a"].connected


async def test_a_certificate_is_renewed_once_a_minute_for_its_own_name(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        link = await scene.join(proof=claim())
        await link.send(say.Renew("csr 1"))
        assert await next_of(link, say.Renewed) == say.Renewed("certificate 1")
        await link.send(say.Renew("csr 2"))
        assert "once in 60 s" in (await next_of(link, say.Renewed)).reason
        for _ in range(7):
            await trio.sleep(10)
            await link.send(Beat(WALL))
        await link.send(say.Renew("csr 3"))
        assert await next_of(link, say.Renewed) == say.Renewed("certificate 2")
        assert scene.joining.renewed == [("node-a", "csr 1"), ("node-a", "csr 3")]
        other = await scene.join(register("node-b"))
        await other.send(say.Renew("csr"))
        assert "no certificate" in (await next_of(other, say.Renewed)).reason

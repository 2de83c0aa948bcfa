"""Which agents may register at the control plane, and what those hear who may not."""

from __future__ import annotations

import attrs
import pytest
import structlog.testing
import trio
import trio.testing

from appliance.control.attendance import REGISTER_S
from appliance.facts.link import Beat, Refused, Start, Welcome
from appliance.wire.link import LinkClosed, memory_links
from tests.control_scene import WALL, claim, control, next_of, register, report, shard

Clock = trio.testing.MockClock


async def test_an_agent_registers_with_what_it_runs_and_is_welcomed(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.call(register(reports=(report(),)))
        welcome = await link.receive()
        assert isinstance(welcome, Welcome) and welcome.clock == WALL
        assert (welcome.beat_s, welcome.silence_s) == (5.0, 30.0)
        node = scene.plane.world.nodes["node-a"]
        assert node.connected and node.state == "ready" and "m.abcde/0" in node.reports
        assert "m.abcde" in scene.plane.world.replicas


async def test_a_certificate_must_be_given_known_good_and_of_that_name(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        scene.store.give("node-b", "5e41b", revoked=True)
        scene.store.give("node-c", "5e41c", until=WALL - 1)
        await scene.join(proof=claim())
        for message, proof, code, words in (
            (register("node-b"), claim("node-a"), "wrong_name", "certificate says node-a, agent claims node-b"),
            (register("node-b"), claim("node-b"), "revoked", "certificate says node-b (serial 5e41b), agent claims"),
            (register("node-c"), claim("node-c"), "unknown", "has expired"),
            (register("node-d"), claim("node-d"), "unknown", "did not give out that certificate"),
            (register("node-a"), attrs.evolve(claim(), name=""), "no_certificate", "shown, agent claims node-a"),
            (register("node-a", protocol=2), claim(), "protocol", "speaks version 2"),
        ):
            refused = await scene.refused(message, proof)
            assert refused.code == code and words in refused.message, refused
        assert set(scene.plane.sessions) == {"node-a"}


async def test_a_refusal_is_logged_once_until_something_else_is_wrong(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        with structlog.testing.capture_logs() as lines:
            for _ in range(3):
                await scene.refused(register("node-b"), claim("node-a"))
            await scene.refused(register("node-c"), claim("node-a"))
            await scene.join(proof=claim())
            await scene.refused(register("node-b"), claim("node-a"))
        told = [each["reason"] for each in lines if each["event"] == "agent refused"]
        assert told == [f"certificate says node-a, agent claims node-{name}" for name in "bcb"]


async def test_a_name_in_use_is_not_given_to_a_second_machine(autojump_clock: Clock) -> None:
    async with control() as scene:
        first = await scene.join()
        refused = await scene.refused(register(boot_id="boot-2"))
        assert refused.code == "name_taken" and "10.0.0.1:4711" in refused.message and "node-a" in refused.message
        await first.aclose()
        await scene.pass_over()
        await scene.join(register(boot_id="boot-2"))


async def test_of_two_that_register_at_one_moment_one_is_welcomed(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        scene.store.gate = trio.Event()  # both have read their certificate, and neither was judged
        links = [await scene.call(register(boot_id=f"boot-{number}"), claim()) for number in range(2)]
        await trio.testing.wait_all_tasks_blocked()
        scene.store.gate.set()
        first = [await link.receive() for link in links]
        assert sorted(type(each).__name__ for each in first) == ["Refused", "Welcome"]
        assert scene.plane.world.nodes["node-a"].session == 1


async def test_an_agent_that_calls_again_takes_its_own_place(autojump_clock: Clock) -> None:
    async with control() as scene:
        first = await scene.join()
        second = await scene.join()
        with pytest.raises(LinkClosed):
            await next_of(first, Start)
        await scene.pass_over()
        assert scene.plane.world.nodes["node-a"].connected
        scene.plane.sessions["node-a"].say(Start(shard()))
        assert await next_of(second, Start) == Start(shard())


async def test_one_revoked_between_the_look_and_the_judgement_does_not_come_in(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        scene.store.gate = trio.Event()
        link = await scene.call(proof=claim())
        await trio.testing.wait_all_tasks_blocked()
        scene.plane.attendance.revoked.add(claim().serial)
        scene.store.gate.set()
        refused = await link.receive()
        assert isinstance(refused, Refused) and refused.code == "revoked"


async def test_an_agent_that_does_not_register_is_told_and_ended(autojump_clock: Clock) -> None:
    async with control() as scene:
        ours, theirs = memory_links()
        scene.nursery.start_soon(scene.plane.attend, theirs)
        before = trio.current_time()
        refused = await ours.receive()
        assert isinstance(refused, Refused) and f"within {REGISTER_S:g} s" in refused.message
        assert trio.current_time() - before == REGISTER_S
        ours, theirs = memory_links()
        scene.nursery.start_soon(scene.plane.attend, theirs)
        await ours.send(Beat(1.0))
        refused = await ours.receive()
        assert isinstance(refused, Refused) and refused.code == "malformed" and "it is Beat" in refused.message


async def test_while_the_database_cannot_be_read_its_last_look_counts(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        scene.store.give("node-b")
        await scene.plane.attendance.look_at_papers()
        link = await scene.join(proof=claim())
        scene.store.failed = "it is damaged"
        with structlog.testing.capture_logs() as lines:
            await link.aclose()
            await trio.testing.wait_all_tasks_blocked()
            await scene.join(register(boot_id="boot-2"), claim())
            await scene.plane.attendance.look_at_papers()
        assert [each["reason"] for each in lines if each["log_level"] == "error"] == ["it is damaged"]
        assert (await scene.refused(proof=claim("node-b"))).code == "wrong_name"
        scene.plane.attendance.revoked.add(claim("node-b").serial)
        assert (await scene.refused(register("node-b"), claim("node-b"))).code == "revoked"
        scene.wall[0] += 2e6
        assert (await scene.refused(register("node-a", "boot-3"), claim())).code == "unknown", "time goes by"


async def test_without_the_database_no_certificate_is_taken_and_it_is_told_once(
    autojump_clock: Clock,
) -> None:
    async with control() as scene:
        scene.store.failed = "the disk is full"
        with structlog.testing.capture_logs() as lines:
            for _ in range(2):
                link = await scene.call(proof=claim())
                with pytest.raises(LinkClosed):
                    await link.receive()
        assert [each["reason"] for each in lines if each["log_level"] == "error"] == ["the disk is full"]

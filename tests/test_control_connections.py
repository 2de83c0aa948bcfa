"""How an agent's connection lives and ends: signs of life, silence, a node that does not read, cancellation."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import pytest
import structlog.testing
import trio
import trio.testing

from appliance.control.session import Rhythm
from appliance.facts import link as say
from appliance.facts.control import ControlSettings
from appliance.facts.link import AskLog, Beat, EndLog, Forget, LogLines, Start, Welcome
from appliance.rules.fleet.actions import Actions
from appliance.wire.link import LinkClosed, memory_links
from tests.control_scene import SETTINGS, WALL, Scene, claim, control, next_of, read_log, register, report, shard

Clock = trio.testing.MockClock


async def test_both_sides_beat_and_a_beating_agent_is_kept(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.join()
        for _ in range(30):
            with trio.fail_after(5.5):
                assert await link.receive() == Beat(WALL)
            await link.send(Beat(WALL))
        assert scene.plane.world.nodes["node-a"].connected


async def test_an_agent_that_falls_silent_is_ended(autojump_clock: Clock) -> None:
    async with control() as scene:
        with structlog.testing.capture_logs() as lines:
            link = await scene.join()
            await trio.sleep(29.9)
            assert scene.plane.world.nodes["node-a"].connected
            await trio.sleep(0.2)
            assert not scene.plane.world.nodes["node-a"].connected and not scene.plane.sessions
            with pytest.raises(LinkClosed):
                await next_of(link, Start)
        ends = [each["reason"] for each in lines if each["event"] == "agent's connection ended"]
        assert ends == ["it has said nothing for 30 s"]


@pytest.mark.parametrize("unreachable_after_s", [0.4, 20.0, 300.0])
def test_silence_makes_a_node_unreachable_before_it_ends_the_connection(unreachable_after_s: float) -> None:
    rhythm = Rhythm.of(unreachable_after_s)
    assert 4 * rhythm.beat_s <= unreachable_after_s < rhythm.silence_s


@pytest.mark.parametrize("hours", [-48, -1, 1, 48])
async def test_a_clock_that_is_set_by_hours_parts_nobody_and_decides_nothing(hours: int, autojump_clock: Clock) -> None:
    async with control(real=True) as scene:
        scene.store.give("node-a")
        await scene.plane.attendance.look_at_papers()
        link = await scene.join(proof=claim())
        placed = await next_of(link, Start)
        scene.wall[0] += hours * 3600.0
        for _ in range(20):
            await trio.sleep(5)
            await link.send(Beat(WALL))
        assert scene.plane.world.nodes["node-a"].connected and "node-a" in scene.plane.sessions
        assert list(scene.plane.world.replicas) == [placed.shard.replica]
        assert abs(scene.plane.world.nodes["node-a"].clock_off_s) == abs(hours) * 3600


async def test_a_node_that_is_given_up_has_no_connection_left(autojump_clock: Clock) -> None:
    settings = attrs.evolve(
        SETTINGS, control=ControlSettings(settle_s=0.0, unreachable_after_s=20.0, lost_after_s=21.0)
    )
    async with control(real=True, settings=settings) as scene:
        link = await scene.join()
        await trio.sleep(25)
        assert scene.plane.world.nodes["node-a"].state == "lost" and not scene.plane.sessions
        with pytest.raises(LinkClosed):
            await next_of(link, EndLog)
        await scene.join()
        assert scene.plane.world.nodes["node-a"].state == "ready"


async def test_the_silence_of_a_node_without_power_counts_from_its_last_word(autojump_clock: Clock) -> None:
    async with control(real=True) as scene:
        link = await scene.join()
        await trio.sleep(17)
        await link.aclose()  # as the kernel does it, once nothing has been acknowledged for long
        await trio.sleep(2)
        node = scene.plane.world.nodes["node-a"]
        assert node.state == "ready" and not node.connected
        await trio.sleep(2)
        assert node.state == "unreachable"
        await trio.sleep(40)
        assert node.state == "lost"


class StuckLink:
    """Takes nothing more after `most` messages, as a peer that does not read; says nothing but its registration."""

    peer = "10.0.0.9:1"

    def __init__(self, most: int) -> None:
        self.most = most
        self.sent: list[say.Message] = []
        self.said = False
        self.reason: str | None = None

    async def send(self, message: say.Message) -> None:
        await trio.lowlevel.checkpoint()
        if len(self.sent) >= self.most:
            await trio.sleep_forever()
        self.sent.append(message)

    async def receive(self) -> say.Message:
        await trio.lowlevel.checkpoint()
        if not self.said:
            self.said = True
            return register()
        while True:
            await trio.sleep(1.0)
            return Beat(WALL)

    async def aclose(self, reason: str = "") -> None:
        self.reason = reason


async def test_a_node_that_does_not_read_is_cut_off(autojump_clock: Clock) -> None:
    async with control() as scene:
        stuck = StuckLink(3)
        scene.nursery.start_soon(scene.plane.attend, stuck)
        await trio.sleep(14)
        assert scene.plane.sessions  # the welcome and two beats were taken
        await trio.sleep(40)
        assert not scene.plane.sessions and stuck.reason == "it has read nothing for 30 s"
        assert not scene.plane.world.nodes["node-a"].connected


async def test_a_node_for_which_too_much_waits_is_cut_off_at_once(autojump_clock: Clock) -> None:
    async with control() as scene:
        stuck = StuckLink(1)
        scene.nursery.start_soon(scene.plane.attend, stuck)
        await trio.testing.wait_all_tasks_blocked()
        scene.fleet.next = Actions(tuple(("node-a", Forget(f"m.{number}/0")) for number in range(3000)))
        await scene.pass_over()
        assert stuck.reason is not None and "does not read: 2048 messages wait" in stuck.reason


async def test_what_was_lost_with_a_connection_is_said_again(autojump_clock: Clock) -> None:
    async with control(real=True) as scene:
        link = await scene.join()
        first = await next_of(link, Start)
        await link.aclose()  # with the start on its way, for all the control plane knows
        again = await scene.join()
        assert await next_of(again, Start) == first


async def test_parting_while_a_command_is_sent_leaves_nothing_behind(autojump_clock: Clock) -> None:
    async with control() as scene:
        stuck = StuckLink(1)
        with trio.CancelScope() as scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(scene.plane.attend, stuck)
                await trio.testing.wait_all_tasks_blocked()
                scene.fleet.next = Actions((("node-a", Start(shard())),))
                scene.plane.wake()
                await trio.testing.wait_all_tasks_blocked()
                scope.cancel()
        assert not scene.plane.sessions and not scene.plane.world.nodes["node-a"].connected
        assert stuck.reason is not None


async def test_the_clock_of_a_node_is_named_once_and_once_more_when_it_is_right(autojump_clock: Clock) -> None:
    async with control() as scene:
        with structlog.testing.capture_logs() as lines:
            link = await scene.join(register(clock=WALL + 90.0))
            assert scene.plane.world.nodes["node-a"].clock_off_s == 90.0
            for ahead in (90.0, 91.0, 1.0, 2.0, -31.0):
                await link.send(Beat(WALL + ahead))
            await scene.pass_over()
            assert scene.plane.world.nodes["node-a"].clock_off_s == -31.0
        assert [each["event"] for each in lines if "clock" in each["event"]] == [
            "the clock of node-a is 90 s ahead of the control plane's",
            "the clock of node-a agrees with the control plane's again",
            "the clock of node-a is 31 s behind the control plane's",
        ]


async def everything(scene: Scene) -> None:
    """A call with all that can happen on it."""
    ours, theirs = memory_links("10.0.0.1:1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.plane.attend, theirs, claim())
        await ours.send(register(reports=(report(),)))
        await next_of(ours, Welcome)
        nursery.start_soon(read_log, scene)
        ask = await next_of(ours, AskLog)
        await ours.send(LogLines(ask.request, ("a",)))
        await ours.send(say.Renew("csr"))
        await next_of(ours, say.Renewed)
        await ours.send(LogLines(ask.request, ("b",), True))
        await ours.send(Beat(WALL))
        await trio.lowlevel.checkpoint()
        await ours.aclose()


async def test_wherever_a_connection_is_cancelled_nothing_is_left_of_it(autojump_clock: Clock) -> None:
    async with control() as scene:
        scene.store.give("node-a")
        whole = False
        for steps in range(200):
            with trio.CancelScope() as scope:
                async with trio.open_nursery() as nursery:
                    nursery.start_soon(run_and_cancel, everything, scene, nursery)
                    for _ in range(steps):
                        await trio.lowlevel.checkpoint()
                    if nursery.child_tasks:
                        scope.cancel()
            assert not scene.plane.sessions and not scene.plane.logs.readings, steps
            node = scene.plane.world.nodes.get("node-a")
            assert node is None or not node.connected, steps
            if not scope.cancelled_caught:
                whole = True
                break
        assert whole and steps > 10


async def run_and_cancel(job: Callable[[Scene], Awaitable[None]], scene: Scene, nursery: trio.Nursery) -> None:
    await job(scene)

"""The control plane among agents: who may register, what is said to them, and how their connections end."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from contextlib import aclosing

import attrs
import pytest
import structlog.testing
import trio
import trio.testing

from appliance.control.attendance import PAPERS_S, REGISTER_S
from appliance.control.session import Rhythm
from appliance.facts import link as say
from appliance.facts.control import ControlSettings
from appliance.facts.demand import Demand
from appliance.facts.errors import Refusal
from appliance.facts.link import AskLog, Beat, EndLog, Forget, LogLines, News, Refused, Start, Stop, Trouble, Welcome
from appliance.rules.fleet.actions import Actions, Event
from appliance.store.failed import StoreFailed
from appliance.wire.link import Link, LinkClosed, UnknownMessage, memory_links
from tests.control_scene import SETTINGS, WALL, Scene, claim, control, next_of, register, report, shard

Clock = trio.testing.MockClock


# -- registration ------------------------------------------------------------------------------------------------------


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


# -- what is said ------------------------------------------------------------------------------------------------------


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


# -- signs of life -----------------------------------------------------------------------------------------------------


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


# -- what is not understood --------------------------------------------------------------------------------------------


class Mumbling:
    """A link whose `receive` raises what a test wants, after the registration."""

    peer = "10.0.0.9:1"

    def __init__(self, raises: list[Exception]) -> None:
        self.raises = raises
        self.sent: list[say.Message] = []
        self.said = False
        self.reason: str | None = None

    async def send(self, message: say.Message) -> None:
        await trio.lowlevel.checkpoint()
        self.sent.append(message)

    async def receive(self) -> say.Message:
        await trio.lowlevel.checkpoint()
        if not self.said:
            self.said = True
            return register()
        if self.raises:
            raise self.raises.pop(0)
        await trio.sleep_forever()

    async def aclose(self, reason: str = "") -> None:
        self.reason = reason


async def test_a_message_of_a_later_version_is_answered_and_the_link_goes_on(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = Mumbling([UnknownMessage("there is no message of the type 'dance'")] * 100)
        scene.nursery.start_soon(scene.plane.attend, link)
        await scene.pass_over()
        assert "node-a" in scene.plane.sessions
        answers = [each for each in link.sent if isinstance(each, Trouble)]
        assert answers[0] == Trouble("there is no message of the type 'dance'") and len(answers) == 20


async def test_what_is_no_message_ends_the_link_and_is_named(autojump_clock: Clock) -> None:
    from appliance.wire.link import Malformed

    async with control() as scene:
        link = Mumbling([Malformed("not a message of the link: it is broken")])
        scene.nursery.start_soon(scene.plane.attend, link)
        await scene.pass_over()
        assert not scene.plane.sessions
        last = link.sent[-1]
        assert (
            isinstance(last, Refused) and last.code == "malformed" and "node-a has sent not a message" in last.message
        )


async def test_a_second_registration_and_words_of_a_control_plane_are_answered(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.join()
        for message in (register(), Welcome(1, "1.0", 1.0, 1.0, 1.0)):
            await link.send(message)
            assert isinstance(await next_of(link, Trouble), Trouble)
        assert scene.plane.world.nodes["node-a"].session == 1


async def test_a_fault_in_one_link_reaches_no_other(autojump_clock: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    async with control() as scene:
        healthy = await scene.join(register("node-b"))
        link = await scene.join()

        def broken(*_: object) -> None:
            raise RuntimeError("a fault")

        with structlog.testing.capture_logs() as lines:
            monkeypatch.setattr(scene.plane.world, "looked", broken)
            await link.send(say.Look(register().inventory))
            with pytest.raises(LinkClosed):
                await next_of(link, Start)
        assert [each["event"] for each in lines if each["log_level"] == "error"] == ["fault of a link"]
        assert set(scene.plane.sessions) == {"node-b"}
        scene.plane.sessions["node-b"].say(Start(shard()))
        assert await next_of(healthy, Start)


# -- operators ---------------------------------------------------------------------------------------------------------


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


# -- logs --------------------------------------------------------------------------------------------------------------


async def test_a_log_is_read_to_its_end(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.join(register(reports=(report(),)))

        async def agent() -> None:
            ask = await next_of(link, AskLog)
            assert (ask.shard_id, ask.lines, ask.follow) == ("m.abcde/0", 10, False)
            await link.send(LogLines(ask.request, ("a", "b")))
            await link.send(LogLines("another", ("no",)))
            await link.send(LogLines(ask.request, ("c",), True))

        scene.nursery.start_soon(agent)
        assert [line for piece in await read(scene, follow=False) for line in piece] == ["a", "b", "c"]
        await scene.pass_over()
        assert not scene.plane.logs.readings


async def read(scene: Scene, *, follow: bool = True) -> list[tuple[str, ...]]:
    pieces = []
    async with aclosing(scene.plane.log("m.abcde", 0, 10, follow)) as log:
        async for piece in log:
            pieces.append(piece)
    return pieces


async def test_whoever_asked_for_a_log_leaves_and_the_node_is_told(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.join(register(reports=(report(),)))
        with trio.CancelScope() as reader:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read, scene)
                ask = await next_of(link, AskLog)
                await link.send(LogLines(ask.request, ("a",)))
                await scene.pass_over()
                reader.cancel()
        assert await next_of(link, EndLog) == EndLog(ask.request)
        assert not scene.plane.logs.readings


async def test_a_log_ends_with_its_node_and_says_so(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.join(register(reports=(report(),)))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(
                refused_log, scene, "node-a has no connection any more: the other side has ended the link"
            )
            await next_of(link, AskLog)
            await link.aclose()
        await refused_log(scene, "is on node-a, which has no connection")


async def refused_log(scene: Scene, words: str) -> None:
    with pytest.raises(Refusal, match=words):
        await read(scene)


async def test_a_log_that_nobody_has_is_refused_and_a_silent_node_too(autojump_clock: Clock) -> None:
    async with control() as scene:
        with pytest.raises(Refusal, match="no replica"):
            await read(scene)
        await scene.join(register(reports=(report(),)))
        with pytest.raises(Refusal, match="has sent nothing of the log for 15 s"):
            await read(scene)
        assert not scene.plane.logs.readings


async def test_lines_that_come_faster_than_they_are_read_push_out_older_ones(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.join(register(reports=(report(),)))
        async with aclosing(scene.plane.log("m.abcde", 0, 10, True)) as log:
            scene.nursery.start_soon(feed, link)
            first = await anext(log)
            assert first == ("first",)
            await scene.pass_over()
            rest = await anext(log)
            assert rest[0].startswith("[") and "lines left out" in rest[0] and rest[-1].startswith("99 ")
            assert sum(len(line) for line in rest) < (1 << 20) + 100


async def feed(link: Link) -> None:
    ask = await next_of(link, AskLog)
    await link.send(LogLines(ask.request, ("first",)))
    await trio.sleep(0.01)
    for number in range(100):
        await link.send(LogLines(ask.request, (f"{number} " + "x" * 50_000,)))


# -- cancellation ------------------------------------------------------------------------------------------------------


async def everything(scene: Scene) -> None:
    """A call with all that can happen on it."""
    ours, theirs = memory_links("10.0.0.1:1")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(scene.plane.attend, theirs, claim())
        await ours.send(register(reports=(report(),)))
        await next_of(ours, Welcome)
        nursery.start_soon(read, scene)
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

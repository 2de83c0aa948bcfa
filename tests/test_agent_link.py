"""The agent's end of the link against a control plane that is the test: what is said, what is heeded, how it ends."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from appliance.agent import conversation, redial
from appliance.agent.said import REFRESH_S
from appliance.facts import link as say
from appliance.facts.hardware import Disk
from appliance.facts.report import Report
from appliance.wire.link import Link, LinkClosed, LinkRefused, Malformed, UnknownMessage
from tests.agent_scene import NODE, gpu, hindered
from tests.caller_scene import BEAT_S, SILENCE_S, Line, Scene, calling, gone, shard


def told(lines: list[Any], event: str) -> list[dict[str, Any]]:
    return [line for line in lines if event in line["event"]]


def reports(*replicas: str) -> list[Report]:
    return [Report(shard(name), "ready", 1.0) for name in replicas]


# -- up ----------------------------------------------------------------------------------------------------------------


async def test_every_connection_begins_with_all_there_is(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        for report in reports("a.1", "b.1"):
            scene.shards.say(report)
        line = await scene.call()
        register = await line.welcome()
        assert (register.protocol, register.node, register.version) == (say.PROTOCOL, "box", "1.0")
        assert (register.boot_id, register.port_range) == ("boot-1", (20000, 20009))
        assert register.inventory == NODE
        assert list(register.reports) == reports("a.1", "b.1")
        await line.link.aclose()
        scene.shards.become("a.1/0", "failed", 5.0, tail=("boom",))
        scene.see(attrs.evolve(NODE, gpus=(gpu(0),)))
        again = await (await scene.call()).welcome()
        assert [(each.shard.id, each.state) for each in again.reports] == [("a.1/0", "failed"), ("b.1/0", "ready")]
        assert again.reports[0].tail == ("boom",)
        assert again.inventory.gpus == (gpu(0),)
        assert again.boot_id == "boot-1"


async def test_only_what_changed_is_said_and_nothing_twice(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        for report in reports("a.1", "b.1", "c.1"):
            scene.shards.say(report)
        line = await scene.welcomed()
        scene.nursery.start_soon(line.keep_up)
        await line.only_beats()
        scene.shards.become("b.1/0", "failed", 9.0)
        assert await line.next() == say.News((scene.shards.told["b.1/0"],))
        scene.shards.forget("b.1/0")
        assert await line.next() == say.News(gone=("b.1/0",))
        # there and gone again before it could be said
        scene.shards.say(reports("d.1")[0])
        scene.shards.forget("d.1/0")
        scene.shards.become("a.1/0", "draining", 10.0)
        news = await line.hear(say.News)
        assert [each.shard.id for each in news.reports] == ["a.1/0"]
        await line.only_beats()


async def test_hardware_is_told_when_it_decides_something(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        line = await scene.welcomed()
        scene.nursery.start_soon(line.keep_up)
        scene.see(attrs.evolve(NODE, gpus=(gpu(0, used_bytes=1),)))
        at = trio.current_time()
        assert (await line.hear(say.Look)).inventory.gpus == (gpu(0, used_bytes=1),)
        assert trio.current_time() == at, "told at once"
        busy = attrs.evolve(NODE, gpus=(gpu(0, used_bytes=2),), disk=Disk("/", 10, 5))
        scene.see(busy)
        await line.only_beats(4)
        scene.see(attrs.evolve(NODE, gpus=(hindered(0, "ecc", "3 errors"),)))
        assert (await line.next()) == say.Look(scene.machine.inventory)
        scene.see(attrs.evolve(scene.machine.inventory, disk=Disk("/", 10, 4)))
        at = trio.current_time()
        assert (await line.hear(say.Look)).inventory.disk == Disk("/", 10, 4)
        assert REFRESH_S - BEAT_S <= trio.current_time() - at <= REFRESH_S + BEAT_S


# -- down --------------------------------------------------------------------------------------------------------------


async def test_commands_reach_the_shards_and_reports_answer(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        line = await scene.welcomed()
        await line.say(say.Start(shard("a.1")))
        assert (await line.next()) == say.News((Report(shard("a.1"), "starting", 0.0),))
        await line.say(say.Stop("a.1/0", 30.0, "moved"))
        assert [each.state for each in (await line.hear(say.News)).reports] == ["draining"]
        await line.say(say.Forget("a.1/0"))
        assert (await line.next()) == say.News(gone=("a.1/0",))
        assert scene.shards.taken() == ["start a.1/0", "stop a.1/0 30", "forget a.1/0"]


async def test_commands_about_what_is_not_here_are_answered(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        line = await scene.welcomed()
        for command in (say.Stop("x.1/0"), say.Forget("y.1/0")):
            await line.say(command)
            assert (await line.next()) == say.News(gone=(command.shard_id,))
        await line.say(say.Stop("x.1/0"))
        assert (await line.next()) == say.News(gone=("x.1/0",)), "said again when it is asked again"
        await line.say(say.Start(attrs.evolve(shard("z.1"), node="other")))
        assert (await line.next()) == say.Trouble("z.1/0 is for node other, and this is box")
        assert scene.shards.taken() == []


async def test_what_is_not_for_an_agent_is_answered_and_the_link_goes_on(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with calling() as scene:
        line = await scene.welcomed()
        for message in (say.Renew("x"), say.Welcome(1, "", 0.0, 1.0, 2.0)):
            await line.say(message)
            assert isinstance(await line.next(), say.Trouble)
        await line.say(say.Start(shard("a.1")))
        assert isinstance(await line.next(), say.News)


class Raising(Link):
    """A link on which the next messages are faults, one each."""

    def __init__(self, link: Link, *faults: Exception) -> None:
        self.peer = link.peer
        self._link = link
        self.faults = list(faults)
        self.silent = False

    async def send(self, message: say.Message) -> None:
        if self.silent:
            await trio.sleep_forever()
        await self._link.send(message)

    async def receive(self) -> say.Message:
        message = await self._link.receive()
        if self.faults and not isinstance(message, say.Welcome):
            raise self.faults.pop(0)
        return message

    async def aclose(self, reason: str = "") -> None:
        await self._link.aclose(reason)


async def test_an_unknown_message_is_answered_and_half_a_one_ends_the_link(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with calling() as scene:
        scene.board.wrap = lambda link: Raising(link, UnknownMessage("a 'dance'"), Malformed("no JSON"))
        line = await scene.welcomed()
        await line.say(say.Beat(0.0))
        assert await line.next() == say.Trouble("a 'dance'")
        await line.say(say.Beat(0.0))
        assert await line.next() == say.Trouble("no JSON")
        at = trio.current_time()
        with pytest.raises(LinkClosed):
            await line.next()
        assert trio.current_time() - at < 1.0
        await scene.welcomed()


async def test_a_fault_of_ours_costs_the_link_and_not_the_agent(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        line = await scene.welcomed()
        scene.shards.fault = RuntimeError("a bug")
        with capture_logs() as lines:
            await line.say(say.Start(shard("a.1")))
            again = await scene.call()
            scene.shards.fault = None
        (fault,) = told(lines, "fault of the link")
        assert fault["log_level"] == "error"
        await again.welcome()


# -- how it ends -------------------------------------------------------------------------------------------------------


async def test_a_lost_connection_is_tried_at_once_then_ever_more_rarely(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with calling() as scene:
        line = await scene.welcomed()
        scene.nursery.start_soon(line.keep_up)
        await trio.sleep(100)
        scene.board.refuse = gone()
        await line.link.aclose()
        lost_at = trio.current_time()
        await trio.sleep(300)
        waits = [scene.board.at[1] - lost_at, *scene.board.waits[1:]]
        assert waits[0] < 0.3
        assert waits[1] < 0.6
        assert min(waits[8:]) >= 7.5
        assert max(waits) <= 15.0
        assert len({round(each, 6) for each in waits[8:]}) > 1, "no jitter"
        scene.board.refuse = None
        await scene.welcomed()


async def test_a_connection_that_did_not_last_does_not_begin_anew(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        for _ in range(8):
            line = await scene.welcomed()
            await line.link.aclose()
        assert scene.board.waits[-1] > 5.0
        line = await scene.welcomed()
        scene.nursery.start_soon(line.keep_up)
        await trio.sleep(redial.LASTED_S + 1)
        await line.link.aclose()
        at = trio.current_time()
        await scene.call()
        assert trio.current_time() - at < 0.3


@pytest.mark.parametrize("how", ["message", "tls"])
async def test_a_refusal_backs_off_from_five_seconds_to_a_minute(
    autojump_clock: trio.testing.MockClock, how: str
) -> None:
    async with calling() as scene:
        if how == "tls":
            scene.board.refuse = LinkRefused("plane:6384: TLS: unknown ca", "tls")
        with capture_logs() as lines:
            for _ in range(8):
                if how == "tls":
                    await trio.sleep(40)
                    continue
                line = await scene.call()
                await line.hear(say.Register)
                await line.say(say.Refused("wrong_name", "certificate says node-a, agent claims box"))
        waits = scene.board.waits
        assert 5.0 <= waits[0] <= 6.5
        assert 10.0 <= waits[1] <= 13.0
        assert max(waits) <= 60.0
        if how == "message":
            assert waits[-1] == 60.0
        (refusal,) = told(lines, "control plane refuses this agent")
        assert refusal["log_level"] == "error"
        assert refusal["claim"] == "box"
        assert refusal["next_step"]
        assert refusal["code"] == ("tls" if how == "tls" else "wrong_name")
        if how == "message":
            assert refusal["reason"] == "certificate says node-a, agent claims box"


async def test_a_trouble_is_told_once_and_again_after_a_welcome(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        scene.board.refuse = gone("connection refused")
        with capture_logs() as lines:
            await trio.sleep(100)
            scene.board.refuse = gone("no route to host")
            await trio.sleep(100)
            scene.board.refuse = gone("connection refused")
            await trio.sleep(100)
            assert len(told(lines, "cannot be reached")) == 2
            assert scene.caller.line.connected is False
            assert scene.caller.line.reason == "plane:6384: connection refused"
            scene.board.refuse = None
            line = await scene.welcomed()
            scene.nursery.start_soon(line.keep_up)
            await trio.sleep(20)
            assert len(told(lines, "control plane answers")) == 1
            assert scene.caller.line.connected is True
            scene.board.refuse = gone("connection refused")
            await line.link.aclose()
            await trio.sleep(100)
        assert len(told(lines, "control plane lost")) == 1
        assert len(told(lines, "cannot be reached")) == 3


async def test_a_silent_control_plane_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        line = await scene.call()
        await line.hear(say.Register)
        at = trio.current_time()
        line = await scene.call()
        assert conversation.WELCOME_S <= trio.current_time() - at < conversation.WELCOME_S + 1
        await line.welcome()
        at = trio.current_time()
        with capture_logs() as lines:
            await scene.call()
        assert SILENCE_S <= trio.current_time() - at < SILENCE_S + 1
        assert told(lines, "control plane lost")[0]["reason"] == "it has said nothing for 20 s"


async def test_a_control_plane_that_does_not_read_is_given_up(autojump_clock: trio.testing.MockClock) -> None:
    made: list[Raising] = []

    def wrap(link: Link) -> Link:
        made.append(Raising(link))
        return made[-1]

    async with calling() as scene:
        scene.board.wrap = wrap
        line = await scene.welcomed()
        scene.nursery.start_soon(line.keep_up)
        made[0].silent = True
        with capture_logs() as lines:
            await scene.call()
        assert told(lines, "control plane lost")[0]["reason"] == "it has read nothing for 20 s"


async def test_both_keep_a_quiet_link(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        line = await scene.welcomed()
        scene.nursery.start_soon(line.keep_up)
        at = trio.current_time()
        await line.only_beats(100)
        assert 99 * BEAT_S <= trio.current_time() - at <= 101 * BEAT_S
        assert len(scene.board.at) == 1


async def test_whatever_the_link_does_it_ends_with_the_agent(autojump_clock: trio.testing.MockClock) -> None:
    for stuck in (True, False):
        async with calling() as scene:
            scene.board.stuck = stuck
            await trio.sleep(1)
            at = trio.current_time()
        assert trio.current_time() == at


async def test_numbers_that_make_no_sense_make_no_busy_loop(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        line = await scene.welcomed(beat_s=0.0, silence_s=math.inf)
        heard = 0
        with trio.move_on_after(1.0):
            while True:
                await line.link.receive()
                heard += 1
        assert heard <= 1.0 / conversation.SHORTEST_BEAT_S + 1


# -- clocks ------------------------------------------------------------------------------------------------------------


async def test_a_clock_that_is_off_is_named_once_and_once_more_when_it_is_right(
    autojump_clock: trio.testing.MockClock,
) -> None:
    async with calling() as scene:
        with capture_logs() as lines:
            for _ in range(2):
                line = await scene.welcomed(clock=trio.current_time() + 47)
                await line.say(say.Beat(trio.current_time() + 46))
                await line.only_beats(1)
                await line.link.aclose()
            (off,) = told(lines, "the clock of this node is")
            assert off["event"] == "the clock of this node is 47 s behind the control plane's"
            line = await scene.welcomed()
            await line.only_beats(1)
        assert len(told(lines, "agrees")) == 1


# -- logs --------------------------------------------------------------------------------------------------------------


async def lines_of(line: Line, request: str) -> tuple[list[str], str]:
    """All lines of an answer to its end, and why it ended."""
    found: list[str] = []
    while True:
        message = await line.hear(say.LogLines)
        assert message.request == request
        found += message.lines
        if message.ended:
            return found, message.reason


async def test_a_log_is_given_in_pieces(autojump_clock: trio.testing.MockClock) -> None:
    async with calling() as scene:
        scene.shards.say(reports("a.1")[0])
        line = await scene.welcomed()
        await line.say(say.AskLog("r1", "a.1/0", 1000))
        found, reason = await lines_of(line, "r1")
        assert found == [f"line {number}" for number in range(1000)]
        assert reason == ""
        await line.say(say.AskLog("r2", "nobody/0", 10))
        assert await lines_of(line, "r2") == ([], "there is no shard nobody/0 on box")


async def follow(scene: Scene, line: Line, request: str = "r") -> None:
    scene.shards.say(reports("a.1")[0])
    await line.say(say.AskLog(request, "a.1/0", 2, follow=True))


async def test_a_log_is_followed_to_its_end(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthree\nfo")
    async with calling(log=str(log)) as scene:
        line = await scene.welcomed()
        await follow(scene, line)
        assert (await line.hear(say.LogLines)).lines == ("two", "three")
        with log.open("a") as file:
            file.write("ur secret-key\nfive\n")
        assert (await line.hear(say.LogLines)).lines == ("four ***", "five")
        scene.shards.become("a.1/0", "failed")
        assert await lines_of(line, "r") == ([], "the shard has failed")
        await line.say(say.AskLog("again", "a.1/0", 1, follow=True))
        assert await lines_of(line, "again") == (["five"], "the shard has failed")


async def test_nobody_reads_on_after_the_end_of_a_request(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    async with calling(log=str(log)) as scene:
        line = await scene.welcomed(beat_s=0.05)
        await follow(scene, line)
        await line.hear(say.LogLines)
        await line.say(say.AskLog("r", "a.1/0", 2))
        assert "runs already" in (await line.hear(say.Trouble)).message
        await line.say(say.EndLog("r"))
        await line.say(say.EndLog("never asked"))
        await line.say(say.AskLog("r", "a.1/0", 1))
        assert await lines_of(line, "r") == (["line 0"], "")
        with log.open("a") as file:
            file.write("two\n")
        await line.only_beats(15)


async def test_readers_of_logs_are_limited(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    async with calling(log=str(log)) as scene:
        line = await scene.welcomed()
        for number in range(conversation.MOST_LOGS):
            await follow(scene, line, f"r{number}")
            await line.hear(say.LogLines)
        await follow(scene, line, "more")
        ended = await line.hear(say.LogLines)
        assert (ended.request, ended.ended) == ("more", True)
        assert "end one of them" in ended.reason
        await line.say(say.EndLog("r0"))
        await follow(scene, line, "more")
        assert (await line.hear(say.LogLines)).lines == ("one",)


async def test_a_slow_reader_costs_no_memory_and_hears_what_was_left_out(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("zero\n")
    async with calling(log=str(log)) as scene:
        line = await scene.welcomed(silence_s=600.0)
        await follow(scene, line)
        assert (await line.hear(say.LogLines)).lines == ("zero",)
        with log.open("a") as file:
            for number in range(300_000):
                file.write(f"line {number} of very many\n")
        found: list[str] = []
        while not found or "299999" not in found[-1]:
            message = await line.hear(say.LogLines)
            assert sum(map(len, message.lines)) <= 64 << 10
            found += message.lines
        assert "bytes are left out: the log grows too fast" in found[0]
        assert len(found) < 10_000

"""The logs of shards, asked for over their agents' connections."""

from __future__ import annotations

from contextlib import aclosing

import pytest
import trio
import trio.testing

from appliance.facts.errors import Refusal
from appliance.facts.link import AskLog, EndLog, LogLines
from appliance.wire.link import Link
from tests.control_scene import Scene, control, next_of, read_log, register, report

Clock = trio.testing.MockClock


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
        assert [line for piece in await read_log(scene, follow=False) for line in piece] == ["a", "b", "c"]
        await scene.pass_over()
        assert not scene.plane.logs.readings


async def test_whoever_asked_for_a_log_leaves_and_the_node_is_told(autojump_clock: Clock) -> None:
    async with control() as scene:
        link = await scene.join(register(reports=(report(),)))
        with trio.CancelScope() as reader:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(read_log, scene)
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
        await read_log(scene)


async def test_a_log_that_nobody_has_is_refused_and_a_silent_node_too(autojump_clock: Clock) -> None:
    async with control() as scene:
        with pytest.raises(Refusal, match="no replica"):
            await read_log(scene)
        await scene.join(register(reports=(report(),)))
        with pytest.raises(Refusal, match="has sent nothing of the log for 15 s"):
            await read_log(scene)
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

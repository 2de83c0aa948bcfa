"""The bounds of trying again: kept connections cost no error, nothing is sent a third time, and neither a client's
mistakes nor a replica that fails at once change what others get."""

from __future__ import annotations

import math
import random
import time
from collections import Counter
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from appliance.nursery.sleeper import Sleeper
from tests.fake_engine import (
    CHAT,
    DONE,
    STREAM_HEAD,
    Asked,
    FakeEngine,
    Peer,
    Script,
    chunk,
    event,
    fake_engine,
    in_turn,
    says,
    streamed,
    whole,
)
from tests.raw_client import Answer, BrokenOff, chat
from tests.routers import Running, router

GOOD = says(whole(200, CHAT))


async def warm(door: Running, count: int = 1) -> None:
    """`count` connections of the endpoint are idle."""
    async with trio.open_nursery() as asking:
        for _ in range(count):
            asking.start_soon(door.ask, chat())
    await wait_all_tasks_blocked()
    assert door.app.gateway.upstreams["a"].idle


async def test_the_latest_connection_serves_next_and_the_oldest_goes_first(tmp_path: Path) -> None:
    """So that what is not needed any more becomes stale: shared out evenly, all would be kept for ever."""
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        upstream = door.app.gateway.upstreams["a"]
        upstream.drop_stale(math.inf)
        sleeper = Sleeper()
        lines = [await upstream.dial(sleeper) for _ in range(5)]
        for number, line in enumerate(lines):
            upstream.give_back(line, 100.0 + number)
        assert upstream.take(sleeper, 104.0) is lines[4]
        upstream.drop_stale(105.5)
        assert list(upstream.idle) == [lines[2], lines[3]] and lines[0].closed and lines[1].closed
        assert upstream.take(sleeper, 107.5) is None, "all are too old by now"
        assert all(line.closed for line in lines[:4])
        lines[4].close()


@pytest.mark.parametrize("how", ["close", "reset"])
async def test_an_idle_connection_that_the_engine_closed_costs_no_error(tmp_path: Path, how: str) -> None:
    """Seen in time: it leaves the pool at that moment."""

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(whole(200, CHAT))
        await wait_all_tasks_blocked(0.001)
        await says(then=how)(asked, peer)

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        for _ in range(5):
            assert (await door.ask(chat())).status == 200
            await wait_all_tasks_blocked(0.002)
            assert not door.app.gateway.upstreams["a"].idle
        assert not [record for record in door.app.gateway.books.recent(50) if record.attempts]
        assert engine.connections >= 5


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("how", ["close", "reset"])
async def test_one_closed_while_the_request_was_on_its_way_costs_none_either(
    tmp_path: Path, how: str, stream: bool
) -> None:
    """Not seen in time: the request meets a connection that ends without a byte, and is sent once more, to the same
    endpoint on a new connection. The breaker hears nothing of it."""
    answer = says(*streamed(event("a"), DONE)) if stream else GOOD
    script = in_turn(GOOD, says(then=how), answer)
    async with fake_engine(script) as engine, fake_engine(answer, id="b") as other:
        other.models = ("llama",)
        async with router(tmp_path, engine) as door:
            await warm(door)
            assert (await door.ask(chat(stream=stream))).status == 200
            (record, _) = door.app.gateway.books.recent(2)
            assert [(attempt.kind, attempt.reused) for attempt in record.attempts] == [("reset", True)]
            assert record.outcome == "ok" and record.endpoint == "a"
            assert not door.app.gateway.table.members["a"].penalty
            assert len(engine.asked) == 3


async def test_many_kept_connections_closed_at_once_cost_no_error(tmp_path: Path) -> None:
    """An engine that restarts closes all of them, in the middle of the traffic."""
    known: set[Peer] = set()
    old: set[Peer] = set()

    async def script(asked: Asked, peer: Peer) -> None:
        if peer in old:
            await peer.close()
            return
        known.add(peer)
        await wait_all_tasks_blocked()
        await peer.send(whole(200, CHAT))

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        await warm(door, 2)
        for _ in range(10):
            old.update(known)
            answers: list[Answer] = []

            async def ask(into: list[Answer] = answers) -> None:
                into.append(await door.ask(chat()))

            async with trio.open_nursery() as asking:
                for _ in range(5):
                    asking.start_soon(ask)
            assert [answer.status for answer in answers] == [200] * 5
        assert door.app.gateway.table.members["a"].breaker.closed


async def test_a_request_is_never_sent_a_third_time(tmp_path: Path) -> None:
    """Whatever mixture of endpoints loses it, with kept connections and without, fallbacks included."""
    losing = in_turn(GOOD, GOOD, says(then="reset"))
    for stream in (False, True):
        async with (
            fake_engine(losing, id="a") as a,
            fake_engine(losing, id="b") as b,
            fake_engine(losing, id="c") as c,
        ):
            c.models = ("other",)
            fallback = '[[models]]\nname = "llama"\nfallbacks = ["other"]\n'
            folder = tmp_path / str(stream)
            folder.mkdir()
            async with router(folder, a, b, c, config=fallback) as door:
                for _ in range(30):
                    before = len(a.asked) + len(b.asked) + len(c.asked)
                    answer = await door.ask(chat(stream=stream))
                    sent = len(a.asked) + len(b.asked) + len(c.asked) - before
                    assert sent <= 2 and (answer.status == 200 or sent != 0 or answer.status in (502, 503))


@pytest.mark.parametrize("byte", [b"H", b"HTTP/1.1 200 OK\r\n", b"HTTP/1.1 100 Continue\r\n\r\n", STREAM_HEAD])
@pytest.mark.parametrize("how", ["close", "reset"])
@pytest.mark.parametrize("kept", [False, True])
async def test_nor_a_second_time_after_a_byte_came_back(tmp_path: Path, byte: bytes, how: str, kept: bool) -> None:
    script = in_turn(*([GOOD] if kept else []), says(byte, then=how), GOOD)
    async with fake_engine(script) as a, fake_engine(id="b") as b, router(tmp_path, a, config="") as door:
        if kept:
            await warm(door)
        else:
            await wait_all_tasks_blocked()
            door.app.gateway.drop_stale(float("inf"))
        answer = await door.ask(chat(stream=True))
        assert answer.status == 502
        assert len(a.asked) == 1 + kept and not b.asked


async def test_fifty_client_errors_change_nothing_for_others(tmp_path: Path) -> None:
    """Neither the breaker nor the choice hears of them: half of the good requests still go there."""
    errors = (400, 404, 405, 409, 413, 415, 418, 422, 451)
    rng = random.Random(1)

    async def script(asked: Asked, peer: Peer) -> None:
        if "bad" in asked.json():
            await peer.send(whole(rng.choice(errors), {"error": {"message": "no"}}))
        else:
            await peer.send(whole(200, CHAT))

    async with fake_engine(script, id="a") as a, fake_engine(script, id="b") as b, router(tmp_path, a, b) as door:
        for _ in range(50):
            assert (await door.ask(chat(bad=True))).status in errors
        table = door.app.gateway.table
        for member in table.members.values():
            assert not member.penalty and not member.breaker.history and member.up
        a.asked.clear(), b.asked.clear()
        for _ in range(60):
            assert (await door.ask(chat())).status == 200
        assert min(len(a.asked), len(b.asked)) > 10


async def test_fifty_errors_in_streams_that_are_the_clients_change_nothing_either(tmp_path: Path) -> None:
    error = b'data: {"error":{"message":"too long","type":"BadRequestError","param":null,"code":400}}\n\n'
    for pieces in ((error, DONE), (event("a"), error, DONE)):
        folder = tmp_path / str(len(pieces))
        folder.mkdir()
        async with fake_engine(says(*streamed(*pieces))) as engine, router(folder, engine) as door:
            for _ in range(50):
                await door.ask(chat(stream=True))
            assert len(engine.asked) == 50
            member = door.app.gateway.table.members["a"]
            assert member.up and not member.penalty and not member.breaker.history


@pytest.mark.parametrize("failing", [
    says(whole(500, {})), says(then="reset"), says(whole(401, {})), says(b"garbage", then="close"),
], ids=["500", "reset", "401", "garbage"])  # fmt: skip
async def test_a_replica_that_fails_at_once_does_not_win(tmp_path: Path, failing: Script) -> None:
    """It is always the idle one of two, and would get everything if idleness were all that counted."""

    async def busy(asked: Asked, peer: Peer) -> None:
        for _ in range(6):
            await trio.lowlevel.checkpoint()
        await peer.send(whole(200, CHAT))

    async with (
        fake_engine(failing, id="bad") as bad,
        fake_engine(busy, id="good") as good,
        router(tmp_path, bad, good) as door,
    ):
        statuses: Counter[int] = Counter()

        async def client() -> None:
            for _ in range(25):
                try:
                    statuses[(await door.ask(chat())).status] += 1
                except BrokenOff:
                    statuses[0] += 1

        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(client)
        assert len(bad.asked) <= 12, "the failing one was asked again and again"
        assert len(good.asked) >= 88
        assert statuses[200] >= 95


def over(door: Running) -> None:
    """The time for which the breaker is open is over, and admission has looked."""
    door.app.gateway.table.members["a"].breaker.open_until = 1e-9
    door.app.gateway.gate.sweep(time.monotonic())


async def test_a_failing_replica_comes_back_by_one_probe(tmp_path: Path) -> None:
    async with fake_engine(says(whole(500, {}))) as engine, router(tmp_path, engine) as door:
        member = door.app.gateway.table.members["a"]
        for seed in range(5):
            assert (await door.ask(chat(seed=seed))).status == 500
        assert not member.up
        answer = await door.ask(chat())
        assert answer.status == 503 and answer.error["code"] == "model_not_ready"
        assert "stopped after failures" in answer.error["message"] and int(answer.fields["retry-after"]) >= 1
        assert len(engine.asked) == 5
        over(door)
        engine.script = says(*streamed(event("a"), end=b""), then="silent")
        probe = await door.connect()
        await probe.send(chat(stream=True))
        await probe.until(chunk(event("a")))
        assert member.up, "the first event proves that it is back; the stream may last for hours"
        engine.script = GOOD
        assert (await door.ask(chat())).status == 200


async def test_one_bad_request_again_and_again_shuts_nobody_out(tmp_path: Path) -> None:
    """llama.cpp answers some mistakes of clients with 500, and libraries send such a request three times unasked."""

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(whole(500 if b"tools" in asked.body else 200, {}))

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        member = door.app.gateway.table.members["a"]
        for turn in range(60):
            assert (await door.ask(chat(tools=turn % 3))).status == 500
            if not turn % 20:
                assert (await door.ask(chat())).status == 200
        assert member.up and member.breaker.history.bit_count() == 3
        for turn in range(3, 9):
            if member.up:
                await door.ask(chat(tools=turn))
        assert not member.up, "five that differ are no mistake of one client"


async def test_connections_that_break_count_whatever_was_asked(tmp_path: Path) -> None:
    async with fake_engine(says(then="reset")) as engine, router(tmp_path, engine) as door:
        member = door.app.gateway.table.members["a"]
        for _ in range(5):
            if member.up:
                await door.ask(chat())
        assert not member.up


async def test_two_wait_for_one_probe(tmp_path: Path) -> None:
    async with fake_engine(says(whole(500, {}))) as engine, router(tmp_path, engine) as door:
        for seed in range(5):
            await door.ask(chat(seed=seed))
        over(door)
        engine.script = says(then="silent")
        probe = await door.connect()
        await probe.send(chat())
        await wait_all_tasks_blocked()
        answer = await door.ask(chat())
        assert answer.status == 503 and "being tried again" in answer.error["message"]
        assert len(engine.asked) == 6
        await probe.close()


async def test_an_endpoint_that_a_reload_takes_away_is_not_tried_again(tmp_path: Path) -> None:
    """A connection is lost, and by then the endpoint has left the configuration."""
    go = trio.Event()

    async def script(asked: Asked, peer: Peer) -> None:
        await go.wait()
        await peer.reset()

    async with fake_engine(script, id="a") as a, fake_engine(id="b") as b, router(tmp_path, a) as door:
        client = await door.connect()
        await client.send(chat())
        await wait_all_tasks_blocked()
        door.file.write_text(_config(door, b))
        assert door.app.reload() == ""
        go.set()
        answer = await client.answer("POST")
        assert answer.status == 200 and len(b.asked) == 1


def _config(door: Running, *engines: FakeEngine) -> str:
    return "".join(engine.toml for engine in engines)

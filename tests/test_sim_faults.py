"""Misbehaviour on request: what the client of a spoiled answer sees, and that nothing is left behind in the engine."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest
import trio
import trio.testing

from appliance.sim.connection import CLOGGED_BYTES
from appliance.sim.settings import Misbehaviour, Sizes, Speeds
from tests.engines.sim_engine import Running, serving, until

ROUTES = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "hello"}]},
    "/v1/completions": {"prompt": "hello"},
    "/v1/responses": {"input": "hello"},
    "/v1/messages": {"max_tokens": 99, "messages": [{"role": "user", "content": "hello"}]},
}
ENDS = {
    "/v1/chat/completions": b"data: [DONE]\n\n",
    "/v1/completions": b"data: [DONE]\n\n",
    "/v1/responses": b"event: response.completed\n",
    "/v1/messages": b"event: message_stop\n",
}


@asynccontextmanager
async def asked(sim: Running, path: str, body: Any, *headers: bytes) -> AsyncIterator[trio.SocketStream]:
    """A connection over which a request has gone out whole."""
    data = json.dumps(body).encode()
    stream = await trio.open_tcp_stream("127.0.0.1", sim.port)
    async with stream:
        lines = [b"POST " + path.encode() + b" HTTP/1.1", b"host: x", b"content-length: %d" % len(data), *headers]
        await stream.send_all(b"\r\n".join(lines) + b"\r\n\r\n" + data)
        yield stream


async def see(sim: Running, path: str, body: Any, *headers: bytes) -> tuple[bytes, str]:
    """All that comes back for a request, and how it ended: "open" (the framing was complete), "closed" or "reset"."""
    seen = b""
    async with asked(sim, path, body, *headers) as stream:
        with trio.fail_after(10):
            while not complete(seen):
                try:
                    part = await stream.receive_some()
                except trio.BrokenResourceError:
                    return seen, "reset"
                if not part:
                    return seen, "closed"
                seen += part
    return seen, "open"


def complete(seen: bytes) -> bool:
    """Whether a whole response is there."""
    head, found, body = seen.partition(b"\r\n\r\n")
    if not found or b"HTTP/" not in head:
        return False
    if b"transfer-encoding: chunked" in head:
        return body.endswith(b"0\r\n\r\n")
    return len(body) >= int(head.partition(b"content-length: ")[2].partition(b"\r\n")[0])


async def emptied(sim: Running) -> None:
    """Wait until the engine holds nothing."""
    await until(lambda: not (sim.batch.running or sim.batch.waiting or sim.engine.answers))
    assert sim.batch.kv_usage == 0


def words(seen: bytes) -> int:
    """Word events in a stream of any route."""
    return sum(
        seen.count(mark) for mark in (b'"delta":{"content":" ', b'"content":"You"', b'"text":" ', b'"text":"You"')
    )


@pytest.mark.parametrize("path", ROUTES)
async def test_a_good_stream_is_complete_and_ends_with_the_routes_end(path: str) -> None:
    async with serving() as sim:
        seen, how = await see(sim, path, {**ROUTES[path], "stream": True})
        assert how == "open" and ENDS[path] in seen
        await emptied(sim)


@pytest.mark.parametrize("path", ROUTES)
@pytest.mark.parametrize("after", [0, 2])
@pytest.mark.parametrize(("fault", "how"), [("cut_after", "closed"), ("reset_after", "reset"), ("error_after", "open")])
async def test_a_stream_breaks_off_after_so_many_words(path: str, after: int, fault: str, how: str) -> None:
    async with serving(speeds=Speeds(0, 1000)) as sim:
        seen, ended = await see(sim, path, {**ROUTES[path], "stream": True, "sim": {fault: after}})
        assert seen.startswith(b"HTTP/1.1 200 ")
        assert ended == how
        if path != "/v1/responses":
            assert words(seen) == after
        else:
            assert seen.count(b"event: response.output_text.delta") == after
        if fault == "error_after":
            assert b"the simulated engine failed" in seen
            if after == 0:  # the very first event is the error
                first = seen.partition(b"\r\n\r\n")[2].partition(b"\r\n")[2].partition(b"\n\n")[0]
                assert b"the simulated engine failed" in first
        else:
            assert not complete(seen) and ENDS[path] not in seen
        await emptied(sim)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("fault", "how"), [("cut_after", "closed"), ("reset_after", "reset")])
async def test_nothing_at_all_comes_before_the_head(stream: bool, fault: str, how: str) -> None:
    async with serving() as sim:
        assert await see(sim, "/v1/completions", {"prompt": "x", "stream": stream, "sim": {fault: -1}}) == (b"", how)
        await emptied(sim)


@pytest.mark.parametrize(("fault", "how"), [("cut_after", "closed"), ("reset_after", "reset")])
async def test_a_whole_answer_is_cut_in_its_middle(fault: str, how: str) -> None:
    async with serving() as sim:
        seen, ended = await see(sim, "/v1/completions", {"prompt": "x", "sim": {fault: 1}})
        assert ended == how
        head, _, body = seen.partition(b"\r\n\r\n")
        assert b"HTTP/1.1 200 " in head and 0 < len(body) < int(head.partition(b"content-length: ")[2].split()[0])
        await emptied(sim)


async def test_an_error_before_the_head_or_instead_of_an_answer_is_a_500() -> None:
    async with serving() as sim:
        for stream, after in ((True, -1), (False, -1), (False, 1)):
            seen, _ = await see(
                sim, "/v1/completions", {"prompt": "x", "stream": stream, "sim": {"error_after": after}}
            )
            assert seen.startswith(b"HTTP/1.1 500 ")
        await emptied(sim)


async def test_a_status_is_answered_as_asked() -> None:
    async with serving() as sim:
        seen, _ = await see(sim, "/v1/completions", {"prompt": "x", "sim": {"status": 429, "retry_after_s": 7}})
        assert seen.startswith(b"HTTP/1.1 429 ") and b"\r\nretry-after: 7\r\n" in seen
        seen, _ = await see(sim, "/v1/completions", {"prompt": "x"}, b'x-sim: {"status": 418}')
        assert seen.startswith(b"HTTP/1.1 418 ")


@pytest.mark.parametrize("path", ROUTES)
async def test_no_done_leaves_the_end_out_and_the_framing_whole(path: str) -> None:
    async with serving() as sim:
        seen, how = await see(sim, path, {**ROUTES[path], "stream": True, "sim": {"no_done": True}})
        assert how == "open" and complete(seen) and ENDS[path] not in seen
        assert b"hello" in seen


async def test_a_lie_about_the_model() -> None:
    async with serving() as sim:
        seen, _ = await see(sim, "/v1/completions", {"model": "m", "prompt": "x", "sim": {"model": "other"}})
        assert b'"model":"other"' in seen


@pytest.mark.parametrize(("after", "seen_words"), [(-1, 0), (0, 0), (2, 2)])
async def test_a_stalled_stream_is_silent_and_holds_its_blocks_until_the_client_leaves(
    after: int, seen_words: int
) -> None:
    async with serving() as sim:
        async with asked(
            sim, "/v1/completions", {"prompt": "x", "stream": True, "sim": {"stall_after": after}}
        ) as stream:
            await until(lambda: sim.batch.running)
            seen = b""
            while words(seen) < seen_words or (after >= 0 and b"\r\n\r\n" not in seen):
                seen += await stream.receive_some()
            assert words(seen) == seen_words
            assert seen.startswith(b"HTTP/1.1 200") == (after >= 0)
            assert sim.batch.next_at() is None  # and nothing more will ever come
            assert sim.batch.kv_usage > 0
        await emptied(sim)


async def test_a_delay_holds_the_first_word_back(autojump_clock: trio.testing.MockClock) -> None:
    async with serving() as sim:
        begun = trio.current_time()
        seen, _ = await see(sim, "/v1/completions", {"prompt": "x", "sim": {"delay_s": 3.0}})
        assert b"You said: x" in seen
        assert 3.0 <= trio.current_time() - begun < 3.1


@pytest.mark.parametrize("stream", [False, True])
async def test_garbage(stream: bool) -> None:
    async with serving() as sim:

        async def garbage(kind: str) -> tuple[bytes, str]:
            return await see(sim, "/v1/completions", {"prompt": "x", "stream": stream, "sim": {"garbage": kind}})

        seen, how = await garbage("head")
        assert how == "closed" and not seen.startswith(b"HTTP/") and seen
        seen, how = await garbage("chunk")
        assert how == "closed" and b"\r\n\r\nzz\r\n" in seen
        seen, how = await garbage("body")
        assert how == "open" and b"\xff" in seen and complete(seen)
        await emptied(sim)


@pytest.mark.parametrize(("kind", "mark"), [("endless_head", b"x-filler: "), ("endless_body", b"400\r\nooo")])
async def test_what_does_not_end_goes_on_until_the_client_leaves(kind: str, mark: bytes) -> None:
    async with serving() as sim:
        async with asked(sim, "/v1/completions", {"prompt": "x", "sim": {"garbage": kind}}) as stream:
            seen = 0
            with trio.fail_after(10):
                while seen < 200_000:
                    part = await stream.receive_some()
                    assert part
                    seen += len(part)
        await emptied(sim)


# -- faults of the whole engine ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["500", "503", "429"])
async def test_after_so_many_requests_it_answers_errors(mode: str) -> None:
    async with serving(misbehaviour=Misbehaviour(fail_after=2, fail_mode=mode)) as sim:
        seen = [(await see(sim, "/v1/completions", {"prompt": "x"}))[0][9:12] for _ in range(4)]
        assert seen == [b"200", b"200", mode.encode(), mode.encode()]


async def test_after_so_many_requests_it_resets_or_dies() -> None:
    for mode, crashes in (("reset", 0), ("exit", 1)):
        crashed: list[None] = []
        async with serving(misbehaviour=Misbehaviour(fail_after=0, fail_mode=mode)) as sim:
            sim.engine.on_crash = lambda crashed=crashed: crashed.append(None)  # type: ignore[misc]
            assert await see(sim, "/v1/completions", {"prompt": "x"}) == (b"", "reset")
            assert len(crashed) == crashes


async def test_flags_spoil_every_answer_but_a_request_may_ask_otherwise() -> None:
    async with serving(misbehaviour=Misbehaviour(cut_after=1, stall_after=2)) as sim:
        body = {"prompt": "x", "stream": True}
        seen, how = await see(sim, "/v1/completions", body)
        assert (words(seen), how) == (1, "closed")
        seen, how = await see(sim, "/v1/completions", {**body, "sim": {"cut_after": 2}})
        assert (words(seen), how) == (2, "closed")
        await emptied(sim)


# -- clients that leave, and clients that do not read -----------------------------------------------------------------


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("leave", ["close", "half_close"])
async def test_a_client_that_leaves_frees_slot_and_blocks(stream: bool, leave: str) -> None:
    async with serving(speeds=Speeds(0, 0.001), sizes=Sizes(max_num_seqs=1)) as sim:
        body = {"prompt": "x", "stream": stream}
        async with asked(sim, "/v1/completions", body) as first, asked(sim, "/v1/completions", body):
            await until(lambda: (sim.batch.running, sim.batch.waiting) == (1, 1))
            if leave == "close":
                await first.aclose()
            else:
                await first.send_eof()
            await until(lambda: not sim.batch.waiting)
            assert sim.batch.running == 1
        await emptied(sim)
        assert sim.batch.counters.finished["abort"] == 2


async def test_a_reader_that_stalls_costs_little_and_gets_everything_in_the_end() -> None:
    """The engine makes 100,000 words for somebody who does not read: few of them become bytes until he does."""
    count = 100_000
    async with serving() as sim:
        body = {"prompt": "x", "stream": True, "max_tokens": count, "ignore_eos": True}
        async with asked(sim, "/v1/completions", body) as stream:
            await until(lambda: sim.batch.counters.finished["length"])
            with trio.fail_after(20):
                (connection,) = sim.front._connections
                assert len(connection._unsent) < 2 * CLOGGED_BYTES  # of 25 MB
                tail, found = b"", 0
                while not tail.endswith(b"0\r\n\r\n"):
                    part = await stream.receive_some(1 << 20)
                    assert part
                    seen = tail + part
                    found += seen.count(b'"text":"') - tail.count(b'"text":"')
                    tail = seen[-40:]
        assert found == count + 1  # and the closing event's empty text
        await emptied(sim)


def test_every_route_is_covered() -> None:
    from appliance.sim.shapes import SHAPES

    assert len(ROUTES) == len(ENDS) == len(SHAPES)

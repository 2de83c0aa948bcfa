"""A client that leaves ends the engine's work at once, whatever it was waiting for; and no storm of leaving clients
leaves a count behind."""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

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
    says,
    streamed,
    whole,
)
from tests.raw_client import BEYOND_SOCKETS, BrokenOff, Client, chat
from tests.routers import Running, router
from tests.test_relay_deadlines import at, full

__all__ = ["full"]


async def half_close(client: Client) -> None:
    """A FIN after the whole request counts as leaving, as in nginx and in Go's server."""
    await client.stream.send_eof()


WAYS: dict[str, Callable[[Client], Awaitable[None]]] = {
    "close": Client.close,
    "reset": Client.reset,
    "half-close": half_close,
}

STAGES: dict[str, bytes] = {
    # what the engine has said when the client leaves
    "before any answer": b"",
    "within the header": b"HTTP/1.1 200 OK\r\ncont",
    "after an interim answer": b"HTTP/1.1 100 Continue\r\n\r\n",
    "after the head of a stream": STREAM_HEAD,
    "after a comment": STREAM_HEAD + chunk(b": a\n\n"),
    "after an event": STREAM_HEAD + chunk(event("a")),
    "within an event": STREAM_HEAD + chunk(event("a")[:30]),
    "within a chunk": STREAM_HEAD + chunk(event("a"))[:60],
    "within a document": b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 99\r\n\r\n{",
    "within an error": b"HTTP/1.1 500 Oh\r\ncontent-length: 99\r\n\r\n{",
    "within a sound": b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"R"),
}


async def gone(door: Running, *engines: FakeEngine) -> None:
    """Nothing but the scheduler's turns has passed, and every trace of the request is gone, at the engines too."""
    await wait_all_tasks_blocked(0.01)
    assert not door.app.gateway.books.live
    assert [member.in_flight for member in door.app.gateway.table.members.values() if member.in_flight] == []
    for engine in engines:
        assert not open_work(engine), "the engine still works for nobody"


def open_work(engine: FakeEngine) -> int:
    return sum(peer.open for peer in working.get(engine.port, ()))


working: dict[int, list[Peer]] = {}


def stuck(*said: bytes) -> Script:
    """Say this and work on until the router goes, which `open_work` tells."""

    async def script(asked: Asked, peer: Peer) -> None:
        port = peer.stream.socket.getsockname()[1]
        working.setdefault(port, []).append(peer)
        await peer.send(*said)
        await peer.left()

    return script


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", STAGES.values(), ids=STAGES.keys())
async def test_a_client_that_leaves_ends_the_work(tmp_path: Path, said: bytes, stream: bool, way: str) -> None:
    async with fake_engine(stuck(said)) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=stream))
        await wait_all_tasks_blocked()
        assert open_work(engine) == 1
        await WAYS[way](client)
        await gone(door, engine)
        (record,) = door.app.gateway.books.recent(3)
        assert (record.outcome, record.code) == ("client left", 499)
        assert [attempt.kind for attempt in record.attempts] == ["client_left"]
        member = door.app.gateway.table.members["a"]
        assert not member.penalty and member.breaker.closed, "no fault of the engine"
        working.clear()


ROUTES = (
    "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank",
    "/v1/score", "/v1/audio/speech", "/v1/anything/else", "/tokenize", "/detokenize", "/rerank", "/score", "/generate",
    "/invocations", "/v1/messages/count_tokens",
)  # fmt: skip


@pytest.mark.parametrize("target", ROUTES)
async def test_on_every_route(tmp_path: Path, target: str) -> None:
    async with fake_engine(stuck()) as engine, router(tmp_path, engine) as door:
        for stream in (False, True):
            client = await door.connect()
            await client.send(chat(target=target, stream=stream))
            await wait_all_tasks_blocked()
            assert open_work(engine) == 1
            await client.close()
            await gone(door, engine)
        working.clear()


async def test_while_connecting(tmp_path: Path, full: int) -> None:
    async with router(tmp_path, config=at(full)) as door:
        for way in WAYS.values():
            client = await door.connect()
            await client.send(chat())
            await wait_all_tasks_blocked()
            assert door.app.gateway.books.live
            await way(client)
            await gone(door)


@pytest.mark.parametrize("way", WAYS)
async def test_while_sending_a_large_body(tmp_path: Path, way: str, nursery: trio.Nursery) -> None:
    """The engine takes a part of it and reads no further."""
    streams: list[trio.SocketStream] = []

    async def reluctant(stream: trio.SocketStream) -> None:
        if (await stream.receive_some(1000)).startswith(b"POST"):
            streams.append(stream)
        await trio.sleep_forever()

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, reluctant, [listener])
    async with router(tmp_path, config=at(listener.socket.getsockname()[1])) as door:
        await wait_all_tasks_blocked()
        client = await door.connect()
        await client.send(chat(filler="x" * BEYOND_SOCKETS))
        await door.until("it is being sent", lambda: streams)
        assert door.app.gateway.books.live
        await WAYS[way](client)
        await gone(door)
        with trio.fail_after(15), pytest.raises(trio.BrokenResourceError):
            while await streams[-1].receive_some(1 << 20):
                continue
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("way", WAYS)
async def test_while_the_client_takes_nothing(tmp_path: Path, way: str) -> None:
    async def flood(asked: Asked, peer: Peer) -> None:
        working[engine.port] = [peer]
        await peer.send(STREAM_HEAD)
        while peer.open:
            await peer.send(chunk(event("x" * 60_000)))

    async with fake_engine(flood) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=True))
        await wait_all_tasks_blocked(0.01)
        assert open_work(engine) == 1
        await WAYS[way](client)
        await gone(door, engine)
        working.clear()


async def test_while_waiting_for_a_place(tmp_path: Path) -> None:
    async with fake_engine(stuck()) as engine:
        engine.capacity = 1
        async with router(tmp_path, engine) as door:
            clients = []
            for _ in range(10):
                client = await door.connect()
                await client.send(chat())
                clients.append(client)
            await wait_all_tasks_blocked()
            asked = len(engine.asked)
            assert asked < 10
            for client in reversed(clients):
                await client.close()
                await wait_all_tasks_blocked()
            assert len(engine.asked) == asked, "one that left was sent"
            await gone(door, engine)
            assert door.app.gateway.gate.rules.depth("silver") == 0
        working.clear()


async def test_between_two_attempts(tmp_path: Path) -> None:
    """The first engine was full, the second hangs: leaving ends the second."""
    async with (
        fake_engine(says(whole(503, {})), id="a") as first,
        fake_engine(stuck(), id="b") as second,
        router(tmp_path, first, second) as door,
    ):
        for _ in range(6):
            client = await door.connect()
            await client.send(chat())
            await wait_all_tasks_blocked()
            assert open_work(second) == 1
            await client.close()
            await gone(door, second)
        working.clear()


async def test_an_operator_ends_a_request(tmp_path: Path) -> None:
    async with fake_engine(stuck(STREAM_HEAD + chunk(event("a")))) as engine, router(tmp_path, engine) as door:
        for stream in (True, False):
            client = await door.connect()
            await client.send(chat(stream=stream))
            await wait_all_tasks_blocked()
            (record,) = door.app.gateway.books.live.values()
            assert record.cancel()
            raw, how = await client.rest()
            assert how == "closed" and raw.startswith(b"HTTP/1.1 200") and not raw.endswith(b"0\r\n\r\n")
            assert b"cancelled by the operator" in raw
            await gone(door, engine)
            assert record.outcome == "cancelled"
        working.clear()


async def test_an_operator_ends_a_request_before_its_answer(tmp_path: Path) -> None:
    async with fake_engine(stuck()) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat())
        await wait_all_tasks_blocked()
        (record,) = door.app.gateway.books.live.values()
        assert record.cancel()
        answer = await client.answer("POST")
        assert answer.status == 503 and answer.error["code"] == "cancelled"
        assert answer.fields["x-should-retry"] == "false"
        await gone(door, engine)
        working.clear()


# -- storms ------------------------------------------------------------------------------------------------------------


def moody(rng: random.Random) -> Script:
    """An engine that does anything."""

    async def script(asked: Asked, peer: Peer) -> None:
        match rng.randrange(10):
            case 0:
                await peer.reset()
            case 1:
                await peer.close()
            case 2:
                await peer.send(whole(503, {}))
            case 3:
                await peer.send(b"garbage")
            case 4:
                await peer.left()
            case 5:
                await peer.send(*streamed(event("a"), end=b""))
                await peer.left()
            case 6:
                await peer.send(*streamed(*[event("x" * 5000)] * 40, DONE))
            case 7:
                await peer.send(*streamed(event("a"), event("b"), end=b""))
                await peer.reset()
            case 8:
                await peer.send(*streamed(event("a"), DONE))
            case _:
                await peer.send(whole(200, CHAT))

    return script


@pytest.mark.parametrize("seed", range(4))
async def test_a_storm_leaves_nothing_behind(tmp_path: Path, seed: int) -> None:
    """What is left over is checked when the router's block ends (`Running.settled`), and here at the engines."""
    rng = random.Random(seed)
    async with AsyncExitStack() as stack:
        engines = [await stack.enter_async_context(fake_engine(moody(rng), id=id)) for id in "abc"]
        door = await stack.enter_async_context(router(tmp_path, *engines))

        async def one() -> None:
            target = rng.choice(ROUTES)
            try:
                client = await door.connect()
                filler = "x" * rng.choice((0, 0, 0, 0, 400_000))
                await client.send(chat(target=target, stream=rng.random() < 0.6, filler=filler))
                if rng.random() < 0.2:
                    with trio.move_on_after(0.2):
                        await client.answer("POST")
                for _ in range(rng.choice((0, 1, 3, 10, 40))):
                    await trio.lowlevel.checkpoint()
                await rng.choice((Client.close, Client.reset))(client)
            except (BrokenOff, trio.BrokenResourceError, trio.ClosedResourceError):
                return

        for _ in range(5):
            async with trio.open_nursery() as nursery:
                for _ in range(25):
                    nursery.start_soon(one)
        await door.until("no request is live", lambda: not door.app.gateway.books.live)
        door.app.gateway.close()  # the idle connections: what is still open then is work for nobody
        await wait_all_tasks_blocked(0.01)
        books = list(door.app.gateway.books.recent(5000))
        assert len(books) > 60 and {record.outcome for record in books} >= {"client left", "ok"}
        assert "running" not in {record.outcome for record in books}


async def test_no_socket_is_left_over(tmp_path: Path) -> None:
    rng = random.Random(9)
    async with fake_engine(moody(rng)) as engine, router(tmp_path, engine) as door:
        before = len(door.app.poller)
        for _ in range(150):
            client = await door.connect()
            await client.send(chat(stream=rng.random() < 0.5))
            for _ in range(rng.choice((0, 2, 8))):
                await trio.lowlevel.checkpoint()
            await client.close()
        await door.until("every connection has ended", lambda: not door.app.listeners.connections)
        idle = len(door.app.gateway.upstreams["a"].idle)
        assert len(door.app.poller) <= before + idle

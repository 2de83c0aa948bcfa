"""Every deadline strikes, says its name, and is never the reason for another try."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fake_engine import DONE, STREAM_HEAD, Asked, Peer, chunk, event, fake_engine, says, streamed, whole
from tests.raw_client import BrokenOff, Client, chat
from tests.routers import Running, router

JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
AUDIO = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n" + chunk(b"RIFF")

BEFORE: dict[str, tuple[bytes, bool, str, float]] = {
    # what the engine has said when it falls silent; whether a stream was asked for; which deadline strikes after what
    "no answer": (b"", False, "total_s", 1800),
    "half a header": (b"HTTP/1.1 200 OK\r\nx", False, "total_s", 1800),
    "a header": (JSON_HEAD + b"content-length: 9\r\n\r\n", False, "total_s", 1800),
    "half a document": (JSON_HEAD + b'content-length: 9\r\n\r\n{"', False, "total_s", 1800),
    "half a chunked document": (
        JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n" + chunk(b"{"),
        False,
        "total_s",
        1800,
    ),
    "half an error": (b"HTTP/1.1 500 Oh\r\ncontent-length: 9\r\n\r\n{", False, "total_s", 1800),
    "no stream": (b"", True, "first_token_s", 600),
    "an interim answer": (b"HTTP/1.1 100 Continue\r\n\r\n", True, "first_token_s", 600),
    "the head of a stream": (STREAM_HEAD, True, "first_token_s", 600),
    "comments": (STREAM_HEAD + chunk(b": a\n\n: b\n\n"), True, "first_token_s", 600),
    "half an event": (STREAM_HEAD + chunk(event("a")[:20]), True, "first_token_s", 600),
    "a document instead of a stream": (JSON_HEAD + b"content-length: 9\r\n\r\n{", True, "total_s", 1800),
    "a stream nobody asked for": (STREAM_HEAD, False, "first_token_s", 600),
}


async def asked(door: Running, *, stream: bool) -> Client:
    client = await door.connect()
    await client.send(chat(stream=stream))
    await wait_all_tasks_blocked()
    return client


@pytest.mark.parametrize(("said", "stream", "name", "after_s"), BEFORE.values(), ids=BEFORE.keys())
async def test_before_the_answer_a_deadline_is_a_504_with_its_name(
    tmp_path: Path, said: bytes, stream: bool, name: str, after_s: float
) -> None:
    async with fake_engine(says(said, then="silent")) as a, fake_engine(says(whole(200, {})), id="b") as b:
        b.models = ("other",)
        fallback = '[[models]]\nname = "llama"\nfallbacks = ["other"]\n'
        async with router(tmp_path, a, b, config=fallback) as door:
            client = await asked(door, stream=stream)
            await door.held_by(name)
            door.nearly()
            await wait_all_tasks_blocked()
            assert door.app.gateway.books.live
            door.later(after_s + 1)
            answer = await client.answer("POST")
            assert answer.status == 504 and answer.error["code"] == "upstream_timeout"
            assert name in answer.error["message"]
            assert answer.fields["x-appliance-reason"] == "upstream_timeout"
            assert (len(a.asked), len(b.asked)) == (1, 0), "a deadline never tries again"
            (record,) = door.app.gateway.books.recent(3)
            assert [(attempt.kind, attempt.deadline) for attempt in record.attempts] == [("deadline", name)]
            assert door.app.gateway.table.members["a"].penalty > 0


AFTER: dict[str, tuple[str, str, float]] = {
    # further settings; which deadline strikes a stream that has begun, and after what
    "silence": ("", "idle_s", 120),
    "the whole": ("stream_total_s = 100\n", "stream_total_s", 100),
    "the whole, before the silence": ("stream_total_s = 119\n", "stream_total_s", 119),
}


@pytest.mark.parametrize(("config", "name", "after_s"), AFTER.values(), ids=AFTER.keys())
async def test_in_a_stream_a_deadline_is_an_error_event_with_its_name(
    tmp_path: Path, config: str, name: str, after_s: float
) -> None:
    script = says(*streamed(event("a"), end=b""), then="silent")
    async with fake_engine(script) as engine, router(tmp_path, engine, config="[deadlines]\n" + config) as door:
        client = await asked(door, stream=True)
        await door.held_by(name, begun=True)
        door.nearly()
        await wait_all_tasks_blocked()
        assert door.app.gateway.books.live
        door.later(after_s + 1)
        with pytest.raises(BrokenOff) as broken:
            await client.answer("POST")
        last = broken.value.args[0].body.removeprefix(event("a"))
        error = json.loads(last.replace(b": ping\n\n", b"").removeprefix(b"data: "))["error"]
        assert error["code"] == "upstream_timeout" and name in error["message"]
        (record,) = door.app.gateway.books.recent(3)
        assert (record.outcome, record.code) == ("cut", 504)


async def test_the_limit_of_a_whole_stream_holds_before_its_first_event(tmp_path: Path) -> None:
    config = "[deadlines]\nstream_total_s = 100\n"
    async with fake_engine(says(STREAM_HEAD, then="silent")) as engine, router(tmp_path, engine, config=config) as door:
        client = await asked(door, stream=True)
        await door.held_by("stream_total_s")
        door.later(101)
        answer = await client.answer("POST")
        assert answer.status == 504 and "stream_total_s" in answer.error["message"]


async def test_silence_begins_anew_with_every_event(tmp_path: Path) -> None:
    peers: list[Peer] = []

    async def script(asked: Asked, peer: Peer) -> None:
        peers.append(peer)
        await peer.send(*streamed(event("a"), end=b""))
        await peer.left()

    config = "[deadlines]\nidle_s = 500\nsse_ping_s = 10000"
    async with fake_engine(script) as engine, router(tmp_path, engine, config=config) as door:
        client = await asked(door, stream=True)
        await door.held_by("idle_s", begun=True)
        (record,) = door.app.gateway.books.live.values()
        sleeper = record.sleeper
        assert sleeper is not None
        for _ in range(4):
            due = sleeper.due
            door.nearly()
            await peers[0].send(chunk(event("b")))
            await door.until("the silence has begun anew", lambda due=due: sleeper.due > due)
        assert door.app.gateway.books.live
        door.later(501)
        raw, _ = await client.rest()
        assert b"idle_s" in raw and raw.count(b"data: {") == 6


async def test_a_body_that_has_begun_is_aborted(tmp_path: Path) -> None:
    async with fake_engine(says(AUDIO, then="silent")) as engine, router(tmp_path, engine) as door:
        client = await asked(door, stream=False)
        door.later(1801)
        with pytest.raises(BrokenOff) as broken:
            await client.answer("POST")
        assert broken.value.args[0].body == b"RIFF"


@pytest.fixture
def full() -> Iterator[int]:
    """The port of a listener whose queue is full, so that connecting there takes for ever."""
    listener = socket.socket()
    listener.bind(("127.0.0.1", 0))
    listener.listen(0)
    port = listener.getsockname()[1]
    clients = []
    for _ in range(3):
        client = socket.socket()
        client.setblocking(False)
        client.connect_ex(("127.0.0.1", port))
        clients.append(client)
    yield port
    for client in (*clients, listener):
        client.close()


def at(port: int, more: str = "", host: str = "127.0.0.1", id: str = "a") -> str:
    return f'[[endpoints]]\nid = "{id}"\nurl = "http://{host}:{port}"\nmodels = ["llama"]\n{more}\n'


@pytest.mark.parametrize("stream", [False, True])
async def test_connecting_has_a_deadline(tmp_path: Path, full: int, stream: bool) -> None:
    async with fake_engine(id="b") as other:
        config = at(full, 'pool = "x"\npool_priority = 9')
        async with router(tmp_path, other, config=config) as door:
            client = await asked(door, stream=stream)
            door.later(4)
            await wait_all_tasks_blocked()
            assert door.app.gateway.books.live
            door.later(6)
            answer = await client.answer("POST")
            assert answer.status == 504 and "dial_s" in answer.error["message"]
            assert not other.asked, "a deadline never tries again"
            (record,) = door.app.gateway.books.recent(3)
            assert [(a.kind, a.deadline, a.sent) for a in record.attempts] == [("deadline", "dial_s", False)]


async def test_a_client_that_takes_nothing_is_let_go(tmp_path: Path) -> None:
    """`write_stall_s` has nobody to tell its name to but the books. The engine is let go with the client."""

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(STREAM_HEAD)
        while peer.open:
            await peer.send(chunk(event("x" * 60_000)))

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await asked(door, stream=True)
        door.later(29)
        await wait_all_tasks_blocked()
        assert door.app.gateway.books.live
        door.later(31)
        await door.until("the request is over", lambda: not door.app.gateway.books.live)
        (record,) = door.app.gateway.books.recent(3)
        assert (record.outcome, record.code) == ("client left", 499)
        assert [(attempt.kind, attempt.deadline) for attempt in record.attempts] == [("client_left", "write_stall_s")]
        assert not door.app.gateway.table.members["a"].penalty, "no fault of the engine"
        await client.close()


async def test_a_client_that_takes_no_document_is_let_go(tmp_path: Path) -> None:
    body = b"x" * 30_000_000
    async with fake_engine(says(whole(200, body))) as engine, router(tmp_path, engine) as door:
        client = await asked(door, stream=False)
        door.later(31)
        await door.until("the request is over", lambda: not door.app.gateway.books.live)
        (record,) = door.app.gateway.books.recent(3)
        assert record.attempts[0].deadline == "write_stall_s"
        await client.close()


async def test_a_look_up_does_not_outlast_connecting(tmp_path: Path) -> None:
    """A resolver that is down answers after half a minute, in a thread that nothing can stop."""
    resolver = Resolver()
    trio.socket.set_custom_hostname_resolver(resolver)
    async with router(tmp_path, config=at(80, host="engine.test")) as door:
        clients = [await asked(door, stream=False) for _ in range(2)]
        assert resolver.questions == 1, "one question is enough for all who wait"
        door.later(6)
        for client in clients:
            answer = await client.answer("POST")
            assert answer.status == 504 and "dial_s" in answer.error["message"]
        leaving = await asked(door, stream=False)
        await leaving.close()
        await door.until("the client's leaving is noticed", lambda: not door.app.gateway.books.live)
        resolver.answer.set()
        await wait_all_tasks_blocked()


class Resolver(trio.abc.HostnameResolver):
    """Answers when the test says so, with `addresses`."""

    def __init__(self, *addresses: tuple[str, int]) -> None:
        self.questions = 0
        self.answer = trio.Event()
        self.addresses = addresses

    async def getaddrinfo(self, host, port, family=0, type=0, proto=0, flags=0):  # type: ignore[no-untyped-def,override]
        self.questions += 1
        await self.answer.wait()
        if not self.addresses:
            raise socket.gaierror(-2, "Name or service not known")
        return [
            (socket.AF_INET6 if ":" in address else socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, number))
            for address, number in self.addresses
        ]

    async def getnameinfo(self, sockaddr, flags):  # type: ignore[no-untyped-def,override]
        raise NotImplementedError


async def test_a_name_that_nobody_knows_is_a_refused_connection(tmp_path: Path) -> None:
    resolver = Resolver()
    resolver.answer.set()
    trio.socket.set_custom_hostname_resolver(resolver)
    async with fake_engine(id="b") as other:
        config = at(80, 'pool = "x"\npool_priority = 9', host="engine.test")
        async with router(tmp_path, other, config=config) as door:
            assert (await door.ask(chat())).status == 200
            assert len(other.asked) == 1


async def test_a_name_with_several_addresses_is_tried_at_each(tmp_path: Path, full: int) -> None:
    """The first refuses, the second swallows the packets, which leaves time for the third."""
    async with fake_engine() as engine:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            addresses = (("127.0.0.1", unused.getsockname()[1]), ("127.0.0.1", full), ("127.0.0.1", engine.port))
            resolver = Resolver(*addresses)
            resolver.answer.set()
            trio.socket.set_custom_hostname_resolver(resolver)
            async with router(tmp_path, config=at(80, host="engine.test")) as door:
                client = await asked(door, stream=False)
                door.later(3)
                assert (await client.answer("POST")).status == 200
                assert engine.asked[0].by_name["host"] == "engine.test"


async def test_a_name_is_asked_for_again_once_its_address_fails(tmp_path: Path) -> None:
    async with fake_engine() as engine:
        with socket.socket() as unused:
            unused.bind(("127.0.0.1", 0))
            resolver = Resolver(("127.0.0.1", unused.getsockname()[1]))
            resolver.answer.set()
            trio.socket.set_custom_hostname_resolver(resolver)
            async with router(tmp_path, config=at(80, host="engine.test")) as door:
                assert (await door.ask(chat())).status == 502
                resolver.addresses = (("127.0.0.1", engine.port),)
                assert (await door.ask(chat())).status == 200


async def test_done_is_not_put_off_by_what_follows(tmp_path: Path) -> None:
    """After the engine's own end its body may take two seconds, however much still comes."""
    peers: list[Peer] = []

    async def script(asked: Asked, peer: Peer) -> None:
        peers.append(peer)
        await peer.send(*streamed(event("a"), DONE, end=b""))
        await peer.left()

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await asked(door, stream=True)
        await peers[0].send(chunk(b": more\n\n"))
        await wait_all_tasks_blocked()
        door.later(3)
        assert (await client.answer("POST")).body == event("a") + DONE + b": more\n\n"

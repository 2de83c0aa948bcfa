"""Connections of clients: cut anywhere, pipelined, kept, parted from, and very many of them."""

from __future__ import annotations

import errno
import gzip
import itertools
import json
import os
import resource
import socket
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from appliance.door import accept
from appliance.door.connection import IDLE_AT_STOP_S
from appliance.nursery.sleeper import DeadlinePassed, sweep_once
from appliance.wire import head, line
from tests.fake_engine import DONE, Asked, Peer, event, fake_engine, says, streamed, whole
from tests.raw_client import BrokenOff, Client, chat, request
from tests.routers import Running, router

CHAT_PATH = "/v1/chat/completions"
BODY = b'{"model": "llama", "x": "0123456789"}'


async def echo(asked: Asked, peer: Peer) -> None:
    await peer.send(whole(200, {"target": asked.target, "body": asked.body.decode()}))


async def quiet() -> None:
    """Let everything run that can, the kernel's loopback included."""
    await trio.testing.wait_all_tasks_blocked(0.01)


# -- requests, cut anywhere --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "raw",
    [
        request("POST", CHAT_PATH, body=BODY),
        request("POST", CHAT_PATH, "transfer-encoding: chunked", "content-type: application/json")
        + b"5;a=b\r\n" + BODY[:5] + b"\r\n%x\r\n" % (len(BODY) - 5) + BODY[5:] + b"\r\n0\r\nx: y\r\n\r\n",
    ],
    ids=["length", "chunks"],
)  # fmt: skip
async def test_a_request_may_come_in_any_two_pieces(tmp_path: Path, raw: bytes) -> None:
    async with fake_engine(echo) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        for cut in range(1, len(raw)):
            await client.send(raw[:cut])
            await trio.testing.wait_all_tasks_blocked(0.0005)
            await client.send(raw[cut:])
            answer = await client.answer("POST")
            assert (answer.status, answer.json()["body"]) == (200, BODY.decode()), cut
        assert len(engine.asked) == len(raw) - 1


async def test_a_request_may_come_byte_by_byte(tmp_path: Path) -> None:
    async with fake_engine(echo) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        raw = request("POST", CHAT_PATH, body=BODY)
        for place in range(len(raw)):
            await client.send(raw[place : place + 1])
            await trio.testing.wait_all_tasks_blocked()
        assert (await client.answer("POST")).status == 200


async def test_one_empty_line_before_a_request_is_skipped_and_a_second_is_not(tmp_path: Path) -> None:
    async with fake_engine(echo) as engine, router(tmp_path, engine) as door:
        raw = request("POST", CHAT_PATH, body=BODY)
        client = await door.connect()
        for pieces in (
            [b"\r\n" + raw],
            [b"\r\n", raw],
            [b"\r", b"\n" + raw],
            [raw + b"\r\n", raw],
            [b"\r", b"\n", raw],
        ):
            for piece in pieces:
                await client.send(piece)
                await quiet()
            for _ in range(b"".join(pieces).count(BODY)):
                assert (await client.answer("POST")).status == 200
        await client.send(raw + b"\r\n" + raw)
        assert [(await client.answer("POST")).status for _ in range(2)] == [200, 200]
        for lines in (b"\r\n\r\n", b"\n", b"\r\r\n"):
            other = await door.connect()
            await other.send(lines + raw)
            assert (await other.answer("POST")).status == 400
        assert len(engine.asked) == 8


async def test_empty_lines_alone_keep_no_connection(tmp_path: Path) -> None:
    async with fake_engine(echo) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(b"\r\n")
        await quiet()
        await client.send(b"\r\n")
        assert (await client.answer("POST")).status == 400


async def test_pipelined_requests_are_answered_in_order(tmp_path: Path) -> None:
    """Of every kind, with answers of every kind, some slower than those behind them."""

    async def script(asked: Asked, peer: Peer) -> None:
        if b"slow" in asked.body:
            await quiet()
        if b'"stream": true' in asked.body:
            await peer.send(*streamed(event("a"), DONE))
        else:
            await echo(asked, peer)

    raws = [
        chat(x=1, slow=True),
        request("GET", "/v1/models"),
        chat(stream=True),
        request("HEAD", "/healthz"),
        request("POST", CHAT_PATH, body=b"{"),
        request("GET", "/nothing"),
        request("OPTIONS", "/v1/models"),
        request("POST", "/nothing", body=b"x" * 100),
        request("POST", CHAT_PATH, "transfer-encoding: chunked") + b"2\r\n{}\r\n0\r\n\r\n",
        chat(x=2),
    ]
    statuses = [200, 200, 200, 200, 400, 404, 204, 404, 400, 200]
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(b"".join(raws))
        answers = [await client.answer(raw.split(b" ", 1)[0].decode()) for raw in raws]
        assert [answer.status for answer in answers] == statuses
        assert not any(answer.closes for answer in answers)
        assert answers[2].body == event("a") + DONE
        assert [json.loads(answers[at].json()["body"])["x"] for at in (0, 9)] == [1, 2]


async def test_a_flood_of_pipelined_requests_lets_others_in(tmp_path: Path) -> None:
    async with router(tmp_path) as door:
        client = await door.connect()
        async with trio.open_nursery() as nursery:
            count = 3000
            nursery.start_soon(client.send, request("GET", "/readyz") * count)
            others = [(await door.ask(request("GET", "/healthz"))).status for _ in range(5)]
            assert others == [200] * 5
            for _ in range(count):
                assert (await client.answer()).status == 503
        assert client.buffer == b""


async def test_what_follows_a_request_that_closes_is_thrown_away(tmp_path: Path) -> None:
    """And does not turn the end into a reset, which could cost the client the answer it was sent."""
    async with fake_engine(echo) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat("connection: close") + chat() * 500)
        answer = await client.answer("POST")
        assert answer.status == 200 and answer.closes
        await client.send(b"x" * 100_000)
        await client.stream.send_eof()  # type: ignore[attr-defined]
        assert await client.rest() == (b"", "closed")
        assert len(engine.asked) == 1


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b"GET /v1/mod",
        request("POST", CHAT_PATH, "content-length: 100"),
        request("POST", CHAT_PATH, "content-length: 100") + b"x" * 50,
        request("POST", CHAT_PATH, "transfer-encoding: chunked") + b"5\r\nhel",
        chat(),
        chat() + b"GET /v1/models",
    ],
)
@pytest.mark.parametrize("how", ["close", "reset", "half"])
async def test_a_client_may_leave_at_any_moment(tmp_path: Path, raw: bytes, how: str) -> None:
    """Half a close is one too, as in nginx: nobody can tell it from a whole one."""
    async with fake_engine(says(then="silent")) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(raw)
        await quiet()
        match how:
            case "close":
                await client.close()
            case "reset":
                await client.reset()
            case "half":
                await client.stream.send_eof()  # type: ignore[attr-defined]
        await door.until("the connection is gone", lambda: not door.app.listeners.connections)
        if how == "half" and raw == b"GET /v1/mod":
            assert (await client.answer()).status == 400
        assert door.told("request failed inside the router") == []


# -- Expect: 100-continue ----------------------------------------------------------------------------------------------

EXPECTS = ("expect: 100-continue", f"content-length: {len(BODY)}", "content-type: application/json")


async def test_a_client_that_asks_first_is_told_to_go_on(tmp_path: Path) -> None:
    async with fake_engine(echo) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        for _ in range(2):
            await client.send(request("POST", CHAT_PATH, *EXPECTS))
            assert await client.until(b"\r\n\r\n") == b"HTTP/1.1 100 Continue\r\n\r\n"
            await client.send(BODY)
            answer = await client.answer("POST")
            assert (answer.status, answer.json()["body"]) == (200, BODY.decode())
        assert "expect" not in engine.asked[0].by_name


async def test_with_chunks_too(tmp_path: Path) -> None:
    async with fake_engine(echo) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(request("POST", CHAT_PATH, EXPECTS[0], "transfer-encoding: chunked"))
        await client.until(b"100 Continue\r\n\r\n")
        await client.send(b"%x\r\n%b\r\n0\r\n\r\n" % (len(BODY), BODY))
        assert (await client.answer("POST")).status == 200


@pytest.mark.parametrize("raw", [request("POST", CHAT_PATH, *EXPECTS, version="1.0") + BODY, chat(EXPECTS[0])])
async def test_nobody_is_told_who_does_not_wait(tmp_path: Path, raw: bytes) -> None:
    async with fake_engine(echo) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(raw)
        assert (answer.status, answer.interim) == (200, ())


@pytest.mark.parametrize(
    ("raw", "status"),
    [
        (request("POST", "/nothing", *EXPECTS), 404),
        (request("POST", CHAT_PATH, EXPECTS[0], "content-length: 999999999"), 413),
    ],
)
async def test_whoever_asks_first_may_be_refused_before_the_body(tmp_path: Path, raw: bytes, status: int) -> None:
    async with router(tmp_path) as door:
        answer = await door.ask(raw)
        assert (answer.status, answer.interim) == (status, ())
        assert answer.closes, "whether the body comes all the same is the client's to decide"


# -- HTTP/1.0 ----------------------------------------------------------------------------------------------------------


async def test_clients_of_http_1_0(tmp_path: Path) -> None:
    async with fake_engine(echo) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat("connection: keep-alive", version="1.0"))
        answer = await client.answer("POST")
        assert (answer.status, answer.fields["connection"]) == (200, "keep-alive")
        await client.send(chat(version="1.0"))
        answer = await client.answer("POST")
        assert answer.closes
        assert await client.rest() == (b"", "closed")


async def test_a_stream_for_http_1_0_ends_with_its_connection(tmp_path: Path) -> None:
    script = says(*streamed(event("a"), event("b"), DONE))
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat("connection: keep-alive", version="1.0", stream=True))
        raw, end = await client.rest()
        head, _, body = raw.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head.lower() and b"connection: close" in head
        assert (body, end) == (event("a") + event("b") + DONE, "closed")


# -- slow readers ------------------------------------------------------------------------------------------------------


async def small_reader(door: Running) -> Client:
    """A client that takes little ahead of what it reads."""
    sock = trio.socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    await sock.connect(("127.0.0.1", door.port))
    client = Client(trio.SocketStream(sock))
    door._clients.append(client)
    return client


def large(size: int) -> bytes:
    return whole(200, {"text": "x" * size})


@pytest.mark.parametrize("version", ["1.0", "1.1"])
async def test_a_slow_reader_gets_all_of_its_last_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, version: str
) -> None:
    """The connection ends after it: what is held back by then must not be dropped by the close."""
    monkeypatch.setattr(accept, "keep_alive_probes", little_room)
    monkeypatch.setattr(line, "CORK_FROM", 0)
    async with fake_engine(says(large(14_000))) as engine, router(tmp_path, engine) as door:
        client = await small_reader(door)
        await client.send(chat("connection: close", version=version))
        await door.until("it is answered", lambda: not door.app.gateway.books.live and engine.asked)
        (connection,) = door.app.listeners.connections
        await door.until("some of it is held back", lambda: connection.line.unsent)
        answer = await client.answer("POST")
        assert len(answer.json()["text"]) == 14_000
        assert await client.rest() == (b"", "closed")


async def cut(door: Running, after_s: float) -> None:
    """Wait until a deadline of a stalled reader has cut the only connection. Time passes again and again: the kernel
    may still take a piece, with which the wait begins anew."""

    def struck() -> bool:
        door.later(after_s)
        return not door.app.listeners.connections

    await door.until("the connection is cut", struck)


def little_room(sock: socket.socket, stall_s: float = 0.0) -> None:
    """In place of the probes: the kernel holds little of what the door sends."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)


async def test_a_reader_that_stalls_is_cut_after_write_stall_s(tmp_path: Path) -> None:
    config = "[deadlines]\nwrite_stall_s = 100\n"
    async with fake_engine(says(large(8_000_000))) as engine, router(tmp_path, engine, config=config) as door:
        client = await small_reader(door)
        await client.send(chat())
        await door.until("the answer is on its way", lambda: engine.asked)
        (connection,) = door.app.listeners.connections
        sleeper = connection._sleeper
        await door.until("the reader has stalled", lambda: sleeper.due_name == "write_stall_s")
        sweep_once((sleeper,), sleeper.due - 0.1)
        await quiet()
        assert door.app.listeners.connections, "neither the door nor the kernel may give up before that"
        await cut(door, 101)
        with pytest.raises(BrokenOff):
            await client.answer("POST")


async def test_the_kernel_is_not_quicker_than_write_stall_s(tmp_path: Path) -> None:
    async with router(tmp_path, config="[deadlines]\nwrite_stall_s = 100\n") as door:
        await door.connect()
        await door.until("it is accepted", lambda: door.app.listeners.connections)
        (connection,) = door.app.listeners.connections
        assert connection.line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 100_000


async def test_a_stalled_reader_of_http_1_0_sees_a_reset(tmp_path: Path) -> None:
    """Its body ends with the connection: an ordinary end would make a whole of the part it got."""

    async def endless(asked: Asked, peer: Peer) -> None:
        await peer.send(streamed()[0])
        while peer.open:
            await peer.send(*streamed(event("x" * 60_000), end=b"")[1:])

    async with fake_engine(endless) as engine, router(tmp_path, engine) as door:
        client = await small_reader(door)
        await client.send(chat(version="1.0", stream=True))
        await door.until("it is asked", lambda: engine.asked)
        await cut(door, 31)
        _, end = await client.rest()
        assert end == "reset"


# -- keeping and ending ------------------------------------------------------------------------------------------------


LONG_KEPT = "[deadlines]\nkeepalive_s = 1000\n"


async def test_an_idle_connection_expires(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config=LONG_KEPT) as door:
        fresh, used = await door.connect(), await door.connect()
        await used.send(chat())
        assert (await used.answer("POST")).status == 200
        await door.until("both are there", lambda: len(door.app.listeners.connections) == 2)
        await quiet()
        door.later(500)
        await quiet()
        assert len(door.app.listeners.connections) == 2
        door.later(1001)
        assert await fresh.rest() == (b"", "closed")
        assert await used.rest() == (b"", "closed")


@pytest.mark.parametrize("name", ["head_s", "keepalive_s"])
async def test_a_deadline_that_came_too_late_does_not_strike_in_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The sweeper found it overdue in the very round in which the request was complete."""
    read = head.read_request

    def overdue(raw: bytes) -> head.RequestHead:
        (connection,) = door.app.listeners.connections
        connection._sleeper.cut(DeadlinePassed(name))
        return read(raw)

    async with fake_engine() as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await door.until("it is accepted", lambda: door.app.listeners.connections)
        monkeypatch.setattr(head, "read_request", overdue)
        await client.send(chat())
        assert (await client.answer("POST")).status == 200


async def test_what_held_for_waiting_does_not_hold_for_the_answer(tmp_path: Path) -> None:
    """A request whose head took two pieces, answered after longer than a head may take."""
    going = trio.Event()

    async def slow(asked: Asked, peer: Peer) -> None:
        await going.wait()
        await echo(asked, peer)

    async with fake_engine(slow) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        raw = chat()
        await client.send(raw[:30])
        await quiet()
        await client.send(raw[30:])
        await door.until("it is asked", lambda: engine.asked)
        door.later(80)  # past head_s and keepalive_s, not past total_s
        await quiet()
        going.set()
        assert (await client.answer("POST")).status == 200


async def test_a_stop_gives_idle_connections_a_moment(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        idle, quick = await door.connect(), await door.connect()
        for client in (idle, quick):
            await client.send(chat())
            assert not (await client.answer("POST")).closes
        door.app.begin_stop()
        await quiet()
        await quick.send(chat())
        answer = await quick.answer("POST")
        assert answer.status == 200 and answer.closes
        door.later(IDLE_AT_STOP_S + 1)
        assert await idle.rest() == (b"", "closed")
        with pytest.raises(OSError):
            await door.connect()


async def test_new_limits_hold_for_open_connections(tmp_path: Path) -> None:
    """Pools of clients keep theirs for days."""
    async with fake_engine() as engine, router(tmp_path, engine, config=LONG_KEPT) as door:
        client = await door.connect()
        await client.send(chat())
        assert (await client.answer("POST")).status == 200
        new = "[server]\nmax_body_bytes = 50\n[deadlines]\nwrite_stall_s = 100\n"
        door.file.write_text(new + engine.toml)
        assert door.app.reload() == ""
        (connection,) = door.app.listeners.connections
        assert connection.line.sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) > 100_000
        await client.send(chat())
        answer = await client.answer("POST")
        assert (answer.status, answer.error["code"]) == (413, "body_too_large")


# -- bodies ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [1, 2, 50])
async def test_a_chunked_upload_reaches_the_engine_with_its_length(tmp_path: Path, pieces: int) -> None:
    body = b'{"model":"llama","x":"' + os.urandom(50_000).hex().encode() + b'"}'
    size = -(-len(body) // pieces)
    chunks = [body[at : at + size] for at in range(0, len(body), size)]
    raw = b"".join(b"%x\r\n%b\r\n" % (len(chunk), chunk) for chunk in chunks) + b"0\r\n\r\n"
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        answer = await door.ask(request("POST", CHAT_PATH, "transfer-encoding: chunked") + raw)
        assert answer.status == 200
        assert engine.asked[0].body == body
        assert engine.asked[0].by_name["content-length"] == str(len(body))


async def test_a_compressed_body_reaches_the_engine_expanded(tmp_path: Path) -> None:
    body = b'\xef\xbb\xbf{"model":"llama","x":"' + b"y" * 3_000_000 + b'"}'
    packed = gzip.compress(body)
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        fields = ("content-encoding: gzip", "content-type: application/json; charset=utf-8")
        answer = await door.ask(request("POST", CHAT_PATH, *fields, body=packed))
        assert answer.status == 200
        assert engine.asked[0].body == body[3:]
        assert "content-encoding" not in engine.asked[0].by_name


async def test_what_bodies_grow_by_is_counted_too(tmp_path: Path) -> None:
    held = trio.Event()

    async def hold(asked: Asked, peer: Peer) -> None:
        await held.wait()
        await echo(asked, peer)

    body = b'{"model":"llama","x":"' + b"y" * 5_000_000 + b'"}'
    packed = request("POST", CHAT_PATH, "content-encoding: gzip", body=gzip.compress(body))
    config = "[server]\nmax_body_bytes = 6000000\nmax_buffered_bytes = 8000000\n"
    async with fake_engine(hold) as engine, router(tmp_path, engine, config=config) as door:
        client = await door.connect()
        await client.send(packed)
        await door.until("it is asked", lambda: engine.asked)
        assert door.app.buffers.held_bytes > len(body)
        answer = await door.ask(packed)
        assert (answer.status, answer.error["code"]) == (503, "buffers_full")
        assert not answer.closes
        held.set()
        assert (await client.answer("POST")).status == 200
        assert door.app.buffers.held_bytes == 0


# -- very many ---------------------------------------------------------------------------------------------------------


@contextmanager
def open_files(soft: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (soft, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


async def test_five_thousand_idle_connections(tmp_path: Path) -> None:
    count, needed = 5000, 5000 * 2 + 500
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard != resource.RLIM_INFINITY and hard < needed:
        pytest.skip(f"needs {needed} open files, the limit is {hard}")
    with open_files(max(needed, resource.getrlimit(resource.RLIMIT_NOFILE)[0])):
        async with fake_engine() as engine, router(tmp_path, engine, config=LONG_KEPT) as door:
            clients = []
            for _ in range(count):
                sock = socket.create_connection(("127.0.0.1", door.port))
                clients.append(sock)
                if len(clients) % 500 == 0:
                    await door.until("they are accepted", lambda: len(door.app.listeners.connections) == len(clients))
            assert (await door.ask(chat())).status == 200
            for sock in clients[::1000]:
                client = Client(trio.SocketStream(trio.socket.from_stdlib_socket(sock.dup())))
                await client.send(request("GET", "/healthz"))
                assert (await client.answer()).status == 200
                await client.close()
            door.later(500)
            await quiet()
            assert len(door.app.listeners.connections) == count
            for sock in clients:
                sock.close()
            await door.until("all are gone", lambda: not door.app.listeners.connections)


async def test_a_process_out_of_descriptors_waits_and_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It neither spins nor gives up, says so once, and says when it is over. Those it has are served meanwhile."""
    tries = 0
    real = socket.socket.accept

    def counted(self: socket.socket) -> tuple[socket.socket, object]:
        nonlocal tries
        try:
            return real(self)
        except OSError as error:
            tries += error.errno == errno.EMFILE
            raise

    monkeypatch.setattr(accept, "CALM_S", 0.0)
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat())
        assert (await client.answer("POST")).status == 200
        monkeypatch.setattr(socket.socket, "accept", counted)
        waiting = [socket.socket() for _ in range(3)]
        with open_files(max(int(name) for name in os.listdir("/proc/self/fd") if name.isdigit()) + 1):
            holes = []
            with pytest.raises(OSError):
                while True:
                    holes.append(os.dup(0))
            for sock in waiting:
                sock.setblocking(False)
                with pytest.raises(BlockingIOError):
                    sock.connect(("127.0.0.1", door.port))
            await door.until("it has tried twice", lambda: tries >= 2)
            assert tries < 20
            await client.send(chat())
            assert (await client.answer("POST")).status == 200
            (told,) = door.told("cannot accept connections")
            assert "LimitNOFILE" in told["next_step"]
            for hole in holes:
                os.close(hole)
        await door.until("all are accepted", lambda: len(door.app.listeners.connections) == 4)
        assert len(door.told("accepting connections again")) == 1
        assert len(door.told("cannot accept connections")) == 1
        for sock in waiting:
            sock.close()


async def test_a_process_at_its_last_descriptor_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each connection that ends lets another one in, and the next is not."""
    turns = itertools.count()
    real = socket.socket.accept

    def every_other(self: socket.socket) -> tuple[socket.socket, object]:
        if next(turns) % 2:
            raise OSError(errno.EMFILE, "Too many open files")
        return real(self)

    monkeypatch.setattr(accept, "BACK_OFF_S", 0.001)
    async with router(tmp_path) as door:
        monkeypatch.setattr(socket.socket, "accept", every_other)
        for _ in range(10):
            assert (await door.ask(request("GET", "/healthz"))).status == 200
        assert len(door.told("cannot accept connections")) == 1
        assert not door.told("accepting connections again")
        monkeypatch.setattr(accept, "CALM_S", 0.0)
        monkeypatch.setattr(socket.socket, "accept", real)
        assert (await door.ask(request("GET", "/healthz"))).status == 200
        assert len(door.told("accepting connections again")) == 1


async def test_a_client_gone_before_it_was_accepted_is_no_news(tmp_path: Path) -> None:
    async with router(tmp_path) as door:
        for _ in range(50):
            client = await door.connect()
            await client.reset()
        assert (await door.ask(request("GET", "/healthz"))).status == 200
        assert [line for line in door.log if line["level"] in ("warning", "error")] == []


class Turns(trio.abc.Instrument):
    """Counts how often Trio let a connection's task run."""

    def __init__(self) -> None:
        self.count = 0

    def before_task_step(self, task: trio.lowlevel.Task) -> None:
        self.count += task.name == "connection"


async def test_a_short_request_wakes_no_task(tmp_path: Path) -> None:
    """It is carried on inside the poller, from its bytes to its answer; two turns of its task would cost a tenth."""
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        for _ in range(2):  # the first one dials
            await client.send(chat())
            assert (await client.answer()).status == 200
        turns = Turns()
        trio.lowlevel.add_instrument(turns)
        try:
            for _ in range(40):
                await client.send(chat())
                assert (await client.answer()).status == 200
        finally:
            trio.lowlevel.remove_instrument(turns)
        assert turns.count == 0

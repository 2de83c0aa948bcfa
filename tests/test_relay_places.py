"""Where engines live: behind TLS, behind a name, at an IPv6 address, under a path."""

from __future__ import annotations

import errno
import math
import socket
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from appliance.gateway.upstream import Upstream
from appliance.wire.line import Line
from appliance.wire.tls import server_context
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
from tests.raw_client import BrokenOff, chat
from tests.routers import router
from tests.serve_certificates import Certificate, make

GOOD = says(whole(200, CHAT))


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("certificates"), "engine")


@pytest.fixture
def trusted(certificate: Certificate, monkeypatch: pytest.MonkeyPatch) -> Certificate:
    """The router believes the engine's certificate."""
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.cert))
    return certificate


def at(url: str, id: str = "a", more: str = "") -> str:
    return f'[[endpoints]]\nid = "{id}"\nurl = "{url}"\nmodels = ["llama"]\n{more}\n'


@asynccontextmanager
async def secure_engine(certificate: Certificate, script: Script = GOOD) -> AsyncIterator[FakeEngine]:
    context = server_context(str(certificate.cert), str(certificate.key))
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        engine = FakeEngine(listener.socket.getsockname()[1], script)

        async def serve(stream: trio.SSLStream[trio.SocketStream]) -> None:
            try:
                await engine._serve(stream)  # type: ignore[arg-type]
            except (trio.BrokenResourceError, ssl.SSLError, OSError):
                return  # a router that does not believe us

        secure = trio.SSLListener(listener, context, https_compatible=True)
        nursery.start_soon(trio.serve_listeners, serve, [secure])
        yield engine
        nursery.cancel_scope.cancel()


def ends(how: str, *pieces: bytes) -> Script:
    """Send, and end the connection: with the goodbye of TLS, without it, or by a reset."""

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(*pieces)
        secure = peer.stream
        assert isinstance(secure, trio.SSLStream)
        peer.open = False
        if how == "goodbye":
            secure._https_compatible = False  # says it without waiting for the answer
            with trio.move_on_after(0.05):
                await secure.aclose()
            return
        tcp = secure.transport_stream
        if how == "reset":
            tcp.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
        await trio.aclose_forcefully(tcp)

    return script


async def test_through_tls_everything_is_as_without(tmp_path: Path, trusted: Certificate) -> None:
    stream = (event("a"), event("b" * 300_000), DONE)
    script = in_turn(GOOD, says(*streamed(*stream)), GOOD, says(whole(400, {"error": "x"})), GOOD)
    async with (
        secure_engine(trusted, script) as engine,
        router(tmp_path, config=at(f"https://localhost:{engine.port}/v1")) as door,
    ):
        assert (await door.ask(chat())).json() == CHAT
        assert (await door.ask(chat(stream=True))).body == b"".join(stream)
        large = chat(filler="y" * 3_000_000)
        assert (await door.ask(large)).status == 200
        assert engine.asked[-1].body == large.partition(b"\r\n\r\n")[2]
        assert (await door.ask(chat())).status == 400
        assert (await door.ask(chat())).status == 200
        assert engine.asked[0].by_name["host"] == f"localhost:{engine.port}"
        assert engine.connections <= 2, "kept connections serve again"


BARE = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\n\r\n"


@pytest.mark.parametrize("how", ["goodbye", "no goodbye", "reset"])
@pytest.mark.parametrize("stream", [False, True])
async def test_an_end_without_the_goodbye_of_tls_is_none(
    tmp_path: Path, trusted: Certificate, how: str, stream: bool
) -> None:
    """Anybody on the way can cut a connection: where the end of the connection is the end of the body, only TLS itself
    can say that it came from the engine."""
    kind, body = (b"text/event-stream", event("a")) if stream else (b"application/json", b'{"cut": ')
    async with (
        secure_engine(trusted, ends(how, BARE % kind, body)) as engine,
        router(tmp_path, config=at(f"https://localhost:{engine.port}")) as door,
    ):
        raw = chat(target="/generate", stream=stream)
        if how == "goodbye":
            assert (await door.ask(raw)).body == body
        elif stream:
            with pytest.raises(BrokenOff):
                await door.ask(raw)
        else:
            assert (await door.ask(raw)).status == 502


async def test_a_certificate_that_nobody_vouches_for_is_a_refused_connection(
    tmp_path: Path, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("SSL_CERT_FILE", raising=False)
    async with secure_engine(certificate) as engine, fake_engine(id="b") as other:
        config = at(f"https://localhost:{engine.port}", more='pool = "x"\npool_priority = 9')
        async with router(tmp_path, other, config=config) as door:
            assert (await door.ask(chat())).status == 200
            (record,) = door.app.gateway.books.recent(1)
            assert [attempt.kind for attempt in record.attempts] == ["refused"]
            assert "certificate" in record.attempts[0].detail.lower()
            assert len(other.asked) == 1 and not engine.asked


async def test_a_certificate_for_another_name_is_refused(tmp_path: Path, trusted: Certificate) -> None:
    async with (
        secure_engine(trusted) as engine,
        router(tmp_path, config=at(f"https://127.0.0.1:{engine.port}")) as door,
    ):
        answer = await door.ask(chat())
        assert answer.status == 502 and not engine.asked
        assert "127.0.0.1" not in answer.error["message"], "clients need not know where engines live"


async def test_plain_where_tls_speaks_is_a_502(tmp_path: Path, trusted: Certificate) -> None:
    async with (
        secure_engine(trusted) as engine,
        router(tmp_path, config=at(f"http://localhost:{engine.port}")) as door,
    ):
        assert (await door.ask(chat())).status == 502


async def test_tls_where_plain_http_is_spoken_is_a_502(tmp_path: Path, nursery: trio.Nursery) -> None:
    async def complain(stream: trio.SocketStream) -> None:
        async with stream:
            await stream.receive_some(65536)
            await stream.send_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")

    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, complain, [listener])
    async with router(tmp_path, config=at(f"https://localhost:{listener.socket.getsockname()[1]}")) as door:
        assert (await door.ask(chat())).status == 502
        (record,) = door.app.gateway.books.recent(1)
        assert [attempt.kind for attempt in record.attempts] == ["refused"]
    nursery.cancel_scope.cancel()


async def test_a_handshake_that_hangs_meets_the_deadline_of_connecting(
    tmp_path: Path, trusted: Certificate, nursery: trio.Nursery
) -> None:
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")

    async def hang(stream: trio.SocketStream) -> None:
        await trio.sleep_forever()

    nursery.start_soon(trio.serve_listeners, hang, [listener])
    async with router(tmp_path, config=at(f"https://localhost:{listener.socket.getsockname()[1]}")) as door:
        client = await door.connect()
        await client.send(chat())
        await door.until("it is dispatched", lambda: door.app.gateway.table.members["a"].in_flight)
        await wait_all_tasks_blocked(0.01)
        door.later(6)
        answer = await client.answer("POST")
        assert answer.status == 504 and "dial_s" in answer.error["message"]
    nursery.cancel_scope.cancel()


async def test_leaving_ends_the_work_behind_tls(tmp_path: Path, trusted: Certificate) -> None:
    left = trio.Event()

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunk(event("a")))
        await peer.left()
        left.set()

    async with (
        secure_engine(trusted, script) as engine,
        router(tmp_path, config=at(f"https://localhost:{engine.port}")) as door,
    ):
        client = await door.connect()
        await client.send(chat(stream=True))
        await client.until(chunk(event("a")))
        await client.close()
        with trio.fail_after(15):
            await left.wait()


async def test_a_kept_secure_connection_that_the_engine_closed_costs_no_error(
    tmp_path: Path, trusted: Certificate
) -> None:
    async with (
        secure_engine(trusted, ends("no goodbye", whole(200, CHAT))) as engine,
        router(tmp_path, config=at(f"https://localhost:{engine.port}")) as door,
    ):
        for _ in range(4):
            assert (await door.ask(chat())).status == 200
        assert {record.outcome for record in door.app.gateway.books.recent(9)} == {"ok"}


# -- plain addresses ---------------------------------------------------------------------------------------------------


async def test_a_name(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, config=at(f"http://localhost:{engine.port}/v1")) as door:
        assert (await door.ask(chat())).status == 200
        assert engine.asked[0].by_name["host"] == f"localhost:{engine.port}"


async def test_a_path_in_front(tmp_path: Path) -> None:
    async with (
        fake_engine() as engine,
        router(tmp_path, config=at(f"http://127.0.0.1:{engine.port}/proxy/llm/v1/")) as door,
    ):
        assert (await door.ask(chat(target="/v1/chat/completions?a=b"))).status == 200
        assert (await door.ask(chat(target="/generate"))).status == 200
        assert [asked.target for asked in engine.asked if asked.method == "POST"] == [
            "/proxy/llm/v1/chat/completions?a=b",
            "/proxy/llm/generate",
        ]


async def test_an_ipv6_address(tmp_path: Path) -> None:
    try:
        (listener,) = await trio.open_tcp_listeners(0, host="::1")
    except OSError:
        pytest.skip("no IPv6 here")
    async with trio.open_nursery() as nursery:
        engine = FakeEngine(listener.socket.getsockname()[1], says(*streamed(event("a"), DONE)))
        nursery.start_soon(trio.serve_listeners, engine._serve, [listener])
        async with router(tmp_path, config=at(f"http://[::1]:{engine.port}")) as door:
            assert (await door.ask(chat(stream=True))).body == event("a") + DONE
            assert engine.asked[0].by_name["host"] == f"[::1]:{engine.port}"
        nursery.cancel_scope.cancel()


async def test_a_router_without_descriptors_says_so_and_blames_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def none(*arguments: object) -> Line:
        raise OSError(errno.EMFILE, "Too many open files")

    async with fake_engine() as engine, router(tmp_path, engine) as door:
        await wait_all_tasks_blocked()
        door.app.gateway.drop_stale(math.inf)
        with monkeypatch.context() as patch:
            patch.setattr(Upstream, "_connect", none)
            for _ in range(6):
                answer = await door.ask(chat())
                assert answer.status == 503 and answer.error["code"] == "router_exhausted"
                assert "LimitNOFILE" in answer.error["message"] and answer.fields["retry-after"] == "1"
        member = door.app.gateway.table.members["a"]
        assert member.up and not member.penalty
        assert (await door.ask(chat())).status == 200


@pytest.mark.parametrize("engine", ["openai", "sim", "llamacpp"])
async def test_a_router_without_descriptors_goes_on_and_asks_its_endpoints_again_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, engine: str
) -> None:
    """Its own questions (models, metrics, spans) need descriptors too, and whoever asks them must survive the lack."""
    tried = 0

    async def none(*arguments: object) -> Line:
        nonlocal tried
        tried += 1
        raise OSError(errno.EMFILE, "Too many open files")

    monkeypatch.setattr("appliance.gateway.watch.ASK_S", 0.01)
    monkeypatch.setattr("appliance.gateway.watch.ASK_AGAIN_S", 0.01)
    monkeypatch.setattr("appliance.gateway.scrape.LLAMACPP_LEAST_S", 0.01)
    config = '[scheduling]\nscrape_s = 0.05\n[tracing]\nendpoint = "http://127.0.0.1:9"\n'
    async with (
        fake_engine(says(whole(404, {}))) as fake,
        router(tmp_path, config=config + at(fake.url, more=f'engine = "{engine}"')) as door,
    ):
        await wait_all_tasks_blocked()
        with monkeypatch.context() as patch:
            patch.setattr(Upstream, "_connect", none)
            door.app.gateway.drop_stale(math.inf)
            assert (await door.ask(chat())).status in (404, 503)  # its span goes to the collector
            await door.until("its endpoint was asked for its models and its load meanwhile", lambda: tried > 20)
        told = door.told("endpoint does not list its models")
        assert [line["reason"] for line in told] and "Too many open files" in told[0]["reason"]
        await door.until("it is asked again", lambda: door.told("endpoint lists its models again"))


async def test_a_key_that_cannot_be_read_for_want_of_descriptors_blames_no_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("secret")
    real = open

    def none(name: object, *arguments: object) -> object:
        if str(name) == str(file):
            raise OSError(errno.EMFILE, "Too many open files")
        return real(name, *arguments)  # type: ignore[call-overload]

    async with fake_engine() as engine:
        config = engine.toml + f'api_key_file = "{file}"\n'
        async with router(tmp_path, config=config) as door:
            await wait_all_tasks_blocked()
            door.app.gateway.upstreams["a"]._key_until = 0.0
            with monkeypatch.context() as patch:
                patch.setattr("builtins.open", none)
                for _ in range(6):
                    answer = await door.ask(chat())
                    assert answer.status == 503 and answer.error["code"] == "router_exhausted"
            assert door.app.gateway.table.members["a"].up
            assert (await door.ask(chat())).status == 200


@pytest.mark.parametrize("broken", ["appliance.gateway.watch._entries", "appliance.gateway.watch.Contract.take"])
async def test_a_fault_in_watching_an_endpoint_costs_no_request(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broken: str
) -> None:
    faults = 0

    def fail(*arguments: object) -> object:
        nonlocal faults
        faults += 1
        raise ZeroDivisionError("a bug")

    monkeypatch.setattr("appliance.gateway.watch.ASK_S", 0.01)
    monkeypatch.setattr(broken, fail)
    async with fake_engine() as engine, router(tmp_path, config=at(engine.url, more='engine = "sim"')) as door:
        await door.until("it was asked again and again", lambda: faults > 3)
        assert (await door.ask(chat())).status == 200
        (told,) = door.told("watching an endpoint failed inside the router")
        assert told["endpoint"] == "a" and "a bug" in told["exception"]

"""The door with TLS, over IPv6, and with another certificate after a reload."""

from __future__ import annotations

import os
import signal
import socket
import ssl
from pathlib import Path

import pytest
import trio
import trio.testing

from appliance.door import accept
from tests.fake_engine import DONE, event, fake_engine, says, streamed, whole
from tests.raw_client import BrokenOff, Client, chat, request
from tests.routers import router
from tests.serve_certificates import Certificate, believing, make


def tls(certificate: Certificate) -> str:
    return f'[server]\ntls_cert = "{certificate.cert}"\ntls_key = "{certificate.key}"\n'


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("certificates"), "first")


def shown(client: Client) -> bytes:
    """The certificate that the door showed."""
    assert isinstance(client.stream, trio.SSLStream)
    der = client.stream.getpeercert(binary_form=True)
    assert isinstance(der, bytes)
    return der


async def test_everything_works_through_tls(tmp_path: Path, certificate: Certificate) -> None:
    script = says(*streamed(event("a"), event("b" * 200_000), DONE))
    async with fake_engine(script) as engine, router(tmp_path, engine, config=tls(certificate)) as door:
        client = await door.connect(believing([certificate]))
        await client.send(chat(stream=True), request("GET", "/v1/models"))
        assert (await client.answer("POST")).body == event("a") + event("b" * 200_000) + DONE
        assert (await client.answer()).status == 200
        body = b'{"model":"llama","x":"' + b"y" * 5_000_000 + b'"}'
        engine.script = says(whole(200, {"text": "z" * 5_000_000}))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(client.send, request("POST", "/v1/embeddings", "expect: 100-continue", body=body))
            answer = await client.answer("POST")
        assert len(answer.json()["text"]) == 5_000_000
        assert engine.asked[-1].body == body
        assert door.app.urls[0].startswith("https://")


async def test_a_slow_reader_gets_all_of_its_last_answer(
    tmp_path: Path, certificate: Certificate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What TLS holds back by then must not be dropped by the close, and the end must be said."""

    def little_room(sock: socket.socket, stall_s: float = 0.0) -> None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 2048)

    monkeypatch.setattr(accept, "keep_alive_probes", little_room)
    async with (
        fake_engine(says(whole(200, {"text": "x" * 50_000}))) as engine,
        router(tmp_path, engine, config=tls(certificate)) as door,
    ):
        client = await door.connect(believing([certificate]))
        client.stream.transport_stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)  # type: ignore[attr-defined]
        await client.send(chat("connection: close"))
        await door.until("it is answered", lambda: not door.app.gateway.books.live and engine.asked)
        (connection,) = door.app.listeners.connections
        assert connection.line.unsent
        answer = await client.answer("POST")
        assert len(answer.json()["text"]) == 50_000
        assert await client.rest() == (b"", "closed")


async def test_a_refusal_within_an_upload_arrives(tmp_path: Path, certificate: Certificate) -> None:
    config = tls(certificate) + "max_body_bytes = 1000\n"
    async with router(tmp_path, config=config) as door:
        client = await door.connect(believing([certificate]))
        await client.send(request("POST", "/v1/embeddings", body=b"x" * 200_000))
        answer = await client.answer("POST")
        assert (answer.status, answer.closes) == (413, True)
        assert await client.rest() == (b"", "closed")


async def test_a_broken_stream_of_http_1_0_does_not_look_whole(tmp_path: Path, certificate: Certificate) -> None:
    script = says(*streamed(event("a"), end=b""), then="close")
    async with fake_engine(script) as engine, router(tmp_path, engine, config=tls(certificate)) as door:
        client = await door.connect(believing([certificate]))
        await client.send(chat(version="1.0", stream=True))
        with pytest.raises((BrokenOff, trio.BrokenResourceError)):
            await client.answer("POST")


async def test_who_does_not_speak_tls_is_shown_the_door(tmp_path: Path, certificate: Certificate) -> None:
    async with router(tmp_path, config=tls(certificate)) as door:
        for raw in (request("GET", "/healthz"), b"\x16\x03\x01\x00", b"\x00" * 100, b""):
            client = await door.connect()
            if raw:
                await client.send(raw)
            await client.stream.send_eof()  # type: ignore[attr-defined]
            raw, _ = await client.rest()
            assert not raw.startswith(b"HTTP")
        with pytest.raises(trio.BrokenResourceError):
            await (await door.connect(ssl.create_default_context())).send(b"x")
        client = await door.connect(believing([certificate]))
        await client.send(request("GET", "/healthz"))
        assert (await client.answer()).status == 200
        assert [line for line in door.log if line["level"] == "error"] == []


async def test_a_handshake_has_head_s(tmp_path: Path, certificate: Certificate) -> None:
    async with router(tmp_path, config=tls(certificate) + "[deadlines]\nhead_s = 100\n") as door:
        client = await door.connect()
        await client.send(b"\x16\x03\x01")
        await trio.testing.wait_all_tasks_blocked(0.02)
        door.later(50)
        with trio.move_on_after(0.02):
            assert await client.rest() == "nothing yet"
        door.later(101)
        assert await client.rest() == (b"", "closed")


async def test_a_new_certificate_is_shown_after_sighup(tmp_path: Path, certificate: Certificate) -> None:
    """To new connections; those that are open go on, and a bad one changes nothing."""
    (tmp_path / "pair").mkdir()
    used = make(tmp_path / "pair", "used")
    first, second = used.der, certificate
    both = believing([used, second])
    async with fake_engine() as engine, router(tmp_path, engine, config=tls(used)) as door:
        old = await door.connect(both)
        await old.send(chat())
        assert (await old.answer("POST")).status == 200
        assert shown(old) == first

        used.cert.write_bytes(b"nonsense")
        os.kill(os.getpid(), signal.SIGHUP)
        await door.until("it is refused", lambda: door.told("configuration refused, the old one goes on"))
        again = await door.connect(both)
        await again.send(request("GET", "/healthz"))
        assert (await again.answer()).status == 200
        assert shown(again) == first

        used.cert.write_bytes(second.cert.read_bytes())
        used.key.write_bytes(second.key.read_bytes())
        os.kill(os.getpid(), signal.SIGHUP)
        await door.until("it is taken", lambda: door.told("configuration reloaded"))
        new = await door.connect(both)
        await new.send(chat())
        assert (await new.answer("POST")).status == 200
        assert shown(new) == second.der
        await old.send(chat())
        assert (await old.answer("POST")).status == 200


def has_ipv6() -> bool:
    try:
        with socket.socket(socket.AF_INET6) as sock:
            sock.bind(("::1", 0))
    except OSError:
        return False
    return True


@pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
async def test_over_ipv6(tmp_path: Path) -> None:
    config = "[server]\naccess_log = true\n"
    async with fake_engine() as engine, router(tmp_path, engine, config=config, listen="[::1]:0") as door:
        client = await door.connect(host="::1")
        await client.send(chat().replace(b"host: door", b"host: [::1]:%d" % door.port))
        assert (await client.answer("POST")).status == 200
        await client.send(request("GET", f"http://[::1]:{door.port}/healthz").replace(b"door", b"[::1]:%d" % door.port))
        assert (await client.answer()).status == 200
        await door.until("both are written down", lambda: len(door.told("request")) == 2)
        assert door.told("request")[0]["client"].startswith("[::1]:")
        assert door.app.urls == (f"http://[::1]:{door.port}",)

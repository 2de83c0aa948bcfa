"""TLS lines: the same calls mean plaintext, a slow peer loses nothing, and an end that was not said is a failure."""

from __future__ import annotations

import contextlib
import random
import socket
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import trio
import trio.testing

from appliance.nursery.sleeper import DeadlinePassed, Sleeper, sweep_once
from appliance.wire.line import CORKED_BYTES, READ_BYTES, Poller
from appliance.wire.tls import MAX_HELD_BYTES, TlsLine, client_context, server_context
from tests.lines import polling, tcp_pair
from tests.serve_certificates import Certificate, believing, make


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Certificate:
    return make(tmp_path_factory.mktemp("tls"), "door")


def tls_lines(
    poller: Poller, certificate: Certificate, pair: tuple[socket.socket, socket.socket]
) -> tuple[TlsLine, TlsLine]:
    """A client's and a server's line on a pair of sockets."""
    near, far = pair
    client = believing([certificate])
    server = server_context(str(certificate.cert), str(certificate.key))
    return (
        TlsLine(near, poller, client, Sleeper(), server_side=False, server_hostname="localhost"),
        TlsLine(far, poller, server, Sleeper(), server_side=True),
    )


@asynccontextmanager
async def shaken(certificate: Certificate, buffer_bytes: int = 0) -> AsyncIterator[tuple[TlsLine, TlsLine]]:
    async with polling() as poller:
        near, far = tls_lines(poller, certificate, tcp_pair(buffer_bytes))
        async with trio.open_nursery() as nursery:
            nursery.start_soon(near.handshake)
            nursery.start_soon(far.handshake)
        # a sleeper belongs to the task that first sleeps there; those two are over
        near.sleeper, far.sleeper = Sleeper(), Sleeper()
        yield near, far
        near.close()
        far.close()


async def read_all(line: TlsLine) -> bytes:
    got = b""
    while piece := await line.recv():
        got += piece
    return got


@pytest.mark.parametrize("corked", [False, True])
async def test_one_way_and_back(certificate: Certificate, corked: bool) -> None:
    """Pieces of any size through small sockets."""
    rng = random.Random(3)
    sizes = (0, 1, 100, CORKED_BYTES, CORKED_BYTES + 1, READ_BYTES, 3 * READ_BYTES, 1 << 20)
    there = [rng.randbytes(rng.choice(sizes)) for _ in range(20)]
    back = [rng.randbytes(rng.choice(sizes)) for _ in range(20)]

    async def send(line: TlsLine, pieces: list[bytes]) -> None:
        poller = line.poller
        for piece in pieces:
            poller.corked = corked and rng.random() < 0.5
            await line.send_all(piece)
            poller.corked = False
            poller._flush()
        await line.flush()
        assert not line.unsent

    async def check(line: TlsLine, pieces: list[bytes]) -> None:
        wanted = b"".join(pieces)
        got = b""
        while len(got) < len(wanted):
            got += await line.recv()
        assert got == wanted

    async with shaken(certificate, 4096) as (near, far), trio.open_nursery() as nursery:

        async def client() -> None:
            await send(near, there)
            await check(near, back)

        nursery.start_soon(client)
        await check(far, there)
        await send(far, back)


@pytest.mark.parametrize("size", [0, 10, 3 * READ_BYTES])
async def test_parting_throws_away_what_still_comes(certificate: Certificate, size: int) -> None:
    """OpenSSL would call it a fault; closing with it unread would be a reset, and lose what the peer was sent."""
    async with shaken(certificate) as (near, far):
        near.try_send(bytes(size))
        far.try_send(b"no more of this")

        async def part() -> None:
            await far.part()
            far.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(part)
            assert await read_all(near) == b"no more of this"
            with contextlib.suppress(OSError):
                near.try_send(bytes(100_000))
            near.sock.shutdown(socket.SHUT_WR)


async def test_what_is_taken_at_once_is_bounded_and_arrives(certificate: Certificate) -> None:
    """A peer that does not read: `try_send` takes a bounded amount, and what it took leaves without another call."""
    async with shaken(certificate, 4096) as (near, far):
        data = random.Random(4).randbytes(4 << 20)
        taken = 0
        while sent := far.try_send(data[taken:]):
            taken += sent
        assert taken < 2 << 20
        assert far.unsent
        assert len(far._held) <= MAX_HELD_BYTES + 2 * READ_BYTES
        got = b""
        while len(got) < taken:
            got += await near.recv()
        assert got == data[:taken]
        with trio.fail_after(5):
            await far.flush()
        assert not far.unsent


async def test_the_end_of_a_parting_line_is_not_lost(certificate: Certificate) -> None:
    """As the door parts from a slow client: flush, then close."""
    async with shaken(certificate, 4096) as (near, far):
        data = bytes(300_000)

        async def part() -> None:
            sent = far.try_send(data)
            while sent < len(data):
                sent += far.try_send(data[sent:])
                await trio.lowlevel.checkpoint()
            await far.flush()
            far.close()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(part)
            # whether the close_notify behind it found room in a full socket is chance: `close` does not wait for it
            got = b""
            while len(got) < len(data):
                got += await near.recv()
            assert got == data


async def test_a_close_says_that_it_is_one(certificate: Certificate) -> None:
    async with shaken(certificate) as (near, far):
        far.try_send(b"bye")
        far.close()
        assert [await near.recv(), await near.recv(), await near.recv()] == [b"bye", b"", b""]


@pytest.mark.parametrize("end", ["shutdown", "abort"])
async def test_an_end_that_was_not_said_is_a_failure(certificate: Certificate, end: str) -> None:
    """Anybody on the way can send a FIN: a body that lasts until the end must not pass for whole."""
    async with shaken(certificate) as (near, far):
        far.try_send(b"part of an answer")
        assert await near.recv() == b"part of an answer"
        if end == "shutdown":
            far.sock.shutdown(socket.SHUT_WR)
        else:
            far.abort()
        with pytest.raises(ConnectionResetError):
            await near.recv()


async def test_garbage_in_a_stream_is_a_failure(certificate: Certificate) -> None:
    async with shaken(certificate) as (near, far):
        far.sock.send(b"HTTP/1.1 200 OK\r\n\r\n")
        with pytest.raises(ConnectionResetError):
            await near.recv()
        with pytest.raises(OSError):
            while True:
                await far.send_all(bytes(READ_BYTES))
                near.close()


async def test_no_handshake_with_garbage(certificate: Certificate) -> None:
    async with polling() as poller:
        _, far = tls_lines(poller, certificate, pair := tcp_pair())
        pair[0].sendall(b"GET / HTTP/1.1\r\nhost: x\r\n\r\n")
        with pytest.raises(ssl.SSLError):
            await far.handshake()
        far.close()
        pair[0].close()


async def test_the_peer_is_told_why_there_is_no_handshake(certificate: Certificate, tmp_path: Path) -> None:
    """A client that does not know the certificate sends its alert before it goes."""
    other = make(tmp_path, "other")
    async with polling() as poller:
        near, far = tls_lines(poller, certificate, tcp_pair())
        near._tls = believing([other]).wrap_bio(near._incoming, near._outgoing, server_hostname="localhost")
        told: list[str] = []

        async def serve() -> None:
            try:
                await far.handshake()
                await far.recv()
            except (ssl.SSLError, ConnectionResetError) as error:
                told.append(str(error))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(serve)
            with pytest.raises(ssl.SSLCertVerificationError):
                await near.handshake()
            near.close()
        assert "ALERT_UNKNOWN_CA" in told[0].upper()
        far.close()


@pytest.mark.parametrize("cut", [0, 5, 100])
async def test_a_peer_that_leaves_within_the_handshake(certificate: Certificate, cut: int) -> None:
    async with polling() as poller:
        near, far = tls_lines(poller, certificate, tcp_pair())
        with pytest.raises(ssl.SSLWantReadError):
            near._tls.do_handshake()
        near.sock.send(near._outgoing.read()[:cut])
        near.sock.shutdown(socket.SHUT_WR)
        with pytest.raises((ConnectionResetError, ssl.SSLError)):
            await far.handshake()
        near.abort()
        far.close()


async def test_a_handshake_that_takes_too_long(certificate: Certificate) -> None:
    async with polling() as poller:
        near, far = tls_lines(poller, certificate, tcp_pair())
        sleeper = far.sleeper
        assert sleeper is not None
        sleeper.arm(time.monotonic() + 15, "head_s")
        async with trio.open_nursery() as nursery:

            async def shake() -> None:
                with pytest.raises(DeadlinePassed, match="head_s"):
                    await far.handshake()

            nursery.start_soon(shake)
            await trio.testing.wait_all_tasks_blocked()
            sweep_once([sleeper], time.monotonic() + 16)
        near.close()
        far.close()


async def test_closing_before_the_handshake(certificate: Certificate) -> None:
    async with polling() as poller:
        near, far = tls_lines(poller, certificate, tcp_pair())
        far.close()
        far.close()
        near.abort()
        assert len(poller) == 0


async def test_plaintext_that_waits_in_tls_is_news_to_nobody_but_is_read(certificate: Certificate) -> None:
    """One read of the socket may bring several records: the next call finds the rest without asking the socket."""
    async with shaken(certificate) as (near, far):
        for _ in range(5):
            far._tls.write(b"x" * 10)
        far._push()
        got = b""
        while len(got) < 50:
            got += await near.recv()
        assert got == b"x" * 50
        assert near.try_recv() is None


def test_contexts(certificate: Certificate, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    context = server_context(str(certificate.cert), str(certificate.key))
    assert context.minimum_version is ssl.TLSVersion.TLSv1_2
    other = make(tmp_path, "other")
    with pytest.raises(ssl.SSLError):
        server_context(str(certificate.cert), str(other.key))
    with pytest.raises(OSError):
        server_context(str(tmp_path / "none"), str(other.key))
    many = len(client_context().get_ca_certs())
    assert many > 50
    monkeypatch.setenv("SSL_CERT_FILE", str(certificate.cert))
    context = client_context()
    assert len(context.get_ca_certs()) == 1
    assert context.verify_mode is ssl.CERT_REQUIRED and context.check_hostname

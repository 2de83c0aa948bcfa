"""How a link over a socket comes about: called by the agent, answered by the control plane.

What TLS had against a call is kept: under TLS 1.3 a server refuses the client's certificate only after the client
believes itself connected, and says so in the first bytes that are read. A handshake that ends in nothing is seen at
once, and told to the other side.
"""

from __future__ import annotations

import socket
import ssl
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, cast
from urllib.parse import urlsplit

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.events import AcceptConnection, RejectConnection, RejectData, Request
from wsproto.utilities import ProtocolError

from .line import keep_alive_probes
from .link import CLOSE_S, Link, LinkRefused
from .messages import MAX_MESSAGE_BYTES
from .websocket import READ_BYTES, SocketLink, why_broken

LINK_PATH = "/link"

DIAL_S = 10.0
"""Connecting, TLS and the upgrade together, on the calling side."""

_REFUSAL_BYTES = 4096


async def shake_hands(tcp: trio.SocketStream, context: ssl.SSLContext, peer: str) -> trio.SSLStream[trio.SocketStream]:
    """The server's side of a TLS handshake. Where it fails the peer is told why, and LinkRefused is raised. The
    transport stays the caller's to close; no bound on the time is set here."""
    with _refused_by(peer):
        return await _secured(tcp, context, None)


async def _secured(
    tcp: trio.SocketStream, context: ssl.SSLContext, server: str | None
) -> trio.SSLStream[trio.SocketStream]:
    """TLS on a connection, as a client of `server` or, for None, as a server. Where the handshake fails the peer is
    told why: a client that does not accept the server's certificate is known there by nothing else."""
    overheard = _Overheard(context)
    secure = trio.SSLStream(
        tcp,
        cast(ssl.SSLContext, overheard),
        server_hostname=server,
        server_side=server is None,
        https_compatible=True,
    )
    try:
        await secure.do_handshake()
    except trio.BrokenResourceError:
        if alert := overheard.outgoing.read():
            with trio.move_on_after(CLOSE_S), suppress(trio.BrokenResourceError, trio.ClosedResourceError):
                await tcp.send_all(alert)
                await tcp.send_eof()
                while await tcp.receive_some(READ_BYTES):
                    continue
        raise
    return secure


class _Overheard:
    """Stands in for a context to keep what TLS wants to send. Trio drops the alert of a handshake that failed, so the
    peer would see nothing but the end."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context
        self.outgoing = ssl.MemoryBIO()

    def wrap_bio(self, incoming: ssl.MemoryBIO, outgoing: ssl.MemoryBIO, **others: Any) -> ssl.SSLObject:
        self.outgoing = outgoing
        return self._context.wrap_bio(incoming, outgoing, **others)


async def answer(stream: trio.abc.Stream, request: bytes, peer: str, most_bytes: int = MAX_MESSAGE_BYTES) -> SocketLink:
    """Upgrade a connection of which `request` was read: the head of an HTTP request that asks for it, and what came
    behind. No message of the peer may have more than `most_bytes`. The stream stays the caller's until this returns,
    then it is the link's. Raises LinkRefused."""
    websocket = WSConnection(ConnectionType.SERVER)
    with _refused_by(peer):
        try:
            websocket.receive_data(request)
        except UnicodeError as error:  # the host is decoded as a name
            raise LinkRefused(f"{peer}: {error}") from None
        if not isinstance(next(iter(websocket.events()), None), Request):
            raise LinkRefused(f"{peer}: it did not ask for a WebSocket")
        await stream.send_all(websocket.send(AcceptConnection()))
    return SocketLink(stream, websocket, peer, most_bytes)


@asynccontextmanager
async def call(
    url: str, ssl_context: ssl.SSLContext | None = None, dial_s: float = DIAL_S, *, name: str = ""
) -> AsyncIterator[Link]:
    """A link to the control plane at `url`, `wss://host:port` (`ws://` without TLS), closed at the end of the block.
    `name` is what its certificate must be for, "" for the host of the URL.

    Raises LinkRefused when none comes about within `dial_s` seconds.
    """
    link = await _dial(url, ssl_context, dial_s, name)
    try:
        yield link
    finally:
        await link.aclose()


async def _dial(url: str, context: ssl.SSLContext | None, dial_s: float, name: str) -> SocketLink:
    parts = urlsplit(url)
    host, port = parts.hostname or "", parts.port or (443 if parts.scheme == "wss" else 80)
    peer = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
    stage = "connect"
    stream: trio.abc.Stream | None = None
    try:
        with trio.fail_after(dial_s), _refused_by(peer):
            tcp = await trio.open_tcp_stream(host, port)
            stream = tcp
            keep_alive_probes(cast(socket.socket, tcp.socket))
            if parts.scheme == "wss":
                stage = "TLS handshake"
                stream = await _secured(tcp, context or ssl.create_default_context(), name or host)
            stage = "WebSocket upgrade"
            link = SocketLink(stream, await _upgrade(stream, peer), peer)
        stream = None
        return link
    except trio.TooSlowError:
        raise LinkRefused(f"{peer}: no answer to the {stage} within {dial_s:g} s") from None
    finally:
        if stream is not None:
            await trio.aclose_forcefully(stream)


async def _upgrade(stream: trio.abc.Stream, peer: str) -> WSConnection:
    websocket = WSConnection(ConnectionType.CLIENT)
    await stream.send_all(websocket.send(Request(host=peer, target=LINK_PATH)))
    status, said = 0, b""
    while True:
        data = await stream.receive_some(READ_BYTES)
        if data or status:  # an answer without a length ends with the connection
            websocket.receive_data(bytes(data))
        # One at a time: what comes behind the acceptance belongs to the link.
        while (event := next(iter(websocket.events()), None)) is not None:
            match event:
                case AcceptConnection():
                    return websocket
                case RejectConnection():
                    status = event.status_code
                    if not event.has_body:
                        raise LinkRefused(f"{peer}: HTTP {status}", "http")
                case RejectData():
                    said = (said + event.data)[:_REFUSAL_BYTES]
                    if event.body_finished:
                        raise LinkRefused(f"{peer}: HTTP {status}: {said.decode(errors='replace').strip()}", "http")
        if not data:
            raise LinkRefused(f"{peer}: it closed the connection instead of upgrading it")


@contextmanager
def _refused_by(peer: str) -> Iterator[None]:
    try:
        yield
    except (OSError, trio.BrokenResourceError, ProtocolError) as error:
        raise LinkRefused(f"{peer}: {why_broken(error)}", _by(error)) from None


def _by(error: BaseException) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, ProtocolError):
        return "http"
    broken = isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return "tls" if isinstance(cause, ssl.SSLError) and not broken else ""

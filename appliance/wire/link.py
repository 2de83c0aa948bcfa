"""The link between an agent and its control plane, in memory and over a socket, and how it comes about.

A message is one WebSocket frame; `messages.py` says what is in it.

The WebSocket is spoken with wsproto on a Trio stream, by the one task that receives and those that send; there is no
task in between. So what fails is raised where it was asked for and not out of a nursery, a handshake that ends in
nothing is seen at once, and what TLS had against it is kept: under TLS 1.3 a server refuses the client's certificate
only after the client believes itself connected, and says so in the first bytes that are read.

Sending to a peer that does not read waits for as long as that takes: whoever promised anything sets the deadline. A
send that was broken off leaves half a frame behind, so the link is over after it.
"""

from __future__ import annotations

import socket
import ssl
from collections import deque
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any, Protocol, cast
from urllib.parse import urlsplit

import trio
from wsproto import ConnectionType, WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import (
    AcceptConnection,
    BytesMessage,
    CloseConnection,
    Event,
    Ping,
    RejectConnection,
    RejectData,
    Request,
    TextMessage,
)
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import ProtocolError

from ..facts.link import Message
from .handshake import handshake_fault
from .line import keep_alive_probes
from .messages import MAX_MESSAGE_BYTES as MAX_MESSAGE_BYTES
from .messages import Malformed as Malformed
from .messages import UnknownMessage as UnknownMessage
from .messages import Unsendable as Unsendable
from .messages import decode as decode
from .messages import encode as encode

LINK_PATH = "/link"

DIAL_S = 10.0
"""Connecting, TLS and the upgrade together, on the calling side."""

CLOSE_S = 0.5
"""How long the end of a link waits for the peer's: long enough for our last words to arrive before a reset could."""

UNREAD_MESSAGES = 64
"""Messages a link in memory holds in each direction before its sender waits."""

_READ_BYTES = 65536
_REFUSAL_BYTES = 4096
_REASON_BYTES = 123  # a close frame has 125 bytes, two of them the code


class LinkClosed(Exception):
    """The link is over; the text says why, as far as it is known."""


class LinkRefused(Exception):
    """No link came of the call; the text is what the network, TLS or HTTP said. `by` is who said so: `tls` and `http`
    are answers, and asking again at once would get the same ones; "" is a network, or a peer that is not there."""

    def __init__(self, text: str, by: str = "") -> None:
        super().__init__(text)
        self.by = by


class Link(Protocol):
    """One connection. `receive` belongs to one task, `send` to any."""

    peer: str
    """Who is at the other end, for log lines."""

    async def send(self, message: Message) -> None:
        """Hand over a message, waiting for a peer that does not read. Raises LinkClosed, Unsendable."""

    async def receive(self) -> Message:
        """The next message. Raises LinkClosed, UnknownMessage, Malformed."""

    async def aclose(self, reason: str = "") -> None:
        """End the link and tell the peer why, waiting for it at most CLOSE_S. Harmless when repeated."""


# -- in memory ---------------------------------------------------------------------------------------------------------


class MemoryLink:
    """One end of a link within the process. Messages are values that nobody changes, so they pass as they are."""

    def __init__(
        self, peer: str, outgoing: trio.MemorySendChannel[Message], incoming: trio.MemoryReceiveChannel[Message]
    ) -> None:
        self.peer = peer
        self._outgoing = outgoing
        self._incoming = incoming

    async def send(self, message: Message) -> None:
        try:
            await self._outgoing.send(message)
        except trio.BrokenResourceError:
            raise LinkClosed("the other side has ended the link") from None
        except trio.ClosedResourceError:
            raise LinkClosed("the link was ended") from None

    async def receive(self) -> Message:
        try:
            return await self._incoming.receive()
        except trio.EndOfChannel:
            raise LinkClosed("the other side has ended the link") from None
        except trio.ClosedResourceError:
            raise LinkClosed("the link was ended") from None

    async def aclose(self, reason: str = "") -> None:
        self._outgoing.close()
        self._incoming.close()
        await trio.lowlevel.checkpoint()


def memory_links(peer: str = "this process") -> tuple[Link, Link]:
    """The two ends of a link within the process. Close both; what was sent before one closes can still be received."""
    there, here = trio.open_memory_channel[Message](UNREAD_MESSAGES)
    back_there, back_here = trio.open_memory_channel[Message](UNREAD_MESSAGES)
    return MemoryLink(peer, there, back_here), MemoryLink(peer, back_there, here)


# -- over a socket -----------------------------------------------------------------------------------------------------


class SocketLink:
    """A WebSocket on `stream`, upgraded already; `answer` and `call` make it. It owns the stream."""

    def __init__(
        self, stream: trio.abc.Stream, websocket: WSConnection, peer: str, most_bytes: int = MAX_MESSAGE_BYTES
    ) -> None:
        self.peer = peer
        self._most_bytes = most_bytes
        self._stream = stream
        self._websocket = websocket
        self._turn = trio.StrictFIFOLock()
        self._over = ""
        self._closed = False
        self._peer_ended = False
        self._part = bytearray()
        self._arrived: deque[bytes] = deque()
        self._replies: deque[tuple[Event, str]] = deque()
        self._take_events()

    async def send(self, message: Message) -> None:
        await self._write(BytesMessage(encode(message)))

    async def receive(self) -> Message:
        if self._arrived:
            await trio.lowlevel.checkpoint()
        while not self._arrived:
            await self._reply()
            if self._over:
                raise LinkClosed(self._over)
            try:
                data = await self._stream.receive_some(_READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._peer_ended = True
                raise LinkClosed(self._end(_why(error))) from None
            if not data:
                self._peer_ended = True
                raise LinkClosed(self._end("the connection ended without a word"))
            self._take_events(bytes(data))
        return decode(self._arrived.popleft())

    async def aclose(self, reason: str = "") -> None:
        if self._closed:
            return
        self._closed = True
        try:
            with trio.move_on_after(CLOSE_S):
                await self._part_with(reason)
        finally:
            self._over = self._over or "the link was ended"
            await trio.aclose_forcefully(self._stream)

    async def _part_with(self, reason: str) -> None:
        """Say the last word and hear the peer's, throwing away what else it sends: closing with bytes unread would
        make it a reset, which can overtake what we said last."""
        try:
            await self._reply()
            if self._peer_ended:
                return
            if not self._over and self._websocket.state is ConnectionState.OPEN:
                short = reason.encode()[:_REASON_BYTES].decode(errors="ignore")
                await self._write(CloseConnection(code=1000, reason=short or None))
            while await self._stream.receive_some(_READ_BYTES):
                continue
        except (LinkClosed, trio.BrokenResourceError, trio.ClosedResourceError, trio.BusyResourceError):
            return  # gone already, or another task is reading: it sees the end

    async def _write(self, event: Event) -> None:
        async with self._turn:
            if self._over:
                raise LinkClosed(self._over)
            try:
                data = self._websocket.send(event)
            except ProtocolError as error:  # the peer has said its last word meanwhile
                raise LinkClosed(self._end(str(error))) from None
            try:
                await self._stream.send_all(data)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                raise LinkClosed(self._end(_why(error))) from None
            except BaseException:
                self._end("a send was broken off")
                raise

    async def _reply(self) -> None:
        """Send the answers to pings, and the last word."""
        while self._replies and not self._over:
            event, ending = self._replies.popleft()
            if not ending:
                await self._write(event)
                continue
            with trio.move_on_after(CLOSE_S):
                await self._write(event)
            self._over = ending

    def _take_events(self, data: bytes = b"") -> None:
        """Sort what has arrived: whole messages, answers to give, the end."""
        try:
            self._websocket.receive_data(data)
            for event in self._websocket.events():
                match event:
                    case BytesMessage() | TextMessage():
                        self._part += event.data.encode() if isinstance(event.data, str) else event.data
                        if len(self._part) > self._most_bytes:
                            why = f"a message has more than {self._most_bytes} bytes"
                            self._break_off(CloseReason.MESSAGE_TOO_BIG, why)
                            return
                        if event.message_finished:
                            self._arrived.append(bytes(self._part))
                            self._part.clear()
                    case Ping():
                        self._replies.append((event.response(), ""))
                    case CloseConnection() if self._websocket.state is ConnectionState.OPEN:
                        # wsproto's word for bytes that it cannot read, with what we should answer
                        self._break_off(event.code, f"what arrived is not a WebSocket: {event.reason}")
                        return
                    case CloseConnection():
                        self._peer_ended = True
                        why = f": {event.reason}" if event.reason else ""
                        self._replies.append((event.response(), f"the other side has ended the link{why}"))
        except ProtocolError as error:
            self._break_off(CloseReason.PROTOCOL_ERROR, f"what arrived is not a WebSocket: {error}")

    def _break_off(self, code: int, reason: str) -> None:
        self._part.clear()
        if self._websocket.state is ConnectionState.OPEN:
            self._replies.append((CloseConnection(code=code, reason=reason), reason))
        else:
            self._end(reason)

    def _end(self, reason: str) -> str:
        self._over = self._over or reason
        return self._over


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
                while await tcp.receive_some(_READ_BYTES):
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
        data = await stream.receive_some(_READ_BYTES)
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
        raise LinkRefused(f"{peer}: {_why(error)}", _by(error)) from None


def _by(error: BaseException) -> str:
    cause = error.__cause__ or error
    if isinstance(cause, ProtocolError):
        return "http"
    broken = isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError)
    return "tls" if isinstance(cause, ssl.SSLError) and not broken else ""


def _why(error: BaseException) -> str:
    """What a failed operation on a stream says to an operator. Trio wraps what TLS said."""
    cause = error.__cause__ or error
    if isinstance(cause, BaseExceptionGroup):  # one per address that was tried
        cause = cause.exceptions[0]
    if isinstance(cause, ssl.SSLEOFError | ssl.SSLZeroReturnError):
        return "it closed the connection in the middle"
    if isinstance(cause, ssl.SSLError):
        return handshake_fault(cause)
    if isinstance(cause, OSError):
        return cause.strerror or str(cause)
    return str(cause) or "the connection broke"

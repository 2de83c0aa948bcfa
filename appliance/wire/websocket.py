"""The link over a socket: a message is one WebSocket frame.

The WebSocket is spoken with wsproto on a Trio stream, by the one task that receives and those that send; there is no
task in between. So what fails is raised where it was asked for and not out of a nursery, and an end is seen at once.

Sending to a peer that does not read waits for as long as that takes: whoever promised anything sets the deadline. A
send that was broken off leaves half a frame behind, so the link is over after it.
"""

from __future__ import annotations

import ssl
from collections import deque

import trio
from wsproto import WSConnection
from wsproto.connection import ConnectionState
from wsproto.events import BytesMessage, CloseConnection, Event, Ping, TextMessage
from wsproto.frame_protocol import CloseReason
from wsproto.utilities import ProtocolError

from ..facts.link import Message
from .handshake import handshake_fault
from .link import CLOSE_S, LinkClosed
from .messages import MAX_MESSAGE_BYTES, decode, encode

READ_BYTES = 65536
_REASON_BYTES = 123  # a close frame has 125 bytes, two of them the code


class SocketLink:
    """A WebSocket on `stream`, upgraded already; `calls.py` makes it. It owns the stream."""

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
                data = await self._stream.receive_some(READ_BYTES)
            except (trio.BrokenResourceError, trio.ClosedResourceError) as error:
                self._peer_ended = True
                raise LinkClosed(self._end(why_broken(error))) from None
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
            while await self._stream.receive_some(READ_BYTES):
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
                raise LinkClosed(self._end(why_broken(error))) from None
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


def why_broken(error: BaseException) -> str:
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

"""An engine that says what a test wants it to say, byte for byte, and remembers what it was asked.

Requests are read by h11, which is stricter than most engines: what the router sends is proved to be HTTP by every test
that uses this. Answers are raw bytes, since the interesting ones are those that no library would send.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import attrs
import h11
import trio

MODEL = "llama"
_CUT = struct.pack("ii", 1, 0)


@attrs.frozen
class Asked:
    """One request as it arrived; header names in lower case, as h11 gives them."""

    method: str
    target: str
    fields: tuple[tuple[str, str], ...]
    body: bytes

    @property
    def by_name(self) -> dict[str, str]:
        return dict(self.fields)

    def json(self) -> Any:
        return json.loads(self.body)


@attrs.define(eq=False)
class Peer:
    """The engine's end of one connection: what a script answers with."""

    stream: trio.SocketStream
    buffer: bytes = b""
    open: bool = True

    async def send(self, *pieces: bytes) -> None:
        """Each piece in a send of its own, with the scheduler's turn in between; a router that left is no error."""
        try:
            for piece in pieces:
                await self.stream.send_all(piece)
                await trio.lowlevel.checkpoint()
        except trio.BrokenResourceError:
            self.open = False

    async def close(self) -> None:
        """An ordinary end: FIN."""
        self.open = False
        await self.stream.aclose()

    async def reset(self) -> None:
        """The end of a crashed process: RST."""
        self.open = False
        self.stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _CUT)
        await self.stream.aclose()

    async def left(self) -> None:
        """Wait until the router closes its end."""
        try:
            while await self.stream.receive_some(65536):
                continue
        except trio.BrokenResourceError:
            pass
        self.open = False

    async def request(self) -> Asked | None:
        """The next request, None at the end of the connection. h11's complaints come through as they are."""
        http = h11.Connection(h11.SERVER)
        if self.buffer:
            http.receive_data(self.buffer)
        head: h11.Request | None = None
        body = bytearray()
        while True:
            event = http.next_event()
            if event is h11.NEED_DATA:
                try:
                    data = await self.stream.receive_some(65536)
                except trio.BrokenResourceError:
                    return None
                if not data and head is None and not http.trailing_data[0]:
                    return None
                http.receive_data(data)
            elif isinstance(event, h11.Request):
                head = event
            elif isinstance(event, h11.Data):
                body += event.data
            elif isinstance(event, h11.EndOfMessage):
                assert head is not None
                self.buffer = bytes(http.trailing_data[0])
                fields = tuple((name.decode("latin-1"), value.decode("latin-1")) for name, value in head.headers)
                return Asked(head.method.decode(), head.target.decode("latin-1"), fields, bytes(body))
            else:
                return None


Script = Callable[[Asked, Peer], Awaitable[None]]


@attrs.define(eq=False)
class FakeEngine:
    """`script` answers everything but `GET /v1/models`, which lists `models`; `asked` holds what it answered to."""

    port: int
    script: Script
    id: str = "a"
    models: tuple[str, ...] = (MODEL,)
    capacity: int = 1000
    """As the configuration tells it: scripts answer whoever comes, so that nobody waits unless a test says so."""
    asked: list[Asked] = attrs.field(factory=list)
    connections: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}/v1"

    @property
    def toml(self) -> str:
        """The engine as an `[[endpoints]]` table."""
        models = json.dumps(list(self.models))
        return f'[[endpoints]]\nid = "{self.id}"\nurl = "{self.url}"\nmodels = {models}\ncapacity = {self.capacity}\n'

    async def _serve(self, stream: trio.SocketStream) -> None:
        self.connections += 1
        peer = Peer(stream)
        async with stream:
            while peer.open and (asked := await peer.request()) is not None:
                if asked.target == "/v1/models" and asked.method == "GET":
                    listed = [{"id": name, "object": "model", "owned_by": "fake"} for name in self.models]
                    await peer.send(whole(200, {"object": "list", "data": listed}))
                else:
                    self.asked.append(asked)
                    await self.script(asked, peer)


@asynccontextmanager
async def fake_engine(script: Script | None = None, *, id: str = "a") -> AsyncIterator[FakeEngine]:
    """An engine on a port of the kernel's choice; it answers `CHAT` unless a script says otherwise."""
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
        engine = FakeEngine(listener.socket.getsockname()[1], script or says(whole(200, CHAT)), id)
        nursery.start_soon(trio.serve_listeners, engine._serve, [listener])
        yield engine
        nursery.cancel_scope.cancel()


# -- answers -----------------------------------------------------------------------------------------------------------

CHAT: dict[str, Any] = {
    "id": "chatcmpl-1",
    "object": "chat.completion",
    "created": 1,
    "model": MODEL,
    "choices": [{"index": 0, "message": {"role": "assistant", "content": "hello"}, "finish_reason": "stop"}],
    "usage": {"prompt_tokens": 3, "completion_tokens": 1, "total_tokens": 4},
}
DONE = b"data: [DONE]\n\n"
STREAM_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def whole(status: int, body: Any, *fields: str) -> bytes:
    """An answer with a length; `body` is bytes, or a value that is sent as JSON; `fields` are further lines."""
    data = body if isinstance(body, bytes) else json.dumps(body).encode()
    typed = any(line.lower().startswith("content-type:") for line in fields)
    lines = fields if typed else ("content-type: application/json", *fields)
    head = "\r\n".join((f"HTTP/1.1 {status} Said", *lines, f"content-length: {len(data)}"))
    return head.encode("latin-1") + b"\r\n\r\n" + data


def event(text: str, **more: Any) -> bytes:
    """One event of a chat stream, with `text` as its content."""
    choice = {"index": 0, "delta": {"content": text}, "finish_reason": None}
    value = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": MODEL, "choices": [choice]}
    return b"data: " + json.dumps({**value, **more}).encode() + b"\n\n"


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(data), data)


LAST = b"0\r\n\r\n"


def streamed(*events: bytes, end: bytes = LAST) -> tuple[bytes, ...]:
    """The pieces of a stream: its head, each event as a chunk, and `end` as it is."""
    return (STREAM_HEAD, *(chunk(data) for data in events), *([end] if end else []))


# -- scripts -----------------------------------------------------------------------------------------------------------


def says(*pieces: bytes, then: str = "keep") -> Script:
    """Send these pieces, then "keep" the connection, "close" or "reset" it, or stay "silent" until the router goes."""

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(*pieces)
        match then:
            case "close":
                await peer.close()
            case "reset":
                await peer.reset()
            case "silent":
                await peer.left()
            case _:
                assert then == "keep", then

    return script


def in_turn(*scripts: Script) -> Script:
    """The first request gets the first script, and so on; the last one serves all that follow."""
    left = list(scripts)

    async def script(asked: Asked, peer: Peer) -> None:
        await (left.pop(0) if len(left) > 1 else left[0])(asked, peer)

    return script

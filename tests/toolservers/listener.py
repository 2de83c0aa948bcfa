"""A small HTTP server for tests, in the test's own event loop: one handler for all requests, and clients that leave."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress

import attrs
import h11
import httpx
import trio

from appliance.facts.errors import Refusal
from appliance.mcp.merge import Merge
from appliance.mcp.serve import Endpoint
from tests.toolservers.scripted import Server


@attrs.frozen
class Request:
    method: str
    path: str
    fields: tuple[tuple[str, str], ...]
    body: bytes

    def field(self, name: str) -> str | None:
        return next((text for key, text in self.fields if key.lower() == name), None)


class Reply:
    """The answer to one request, as `appliance.mcp.serve.Out` wants it. Without `length` it leaves chunked."""

    def __init__(self, stream: trio.abc.Stream, connection: h11.Connection) -> None:
        self._stream = stream
        self._connection = connection
        self._head = b""
        self.ended = False

    def start(self, status: int, fields: list[tuple[bytes, bytes]], length: int | None) -> None:
        sized = [] if length is None else [(b"content-length", b"%d" % length)]
        self._head = self._connection.send(h11.Response(status_code=status, headers=[*fields, *sized])) or b""

    async def send(self, data: bytes) -> None:
        head, self._head = self._head, b""
        await self._stream.send_all(head + (self._connection.send(h11.Data(data=data)) or b""))

    async def end(self) -> None:
        head, self._head = self._head, b""
        await self._stream.send_all(head + (self._connection.send(h11.EndOfMessage()) or b""))
        self.ended = True

    async def whole(self, status: int, body: bytes, content_type: bytes = b"application/json", **fields: str) -> None:
        """`fields` in Python's spelling: `mcp_session_id="..."`."""
        more = [(name.replace("_", "-").encode(), text.encode()) for name, text in fields.items()]
        self.start(status, [(b"content-type", content_type), *more], len(body))
        await self.send(body)
        await self.end()


async def relayed(server: Server, request: Request, reply: Reply) -> None:
    """Have a server in memory answer. Raises what its tools raise."""
    asked = httpx.Request(request.method, f"http://x{request.path}", headers=request.fields, content=request.body)
    answer = await server.handle(asked)
    reply.start(answer.status_code, [(name.lower(), value) for name, value in answer.headers.raw], None)
    async for piece in answer.aiter_raw():
        await reply.send(piece)
    await reply.end()


Handler = Callable[[Request, Reply], Awaitable[None]]


@asynccontextmanager
async def listening(handler: Handler, port: int = 0) -> AsyncIterator[str]:
    """Serve on loopback; the address without a path. A handler whose client leaves is cancelled."""
    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(port, host="127.0.0.1")

        async def serve(stream: trio.SocketStream) -> None:
            try:
                async with stream:
                    await _connection(stream, handler)
            except (trio.BrokenResourceError, h11.RemoteProtocolError):
                return

        nursery.start_soon(trio.serve_listeners, serve, listeners)
        yield f"http://127.0.0.1:{listeners[0].socket.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def _connection(stream: trio.SocketStream, handler: Handler) -> None:
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20)
    while True:
        request = await _request(stream, connection)
        if request is None:
            return
        reply = Reply(stream, connection)
        async with trio.open_nursery() as nursery:

            async def watch(scope: trio.CancelScope) -> None:
                with suppress(trio.BrokenResourceError):  # a reset is how some leave
                    while data := await stream.receive_some(65536):
                        connection.receive_data(data)  # of the next request, which may come before we are done here
                scope.cancel()

            nursery.start_soon(watch, nursery.cancel_scope)
            await handler(request, reply)
            nursery.cancel_scope.cancel()
        if not reply.ended or connection.our_state is not h11.DONE:
            return
        connection.start_next_cycle()


async def _request(stream: trio.SocketStream, connection: h11.Connection) -> Request | None:
    head: h11.Request | None = None
    body = b""
    while True:
        event = connection.next_event()
        if event is h11.NEED_DATA:
            connection.receive_data(await stream.receive_some(65536))
        elif isinstance(event, h11.Request):
            head = event
        elif isinstance(event, h11.Data):
            body += event.data
        elif isinstance(event, h11.EndOfMessage):
            assert head is not None
            fields = tuple((name.decode("latin-1"), text.decode("latin-1")) for name, text in head.headers)
            return Request(head.method.decode(), head.target.decode(), fields, body)
        else:
            return None


@asynccontextmanager
async def served(merge: Merge) -> AsyncIterator[str]:
    """The merge behind a real address: its URL with /mcp."""
    endpoint = Endpoint(merge)

    async def handle(request: Request, reply: Reply) -> None:
        try:
            await endpoint.answer(request.method, request.fields, request.body, reply)
        except Refusal as refusal:
            more = {name.lower().replace("-", "_"): text for name, text in refusal.headers}
            await reply.whole(refusal.status, b'{"error":{"code":"%b"}}' % refusal.code.encode(), **more)

    async with listening(handle) as url:
        yield url + "/mcp"

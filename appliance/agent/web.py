"""The agent's HTTP: `/status`, `/events`, `/metrics`, `/healthz`, for routers, Prometheus and people.

One request per connection: a router asks every few seconds at most, and what it asks for is read from memory. So this
is a small server of its own, on heads that are read by the same grammar as the door's; only `/events` stays open, as a
WebSocket.
"""

from __future__ import annotations

import contextlib
import ipaddress
import resource
import socket
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any
from urllib.parse import parse_qs

import msgspec
import structlog
import trio
from trio_websocket import ConnectionClosed, HandshakeError, WebSocketConnection, wrap_server_stream

from appliance.agent.events import Board
from appliance.agent.status import one_group, without_tails
from appliance.agent.wording import to_json
from appliance.wire.answered import heard_out, send_answer
from appliance.wire.asked import read_head
from appliance.wire.head import BadHead, RequestHead

HEAD_S = 10.0
WRITE_S = 30.0
PING_S = 15.0
PONG_S = 30.0
MOST_CONNECTIONS = 256
"""At one time, listeners apart; one more, and the oldest is closed. An honest request is over within milliseconds, so
it is not the one that has been open for longest."""

MOST_LISTENERS = 128
"""Who holds `/events` open; one more is told to ask for `/status`."""

_JSON = "application/json"
_TEXT = "text/plain; charset=utf-8"
_PATHS = ("/status", "/events", "/metrics", "/healthz")

Render = Callable[[str], tuple[bytes, str]]

log = structlog.get_logger("http")


class Site:
    """All connections of one agent. `render` makes `/metrics` for an Accept field, and is made by the first scrape."""

    def __init__(self, board: Board, render: Callable[[], Render]) -> None:
        self._board = board
        self._make_render = render
        self._render: Render | None = None
        # Descriptors are needed for engines too.
        self._most = min(MOST_CONNECTIONS, max(8, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 4))
        self._brief: dict[trio.SocketStream, trio.CancelScope] = {}
        self._listeners = 0

    async def serve(
        self, sockets: Iterable[socket.socket], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve on listening sockets until cancelled. They are closed by it."""
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]
        task_status.started()  # they listen already
        await trio.serve_listeners(self._connection, listeners)

    async def _connection(self, stream: trio.SocketStream) -> None:
        """One connection from its beginning to its end. Nothing that happens on it reaches the others."""
        with trio.CancelScope() as brief:
            while len(self._brief) >= self._most:
                self._brief.pop(next(iter(self._brief))).cancel()
            self._brief[stream] = brief
            try:
                await self._answer(stream)
            except (
                trio.BrokenResourceError,
                trio.ClosedResourceError,
                ConnectionClosed,
                HandshakeError,
                trio.TooSlowError,
            ):
                return  # that client has left, or does not read
            except Exception as error:
                log.error("request failed", exc_info=error)
            finally:
                self._brief.pop(stream, None)
                await trio.aclose_forcefully(stream)

    async def _answer(self, stream: trio.SocketStream) -> None:
        try:
            with trio.fail_after(HEAD_S):
                head, received = await read_head(stream)
        except BadHead as bad:
            await _send(stream, bad.status, _JSON, _error(str(bad)))
            return
        if head is None:
            return
        path = head.path.decode("latin-1").rstrip("/")
        if path not in _PATHS:
            await _send(stream, 404, _JSON, _error(f"here are {', '.join(_PATHS)}"))
        elif head.method not in (b"GET", b"HEAD"):
            await _send(stream, 405, _JSON, _error(f"{path} takes GET, HEAD"), (("allow", "GET, HEAD"),))
        elif path == "/events":
            await self._events(stream, head, received)
        else:
            body, content_type = self._body(path, head, _is_loopback(stream))
            await _send(stream, 200, content_type, body, with_body=head.method == b"GET")

    def _body(self, path: str, head: RequestHead, own: bool) -> tuple[bytes, str]:
        if path == "/healthz":
            return b"ok\n", _TEXT
        if path == "/metrics":
            if self._render is None:
                self._render = self._make_render()
            return self._render(head.by_name.get(b"accept", b"").decode("latin-1"))
        whole = self._board.read()
        asked = parse_qs(head.query.decode("latin-1")).get("group")
        if asked:
            whole = one_group(whole, asked[-1])
        return to_json(whole if own else without_tails(whole)), _JSON

    async def _events(self, stream: trio.SocketStream, head: RequestHead, received: bytes) -> None:
        if head.by_name.get(b"upgrade", b"").lower() != b"websocket" or b"sec-websocket-key" not in head.by_name:
            fields = (("upgrade", "websocket"),)
            await _send(stream, 426, _JSON, _error("/events is a WebSocket; /status is the document"), fields)
            return
        if self._listeners >= min(MOST_LISTENERS, self._most):
            await _send(stream, 503, _JSON, _error("too many listen already; /status is the document"))
            return
        self._brief.pop(stream, None)
        self._listeners += 1
        try:
            await self._listen(stream, received)
        finally:
            self._listeners -= 1

    async def _listen(self, stream: trio.SocketStream, received: bytes) -> None:
        own = _is_loopback(stream)
        async with trio.open_nursery() as nursery:
            # Caught in here: out of a nursery they would come as a group.
            with contextlib.suppress(ConnectionClosed, HandshakeError, trio.TooSlowError):
                with trio.fail_after(HEAD_S):
                    request = await wrap_server_stream(nursery, _Again(stream, received), max_message_size=1 << 16)
                    client = await request.accept()
                nursery.start_soon(_discard, client, nursery.cancel_scope)
                await self._tell(client, own)
            nursery.cancel_scope.cancel()

    async def _tell(self, client: WebSocketConnection, own: bool) -> None:
        """The whole document, then every change of it, until one side has enough."""
        with self._board.subscribed() as (snapshot, news):
            whole = snapshot if own else without_tails(snapshot)
            await _message(client, {"type": "snapshot", "seq": snapshot["seq"], "data": whole})
            while True:
                event = None
                with trio.move_on_after(PING_S) as quiet:
                    try:
                        event = await news.receive()
                    except trio.EndOfChannel:
                        return
                if quiet.cancelled_caught:
                    with trio.fail_after(PONG_S):
                        await client.ping()
                elif event is not None:
                    await _message(client, event if own else _without_tails(event))


async def _discard(client: WebSocketConnection, connection: trio.CancelScope) -> None:
    """Read what the client says, until it leaves. It is nothing to us, but unread it would hold back the answers to our
    pings."""
    with contextlib.suppress(ConnectionClosed):
        while True:
            await client.get_message()
    connection.cancel()


async def _message(client: WebSocketConnection, document: dict[str, Any]) -> None:
    with trio.fail_after(WRITE_S):
        await client.send_message(to_json(document).decode())


def _without_tails(event: dict[str, Any]) -> dict[str, Any]:
    if event["type"] != "appliance_shards":
        return event
    patch = [
        {**each, "value": {name: row | {"tail": None} for name, row in each["value"].items()}}
        for each in event["patch"]
    ]
    return {**event, "patch": patch}


async def _send(
    stream: trio.SocketStream,
    status: int,
    content_type: str,
    body: bytes,
    fields: Iterable[tuple[str, str]] = (),
    *,
    with_body: bool = True,
) -> None:
    part = partial(heard_out, stream, WRITE_S)
    await send_answer(stream, status, content_type, body, fields, with_body=with_body, within_s=WRITE_S, part=part)


def _error(message: str) -> bytes:
    return msgspec.json.encode({"error": message})


def _is_loopback(stream: trio.SocketStream) -> bool:
    """Whether the other end is on this machine, by its address."""
    try:
        address = ipaddress.ip_address(stream.socket.getpeername()[0].partition("%")[0])
    except (OSError, ValueError):
        return False
    mapped = getattr(address, "ipv4_mapped", None)
    return (mapped or address).is_loopback


class _Again(trio.abc.Stream):
    """A stream whose first bytes were read already, and come once more."""

    def __init__(self, stream: trio.SocketStream, first: bytes) -> None:
        self._stream = stream
        self._first = first

    async def receive_some(self, max_bytes: int | None = None) -> bytes | bytearray:
        if self._first:
            given = self._first[:max_bytes] if max_bytes is not None else self._first
            self._first = self._first[len(given) :]
            await trio.lowlevel.checkpoint()
            return given
        return await self._stream.receive_some(max_bytes)

    async def send_all(self, data: bytes | bytearray | memoryview) -> None:
        await self._stream.send_all(data)

    async def wait_send_all_might_not_block(self) -> None:
        await self._stream.wait_send_all_might_not_block()

    async def aclose(self) -> None:
        await self._stream.aclose()

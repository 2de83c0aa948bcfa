"""A control plane that does what a test says, over real sockets: `async with control(cluster) as plane`.

As a process (`python -m tests.fake_control STATE PORT`) it welcomes everybody, prints a line of JSON for each
registration and each news, and sends each line of JSON on its standard input as a message to whoever called last.
"""

from __future__ import annotations

import contextlib
import json
import math
import sys
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, Literal

import trio

from appliance.facts import link as say
from appliance.store.papers import Papers
from appliance.wire.calls import answer, shake_hands
from appliance.wire.link import LinkClosed, LinkRefused, decode, encode
from appliance.wire.tls import link_server_context
from appliance.wire.websocket import SocketLink
from tests.caller_scene import Line

Mode = Literal["serve", "no handshake", "no upgrade", "teapot"]


class Plane:
    """`calls` are those that came through; `failures` is what TLS had against the others. `mode` holds for later
    connections."""

    def __init__(self, papers: Papers) -> None:
        self.papers = papers
        self.mode: Mode = "serve"
        self.port = 0
        self.failures: list[str] = []
        self.connections = 0
        self._send, self._calls = trio.open_memory_channel[tuple[Line, dict[str, Any]]](math.inf)

    @property
    def url(self) -> str:
        return f"wss://127.0.0.1:{self.port}"

    async def call(self) -> tuple[Line, dict[str, Any]]:
        """The next call, and the certificate it showed."""
        with trio.fail_after(30):
            return await self._calls.receive()

    async def welcomed(self, **how: Any) -> tuple[Line, say.Register]:
        line, _ = await self.call()
        return line, await line.welcome(**{"clock": time.time(), **how})

    async def serve(self, port: int = 0, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
        self.port = listener.socket.getsockname()[1]
        task_status.started()
        await trio.serve_listeners(self._connection, [listener])

    async def _connection(self, tcp: trio.SocketStream) -> None:
        self.connections += 1
        if self.mode == "no handshake":
            await trio.sleep_forever()
        papers = self.papers
        context = link_server_context(papers.server, papers.server_key, papers.root)
        try:
            stream = await shake_hands(tcp, context, "agent")
            if self.mode == "no upgrade":
                await trio.sleep_forever()
            request = b""
            while b"\r\n\r\n" not in request:
                request += await stream.receive_some() or b"\r\n\r\n"
            if self.mode == "teapot":
                await stream.send_all(b"HTTP/1.1 418 Teapot\r\ncontent-length: 0\r\n\r\n")
                await trio.sleep_forever()
            shown = stream.getpeercert() or {}
            link = await answer(stream, request, "agent")
        except LinkRefused as refused:
            self.failures.append(str(refused))
            await trio.aclose_forcefully(tcp)
            return
        self._send.send_nowait((Line(link), shown))
        await trio.sleep_forever()


async def cut(line: Line) -> None:
    """End a connection as a killed process would."""
    link = line.link
    assert isinstance(link, SocketLink)
    await trio.aclose_forcefully(link._stream)


async def send_raw(line: Line, data: bytes, *, half: bool = False) -> None:
    """Send what is no message; `half` of the frame only."""
    from wsproto.events import BytesMessage

    link = line.link
    assert isinstance(link, SocketLink)
    frame = link._websocket.send(BytesMessage(data))
    await link._stream.send_all(frame[: len(frame) // 2] if half else frame)


@asynccontextmanager
async def control(papers: Papers) -> AsyncIterator[Plane]:
    made = Plane(papers)
    async with trio.open_nursery() as nursery:
        await nursery.start(made.serve)
        yield made
        nursery.cancel_scope.cancel()


async def be_a_process(state: str, port: int) -> None:
    plane = Plane(Papers.of(state))
    last: list[Line] = []

    async def attend(line: Line) -> None:
        register = await line.welcome(beat_s=1.0, silence_s=10.0, clock=time.time())
        last[:] = [line]
        tell("register", register.reports)
        with contextlib.suppress(LinkClosed):
            while True:
                message = await line.link.receive()
                if isinstance(message, say.News):
                    tell("news", message.reports)

    def tell(kind: str, reports: Any) -> None:
        rows = {each.shard.id: {"state": each.state, "pid": each.pid} for each in reports}
        print(json.dumps({"kind": kind, "shards": rows}), flush=True)

    async def heed() -> None:
        async for text in trio.wrap_file(sys.stdin):
            await last[0].say(decode(text))

    async with trio.open_nursery() as nursery:
        await nursery.start(plane.serve, port)
        print(json.dumps({"kind": "port", "port": plane.port}), flush=True)
        nursery.start_soon(heed)
        while True:
            line, _ = await plane._calls.receive()
            nursery.start_soon(attend, line)


def as_text(message: say.Message) -> str:
    return encode(message).decode()


if __name__ == "__main__":
    trio.run(be_a_process, sys.argv[1], int(sys.argv[2]))

"""A served poller and pairs of sockets on it, for tests of lines."""

from __future__ import annotations

import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import trio

from appliance.nursery.sleeper import Sleeper
from appliance.wire.line import Line, Poller

WITHIN_S = 20.0


def tcp_pair(buffer_bytes: int = 0) -> tuple[socket.socket, socket.socket]:
    """Two connected sockets; with `buffer_bytes`, as little as the kernel allows lies between them."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        near = socket.socket()
        for sock in (near, listener) if buffer_bytes else ():
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, buffer_bytes)
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, buffer_bytes)
        near.connect(listener.getsockname())
        far, _ = listener.accept()
    return near, far


@asynccontextmanager
async def polling() -> AsyncIterator[Poller]:
    """A poller that is served until the block ends."""
    poller = Poller()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poller.run)
        with trio.fail_after(WITHIN_S):
            yield poller
        nursery.cancel_scope.cancel()
    poller.close()


def line_on(sock: socket.socket, poller: Poller) -> Line:
    return Line(sock, poller, Sleeper())


def drain(sock: socket.socket) -> bytes:
    """All that has arrived on a blocking socket by now."""
    taken = b""
    sock.setblocking(False)
    try:
        while data := sock.recv(1 << 20):
            taken += data
    except BlockingIOError:
        pass
    return taken

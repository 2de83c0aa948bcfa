"""The HTTP front of the engine: accepts connections and holds the tasks that serve them."""

from __future__ import annotations

import errno
import socket

import trio

from ..nursery.sleeper import Sleeper, sweep
from ..wire.line import Line, Poller
from .connection import Connection
from .engine import Engine
from .ticker import Ticker

BACKLOG = 4096
STOP_S = 0.5
"""How long a stop waits for last words to be sent: a client that does not read must not hold the process up."""
_ACCEPTS_AT_ONCE = 64
_NO_ROOM = (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM)
_NO_ROOM_PAUSE_S = 0.1


class Front:
    """Serves one engine at one listening socket."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._poller = Poller()
        self._sleepers: set[Sleeper] = set()
        self._connections: set[Connection] = set()
        self._calls_scope = trio.CancelScope()
        self._accept_scope = trio.CancelScope()
        self._ended = trio.Event()
        self._serving = False

    async def serve(
        self, listener: socket.socket, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """Serve until `stop` or `crash`; closes the listener. Started when connections are taken."""
        try:
            listener.listen(BACKLOG)
            self._serving = True
            async with trio.open_nursery() as ground:
                ground.start_soon(self._poller.run)
                ground.start_soon(sweep, self._sleepers, trio.current_time)
                ground.start_soon(Ticker(self.engine).run)
                with self._calls_scope:
                    async with trio.open_nursery() as calls:
                        task_status.started()
                        with self._accept_scope:
                            await self._accept(listener, calls)
                        listener.close()
                ground.cancel_scope.cancel()
        finally:
            listener.close()
            self._poller.close()
            self._ended.set()

    async def stop(self, message: str) -> None:
        """Take no more connections, end the streams with an error event, and wait until `serve` has ended: `STOP_S`."""
        if not self._serving:
            return
        self._accept_scope.cancel()
        self.engine.fail_all(message, trio.current_time())
        for connection in tuple(self._connections):
            connection.stop()
        self._calls_scope.deadline = trio.current_time() + STOP_S
        await self._ended.wait()

    def crash(self) -> None:
        """End as a process does that is killed: everything is reset, nobody is told."""
        for connection in tuple(self._connections):
            connection.abort()
        self._accept_scope.cancel()
        self._calls_scope.cancel()

    async def _accept(self, listener: socket.socket, calls: trio.Nursery) -> None:
        while True:
            await trio.lowlevel.wait_readable(listener)
            for _ in range(_ACCEPTS_AT_ONCE):
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno in _NO_ROOM:  # the client stays in the queue; without a pause this would spin
                        await trio.sleep(_NO_ROOM_PAUSE_S)
                    break
                calls.start_soon(self._serve_connection, sock)

    async def _serve_connection(self, sock: socket.socket) -> None:
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        sleeper = Sleeper()
        connection = Connection(Line(sock, self._poller, sleeper), sleeper, self.engine)
        self._sleepers.add(sleeper)
        self._connections.add(connection)
        try:
            await connection.serve()
        finally:
            self._sleepers.discard(sleeper)
            self._connections.discard(connection)

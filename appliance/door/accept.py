"""Listening sockets and the connections that come out of them.

Two nurseries: the accept loops end first at a stop, the connections get until a deadline. A process out of file
descriptors waits a moment between two tries; accepting in a tight loop would burn the core that is needed to end the
connections that hold the descriptors.
"""

from __future__ import annotations

import contextlib
import errno
import socket
import ssl
import time
from collections.abc import Callable, Iterable
from typing import NoReturn

import structlog
import trio

from ..nursery.carried import Carried
from ..nursery.sleeper import Cut, Sleeper
from ..wire.line import Line, Poller, keep_alive_probes
from ..wire.tls import TlsLine
from .buffers import Buffers
from .connection import IDLE_AT_STOP_S, Connection, Limits, Site

BACKLOG = 4096
BACK_OFF_S = 0.1
CALM_S = 5.0
"""For how long nothing must have been lacking before that is said to be over. At the limit of open files each
connection that ends lets another one in, and saying so each time fills the log by twenty lines a second."""
LOOK_S = 4.0
LOOKS_AT_ONCE = 500
MOST_AT_ONCE = 64

log = structlog.get_logger("door")


class Listeners:
    """The accept loops and connections of one site. `limits` and `context` may be changed at any time: limits hold for
    open connections too, a certificate for new ones."""

    def __init__(self, site: Site, poller: Poller, sleepers: set[Sleeper], limits: Limits, buffers: Buffers) -> None:
        self.site = site
        self.buffers = buffers
        self.context: ssl.SSLContext | None = None
        self.shared = False
        """Another process accepts from the same sockets, or will: at a stop, their queues are left to it."""
        self.connections: set[Connection] = set()
        self.limits = limits
        self._poller = poller
        self._sleepers = sleepers
        self._scope: trio.CancelScope | None = None

    @property
    def limits(self) -> Limits:
        return self._limits

    @limits.setter
    def limits(self, limits: Limits) -> None:
        self._limits = limits
        for connection in self.connections:
            connection.limits = limits
            with contextlib.suppress(OSError):
                keep_alive_probes(connection.line.sock, limits.write_stall_s)

    async def serve(
        self,
        sockets: Iterable[socket.socket],
        stop: trio.Event,
        drain_s: Callable[[], float],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Accept until `stop`, then close the sockets and wait for the connections, at most `drain_s()` seconds; what
        is left is cut."""
        listeners = list(sockets)
        async with trio.open_nursery() as connections:
            async with trio.open_nursery() as accepting:
                for listener in listeners:
                    accepting.start_soon(self._accept, listener, connections, name=f"accept {_name(listener)}")
                task_status.started()
                await stop.wait()
                accepting.cancel_scope.cancel()
            for listener in listeners:
                if not self.shared:
                    self._accept_waiting(listener, connections)
                listener.close()
            idle_until = time.monotonic() + IDLE_AT_STOP_S
            for connection in self.connections:
                connection.go_idle_until(idle_until)
            self._scope = connections.cancel_scope
            self.finish_within(drain_s())

    def finish_within(self, seconds: float) -> None:
        """After a stop: cut what is still open after so many seconds from now."""
        if self._scope is not None:
            self._scope.deadline = trio.current_time() + seconds

    async def watch_silence(self) -> NoReturn:
        """Look for clients that have lost power, for ever. The kernel would report them only behind `write_stall_s`,
        which is a promise to living ones. A look costs a microsecond."""
        while True:
            await trio.sleep(LOOK_S)
            for number, connection in enumerate(tuple(self.connections)):
                connection.end_if_silent()
                if number % LOOKS_AT_ONCE == 0:
                    await trio.lowlevel.checkpoint()

    async def _accept(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        listener.setblocking(False)
        short_at = 0.0  # when something was lacking last; 0.0 once that is over
        while True:
            await trio.lowlevel.wait_readable(listener)
            for _ in range(MOST_AT_ONCE):
                try:
                    sock, address = listener.accept()
                except BlockingIOError:
                    break
                except OSError as error:
                    if error.errno not in (errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM):
                        continue  # that client is gone already; the next may wait
                    if not short_at:
                        log.error(
                            "cannot accept connections",
                            reason=error.strerror,
                            next_step="raise the limit of open files (LimitNOFILE)",
                        )
                    short_at = time.monotonic()
                    await trio.sleep(BACK_OFF_S)
                    break
                if short_at and time.monotonic() - short_at >= CALM_S:
                    short_at = 0.0
                    log.info("accepting connections again")
                nursery.start_soon(self._serve, sock, _peer(address), name="connection")
            await trio.lowlevel.checkpoint()

    def _accept_waiting(self, listener: socket.socket, nursery: trio.Nursery) -> None:
        """The last look into a queue: closing the listener resets whoever waits there, though nobody refused them."""
        with contextlib.suppress(OSError):
            for _ in range(BACKLOG):
                sock, address = listener.accept()
                nursery.start_soon(self._serve, sock, _peer(address), name="connection")

    async def _serve(self, sock: socket.socket, peer: str) -> None:
        sleeper = Carried() if self.site.carried else Sleeper()
        line: Line | None = None
        self._sleepers.add(sleeper)
        try:
            keep_alive_probes(sock, self.limits.write_stall_s)
            if self.context is None:
                line = Line(sock, self._poller, sleeper)
            else:
                secure = TlsLine(sock, self._poller, self.context, sleeper, server_side=True)
                line = secure
                sleeper.arm(time.monotonic() + self.limits.head_s, "head_s")
                await secure.handshake()
                sleeper.disarm()
            connection = Connection(line, sleeper, peer, self.site, self.limits, self.buffers)
            self.connections.add(connection)
            try:
                await sleeper.run(connection.serve())
            finally:
                self.connections.discard(connection)
        except (OSError, ssl.SSLError, Cut):
            return  # no connection came of it, and nobody is left to tell
        finally:
            self._sleepers.discard(sleeper)
            if line is None:
                sock.close()
            else:
                line.close()


def bind(host: str, port: int) -> socket.socket:
    """A listening socket. Raises OSError."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if family == socket.AF_INET6:
            # two listeners, one per family, must be able to share a port
            sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except BaseException:
        sock.close()
        raise
    return sock


def _peer(address: object) -> str:
    if isinstance(address, tuple) and len(address) >= 2:
        host, port = address[0], address[1]
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"
    return "local"


def _name(listener: socket.socket) -> str:
    with contextlib.suppress(OSError):
        name = listener.getsockname()
        return name if isinstance(name, str) else _peer(name)
    return "closed"

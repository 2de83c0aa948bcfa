"""The ear for announcements: one UDP socket, shared with a daemon on the same machine.

Whoever sends ten thousand datagrams a second costs this process 5 to 10 % of a core and no memory (measured on one core
of a 2-core machine): after each batch, however small, it sleeps, and the kernel throws away what does not fit into its
buffer. Announcements are repeated every few seconds, so a lost one is made good.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import NoReturn

import structlog
import trio

from ..wire.datagram import MOST_BYTES, READ_BYTES

BATCH = 64
"""Datagrams that are read in one go."""
REST_S = 0.02
"""The sleep after each batch: at most 3,200 datagrams a second are looked at, and the task wakes 50 times a second."""

log = structlog.get_logger("groups")


class Listener:
    """`hear` gets each datagram with the address it came from, `oversize` the address alone. `read` counts them."""

    def __init__(self, hear: Callable[[bytes, str], None], oversize: Callable[[str], None]) -> None:
        self._hear = hear
        self._oversize = oversize
        self.read = 0
        self.rests = 0
        self.port = 0

    async def serve(self, port: int, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Listen until cancelled. Where the port cannot be had, it says so and ends: daemons that are seeds or peers
        are watched all the same."""
        sock = socket.socket(socket.AF_INET, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        with sock:
            try:
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
                sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                sock.bind(("0.0.0.0", port))
            except OSError as error:
                log.warning("announce_listen_failed", port=port, reason=error.strerror)
                task_status.started()
                return
            self.port = sock.getsockname()[1]
            task_status.started()
            await self._listen(sock)

    async def _listen(self, sock: socket.socket) -> NoReturn:
        while True:
            await trio.lowlevel.wait_readable(sock)
            self.take(sock)
            self.rests += 1
            await trio.sleep(REST_S)

    def take(self, sock: socket.socket) -> int:
        """Read what is there, one batch at most; how many datagrams that was."""
        for count in range(BATCH):
            try:
                data, (source, _) = sock.recvfrom(READ_BYTES)
            except BlockingIOError:
                return count
            except OSError:  # an ICMP error of something sent earlier
                continue
            self.read += 1
            if len(data) > MOST_BYTES:
                self._oversize(source)
            else:
                self._hear(data, source)
        return BATCH

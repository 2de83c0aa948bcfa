"""What a supervisor such as systemd says to a process, and what it wants to hear: the protocols of sd_listen_fds and
sd_notify, which are a few environment variables and datagrams.

The variables are taken out of the environment: a child that inherited them would take our sockets for its own, or tell
our supervisor that we are ready.
"""

from __future__ import annotations

import contextlib
import os
import socket
import time
from collections.abc import MutableMapping
from typing import NoReturn

import attrs
import trio

from .startfailed import StartFailed

FIRST_DESCRIPTOR = 3
METRICS = "metrics"
"""The name (`FileDescriptorName=`) of a socket for the metrics listener; all others are the door's."""


@attrs.frozen
class Passed:
    """Listening sockets that a supervisor opened. They stay open there, so those who wait in their queues when this
    process ends are served by the next one. Whoever has this closes them."""

    door: tuple[socket.socket, ...] = ()
    metrics: tuple[socket.socket, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.door or self.metrics)


def passed_sockets(environ: MutableMapping[str, str]) -> Passed:
    """The sockets of `LISTEN_FDS` where `LISTEN_PID` means this process. Raises StartFailed for what is no listening
    TCP socket: serving the wrong thing silently would be found out by clients."""
    pid, count, names = (environ.pop(name, "") for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES"))
    if pid != str(os.getpid()) or not count.isdigit():
        return Passed()
    named = names.split(":")
    door: list[socket.socket] = []
    metrics: list[socket.socket] = []
    for number in range(int(count)):
        name = named[number] if number < len(named) else ""
        (metrics if name == METRICS else door).append(_listening(FIRST_DESCRIPTOR + number, name))
    if metrics and not door:
        raise StartFailed("LISTEN_FDS: no socket for the door was passed, only some for metrics")
    return Passed(tuple(door), tuple(metrics))


def _listening(descriptor: int, name: str) -> socket.socket:
    what = f"LISTEN_FDS: descriptor {descriptor}" + (f" ({name})" if name else "")
    try:
        sock = socket.socket(fileno=descriptor)
        listens = sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)
    except OSError as error:
        raise StartFailed(f"{what} is no socket: {error.strerror}") from None
    if sock.family not in (socket.AF_INET, socket.AF_INET6) or sock.type != socket.SOCK_STREAM or not listens:
        raise StartFailed(f"{what} is no listening TCP socket; give its unit ListenStream=PORT and Accept=no")
    sock.set_inheritable(False)
    sock.setblocking(False)
    return sock


class Supervisor:
    """Whoever wants to hear how this process is; silent where nobody does. `watchdog_s` is how often it must hear
    something, 0 for never."""

    def __init__(self, address: str = "", watchdog_s: float = 0.0) -> None:
        self.watchdog_s = watchdog_s
        self._address = "\0" + address[1:] if address.startswith("@") else address

    @classmethod
    def of(cls, environ: MutableMapping[str, str]) -> Supervisor:
        address, usec, pid = (environ.pop(name, "") for name in ("NOTIFY_SOCKET", "WATCHDOG_USEC", "WATCHDOG_PID"))
        ours = pid in ("", str(os.getpid())) and usec.isdigit()
        return cls(address, int(usec) / 1e6 if ours and address else 0.0)

    def __bool__(self) -> bool:
        return bool(self._address)

    def ready(self) -> None:
        self._tell("READY=1")

    def reloading(self) -> None:
        """Followed by `ready`."""
        self._tell(f"RELOADING=1\nMONOTONIC_USEC={time.clock_gettime_ns(time.CLOCK_MONOTONIC) // 1000}")

    def stopping(self) -> None:
        self._tell("STOPPING=1")

    async def watch(self) -> NoReturn:
        """Say twice in each `watchdog_s` that the loop still turns; for ever."""
        while True:
            self._tell("WATCHDOG=1")
            await trio.sleep(self.watchdog_s / 2)

    def _tell(self, text: str) -> None:
        """A supervisor that is gone, or does not read, costs nothing but the news."""
        if self._address:
            with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
                sock.setblocking(False)
                sock.sendto(text.encode(), self._address)

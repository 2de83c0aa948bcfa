"""The sockets that a router listens on, and the lock of its state: bound by itself, passed by a supervisor, or taken
over from the router that runs already (`takeover.py`).
"""

from __future__ import annotations

import errno
import ipaddress
import resource
import socket
from collections.abc import Iterable, Sequence

import attrs

from ..admin.sockets import CannotListen, UnixSocket, listen
from ..door.accept import bind
from ..facts.settings import Address, Settings
from . import statelock
from .startfailed import StartFailed
from .statelock import StateLock
from .supervisor import Passed

ADMIN_MODE = 0o660


@attrs.define(eq=False)
class Sockets:
    """All that a router owns while it runs. `close` once, at the very end. `shared`: another process holds the door's
    sockets too, so whoever waits in their queues is served there when this one stops."""

    lock: StateLock
    door: list[socket.socket] = attrs.field(factory=list)
    metrics: list[socket.socket] = attrs.field(factory=list)
    admin: UnixSocket | None = None
    shared: bool = False

    def descriptors(self) -> tuple[int, ...]:
        """Door, metrics, admin, lock, in this order."""
        assert self.admin is not None, "a running router has its admin socket"
        listening = (*self.door, *self.metrics, self.admin.sock)
        return (*(sock.fileno() for sock in listening), self.lock.descriptor)

    def pass_on(self) -> None:
        """Another process listens on all of them now: leave it the files."""
        self.shared = True
        self.lock.ours = False
        if self.admin is not None:
            self.admin.ours = False

    def claim(self) -> None:
        """The process that had them has passed them on."""
        self.lock.claim()
        if self.admin is not None:
            self.admin.claim()

    def close(self) -> None:
        for sock in (*self.door, *self.metrics):
            sock.close()
        if self.admin is not None:
            self.admin.close()
        self.lock.close()


def open_sockets(settings: Settings, passed: Passed) -> Sockets:
    """Own the state directory and listen; on the sockets of a supervisor where it passed any, whatever `server.listen`
    says. Raises StartFailed."""
    server = settings.server
    sockets = Sockets(statelock.take(settings.state_dir), list(passed.door), list(passed.metrics), shared=bool(passed))
    try:
        if not sockets.door:
            bind_all(sockets.door, server.listen, "server.listen")
        if not sockets.metrics:
            bind_all(sockets.metrics, server.metrics_listen, "server.metrics_listen")
        try:
            sockets.admin = listen(server.admin_socket, ADMIN_MODE)
        except CannotListen as error:
            raise StartFailed(f"server.admin_socket: {error}") from None
    except BaseException:
        sockets.close()
        raise
    return sockets


def bind_all(into: list[socket.socket], addresses: Iterable[Address], setting: str) -> None:
    """Listen on all `addresses`; the sockets come to `into` one by one, so its owner can close them whatever happens.
    Raises StartFailed."""
    for address in addresses:
        try:
            into.append(bind(address.host, address.port))
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise StartFailed(
                    f"{setting}: {address} is in use by another process; stop that one or choose another address"
                ) from None
            raise StartFailed(f"{setting}: cannot listen on {address}: {error.strerror}") from None


def match(wanted: Sequence[Address], have: Sequence[Address]) -> list[int | None]:
    """For each wanted address the number of the socket that listens there already, None where there is none.

    An exact one goes first; port 0 in `wanted` is content with any socket on its host that nobody else wants.
    """
    free = dict(enumerate(have))
    found: list[int | None] = [None] * len(wanted)
    for exact in (True, False):
        for place, address in enumerate(wanted):
            if found[place] is not None or (not exact and address.port):
                continue
            for number, other in free.items():
                if other == address if exact else other.host == address.host:
                    found[place] = number
                    del free[number]
                    break
    return found


def address_of(sock: socket.socket) -> Address:
    host, port = sock.getsockname()[:2]
    return Address(host, port)


def is_loopback(address: Address) -> bool:
    """Whether only this machine can reach it."""
    return ipaddress.ip_address(address.host).is_loopback


def raise_open_files() -> int:
    """Lift the soft limit of open files to the hard one; what holds now. Every connection is a descriptor, and the
    usual soft limit of 1024 is there for programs that use `select`, which we do not."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard

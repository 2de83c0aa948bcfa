"""Ports of this machine: whether one is really free, and whose it is."""

from __future__ import annotations

import errno
import os
import socket
from collections.abc import Iterable
from pathlib import Path

_LISTENING = "0A"


def taken(ports: Iterable[int]) -> set[int]:
    """Those that somebody has bound, on whatever address, or that are not given back by the kernel yet.

    Tried by binding to every address without SO_REUSEADDR, since an engine that loads has bound its port and does not
    listen yet: with that option both would succeed.
    """
    return {port for port in ports if not _bindable(port)}


def listened_on(ports: Iterable[int]) -> set[int]:
    """Those that somebody listens on; others may have been bound, or be waiting for late packets."""
    wanted = set(ports)
    return {port for port, _ in _listeners() if port in wanted}


def strangers(ports: Iterable[int], pids: Iterable[int]) -> set[int]:
    """Those of `ports` on which a process other than `pids` listens.

    An engine that binds with SO_REUSEPORT would share its port with such a one and never know.
    """
    wanted = set(ports)
    sockets = {inode: port for port, inode in _listeners() if port in wanted}
    for pid in pids if sockets else ():
        inodes = _sockets_of(pid)
        if inodes is None:
            # One of ours does not let us look: nothing can be said about what is not found.
            return set()
        for inode in inodes:
            sockets.pop(inode, None)
    return set(sockets.values())


def _bindable(port: int) -> bool:
    for family, everywhere in ((socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")):
        try:
            with socket.socket(family, socket.SOCK_STREAM) as sock:
                if family == socket.AF_INET6:
                    sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
                sock.bind((everywhere, port))
        except OSError as refused:
            if refused.errno in (errno.EADDRINUSE, errno.EACCES):
                return False
            # A machine without this family of addresses.
    return True


def _listeners() -> set[tuple[int, str]]:
    """Port and inode of every listening TCP socket."""
    found = set()
    for name in ("tcp", "tcp6"):
        try:
            text = Path(f"/proc/self/net/{name}").read_text()
        except OSError:
            continue
        for line in text.splitlines()[1:]:
            words = line.split()
            if words[3] == _LISTENING:
                found.add((int(words[1].rpartition(":")[2], 16), words[9]))
    return found


def _sockets_of(pid: int) -> list[str] | None:
    """Inodes of the sockets it has open; None when that is not for us to see."""
    found: list[str] = []
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except (FileNotFoundError, ProcessLookupError):
        return found
    except OSError:
        return None
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
        except OSError:
            continue
        if target.startswith("socket:["):
            found.append(target[len("socket:[") : -1])
    return found

"""This machine's interfaces with their networks and broadcast addresses, asked of the kernel anew each time.

IPv4 by the ioctls that exist for it, IPv6 from the kernel's own table. No call blocks for a time worth mentioning.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import attrs

_SIOCGIFCONF, _SIOCGIFFLAGS, _SIOCGIFBRDADDR, _SIOCGIFNETMASK = 0x8912, 0x8913, 0x8919, 0x891B
_UP, _BROADCAST, _LOOPBACK = 0x1, 0x2, 0x8
_ENTRY = struct.calcsize("16s24x") if struct.calcsize("P") == 8 else struct.calcsize("16s16x")
"""Size of a kernel `struct ifreq`: a name of 16 bytes and a union."""

UNSPOKEN = ("docker", "veth", "br-", "virbr")
"""Beginnings of names of interfaces that lead to containers of this machine, where nobody is announced to."""


@attrs.frozen
class Link:
    """One IPv4 address of an interface. `broadcast` is "" where the interface has none."""

    name: str
    address: str
    network: ipaddress.IPv4Network
    broadcast: str
    up: bool
    loopback: bool


def networks() -> tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]:
    """The networks this machine has an interface on, loopback included."""
    found: list[ipaddress.IPv4Network | ipaddress.IPv6Network] = [link.network for link in links() if link.up]
    return tuple(dict.fromkeys([*found, *_inet6()]))


def broadcasts() -> tuple[str, ...]:
    """Where an announcement reaches the neighbours of each interface."""
    found = [
        link.broadcast
        for link in links()
        if link.up and not link.loopback and link.broadcast and not link.name.startswith(UNSPOKEN)
    ]
    return tuple(dict.fromkeys(found))


def links() -> tuple[Link, ...]:
    """All IPv4 addresses; what cannot be read is left out."""
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            return tuple(_links(asking))
    except OSError:
        return ()


def _links(asking: socket.socket) -> Iterator[Link]:
    buffer = array.array("B", bytes(_ENTRY * 1024))
    question = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
    filled: int = struct.unpack("iP", fcntl.ioctl(asking, _SIOCGIFCONF, question))[0]
    for at in range(0, filled, _ENTRY):
        entry = buffer[at : at + _ENTRY].tobytes()
        # With the address in the question, the kernel answers for this one of several on an interface.
        try:
            flags: int = struct.unpack_from("H", fcntl.ioctl(asking, _SIOCGIFFLAGS, entry), 16)[0]
            mask = _address(fcntl.ioctl(asking, _SIOCGIFNETMASK, entry))
            broadcast = _address(fcntl.ioctl(asking, _SIOCGIFBRDADDR, entry)) if flags & _BROADCAST else ""
        except OSError:
            continue  # gone since the list was made
        address = _address(entry)
        name = entry[:16].split(b"\0", 1)[0].decode("utf-8", "replace").split(":", 1)[0]
        network = ipaddress.IPv4Network(f"{address}/{mask}", strict=False)
        if broadcast in ("", "0.0.0.0"):  # set by hand without one
            broadcast = str(network.broadcast_address) if flags & _BROADCAST and network.prefixlen < 31 else ""
        yield Link(name, address, network, broadcast, bool(flags & _UP), bool(flags & _LOOPBACK))


def _address(entry: bytes) -> str:
    return socket.inet_ntoa(entry[20:24])


def _inet6() -> Iterator[ipaddress.IPv6Network]:
    try:
        table = Path("/proc/net/if_inet6").read_text("ascii", "replace")
    except OSError:
        return
    for line in table.splitlines():
        fields = line.split()
        if len(fields) == 6 and re.fullmatch(r"[0-9a-fA-F]{32}", fields[0]):
            yield ipaddress.IPv6Network((int(fields[0], 16), int(fields[2], 16)), strict=False)

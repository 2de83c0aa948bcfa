"""Network interfaces and their addresses, without asking any other program.

The engines must be told which interface carries the node's cluster address; left to themselves they take the first that
looks up, which on a machine with containers or a management card is often the wrong one.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import re
import socket
import struct
from collections.abc import Iterable
from pathlib import Path

from appliance.facts.hardware import Interface

_SIOCGIFCONF = 0x8912
_ENTRY = struct.calcsize("16s24x") if struct.calcsize("P") == 8 else struct.calcsize("16s16x")
"""Size of a kernel `struct ifreq`: a name of 16 bytes and a union."""


def interfaces(root: Path = Path("/")) -> tuple[Interface, ...]:
    """All interfaces with an address. Blocks for no time worth mentioning; what cannot be read is left out."""
    try:
        table = (root / "proc/net/if_inet6").read_text("ascii", "replace")
    except OSError:
        table = ""
    return merge([*_ipv4(), *parse_inet6(table)])


def merge(pairs: Iterable[tuple[str, str]]) -> tuple[Interface, ...]:
    """Interfaces from pairs of name and address, in the order of their first mention."""
    found: dict[str, list[str]] = {}
    for name, address in pairs:
        addresses = found.setdefault(name, [])
        if address not in addresses:
            addresses.append(address)
    return tuple(Interface(name, tuple(addresses)) for name, addresses in found.items())


def parse_inet6(table: str) -> list[tuple[str, str]]:
    """The kernel's table of IPv6 addresses (`/proc/net/if_inet6`) as pairs of name and address."""
    found = []
    for line in table.splitlines():
        fields = line.split()
        if len(fields) == 6 and re.fullmatch(r"[0-9a-fA-F]{32}", fields[0]):
            found.append((fields[5], str(ipaddress.IPv6Address(int(fields[0], 16)))))
    return found


def own_address(found: Iterable[Interface]) -> str:
    """The address peers most likely reach this node at: the first IPv4 one that is neither loopback nor link-local,
    then the first such IPv6 one, then loopback. Only a default: `agent.address` says it for certain."""
    usable: list[tuple[int, int, str]] = []
    for interface in found:
        for text in interface.addresses:
            address = ipaddress.ip_address(text)
            if not address.is_loopback and not address.is_link_local:
                usable.append((address.version, len(usable), text))
    return min(usable)[2] if usable else "127.0.0.1"


def _ipv4() -> list[tuple[str, str]]:
    buffer = array.array("B", bytes(_ENTRY * 1024))
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asking:
            question = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
            filled: int = struct.unpack("iP", fcntl.ioctl(asking, _SIOCGIFCONF, question))[0]
    except OSError:
        return []
    found = []
    for at in range(0, filled, _ENTRY):
        entry = buffer[at : at + _ENTRY].tobytes()
        name = entry[:16].split(b"\0", 1)[0].decode("utf-8", "replace")
        # An alias (`eth0:1`) is a second address of the same interface.
        found.append((name.split(":", 1)[0], socket.inet_ntoa(entry[20:24])))
    return found

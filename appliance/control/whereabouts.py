"""Under which names and addresses other machines may find this one."""

from __future__ import annotations

import contextlib
import ipaddress
import re
import socket
from collections.abc import Sequence

from ..facts.address import Address

_HOST = re.compile(r"(?!-)[A-Za-z0-9-]{1,63}(?<!-)(\.(?!-)[A-Za-z0-9-]{1,63}(?<!-))*")
_FAR = ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1"))
"""Addresses that are nobody's: the kernel says which of ours it would call them from, and nothing is sent."""


def addresses() -> list[str]:
    """Those that this machine calls others from, IPv4 first; none where it has no route."""
    found = []
    for family, far in _FAR:
        with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as sock:
            sock.connect((far, 9))
            found.append(str(sock.getsockname()[0]))
    return [each for each in found if _outside(each)]


def names(listen: Sequence[Address]) -> list[str]:
    """What the control plane's certificate should bear: the host's name, its addresses, those it listens at."""
    own = socket.gethostname()
    listening = [each.host for each in listen if not ipaddress.ip_address(each.host).is_unspecified]
    return list(dict.fromkeys([*([own] if is_host(own) else []), *addresses(), *listening]))


def best(listen: Sequence[Address]) -> str:
    """What nodes should call: the address it listens at where that is one alone, else the host's name where it leads
    here from elsewhere, else its first address, else the name. May ask the resolver, so it belongs in a thread."""
    certain = [each.host for each in listen if not ipaddress.ip_address(each.host).is_unspecified]
    if certain:
        return certain[0]
    own, reachable = socket.gethostname(), addresses()
    with contextlib.suppress(OSError, UnicodeError):
        found = {str(info[4][0]) for info in socket.getaddrinfo(own, None, type=socket.SOCK_STREAM)}
        if found.intersection(reachable):
            return own
    return reachable[0] if reachable else own


def is_host(text: str) -> bool:
    """Whether it is an address or may be the name of a host."""
    try:
        ipaddress.ip_address(text)
    except ValueError:
        return len(text) <= 253 and _HOST.fullmatch(text) is not None and not re.fullmatch(r"[0-9.]+", text)
    return True


def control_url(host: str, port: int) -> str:
    """What goes into `agent.control_url`."""
    return f"wss://[{host}]:{port}" if ":" in host else f"wss://{host}:{port}"


def _outside(text: str) -> bool:
    address = ipaddress.ip_address(text)
    return not (address.is_loopback or address.is_link_local or address.is_unspecified)

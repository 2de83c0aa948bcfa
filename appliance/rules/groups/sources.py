"""Which addresses are listened to and asked: `local`, networks, addresses, beginnings of addresses."""

from __future__ import annotations

import ipaddress
from collections.abc import Iterable, Sequence

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Ip = ipaddress.IPv4Address | ipaddress.IPv6Address


class Sources:
    """The allowlist. `own` in each question are the networks that this machine has an interface on at that moment."""

    def __init__(self, patterns: Iterable[str]) -> None:
        self._local = False
        self._networks: list[Network] = []
        self._prefixes: list[str] = []
        for pattern in patterns:
            if pattern == "local":
                self._local = True
                continue
            try:
                self._networks.append(ipaddress.ip_network(pattern, strict=False))
            except ValueError:
                self._prefixes.append(pattern)

    def allow(self, address: str, own: Sequence[Network]) -> bool:
        """Whether `address` passes. A host's name has only its beginning to pass by."""
        ip = ip_of(address)
        text = address if ip is None else str(ip)
        if any(text.startswith(prefix) for prefix in self._prefixes):
            return True
        if ip is None:
            return False
        return (self._local and within(ip, own)) or within(ip, self._networks)


def ip_of(text: str) -> Ip | None:
    """The address that a text is, None for a name. An IPv4 address in IPv6 clothes is the former."""
    try:
        ip = ipaddress.ip_address(text.strip("[]"))
    except ValueError:
        return None
    if isinstance(ip, ipaddress.IPv6Address) and ip.ipv4_mapped is not None:
        return ip.ipv4_mapped
    return ip


def within(ip: Ip, networks: Iterable[Network]) -> bool:
    return any(ip.version == network.version and ip in network for network in networks)


def is_own(address: str, own: Sequence[Network]) -> bool:
    """Whether `address` lies in a network of this machine."""
    ip = ip_of(address)
    return ip is not None and within(ip, own)


_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "ip6-localhost", "ip6-loopback")


def is_loopback(address: str) -> bool:
    ip = ip_of(address)
    return address.rstrip(".").lower() in _LOOPBACK_NAMES if ip is None else ip.is_loopback


def is_one_of(listening: Iterable[tuple[str, int]], there: tuple[str, int], here: str) -> bool:
    """Whether a connection from the address `here` to `there` has come out at one of the sockets `listening`."""
    ip = ip_of(there[0])
    if ip is None:
        return False
    local = ip.is_loopback or ip == ip_of(here)
    for host, port in listening:
        bound = ip_of(host)
        if port == there[1] and bound is not None and (bound == ip or (bound.is_unspecified and local)):
            return True
    return False


def host_port(host: str, port: int) -> str:
    host = host.strip("[]")
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def host_of(address: str) -> str:
    """The host of `host:port` or `[host]:port`."""
    return address.rpartition(":")[0].strip("[]")


def ranked(
    hosts: Iterable[str], sources: Sources, own: Sequence[Network], *, loopback_last: bool = False
) -> tuple[str, ...]:
    """The hosts that pass, without repeats, those in own networks first and otherwise in their order."""
    passed = [host for host in dict.fromkeys(hosts) if host and sources.allow(host, own)]
    passed.sort(key=lambda host: (loopback_last and is_loopback(host), not is_own(host, own)))
    return tuple(passed)

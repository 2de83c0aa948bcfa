"""Whose request it is where proxies stand in front: `server.trusted_proxies`."""

from __future__ import annotations

import ipaddress
import re

from ..wire.headlines import KnownFields

FORWARDED_FOR = b"x-forwarded-for"
_PORT = re.compile(r"(?<=[\].\d]):\d{1,5}$")

Network = ipaddress.IPv4Network | ipaddress.IPv6Network


class Proxies:
    """Networks whose word on the client's address is believed."""

    def __init__(self, networks: tuple[str, ...]) -> None:
        self._networks: list[Network] = [ipaddress.ip_network(network) for network in networks]

    def client_of(self, peer: str, fields: KnownFields) -> str:
        """The client behind `peer` (an address with a port; both forms alike), port 0 where only its address is told.

        Each proxy adds at the end of X-Forwarded-For whom it was talking to, so the list is believed from its end, as
        far as those who wrote it are trusted; what stands before that is the client's own invention. A word that is no
        address ends the belief too: who it came from is the best that is known then.
        """
        client = peer
        address = _address(peer)
        told = b",".join(value for name, value in fields if name == FORWARDED_FOR).decode("latin-1")
        for word in reversed(told.split(",")):
            if address is None or not any(address in network for network in self._networks):
                break
            address = _address(word.strip())
            if address is None:
                break
            client = f"[{address}]:0" if address.version == 6 else f"{address}:0"
        return client


def _address(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An address, with or without a port; IPv6 may stand in brackets, and must where a port follows."""
    if text[:1] == "[" or text.count(":") == 1:
        text = _PORT.sub("", text)
    try:
        address = ipaddress.ip_address(text.removeprefix("[").removesuffix("]").partition("%")[0])
    except ValueError:
        return None
    mapped = address.ipv4_mapped if isinstance(address, ipaddress.IPv6Address) else None
    return mapped or address

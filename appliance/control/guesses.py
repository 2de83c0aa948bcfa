"""How often one machine may be wrong about a join token."""

from __future__ import annotations

import ipaddress
from collections import OrderedDict, deque

ALLOWED = 10
WITHIN_S = 60.0
"""So many wrong tokens in so long a time, then no more are looked at: a token has 160 bits, so this is not what keeps
guessing from success, but what keeps it from being tried at the price of our disk and our log."""

MOST_PEERS = 4096


class Guesses:
    """Counts wrong tokens by peer. `now` is a clock that never goes back, in seconds."""

    def __init__(self) -> None:
        self._wrong: OrderedDict[str, deque[float]] = OrderedDict()

    def wait_s(self, peer: str, now: float) -> float:
        """How long this peer must wait before its next try; 0 if it need not."""
        times = self._wrong.get(_group(peer))
        if times is None:
            return 0.0
        while times and times[0] <= now - WITHIN_S:
            times.popleft()
        return times[0] + WITHIN_S - now if len(times) >= ALLOWED else 0.0

    def wrong(self, peer: str, now: float) -> None:
        """This peer was wrong. Whoever was so least recently is forgotten, where there are too many to remember."""
        group = _group(peer)
        self._wrong.setdefault(group, deque(maxlen=ALLOWED)).append(now)
        self._wrong.move_to_end(group)
        if len(self._wrong) > MOST_PEERS:
            self._wrong.popitem(last=False)


def _group(peer: str) -> str:
    """One machine has all of an IPv6 /64 to call from."""
    try:
        address = ipaddress.ip_address(peer.partition("%")[0])
    except ValueError:
        return peer
    if isinstance(address, ipaddress.IPv6Address):
        if address.ipv4_mapped:
            return str(address.ipv4_mapped)
        return str(ipaddress.ip_network((address, 64), strict=False))
    return str(address)

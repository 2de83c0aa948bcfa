"""What was said to operators already, so that a peer that tries again for ever fills no log."""

from __future__ import annotations

from collections import OrderedDict

AGAIN_S = 3600.0
"""A trouble that lasts is told once more after so long."""

MOST_PEERS = 1024
"""Peers that are remembered; the ones not heard of for longest go first."""

MOST_REASONS = 8
"""Reasons per peer; one that finds ever new ones is told no more of."""


class Told:
    """One line per peer and reason, until the peer succeeds. Plain calls."""

    def __init__(self) -> None:
        self._peers: OrderedDict[str, dict[str, float]] = OrderedDict()

    def worth(self, peer: str, reason: str, now: float) -> bool:
        """Whether this has to be told, which is then taken for done."""
        reasons = self._peers.setdefault(peer, {})
        self._peers.move_to_end(peer)
        while len(self._peers) > MOST_PEERS:
            self._peers.popitem(last=False)
        at = reasons.get(reason)
        if at is None and len(reasons) >= MOST_REASONS:
            oldest = min(reasons, key=lambda each: reasons[each])
            if now - reasons[oldest] < AGAIN_S:
                return False
            del reasons[oldest]
        if at is not None and now - at < AGAIN_S:
            return False
        reasons[reason] = now
        return True

    def succeeded(self, peer: str) -> bool:
        """Forget what was told of the peer; whether there was anything."""
        return self._peers.pop(peer, None) is not None

"""Who may use the door while it has no keys: an allowlist that an operator has set."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..rules.groups.sources import Network, Sources
from ..wire.interfaces import networks
from .config import Loaded

NETWORKS_S = 1.0
"""How long the list of own networks is believed."""


def client_gate(loaded: Loaded) -> Callable[[str], bool] | None:
    """Who may use the door at all, where an operator has said so; None: everybody.

    Only an allowlist that was set counts: the default one is about announcements, and would shut out every client of
    another network.
    """
    if loaded.origins.get("groups.allowed_sources", "default") == "default":
        return None
    sources = Sources(loaded.settings.groups.allowed_sources)
    own: tuple[Network, ...] = ()
    until = 0.0

    def passes(address: str) -> bool:
        nonlocal own, until
        now = time.monotonic()
        if now >= until:
            own, until = networks(), now + NETWORKS_S
        return sources.allow(address, own)

    return passes

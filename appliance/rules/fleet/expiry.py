"""How long silence may last: first a node gets nothing new, much later what ran there is given up."""

from __future__ import annotations

import math

from appliance.facts.control import ControlSettings
from appliance.rules.fleet.world import World


def expire(world: World, settings: ControlSettings, now: float) -> float:
    """Take note of nodes that were silent for too long, and say when the next one will have been."""
    quiet_s = settings.unreachable_after_s
    lost_s = max(quiet_s, settings.lost_after_s)
    due = math.inf
    for name, node in list(world.nodes.items()):
        if node.state == "lost":
            continue
        if now >= node.heard_at + lost_s:
            world.lost(name, now)
            continue
        if node.state == "ready" and now >= node.heard_at + quiet_s:
            world.silent(name, now)
        due = min(due, node.heard_at + (quiet_s if node.state == "ready" else lost_s))
    return due

"""How long silence may last: first a node gets nothing new, much later what ran there is given up."""

from __future__ import annotations

import math

from appliance.facts.control import ControlSettings
from appliance.rules.fleet.world import World


def drained_since(drained_at: float, wall: float, now: float, grace_s: float) -> float:
    """When a drain began by our clock that another run of the control plane was asked for at `drained_at`, where `wall`
    is the time of day. What is left of its grace is left to it.

    One whose grace has gone by meanwhile has all of it again: nobody was there to find a place for what runs on the
    node. So has one that began in the future, since the clock was set.
    """
    gone_s = wall - drained_at
    return now - gone_s if 0 <= gone_s < grace_s else now


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

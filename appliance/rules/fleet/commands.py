"""Which commands agents have to be given. Each is said once per connection, and once more on the next if it is still
needed: what was sent on a connection that broke may never have arrived."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.facts.link import Forget, Start, Stop
from appliance.rules.fleet.actions import Command
from appliance.rules.fleet.members import Node, Placed
from appliance.rules.fleet.world import World

SOONER_S = 1.0
"""A stop is said again when it must be over sooner than was said, by more than this."""


def commands(world: World, now: float) -> list[tuple[str, Command]]:
    """Those that were not said yet, the ones that free something first.

    Takes note that they are said, and buries replicas of which nothing is left.
    """
    ending = [placed for placed in world.replicas.values() if placed.stage != "running"]
    said = [each for placed in ending for each in _end(world, placed, now)]
    for node in world.nodes.values():
        if node.strays and node.reachable:
            said += [(node.name, command) for each in sorted(node.strays) for command in _stray(node, each, now)]
    for node in world.nodes.values():
        if not node.booked or not node.reachable:
            continue
        for shard_id, shard in node.booked.items():
            placed = world.replicas.get(shard.replica)
            if placed is not None and placed.stage == "running" and ("start", shard_id) not in node.told:
                node.told["start", shard_id] = now
                said.append((node.name, Start(shard)))
    return said


def _end(world: World, placed: Placed, now: float) -> Iterator[tuple[str, Command]]:
    """Stop what is left of a replica. One that drains begins with its leader, which needs the others to finish."""
    leader = placed.shards.get(0)
    there = world.nodes.get(leader.node) if leader is not None else None
    leads = leader is not None and there is not None and there.outstanding(leader.id)
    left = False
    for rank, shard in sorted(placed.shards.items()):
        node = world.nodes.get(shard.node)
        if node is None or node.state == "lost":
            continue
        report = node.reports.get(shard.id)
        if report is None and shard.id not in node.booked:
            continue
        if report is None and ("start", shard.id) not in node.told:
            world.unbook(shard)
            continue
        left = True
        if not node.reachable:
            continue
        if report is not None and report.ended:
            yield from _once(node, Forget(shard.id), now)
        elif rank == 0 and placed.stage == "stopping":
            yield from _once(node, Stop(shard.id, max(0.0, placed.stop_by - now), placed.reason), placed.stop_by)
        elif placed.stage == "over" or not leads:
            yield from _once(node, Stop(shard.id, 0.0, placed.reason), now)
    if not left:
        world.bury(placed)


def _stray(node: Node, shard_id: str, now: float) -> Iterator[Command]:
    report = node.reports.get(shard_id)
    if report is not None:
        reason = "it was replaced while this node was away"
        for _, command in _once(node, Forget(shard_id) if report.ended else Stop(shard_id, 0.0, reason), now):
            yield command


def _once(node: Node, command: Stop | Forget, until: float) -> Iterator[tuple[str, Command]]:
    verb = "stop" if isinstance(command, Stop) else "forget"
    before = node.told.get((verb, command.shard_id))
    if before is None or (verb == "stop" and until < before - SOONER_S):
        node.told[verb, command.shard_id] = until
        yield node.name, command

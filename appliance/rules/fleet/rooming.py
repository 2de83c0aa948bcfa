"""The world as placement sees it: what each node has free, and who has the rest."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from appliance.facts.replica import Shard
from appliance.rules.fleet.clashes import Clash
from appliance.rules.fleet.members import Node
from appliance.rules.fleet.world import World
from appliance.rules.placement.rooms import Rooms
from appliance.rules.placement.spots import Spot


@attrs.define
class Plan:
    """The rooms of all nodes, kept from pass to pass and renewed where a node has changed."""

    rooms: Rooms = attrs.field(factory=Rooms)
    seen: dict[str, int] = attrs.field(factory=dict)

    def renew(self, world: World) -> list[Clash]:
        """Bring it up to date. What it says of GPUs that two have is told once for each change of the node."""
        clashes: list[Clash] = []
        if len(self.seen) > len(world.nodes) or self.seen.keys() - world.nodes.keys():
            for name in self.seen.keys() - world.nodes.keys():
                self.rooms.remove(name)
                del self.seen[name]
        for name, node in world.nodes.items():
            if self.seen.get(name) != node.changes:
                self.seen[name] = node.changes
                self.rooms.set(spot_of(node, clashes=clashes))
        return clashes


def shards_on(node: Node) -> Iterator[Shard]:
    """Every shard that runs on a node, or may yet."""
    for report in node.reports.values():
        if not report.ended:
            yield report.shard
    yield from node.booked.values()


def spot_of(node: Node, without: str = "", clashes: list[Clash] | None = None, now: float | None = None) -> Spot:
    """A node as it is, or as it would be without one replica. `now` has reasons say for how long they hold."""
    taken: dict[str, str] = {}
    on_cpus: set[str] = set()
    for shard in shards_on(node):
        if shard.replica == without:
            continue
        if not shard.gpus:
            on_cpus.add(shard.replica)
        for gpu in shard.gpus:
            other = taken.setdefault(gpu, shard.replica)
            if other != shard.replica and clashes is not None:
                clashes.append(Clash(node.name, gpu, other, shard.replica))
    return Spot(
        node.name,
        node.inventory.address,
        node.inventory,
        node.port_range,
        why_not(node, now),
        taken,
        len(on_cpus),
    )


def why_not(node: Node, now: float | None = None) -> str:
    """Why nothing new goes to a node, "" when something may."""
    for_s = f" for {max(0.0, now - node.since):.0f} s" if now is not None else ""
    match node.state:
        case "expected":
            return f"it has not called yet{for_s.replace(' for', ' since we started,')}"
        case "lost":
            return f"it has been lost{for_s}"
        case "unreachable":
            return f"it has been unreachable{for_s}"
    if not node.connected:
        return f"its agent is not connected{f', for {now - node.parted_at:.0f} s' if now is not None else ''}"
    if node.draining_since is not None:
        return "it is being drained" if any(shards_on(node)) else "it is drained"
    return "it is cordoned" if node.cordoned else ""

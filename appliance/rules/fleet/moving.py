"""Whether a replica that fits nowhere would fit if others were elsewhere: room that is there, in pieces.

Nothing is moved by this. Moving costs the load of an engine for each replica, and to whom that is worth it an operator
knows; what can be told is which nodes to drain, and that whatever runs there has a place on the others.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice

import attrs

from appliance.facts.catalog import Model, Profile
from appliance.rules.fleet.members import Node, Placed
from appliance.rules.fleet.rooming import shards_on, spot_of
from appliance.rules.fleet.world import World
from appliance.rules.placement.rooms import Rooms
from appliance.rules.placement.spots import Spot

MOST_TRIED = 64
"""Sets of nodes that are looked at, the ones with the least to move first: an operator waits for the answer, and so
does everything else."""


def to_drain(world: World, models: dict[str, Model], profile: Profile) -> tuple[str, ...]:
    """Nodes that would hold one more replica of `profile` together, were what runs there elsewhere, where there is room
    for it; empty where no such nodes were found. For a profile that fits nowhere now."""
    spots = {name: spot_of(node) for name, node in world.nodes.items()}
    rooms = Rooms(spots.values())
    for empty in islice(_emptied(world, profile, spots), MOST_TRIED):
        if _fits(world, models, profile, rooms, spots, empty):
            return empty
    return ()


def _emptied(world: World, profile: Profile, spots: dict[str, Spot]) -> Iterator[tuple[str, ...]]:
    """Sets of nodes that hold it when they are empty, by how much would have to move."""
    used = sorted(_movable(world, spots), key=lambda node: (len(_replicas(node)), node.name))
    rooms = Rooms(spots.values())
    emptied: list[str] = []
    for node in used:
        rooms.set(_empty(spots[node.name]))
        if profile.nodes == 1:
            if rooms.find(profile) is not None:
                yield (node.name,)
            rooms.set(spots[node.name])
            continue
        emptied.append(node.name)
        if (place := rooms.find(profile)) is not None:
            yield tuple(seat.node for seat in place.seats if seat.node in emptied)


def _movable(world: World, spots: dict[str, Spot]) -> Iterator[Node]:
    """Nodes that may take something new, and have only what goes on."""
    for name, node in world.nodes.items():
        there = _replicas(node)
        if there and not spots[name].why_not:
            placed = [world.replicas.get(replica) for replica in there]
            if all(each is not None and each.stage == "running" and not each.broken for each in placed):
                yield node


def _fits(
    world: World,
    models: dict[str, Model],
    profile: Profile,
    rooms: Rooms,
    spots: dict[str, Spot],
    drained: Sequence[str],
) -> bool:
    """Whether all that is on the drained nodes has a place on the others, and the replica then one on them. The rooms
    are left as they were."""
    there = {replica for name in drained for replica in _replicas(world.nodes[name])}
    # What a replica has on further nodes is not free yet: its replacement comes first.
    for name in drained:
        rooms.set(attrs.evolve(spots[name], why_not="drained"))
    touched = set(drained)
    try:
        for placed in sorted((world.replicas[each] for each in there), key=_size):
            if (model := models.get(placed.model)) is None:
                continue  # it goes anyway
            if (place := rooms.place(model)) is None:
                return False
            touched.update(seat.node for seat in place.seats)
        for name in drained:
            rooms.set(_empty(spots[name]))
        return rooms.find(profile) is not None
    finally:
        for name in touched:
            rooms.set(spots[name])


def _replicas(node: Node) -> set[str]:
    return {shard.replica for shard in shards_on(node)}


def _size(placed: Placed) -> tuple[int, int, str]:
    """The largest first: it has the least choice."""
    return -placed.profile.nodes, -placed.profile.gpus_per_node, placed.id


def _empty(spot: Spot) -> Spot:
    return attrs.evolve(spot, taken={}, cpu_replicas=0)

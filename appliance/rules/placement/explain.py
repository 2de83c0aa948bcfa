"""Why a replica does not go somewhere, for operators: one sentence for each profile and node, or fabric.

The reasons are read from the rooms that the choice is made from, and what would be chosen is found by the choice
itself, so that what is told is what holds.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Protocol

from appliance.facts.catalog import Profile
from appliance.facts.hardware import Gpu
from appliance.rules.placement import fit
from appliance.rules.placement.spots import Placement, Rejection, Spot
from appliance.rules.placement.topology import Network

FAILED_HERE = "is tried last, since the model failed here a moment ago"


class Room(Protocol):
    """What is read of a node."""

    spot: Spot
    networks: dict[Network, float]
    taken: dict[str, str]
    cpu_replicas: int
    free: dict[str, list[Gpu]]


def rejections(
    profiles: Sequence[Profile],
    rooms: Mapping[str, Room],
    find: Callable[[Profile], Placement | None],
    avoid: Collection[str],
) -> Iterator[Rejection]:
    """All of them but for what would be taken, in the order in which profiles are tried and of names."""
    chosen: Placement | None = None
    for profile in profiles:
        before, chosen = chosen, chosen or find(profile)
        against = _on_one if profile.nodes == 1 else _across
        for candidate, reason, preferred in against(profile, rooms, chosen, avoid):
            if before is not None and not reason:
                preferred = f"profile {before.profile.name}, which is tried first, fits on {_seats(before)}"
            if reason or preferred:
                yield Rejection(profile.name, candidate, reason or f"it would do, and {preferred}")


def why_not(profile: Profile, room: Room) -> str:
    """Why this node can take no part of a replica of this profile, "" when it can."""
    spot = room.spot
    if spot.why_not:
        return spot.why_not
    if profile.nodes > 1 and not room.networks:
        return "it is on no named fabric, so it takes only replicas on one node"
    if why := fit.why_no_cpus(profile, spot.inventory, room.cpu_replicas):
        return why
    if fit.choose(profile, room.free) is None:
        return fit.why_no_gpus(profile, spot.inventory, room.taken)
    return fit.why_no_disk(profile, spot.inventory)


Against = Iterator[tuple[str, str, str]]
"""A candidate, why it cannot be had, and, where it can, why something else is preferred: "" when it is the one."""


def _on_one(profile: Profile, rooms: Mapping[str, Room], chosen: Placement | None, avoid: Collection[str]) -> Against:
    best = rooms[chosen.seats[0].node] if chosen else None
    for name, room in sorted(rooms.items()):
        preferred = _preferred(profile, best, room, avoid) if best is not None and best is not room else ""
        yield name, why_not(profile, room), preferred


def _preferred(profile: Profile, best: Room, room: Room, avoid: Collection[str]) -> str:
    there = best.spot.name
    if room.spot.name in avoid and there not in avoid:
        return FAILED_HERE
    if profile.gpus_per_node == 0:
        fewer = _load(best) < _load(room)
        return f"{there} has fewer replicas for its CPUs" if fewer else f"{there} does as well"
    if best.taken and not room.taken:
        return f"{there} is partly used, so that whole nodes stay whole"
    if _least_free(profile, best) < _least_free(profile, room):
        return f"{there} has fewer free GPUs to spare"
    return f"{there} does as well"


def _load(room: Room) -> float:
    return (room.cpu_replicas + 1) / max(1, room.spot.inventory.cpus.count)


def _least_free(profile: Profile, room: Room) -> int:
    return min((len(room.free[kind]) for kind in _kinds(profile, room)), default=0)


def _across(profile: Profile, rooms: Mapping[str, Room], chosen: Placement | None, avoid: Collection[str]) -> Against:
    """Fabrics first, then the nodes: each of them, since a node may be the reason why its fabric does not do."""
    members: dict[Network, list[Room]] = {}
    for _, room in sorted(rooms.items()):
        for network in room.networks:
            members.setdefault(network, []).append(room)
    able: set[str] = set()
    names = [name for name, _ in members]
    seats = {seat.node for seat in chosen.seats} if chosen else set()
    for network, there in sorted(members.items()):
        label = f"fabric {network[0]}" + (f" ({network[1]})" if names.count(network[0]) > 1 else "")
        fitting = _fitting(profile, there)
        enough = {name for those in fitting.values() if len(those) >= profile.nodes for name in those}
        able |= enough
        reason = "" if enough else f"it needs {_wanted(profile)}, and has {_counted(fitting)}"
        ours = chosen is not None and chosen.fabric == network[0] and seats <= enough
        yield label, reason, f"fabric {chosen.fabric} was preferred ({_seats(chosen)})" if chosen and not ours else ""
    for name, room in sorted(rooms.items()):
        reason = why_not(profile, room)
        if not reason and name not in able:
            on = " and ".join(sorted({network for network, _ in room.networks}))
            reason = f"it has room for a part, and too few other nodes of fabric {on} have it too"
        yield name, reason, _preferred_nodes(room, chosen, avoid) if chosen and name not in seats else ""


def _preferred_nodes(room: Room, chosen: Placement, avoid: Collection[str]) -> str:
    if all(name != chosen.fabric for name, _ in room.networks):
        return f"fabric {chosen.fabric} was preferred ({_seats(chosen)})"
    if room.spot.name in avoid and any(seat.node not in avoid for seat in chosen.seats):
        return FAILED_HERE
    return f"{_seats(chosen)} are as empty or emptier"


def _fitting(profile: Profile, rooms: Sequence[Room]) -> dict[str, list[str]]:
    """The nodes that can take a part, by the class they would give; "" on CPUs."""
    found: dict[str, list[str]] = {}
    for room in rooms:
        if why_not(profile, room):
            continue
        for kind in _kinds(profile, room):
            found.setdefault(kind, []).append(room.spot.name)
    return found


def _kinds(profile: Profile, room: Room) -> list[str]:
    """The classes of which a node has enough free GPUs for a part; "" on CPUs, whatever class the profile names."""
    if profile.gpus_per_node == 0:
        return [""]
    return [
        kind
        for kind, gpus in sorted(room.free.items())
        if profile.gpu_class in ("", kind) and len(gpus) >= profile.gpus_per_node and fit.is_young(profile, gpus)
    ]


def _wanted(profile: Profile) -> str:
    if not profile.gpus_per_node:
        return f"{profile.nodes} nodes"
    count = profile.gpus_per_node
    of = f"of class {profile.gpu_class}" if profile.gpu_class else "of one class"
    return f"{profile.nodes} nodes with {count} free GPU{'s' if count > 1 else ''} {of}"


def _counted(fitting: Mapping[str, Sequence[str]]) -> str:
    """`1 (node-c)`; with several classes `1 of class a100-80g (node-c) and 1 of class h100-80g (node-d)`."""
    several = len(fitting) > 1
    told = [
        f"{len(names)}{f' of class {kind}' if several else ''} ({', '.join(names)})"
        for kind, names in sorted(fitting.items())
    ]
    return " and ".join(told) or "none"


def _seats(chosen: Placement) -> str:
    return ", ".join(seat.node for seat in chosen.seats)

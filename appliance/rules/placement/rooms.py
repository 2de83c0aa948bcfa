"""Which nodes a replica goes to: every node with what is free on it, and the choice among them.

What must never happen cannot be written here. Nodes are sorted by fabric before anything is chosen, and a replica on
several nodes is taken from the shelf of one fabric and one class, so that no code ever holds nodes of two. A GPU that
has a hindrance, or that somebody has, is on no shelf. A node that may take nothing new is on no shelf either.

`Rooms` costs about 10 microseconds a node to make and the like for a `set`, so it may be kept or made anew: both give
the same answers.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from itertools import islice

import attrs

from appliance.facts.catalog import Model, Profile
from appliance.facts.hardware import Gpu
from appliance.rules.engines import capability
from appliance.rules.placement import fit
from appliance.rules.placement.explain import rejections
from appliance.rules.placement.packing import Offer, Row, Shelf, Shelves, asked_by, fullest, willing
from appliance.rules.placement.spots import Placement, Rejection, Seat, Spot
from appliance.rules.placement.topology import Network, networks_of


@attrs.define
class Room:
    """One node: what it is, and what is free there now. `places` are the rows in which it stands."""

    spot: Spot
    networks: dict[Network, float]
    cramped: bool
    taken: dict[str, str]
    cpu_replicas: int
    free: dict[str, list[Gpu]]
    places: list[tuple[Shelf, Row]] = attrs.field(factory=list)

    @classmethod
    def of(cls, spot: Spot) -> Room:
        inventory, taken = spot.inventory, dict(spot.taken)
        free = fit.free_gpus(inventory.gpus, taken)
        return cls(spot, networks_of(inventory), fit.is_cramped(inventory), taken, spot.cpu_replicas, free)

    def take(self, gpus: Sequence[Gpu], holder: str) -> None:
        if not gpus:
            self.cpu_replicas += 1
            return
        self.taken.update((gpu.uuid, holder) for gpu in gpus)
        self.free = fit.free_gpus(self.spot.inventory.gpus, self.taken)


class Rooms:
    """All nodes. A plain object: whoever has it says what changed, by `set` and `remove`."""

    def __init__(self, spots: Iterable[Spot] = ()) -> None:
        self._rooms: dict[str, Room] = {}
        self._everywhere = Shelves()
        self._fabrics: dict[Network, Shelves] = {}
        # By name, so that each is put at the end of its row: half the work.
        for spot in sorted(spots, key=lambda spot: spot.name):
            self.set(spot)

    def set(self, spot: Spot) -> None:
        """A node as it is now, whether it was known or not. What was placed there and is not in `taken` is undone."""
        self.remove(spot.name)
        room = self._rooms[spot.name] = Room.of(spot)
        self._shelve(room)

    def remove(self, name: str) -> None:
        """Forget a node; one that is not known is forgotten already."""
        room = self._rooms.pop(name, None)
        if room is not None:
            self._unshelve(room)

    def place(
        self, model: Model, profiles: Sequence[Profile] | None = None, avoid: Collection[str] = ()
    ) -> Placement | None:
        """The place of one more replica, by the profile of the highest priority that fits; None when none does.

        It takes the room it gives. `profiles` are those that may be used, all of the model's unless they are given;
        the nodes in `avoid` are tried last.
        """
        for profile in by_priority(model.profiles if profiles is None else profiles):
            placement = self.find(profile, avoid)
            if placement is not None:
                self._take(placement, model.name)
                return placement
        return None

    def find(self, profile: Profile, avoid: Collection[str] = ()) -> Placement | None:
        """The place of one more replica of this profile, without taking it."""
        return self._on_one(profile, avoid) if profile.nodes == 1 else self._across(profile, avoid)

    def explain(
        self, model: Model, profiles: Sequence[Profile] | None = None, avoid: Collection[str] = ()
    ) -> tuple[Rejection, ...]:
        """Why `place` would take nothing but what it would take: every profile with every node or fabric.

        Takes nothing, and looks at every node for every profile: for operators, not for each pass. Empty without nodes.
        """
        tried = by_priority(model.profiles if profiles is None else profiles)
        return tuple(rejections(tried, self._rooms, lambda profile: self.find(profile, avoid), avoid))

    def why_nowhere(self, model: Model, most: int, avoid: Collection[str] = ()) -> tuple[tuple[Rejection, ...], int]:
        """The first `most` of what `explain` says of a model that fits nowhere, and how many there are in all.

        Looks at no more nodes than that takes: a pass asks it for each model without a place, and they may be many.
        """
        tried = by_priority(model.profiles)
        told = rejections(tried, self._rooms, lambda profile: self.find(profile, avoid), avoid)
        networks = {network for room in self._rooms.values() for network in room.networks}
        total = sum(len(self._rooms) + (len(networks) if profile.nodes > 1 else 0) for profile in tried)
        return tuple(islice(told, most)), total

    def _on_one(self, profile: Profile, avoid: Collection[str]) -> Placement | None:
        last: tuple[str, str] | None = None
        for name, kind in fullest(self._everywhere, profile):
            if name not in avoid:
                return self._placement(profile, [name], kind)
            last = last or (name, kind)
        return self._placement(profile, [last[0]], last[1]) if last else None

    def _across(self, profile: Profile, avoid: Collection[str]) -> Placement | None:
        """The emptiest nodes of one fabric. Among fabrics where these are equally empty: the fastest, then the one with
        the fewest nodes to spare, so that larger replicas find room on the others."""
        best: tuple[Offer, Network, str] | None = None
        for network, shelves in self._fabrics.items():
            for kind, shelf in shelves.of(profile):
                offer = self._offer(profile, network, shelf, avoid)
                if offer is not None and (best is None or (offer, network, kind) < best):
                    best = offer, network, kind
        if best is None:
            return None
        offer, network, kind = best
        return self._placement(profile, offer[-1], kind, network[0])

    def _offer(self, profile: Profile, network: Network, shelf: Shelf, avoid: Collection[str]) -> Offer | None:
        """What one fabric has of one class. Remembered while nothing moves there: fabrics are many, and a replica
        moves nodes of one."""
        asked = asked_by(profile)
        if not avoid and asked in shelf.offers:
            return shelf.offers[asked]
        rows = shelf.fitting(asked)
        there = sum(len(shelf.rows[row]) for row in rows)
        offer: Offer | None = None
        if there >= profile.nodes:
            names = willing(shelf.emptiest(rows), profile.nodes, avoid)
            rooms = [self._rooms[name] for name in names]
            avoided = sum(name in avoid for name in names)
            used = sum(bool(room.taken) for room in rooms)
            offer = (avoided, used, -min(room.networks[network] for room in rooms), there, names)
        if not avoid:
            shelf.offers[asked] = offer
        return offer

    def _placement(self, profile: Profile, names: Iterable[str], kind: str, fabric: str = "") -> Placement:
        seats = []
        for name in names:
            room = self._rooms[name]
            gpus = fit.choose(profile, room.free, kind)
            assert gpus is not None, f"{name} stands where it has no room"
            seats.append(Seat(name, room.spot.address, tuple(gpu.uuid for gpu in gpus)))
        return Placement(profile, tuple(seats), kind, fabric)

    def _take(self, placement: Placement, holder: str) -> None:
        for seat in placement.seats:
            room = self._rooms[seat.node]
            self._unshelve(room)
            chosen = set(seat.gpus)
            room.take([gpu for gpu in room.spot.inventory.gpus if gpu.uuid in chosen], holder)
            self._shelve(room)

    def _shelve(self, room: Room) -> None:
        if room.spot.why_not:
            return
        used, cramped = bool(room.taken), room.cramped
        count = max(1, room.spot.inventory.cpus.count)
        for shelves in (self._everywhere, *map(self._on, room.networks)):
            if room.cpu_replicas < count:
                room.places.append((shelves.cpus, (False, -(room.cpu_replicas + 1) / count, cramped, None)))
            for kind, gpus in room.free.items():
                room.places.append((shelves.on(kind), (used, len(gpus), cramped, capability.least(gpus))))
        for shelf, row in room.places:
            shelf.add(row, room.spot.name)

    def _on(self, network: Network) -> Shelves:
        shelves = self._fabrics.get(network)
        if shelves is None:
            shelves = self._fabrics[network] = Shelves()
        return shelves

    def _unshelve(self, room: Room) -> None:
        for shelf, row in room.places:
            shelf.drop(row, room.spot.name)
        room.places.clear()


def by_priority(profiles: Iterable[Profile]) -> list[Profile]:
    """The order in which profiles are tried; among equals the order in which they were written down."""
    return sorted(profiles, key=lambda profile: -profile.priority)

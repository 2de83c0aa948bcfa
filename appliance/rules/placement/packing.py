"""The order in which nodes are tried, kept so that nobody has to look at all of them.

Nodes that are alike for placement stand in one row, in the order of their names. A shelf holds the rows of one class
of GPU (or of CPUs) among the nodes that may be combined: all of them for replicas on one node, those of one fabric for
larger ones. There are never more rows than a node has different states, so a choice costs the same among ten nodes and
among ten thousand; only moving a node from row to row costs a search by halves in a list.

Single-node replicas fill partly used nodes first and of those the ones with the least room, so that whole nodes stay
whole. Replicas on several nodes take the emptiest, since each rank waits for the slowest. On CPUs room is not counted
but shared, so the node with the fewest replicas for its CPUs is taken.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Iterator

import attrs

from appliance.facts.catalog import Profile
from appliance.rules.engines import capability
from appliance.rules.engines.capability import Capability
from appliance.rules.placement import fit

Row = tuple[bool, float, bool, Capability | None]
"""What the nodes of a row have in common: whether some GPU of theirs is taken; how much room they have (free GPUs of
the class; on CPUs minus the replicas per CPU that there would be with one more); whether the disk is too full to fetch
anything to it; how old their free GPUs of the class are."""

UNKNOWN: Capability = (1 << 16, 0)
"""Where GPUs of unknown age stand: behind all others that are alike. So what any will do for takes the oldest ones, and
what asks for young ones takes those that are known to be."""

Asked = tuple[int, float, bool, Capability | None]
"""What a replica asks of a shelf: number of nodes, room on each, whether something must be fetched, and how old its
GPUs may be."""

Offer = tuple[int, int, float, int, list[str]]
"""The best nodes of a shelf for one replica, in the order of ranks, with what they are judged by; less is better: how
many of them are to be avoided, how many have GPUs taken, minus the slowest rate, how many nodes there are to choose
from."""

ANY = float("-inf")


@attrs.define
class Shelf:
    """The nodes that may be combined, by what room they have."""

    rows: dict[Row, list[str]] = attrs.field(factory=dict)
    offers: dict[Asked, Offer | None] = attrs.field(factory=dict)
    """What was found here since the last change."""

    def add(self, row: Row, name: str) -> None:
        self.offers.clear()
        insort(self.rows.setdefault(row, []), name)

    def drop(self, row: Row, name: str) -> None:
        self.offers.clear()
        names = self.rows[row]
        del names[bisect_left(names, name)]
        if not names:
            del self.rows[row]

    def fitting(self, asked: Asked) -> list[Row]:
        """The rows whose nodes can each take a part."""
        _, least, fetches, need = asked
        return [
            row
            for row in self.rows
            if row[1] >= least and not (fetches and row[2]) and (need is None or capability.suffices(row[3], need))
        ]

    def emptiest(self, rows: list[Row]) -> Iterator[str]:
        """Names of the nodes in `rows`, unused ones with the most room first."""
        for row in sorted(rows, key=lambda row: (row[0], -row[1], row[2], row[3] or UNKNOWN)):
            yield from self.rows[row]


@attrs.define
class Shelves:
    """The shelves of nodes that may be combined: one for each class of GPU, one for CPUs."""

    gpus: dict[str, Shelf] = attrs.field(factory=dict)
    cpus: Shelf = attrs.field(factory=Shelf)

    def of(self, profile: Profile) -> list[tuple[str, Shelf]]:
        """Those that may do, with their class. A replica is taken from one of them alone, so its class is one."""
        if profile.gpus_per_node == 0:
            return [("", self.cpus)]
        if profile.gpu_class:
            shelf = self.gpus.get(profile.gpu_class)
            return [(profile.gpu_class, shelf)] if shelf else []
        return list(self.gpus.items())

    def on(self, kind: str) -> Shelf:
        """The shelf of this class, made when it is the first."""
        shelf = self.gpus.get(kind)
        if shelf is None:
            shelf = self.gpus[kind] = Shelf()
        return shelf


def asked_by(profile: Profile) -> Asked:
    """What a replica of this profile asks of each node."""
    return profile.nodes, profile.gpus_per_node or ANY, fit.is_fetched(profile), capability.needed(profile)


def fullest(shelves: Shelves, profile: Profile) -> Iterator[tuple[str, str]]:
    """Nodes with room for a replica on one node, and the class it would take there, the best first."""
    asked = asked_by(profile)
    rows = [(row, kind, shelf) for kind, shelf in shelves.of(profile) for row in shelf.fitting(asked)]
    if profile.gpus_per_node == 0:
        rows.sort(key=lambda each: (-each[0][1], each[0][2]))
    else:
        rows.sort(key=lambda each: (not each[0][0], each[0][1], each[0][2], each[1], each[0][3] or UNKNOWN))
    for row, kind, shelf in rows:
        for name in shelf.rows[row]:
            yield name, kind


def willing(names: Iterator[str], count: int, avoid: Collection[str]) -> list[str]:
    """The first `count` names, those to avoid last."""
    found: list[str] = []
    avoided: list[str] = []
    for name in names:
        if name not in avoid:
            found.append(name)
            if len(found) == count:
                return found
        elif len(avoided) < count:
            avoided.append(name)
    return (found + avoided)[:count]

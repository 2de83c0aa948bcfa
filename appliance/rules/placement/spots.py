"""What placement is asked about and what it answers: nodes as it sees them, seats, and reasons against."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from appliance.facts.catalog import Profile
from appliance.facts.hardware import Inventory


@attrs.frozen
class Spot:
    """One node as placement sees it.

    `why_not` says why nothing new may go here ("cordoned"), "" when something may. `taken` says by UUID which replica
    has a GPU, `cpu_replicas` how many replicas here use none. `port_range` is for whoever makes shards of the answer.
    """

    name: str
    address: str
    inventory: Inventory
    port_range: tuple[int, int]
    why_not: str = ""
    taken: Mapping[str, str] = attrs.field(factory=dict)
    cpu_replicas: int = 0


@attrs.frozen
class Seat:
    """The part of one node in a replica. `gpus` are UUIDs, empty on CPUs."""

    node: str
    address: str
    gpus: tuple[str, ...] = ()


@attrs.frozen
class Placement:
    """Where one replica goes: seats in the order of ranks (the first leads), all of one class and on one fabric.

    `gpu_class` is "" on CPUs, `fabric` is "" on a single node.
    """

    profile: Profile
    seats: tuple[Seat, ...]
    gpu_class: str = ""
    fabric: str = ""


@attrs.frozen
class Rejection:
    """Why a profile did not go somewhere. `candidate` is the name of a node, or "fabric NAME"; `reason` a sentence."""

    profile: str
    candidate: str
    reason: str

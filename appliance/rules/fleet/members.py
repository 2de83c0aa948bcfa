"""What the world is made of: nodes and replicas, as they are known now. `world.py` alone changes them."""

from __future__ import annotations

from typing import Literal

import attrs

from appliance.facts.catalog import Model, Profile
from appliance.facts.hardware import Inventory
from appliance.facts.replica import Shard
from appliance.facts.report import Report

NodeState = Literal["expected", "ready", "unreachable", "lost"]
"""`expected` has a certificate and has not called since we started: as good as unreachable."""

REFUSED_S = 600.0
"""How long a port is not drawn again that somebody else was found to have. Whoever has one mostly keeps it: another
service of that machine. Forgotten with the control plane's process, which costs a few tries."""

Stage = Literal["running", "stopping", "over"]
"""`running` is wanted, starting included; `stopping` finishes what it has and gets nothing new; `over` ends at once."""


@attrs.define
class Node:
    """One node. `heard_at` is when it last said anything (or was first expected), by our clock.

    `session` counts connections; what was sent on an earlier one may be lost. `reports` are by shard id, `booked` are
    shards that are to run here and were not reported yet. `told` says what was commanded on this connection: verb and
    shard, and for a stop until when it may drain. `strays` are shards here that belong to nobody and must end.
    `changes` counts with everything that placement looks at. `since` is when `state` began. `version` is that of the
    agent's program. `refused` are rendezvous ports that somebody else has, and when that was last seen.
    """

    name: str
    state: NodeState = "expected"
    since: float = 0.0
    heard_at: float = 0.0
    connected: bool = False
    parted_at: float = 0.0
    """When its last connection closed."""
    session: int = 0
    cordoned: bool = False
    draining_since: float | None = None
    announced: Inventory = attrs.field(factory=Inventory)
    """As its agent says; `inventory` is that with what we hold against it."""
    inventory: Inventory = attrs.field(factory=Inventory)
    boot_id: str = ""
    version: str = ""
    port_range: tuple[int, int] = (0, 0)
    clock_off_s: float = 0.0
    reports: dict[str, Report] = attrs.field(factory=dict)
    booked: dict[str, Shard] = attrs.field(factory=dict)
    told: dict[tuple[str, str], float] = attrs.field(factory=dict)
    strays: set[str] = attrs.field(factory=set)
    refused: dict[int, float] = attrs.field(factory=dict)
    changes: int = 0

    @property
    def reachable(self) -> bool:
        """Whether commands reach it now."""
        return self.connected and self.state == "ready"

    @property
    def may_come(self) -> bool:
        """Whether it may register any moment, with shards nobody knows of yet."""
        return not self.connected and self.state != "lost"

    def refused_ports(self, now: float) -> set[int]:
        """Those of `refused` that are not worth another try yet."""
        return {port for port, at in self.refused.items() if now < at + REFUSED_S}

    def outstanding(self, shard_id: str) -> bool:
        """Whether that shard runs here, or may yet."""
        report = self.reports.get(shard_id)
        return not report.ended if report is not None else shard_id in self.booked


@attrs.define
class Placed:
    """One replica. `shards` are by rank; one taken in from reports lacks ranks whose nodes have not registered.

    `reason` says why it is no longer `running`, `stop_by` until when it may go on with its requests. `broken` is set
    when it cannot go on as it is, though no shard said so; `fault` tells whether that counts as a failure of the model.
    `states` keeps for each rank its last state and since when by our clock. `ready_at` is when it first served.
    """

    id: str
    model: str
    profile: Profile
    shards: dict[int, Shard]
    made_at: float
    adopted: bool = False
    stage: Stage = "running"
    stage_at: float = 0.0
    reason: str = ""
    stop_by: float = 0.0
    broken: str = ""
    fault: bool = False
    ready_at: float | None = None
    states: dict[int, tuple[str, float]] = attrs.field(factory=dict)
    checked: Model | None = None
    """The model by which it was last found to run as configured."""

    @property
    def complete(self) -> bool:
        return len(self.shards) == self.profile.nodes

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of its nodes in the order of ranks, as far as they are known."""
        return tuple(shard.node for _, shard in sorted(self.shards.items()))

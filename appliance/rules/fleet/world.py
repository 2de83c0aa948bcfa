"""The fleet as it is known: nodes, what their agents report, and which replica has which GPU.

Nothing here is stored. Agents register with everything they run, so after a restart of the control plane the same
calls that keep the world up to date build it anew: a replica that nobody has heard of is taken in from the reports of
its shards. Two sources make up what a node's GPUs are taken by: shards that its agent reports and that have not ended,
and shards that are booked for it, which it has not reported yet. A booking is made in the step that decides it.

Every change is one method, and none of them decides what to do about it; that is `reconcile.py`. `now` is a clock that
never steps. What agents say of times is by their own clocks, and nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Literal

import attrs

from appliance.facts.catalog import Model, Profile
from appliance.facts.hardware import Inventory
from appliance.facts.link import Register
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.rules.fleet.actions import Event

NodeState = Literal["expected", "ready", "unreachable", "lost"]
"""`expected` has a certificate and has not called since we started: as good as unreachable."""

Stage = Literal["running", "stopping", "over"]
"""`running` is wanted, starting included; `stopping` finishes what it has and gets nothing new; `over` ends at once."""


@attrs.define
class Node:
    """One node. `heard_at` is when it last said anything (or was expected, or its connection closed), by our clock.

    `session` counts connections; what was sent on an earlier one may be lost. `reports` are by shard id, `booked` are
    shards that are to run here and were not reported yet. `told` says what was commanded on this connection: verb and
    shard, and for a stop until when it may drain. `strays` are shards here that belong to nobody and must end.
    `version` changes with everything that placement looks at. `since` is when `state` began.
    """

    name: str
    state: NodeState = "expected"
    since: float = 0.0
    heard_at: float = 0.0
    connected: bool = False
    session: int = 0
    cordoned: bool = False
    draining_since: float | None = None
    inventory: Inventory = Inventory()
    boot_id: str = ""
    release: str = ""
    """The version of the agent's program."""
    port_range: tuple[int, int] = (0, 0)
    clock_off_s: float = 0.0
    reports: dict[str, Report] = attrs.field(factory=dict)
    booked: dict[str, Shard] = attrs.field(factory=dict)
    told: dict[tuple[str, str], float] = attrs.field(factory=dict)
    strays: set[str] = attrs.field(factory=set)
    version: int = 0

    @property
    def reachable(self) -> bool:
        """Whether commands reach it now."""
        return self.connected and self.state == "ready"

    @property
    def may_come(self) -> bool:
        """Whether it may register any moment, with shards nobody knows of yet."""
        return not self.reachable and self.state != "lost"

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


class World:
    """All nodes and replicas. Plain calls; one owner. `events` collects what happened until the next step takes it.

    `tombs` are replicas that were given up while a node that had a part of them was away: when it comes back with that
    part, it is stopped. Read `nodes` and `replicas` freely; change them only through the methods here.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.replicas: dict[str, Placed] = {}
        self.tombs: dict[str, set[str]] = {}
        self.events: list[Event] = []
        self.version = 0
        """Changes with everything but mere signs of life."""
        self._cordoned: set[str] = set()
        self._draining: dict[str, float] = {}

    # -- what nodes do -------------------------------------------------------------------------------------------------

    def expect(self, name: str, now: float) -> None:
        """A node that holds a certificate. Until it calls, it counts as unreachable."""

    def register(self, message: Register, now: float, clock_off_s: float = 0.0) -> None:
        """A new connection of a node, with everything it runs. `clock_off_s`: how far its clock is ahead of ours."""

    def looked(self, name: str, inventory: Inventory, now: float) -> None:
        """Its hardware has changed."""

    def report(self, name: str, reports: Iterable[Report], gone: Iterable[str], now: float) -> None:
        """Shards that changed, and ids of those the agent has forgotten."""

    def heard(self, name: str, now: float) -> None:
        """It said something."""

    def parted(self, name: str, now: float) -> None:
        """Its connection is closed. An agent that starts anew is back in a second; the clock of silence starts now."""

    # -- what operators do ---------------------------------------------------------------------------------------------

    def cordon(self, name: str) -> None:
        """Nothing new goes there; also a node nobody has heard of yet."""

    def uncordon(self, name: str) -> None:
        """Undo `cordon` and `drain`. What has been stopped stays stopped."""

    def drain(self, name: str, now: float) -> None:
        """Cordon it, and have what runs there replaced elsewhere and stopped. A second call changes nothing."""

    def forget(self, name: str, now: float) -> None:
        """Its certificate was revoked: whatever runs there is none of ours any more."""

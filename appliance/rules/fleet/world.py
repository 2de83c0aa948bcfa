"""The fleet as it is known: nodes, what their agents report, and which replica has which GPU.

Nothing here is stored. Agents register with everything they run, so after a restart of the control plane the same
calls that keep the world up to date build it anew: a replica that nobody has heard of is taken in from the reports of
its shards. Two sources make up what a node's GPUs are taken by: shards that its agent reports and that have not ended,
and shards that are booked for it, which it has not reported yet. A booking is made in the step that decides it.

Every change is one method, and none of them decides what to do about it; that is `reconcile.py`. `now` is a clock that
never steps. What agents say of times is by their own clocks, and nothing is decided by it.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from appliance.facts.hardware import Inventory
from appliance.facts.link import Register
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.rules.fleet.actions import Event, Level
from appliance.rules.fleet.members import Node, Placed
from appliance.rules.fleet.owners import Owners

REMEMBERED = 100_000
"""Ids of replicas that were given up are kept for nodes that may come back; the oldest go first."""


class World:
    """All nodes and replicas. Plain calls; one owner. `events` collects what happened until the next step takes it.

    `tombs` are replicas that were given up while nodes that had a part of them were away, with the names of those
    nodes: when one comes back with that part, it is stopped. Read `nodes` and `replicas` freely; change them only
    through the methods here. Names of nodes come from certificates; a report of one that is not known is passed over.
    """

    def __init__(self) -> None:
        self.nodes: dict[str, Node] = {}
        self.replicas: dict[str, Placed] = {}
        self.tombs: dict[str, set[str]] = {}
        self.events: list[Event] = []
        self.changes = 0
        """Counts everything but mere signs of life."""
        self._cordoned: set[str] = set()
        self._draining: dict[str, float] = {}
        self._owners = Owners()

    # -- what nodes do -------------------------------------------------------------------------------------------------

    def expect(self, name: str, now: float) -> None:
        """A node that holds a certificate. Until it calls, it counts as unreachable."""
        if name not in self.nodes:
            self._node(name, now)

    def register(self, message: Register, now: float, clock_off_s: float = 0.0) -> None:
        """A new connection of a node, with everything it runs. `clock_off_s`: how far its clock is ahead of ours."""
        node = self._node(message.node, now)
        if node.state != "ready":
            was, for_s = node.state, round(now - node.since, 1)
            node.state, node.since = "ready", now
            self.tell("info", "node_registered", node=node.name, was=was, for_s=for_s, shards=len(message.reports))
        node.connected, node.heard_at = True, now
        node.session += 1
        node.port_range = message.port_range
        self._announced(node, message.inventory)
        node.boot_id, node.version, node.clock_off_s = message.boot_id, message.version, clock_off_s
        node.told.clear()
        before = set(node.reports)
        node.reports = {}
        node.strays.clear()
        for report in message.reports:
            self._take_in(node, report, now)
        for shard_id in before - set(node.reports):
            self._vanished(node, shard_id)
        self._open_tombs(node)
        self._changed(node)

    def looked(self, name: str, inventory: Inventory, now: float) -> None:
        """Its hardware has changed."""
        node = self.nodes.get(name)
        if node is not None and node.connected:
            self._announced(node, inventory)
            self.heard(name, now)
            self._changed(node)

    def report(self, name: str, reports: Iterable[Report], gone: Iterable[str], now: float) -> None:
        """Shards that changed, and ids of those the agent has forgotten."""
        node = self.nodes.get(name)
        if node is None or not node.connected:
            return
        self.heard(name, now)
        for report in reports:
            self._take_in(node, report, now)
        for shard_id in gone:
            if node.reports.pop(shard_id, None) is not None:
                self._vanished(node, shard_id)
            node.strays.discard(shard_id)
            for verb in ("start", "stop", "forget"):
                node.told.pop((verb, shard_id), None)
        self._open_tombs(node)
        self._changed(node)

    def heard(self, name: str, now: float) -> None:
        """It said something."""
        node = self.nodes.get(name)
        if node is None or not node.connected:
            return
        node.heard_at = now
        if node.state == "unreachable":
            self.tell("info", "node_back", node=name, silent_s=round(now - node.since, 1))
            node.state, node.since = "ready", now
            self._changed(node)

    def parted(self, name: str, now: float) -> None:
        """Its connection is closed, so it is silent. An agent that starts anew is back in a second."""
        if (node := self.nodes.get(name)) is not None and node.connected:
            node.connected, node.parted_at = False, now
            self._changed(node)

    # -- what operators do ---------------------------------------------------------------------------------------------

    def cordon(self, name: str) -> None:
        """Nothing new goes there; also a node nobody has heard of yet."""
        self._cordoned.add(name)
        self._mark(name)

    def uncordon(self, name: str) -> None:
        """Undo `cordon` and `drain`. What has been stopped stays stopped."""
        self._cordoned.discard(name)
        self._draining.pop(name, None)
        self._mark(name)

    def drain(self, name: str, since: float) -> None:
        """Cordon it, and have what runs there replaced elsewhere and stopped; its grace counts from `since`. A second
        call changes nothing."""
        self._cordoned.add(name)
        self._draining.setdefault(name, since)
        self._mark(name)

    def forget(self, name: str, now: float) -> None:
        """Its certificate was revoked: whatever runs there is none of ours any more."""
        if name in self.nodes:
            self._bury(self.nodes[name], f"{name} was taken out of the cluster")
            del self.nodes[name]
            self._judge_gpus(self._owners.withdraw(name))
            self.tell("info", "node_forgotten", node=name)
            self.changes += 1
        self._cordoned.discard(name)
        self._draining.pop(name, None)

    # -- what time does ------------------------------------------------------------------------------------------------

    def silent(self, name: str, now: float) -> None:
        """It has said nothing for so long that it gets nothing new."""
        node = self.nodes[name]
        self.tell("warning", "node_unreachable", node=name, silent_s=round(now - node.heard_at, 1))
        node.state, node.since = "unreachable", now
        self._changed(node)

    def refuse_port(self, name: str, port: int, now: float) -> bool:
        """Somebody else has this port of a node, on which ranks were to meet. Whether that was not known before."""
        node = self.nodes.get(name)
        if node is None:
            return False
        known = node.refused_ports(now)
        node.refused = {each: at for each, at in node.refused.items() if each in known} | {port: now}
        return port not in known

    def lost(self, name: str, now: float) -> None:
        """It has said nothing for so long that what ran there is given up.

        From now on only a new registration counts: whatever its connection may still say is about a node we know
        nothing of. So the connection should be closed, as `connected` tells.
        """
        node = self.nodes[name]
        shards = sum(not report.ended for report in node.reports.values())
        silent_s = round(now - node.heard_at, 1)
        self.tell("error", "node_lost", node=name, silent_s=silent_s, was=node.state, shards=shards)
        node.state, node.since, node.connected = "lost", now, False
        self._bury(node, f"{name} is lost")
        self._judge_gpus(self._owners.withdraw(name))
        self._changed(node)

    def overslept(self, seconds: float, now: float) -> None:
        """We ourselves were held up for so long: who sleeps hears nobody, so that was no silence of theirs."""
        for node in self.nodes.values():
            if node.state != "lost":
                node.heard_at = min(now, node.heard_at + seconds)
        self.tell("warning", "overslept", seconds=round(seconds, 1))

    # -- what a step decides -------------------------------------------------------------------------------------------

    def book(self, placed: Placed) -> None:
        """A new replica: from now on its GPUs are taken."""
        self.replicas[placed.id] = placed
        for shard in placed.shards.values():
            node = self.nodes[shard.node]
            node.booked[shard.id] = shard
            self._changed(node)

    def stop(self, placed: Placed, reason: str, now: float, drain_s: float) -> None:
        """It gets nothing new from now on, and ends when it has nothing to do or `drain_s` is over."""
        placed.stage, placed.stage_at, placed.reason, placed.stop_by = "stopping", now, reason, now + drain_s
        self.changes += 1

    def give_up(self, placed: Placed, reason: str, now: float) -> None:
        """All of it ends at once."""
        placed.stage, placed.stage_at, placed.reason, placed.stop_by = "over", now, reason, now
        self.changes += 1

    def unbook(self, shard: Shard) -> None:
        """A shard that was never asked for need not be stopped."""
        if (node := self.nodes.get(shard.node)) is not None and node.booked.pop(shard.id, None) is not None:
            self._changed(node)

    def bury(self, placed: Placed) -> None:
        """Nothing of it is left that could be asked for."""
        del self.replicas[placed.id]
        self.changes += 1

    def break_off(self, placed: Placed, reason: str, *, fault: bool = False) -> None:
        """It cannot go on as it is. `fault`: that counts as a failure of its model."""
        if placed.stage == "running" and not placed.broken:
            placed.broken, placed.fault = reason, fault
            self.changes += 1

    def tell(self, level: Level, name: str, **fields: object) -> None:
        """Something for the log."""
        self.events.append(Event(level, name, fields))

    # -- inside --------------------------------------------------------------------------------------------------------

    def _node(self, name: str, now: float) -> Node:
        node = self.nodes.get(name)
        if node is None:
            node = self.nodes[name] = Node(name, since=now, heard_at=now)
            node.cordoned, node.draining_since = name in self._cordoned, self._draining.get(name)
            self._changed(node)
        return node

    def _mark(self, name: str) -> None:
        if (node := self.nodes.get(name)) is not None:
            node.cordoned, node.draining_since = name in self._cordoned, self._draining.get(name)
            self._changed(node)

    def _changed(self, node: Node) -> None:
        node.changes += 1
        self.changes += 1

    def _announced(self, node: Node, inventory: Inventory) -> None:
        node.announced = inventory
        self._judge_gpus({node.name, *self._owners.announce(node.name, inventory)})

    def _judge_gpus(self, names: Iterable[str]) -> None:
        """Whose GPUs may be others now, since another node announced them too, or does so no more."""
        for name in names:
            node = self.nodes[name]
            was = sum(any(each.code == "twice" for each in gpu.hindrances) for gpu in node.inventory.gpus)
            node.inventory = self._owners.judged(name, node.announced)
            twice = [each.message for gpu in node.inventory.gpus for each in gpu.hindrances if each.code == "twice"]
            if len(twice) != was:
                reason = twice[0] if twice else "no other node announces them any more"
                self.tell("error" if twice else "info", "gpus_of_two_nodes", node=name, gpus=len(twice), reason=reason)
            self._changed(node)

    def _take_in(self, node: Node, report: Report, now: float) -> None:
        shard = report.shard
        node.reports[shard.id] = report
        node.booked.pop(shard.id, None)
        placed = self.replicas.get(shard.replica)
        if shard.id in node.strays:
            return
        if placed is None and shard.replica not in self.tombs:
            placed = self.replicas[shard.replica] = Placed(
                shard.replica, shard.model, shard.profile, {}, made_at=now, adopted=True
            )
        known = placed.shards.get(shard.rank) if placed is not None else None
        if placed is None or (known is not None and known.node != node.name):
            node.strays.add(shard.id)
            return
        if known is None:
            placed.shards[shard.rank] = attrs.evolve(shard, node=node.name)
        state, _ = placed.states.get(shard.rank, ("", now))
        if state != report.state:
            placed.states[shard.rank] = (report.state, now)

    def _vanished(self, node: Node, shard_id: str) -> None:
        """The agent does not know a shard any more that it told us of."""
        replica, _, rank = shard_id.rpartition("/")
        placed = self.replicas.get(replica)
        known = placed.shards.get(int(rank)) if placed is not None else None
        if placed is not None and known is not None and known.node == node.name:
            self.break_off(placed, f"the agent of {node.name} knows nothing of it any more", fault=True)

    def _bury(self, node: Node, reason: str) -> None:
        """Give up everything on a node that is away, and remember it for when it comes back."""
        ids = {report.shard.replica for report in node.reports.values()}
        ids.update(shard.replica for shard in node.booked.values())
        for replica in ids:
            self.tombs.setdefault(replica, set()).add(node.name)
            placed = self.replicas.get(replica)
            if placed is not None and any(shard.node == node.name for shard in placed.shards.values()):
                self.break_off(placed, reason)
        while len(self.tombs) > REMEMBERED:
            del self.tombs[next(iter(self.tombs))]
        node.reports.clear()
        node.booked.clear()
        node.told.clear()
        node.strays.clear()

    def _open_tombs(self, node: Node) -> None:
        """Nothing needs to be remembered of what the node does not have any more."""
        if not self.tombs:
            return
        here = {report.shard.replica for report in node.reports.values()}
        for replica in [each for each, nodes in self.tombs.items() if node.name in nodes and each not in here]:
            self.tombs[replica].discard(node.name)
            if not self.tombs[replica]:
                del self.tombs[replica]

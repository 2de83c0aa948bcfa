"""A fleet without machines: agents that do what they are told, as far as a control plane can see, and a clock.

An agent keeps its shards over lost connections and its own restarts, as the real one does. What is sent in either
direction waits in a queue and is lost with the connection. Agents' clocks are their own.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random

import attrs

from appliance.facts.catalog import Model, Profile, Scaling
from appliance.facts.control import ControlSettings
from appliance.facts.demand import Demand
from appliance.facts.hardware import GIB, Cpus, Disk, Fabric, Gpu, Inventory, Rail
from appliance.facts.link import PROTOCOL, Forget, News, Register, Start, Stop
from appliance.facts.report import Report, State
from appliance.rules.fleet.actions import Event
from appliance.rules.fleet.keeping import SURGE
from appliance.rules.fleet.reconcile import Fleet
from appliance.rules.fleet.rooming import shards_on
from appliance.rules.fleet.world import World

SETTINGS = ControlSettings()


def inventory(node: str, gpus: int = 4, fabric: str = "", kind: str = "l40s-45g") -> Inventory:
    return Inventory(
        node=node,
        address=f"10.0.0.{sum(node.encode()) % 250 + 1}",
        cpus=Cpus(count=8),
        disk=Disk("/", 1000 * GIB, 500 * GIB),
        gpus=tuple(
            Gpu(f"GPU-{node}-{index}", index, kind, gpu_class=kind, memory_bytes=45 * GIB) for index in range(gpus)
        ),
        fabrics=(Fabric(fabric, "ib", (Rail("mlx5_0", rate_gbps=400.0),)),) if fabric else (),
    )


def model(name: str = "llama", least: int = 1, most: int = 0, idle_s: float = 0.0, **profile: object) -> Model:
    written = attrs.evolve(Profile("only", "sim", gpus_per_node=1), **profile)
    return Model(name, scaling=Scaling(least, most, idle_s), profiles=(written,))


@attrs.define
class Agent:
    """One node's agent. `inbox` and `outbox` are what is under way; `off_s` is how far its clock is ahead.
    While it is `slow` only signs of life come through, and the rest waits."""

    name: str
    inventory: Inventory
    connected: bool = False
    slow: bool = False
    off_s: float = 0.0
    ports: tuple[int, int] = (20000, 24999)
    boots: int = 0
    shards: dict[str, Report] = attrs.field(factory=dict)
    since: dict[str, float] = attrs.field(factory=dict)
    drain_by: dict[str, float] = attrs.field(factory=dict)
    inbox: list[Start | Stop | Forget] = attrs.field(factory=list)
    outbox: list[News] = attrs.field(factory=list)
    seen: list[Start | Stop | Forget] = attrs.field(factory=list)
    """Everything it was told, for tests."""

    @property
    def live(self) -> list[Report]:
        return [report for report in self.shards.values() if not report.ended]

    def register(self) -> Register:
        clock = 1.7e9 + self.off_s
        reports = tuple(self.shards.values())
        return Register(PROTOCOL, "1", self.name, f"boot{self.boots}", clock, self.inventory, self.ports, reports)

    def obey(self, command: Start | Stop | Forget, now: float) -> None:
        self.seen.append(command)
        match command:
            case Start(shard):
                there = self.shards.get(shard.id)
                if there is None or there.ended:
                    self.shards[shard.id] = Report(shard, "starting", now + self.off_s)
                    self.become(shard.id, "starting", now)
            case Stop(shard_id, drain_s):
                report = self.shards.get(shard_id)
                if report is None or report.ended:
                    return
                self.drain_by[shard_id] = min(self.drain_by.get(shard_id, now + drain_s), now + drain_s)
                if report.state == "ready" and report.url and drain_s > 0:
                    self.become(shard_id, "draining", now)
                elif report.state != "draining" or drain_s <= 0:
                    self.become(shard_id, "stopping", now)
            case Forget(shard_id):
                if shard_id in self.shards and self.shards[shard_id].ended:
                    del self.shards[shard_id]
                    self.say(News((), (shard_id,)))

    def become(self, shard_id: str, state: State, now: float, **more: object) -> None:
        report = attrs.evolve(self.shards[shard_id], state=state, since=now + self.off_s, **more)
        self.shards[shard_id] = report
        self.since[shard_id] = now
        self.say(News((report,)))

    def say(self, news: News) -> None:
        if self.connected:
            self.outbox.append(news)


class Scene:
    """Agents, their control plane, and time. `load_s` is how long an engine loads; `busy` keeps draining ones from
    ending before their time is over; `breaks` says which shards fail when they have loaded. `strangers` are ports that
    somebody else has on every node."""

    def __init__(self, agents: Iterable[Inventory], models: Iterable[Model], settings: ControlSettings = SETTINGS):
        self.now = 1000.0
        self.rng = Random(7)
        self.settings = settings
        self.models = tuple(models)
        self.agents = {each.node: Agent(each.node, each) for each in agents}
        self.demand: dict[str, Demand] = {}
        self.events: list[Event] = []
        self.load_s = 10.0
        self.busy = False
        self.breaks: Callable[[Report], bool] = lambda report: False
        self.strangers: set[int] = set()
        self.cordons: dict[str, float | None] = {}
        self.again_at = 0.0
        self.restart()

    def restart(self, expecting: bool = True) -> None:
        """The control plane starts again: it knows nothing but certificates and cordons."""
        self.world = World()
        self.fleet = Fleet(self.world, self.settings, self.now)
        self.fleet.configure(self.models, self.settings)
        for agent in self.agents.values():
            if expecting:
                self.world.expect(agent.name, self.now)
            self.part(agent.name)
        for name, since in self.cordons.items():
            self.world.cordon(name) if since is None else self.world.drain(name, since)

    def configure(self, *models: Model) -> None:
        self.models = models
        self.fleet.configure(models, self.settings)

    # -- connections

    def connect(self, *names: str) -> None:
        for name in names or list(self.agents):
            agent = self.agents[name]
            agent.inbox.clear()
            agent.outbox.clear()
            agent.connected = True
            self.world.register(agent.register(), self.now, agent.off_s)

    def part(self, *names: str) -> None:
        """The connection closes, and both sides see it."""
        for name in names:
            self.cut(name)
            self.world.parted(name, self.now)

    def cut(self, *names: str) -> None:
        """Nothing comes through any more, and the control plane is not told."""
        for name in names:
            agent = self.agents[name]
            agent.connected = False
            agent.inbox.clear()
            agent.outbox.clear()

    # -- time

    def step(self) -> int:
        """One pass, whose commands go on their way. How many there were."""
        actions = self.fleet.step(self.demand, self.now, self.rng)
        self.events += actions.events
        self.again_at = actions.again_at
        for event in actions.events:
            if event.name == "replica_placed":
                # Those that count, and one to roll out a change; those on drained nodes do not count.
                team, wanted = self.fleet.teams[event.fields["model"]], self.fleet.wanted(event.fields["model"])
                assert len(team.current) + len(team.changed) <= wanted + SURGE
                assert len(team.current) <= wanted
        for name, command in actions.commands:
            if (agent := self.agents.get(name)) is not None and agent.connected:
                agent.inbox.append(command)
        self.check()
        return len(actions.commands)

    def tick(self, seconds: float = 1.0) -> int:
        """Time passes, everything under way arrives, engines get on, one pass."""
        self.now += seconds
        for agent in self.agents.values():
            self.live(agent)
            self.deliver(agent)
        return self.step()

    def deliver(self, agent: Agent) -> None:
        if not agent.connected:
            return
        if agent.slow:
            self.world.heard(agent.name, self.now)
            return
        inbox, agent.inbox = agent.inbox, []
        for command in inbox:
            agent.obey(command, self.now)
        outbox, agent.outbox = agent.outbox, []
        for news in outbox:
            self.world.report(agent.name, news.reports, news.gone, self.now)
        node = self.world.nodes.get(agent.name)
        if node is not None and not node.connected:
            # It was given up, so its connection is closed, and it calls again.
            self.connect(agent.name)
        self.world.heard(agent.name, self.now)

    def run(self, seconds: float, dt: float = 1.0) -> int:
        return sum(self.tick(dt) for _ in range(int(seconds / dt)))

    def live(self, agent: Agent) -> None:
        for shard_id, report in list(agent.shards.items()):
            age = self.now - agent.since.get(shard_id, self.now)
            match report.state:
                case "starting" if report.shard.leads and (port := report.shard.rendezvous_port) in self.strangers:
                    reason = f"rendezvous port {port} is in use by another process"
                    agent.become(shard_id, "failed", self.now, reason=reason, refused_port=port)
                case "starting":
                    agent.become(shard_id, "loading", self.now)
                case "loading" if age >= self.load_s:
                    self._load(agent, report)
                case "ready" if not self._whole(report):
                    agent.become(shard_id, "failed", self.now, reason="a rank is gone", tail=("NCCL: peer is gone", ""))
                case "draining" if not self.busy or self.now >= agent.drain_by[shard_id]:
                    agent.become(shard_id, "stopping", self.now)
                case "stopping":
                    agent.become(shard_id, "stopped", self.now)

    def _load(self, agent: Agent, report: Report) -> None:
        shard = report.shard
        if self.breaks(report):
            agent.become(
                shard.id,
                "failed",
                self.now,
                reason="the engine ended",
                exit="exit status 1",
                tail=("", "no such file "),
            )
        elif shard.rank:
            agent.become(shard.id, "ready", self.now)
        elif self._whole(report):
            agent.become(shard.id, "ready", self.now, url=f"http://{shard.address}:20000", port=20000)

    def _whole(self, report: Report) -> bool:
        all_live = (each.shard for agent in self.agents.values() for each in agent.live)
        ranks = {shard.rank for shard in all_live if shard.replica == report.shard.replica}
        return len(ranks) == report.shard.profile.nodes

    # -- what there is

    @property
    def running(self) -> list[str]:
        """Ids of live shards, wherever they are."""
        return sorted(report.shard.id for agent in self.agents.values() for report in agent.live)

    def ready(self, name: str) -> list[str]:
        return sorted(each.id for each in self.fleet.endpoints() if each.models == (name,))

    def told(self, name: str) -> list[Event]:
        return [event for event in self.events if event.name == name]

    def check(self) -> None:
        """What holds always."""
        for agent in self.agents.values():
            once(((gpu, report.shard.replica) for report in agent.live for gpu in report.shard.gpus), agent.name)
        for node in self.world.nodes.values():
            once(((gpu, shard.replica) for shard in shards_on(node) for gpu in shard.gpus), node.name)
        for placed in self.world.replicas.values():
            shards = placed.shards.values()
            assert len({(shard.fabric, shard.gpu_class) for shard in shards}) == 1
            for shard in shards:
                agent = self.agents.get(shard.node)
                assert not shard.fabric or agent is None or agent.inventory.fabric(shard.fabric)
                assert (placed.profile.nodes > 1) == bool(shard.fabric)


def once(pairs: Iterable[tuple[str, str]], where: str) -> None:
    owners: dict[str, str] = {}
    for gpu, replica in pairs:
        assert owners.setdefault(gpu, replica) == replica, f"{gpu} on {where}: {owners[gpu]} and {replica}"

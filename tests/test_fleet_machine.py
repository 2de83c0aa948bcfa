"""The fleet under whatever may happen to it, driven through agents that do what they are told.

Nodes are lost and come back, reports are late or lost with their connection, agents register twice, the control plane
starts again and knows nothing, operators cordon, drain and change models, agents' clocks step. What must never be is
checked after each pass (`Scene.step`); once everything is calm, exactly what is
wanted runs and nothing more is said.
"""

from __future__ import annotations

import attrs
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from appliance.facts.control import ControlSettings
from appliance.facts.demand import Demand
from tests.fleet_scene import Scene, inventory, model

QUICK = ControlSettings(settle_s=5, unreachable_after_s=5, lost_after_s=15, drain_grace_s=60)
NODES = tuple(inventory(name, fabric=fabric) for name, fabric in (("a", "x"), ("b", "x"), ("c", "y"), ("d", "y")))
NAMES = tuple(each.node for each in NODES)
WIDE = model("wide", 1, 2, nodes=2, gpus_per_node=2, tensor_parallel=4)
PAIR = model("pair", 2, 3)
LAZY = model("lazy", 0, 1, idle_s=30.0, gpus_per_node=0)
CATALOG = (WIDE, PAIR, LAZY)

PORTS = (20000, 20007)

some_node = st.sampled_from(NAMES)


class Fleets(RuleBasedStateMachine):
    @initialize(late=st.sets(some_node, max_size=2), seconds=st.sampled_from((0, 40)))
    def begin(self, late: set[str], seconds: int) -> None:
        self.scene = Scene(NODES, CATALOG, QUICK)
        self.scene.load_s = 4.0
        for agent in self.scene.agents.values():
            agent.ports = PORTS
        self.version = 0
        self.scene.connect(*[name for name in NAMES if name not in late])
        self.scene.run(seconds)

    # -- time

    @rule(seconds=st.integers(1, 25))
    def time_passes(self, seconds: int) -> None:
        self.scene.run(seconds)

    @rule(name=some_node)
    def one_pass_in_between(self, name: str) -> None:
        """What one agent has to say arrives before anything of the others does."""
        self.scene.deliver(self.scene.agents[name])
        self.scene.step()

    @rule(name=some_node, slow=st.booleans())
    def is_slow(self, name: str, slow: bool) -> None:
        self.scene.agents[name].slow = slow

    @rule(seconds=st.integers(1, 100))
    def control_plane_is_held_up(self, seconds: int) -> None:
        self.scene.now += seconds
        self.scene.step()

    # -- nodes

    @rule(name=some_node)
    def connection_closes(self, name: str) -> None:
        self.scene.part(name)

    @rule(name=some_node)
    def connection_goes_dead(self, name: str) -> None:
        self.scene.cut(name)

    @rule(name=some_node)
    def registers(self, name: str) -> None:
        """Also while it is connected: it gave up a connection that we think is there."""
        self.scene.connect(name)

    @rule(name=some_node)
    def loses_power(self, name: str) -> None:
        self.scene.cut(name)
        agent = self.scene.agents[name]
        agent.shards.clear()
        agent.since.clear()

    @rule(name=some_node)
    def engines_die(self, name: str) -> None:
        agent = self.scene.agents[name]
        for report in agent.live:
            agent.become(report.shard.id, "failed", self.scene.now, reason="signal SIGKILL")

    @rule(name=some_node, seconds=st.floats(-1e6, 1e6))
    def clock_steps(self, name: str, seconds: float) -> None:
        self.scene.agents[name].off_s += seconds

    @rule(name=some_node, breaks=st.booleans())
    def loads_fail(self, name: str, breaks: bool) -> None:
        self.scene.breaks = lambda report: breaks and report.shard.node == name

    @rule(free=st.sets(st.integers(*PORTS), max_size=2))
    def strangers_have_ports(self, free: set[int]) -> None:
        self.scene.strangers = set(range(PORTS[0], PORTS[1] + 1)) - free

    @rule(name=some_node)
    def is_revoked(self, name: str) -> None:
        """It may come back with a new certificate, and with all it has."""
        self.scene.cut(name)
        self.scene.world.forget(name, self.scene.now)

    # -- the control plane and its operators

    @rule(lost=st.booleans())
    def control_plane_starts_again(self, lost: bool) -> None:
        self.scene.restart(expecting=not lost)

    @rule(name=some_node)
    def cordons(self, name: str) -> None:
        self.scene.cordons[name] = None
        self.scene.world.cordon(name)

    @rule(name=some_node)
    def drains(self, name: str) -> None:
        self.scene.cordons[name] = self.scene.now
        self.scene.world.drain(name, self.scene.now)

    @rule(name=some_node)
    def uncordons(self, name: str) -> None:
        self.scene.cordons.pop(name, None)
        self.scene.world.uncordon(name)

    @rule(which=st.integers(0, 2))
    def changes_a_profile(self, which: int) -> None:
        self.version += 1
        models = list(self.scene.models)
        old = models[which]
        args = (f"--seed={self.version}",)
        models[which] = attrs.evolve(old, profiles=(attrs.evolve(old.profiles[0], args=args),))
        self.scene.configure(*models)

    @rule(which=st.integers(0, 2), priority=st.integers(0, 9))
    def changes_what_no_engine_notices(self, which: int, priority: int) -> None:
        models = list(self.scene.models)
        old = models[which]
        profile = attrs.evolve(old.profiles[0], priority=priority, name=f"p{priority}")
        models[which] = attrs.evolve(old, profiles=(profile,), aliases=(f"alias{priority}",))
        self.scene.configure(*models)

    @rule(waiting=st.integers(0, 3), running=st.integers(0, 9))
    def is_asked(self, waiting: int, running: int) -> None:
        for each in CATALOG:
            slots = 4 * len(self.scene.ready(each.name))
            self.scene.demand[each.name] = Demand(waiting, running, slots, self.scene.now)

    @rule(busy=st.booleans())
    def requests_last(self, busy: bool) -> None:
        self.scene.busy = busy

    # -- what must be

    @rule()
    def calms_down(self) -> None:
        """Everybody is there and nothing breaks: it settles, and then it is silent."""
        scene = self.scene
        scene.breaks, scene.busy, scene.strangers = (lambda report: False), False, set()
        for name in NAMES:
            self.uncordons(name)
        scene.demand.clear()
        for agent in scene.agents.values():
            agent.slow = False
            if not agent.connected or not scene.world.nodes[agent.name].connected:
                scene.connect(agent.name)
        scene.run(1200, 2.0)
        for each in CATALOG:
            wanted = scene.fleet.wanted(each.name)
            assert wanted == each.scaling.min_replicas
            assert len(scene.ready(each.name)) == wanted, each.name
        live = {report.shard.replica for agent in scene.agents.values() for report in agent.live}
        ready = {each.id for each in scene.fleet.endpoints()}
        assert live == ready == set(scene.world.replicas)
        assert not any(report.ended for agent in scene.agents.values() for report in agent.shards.values())
        assert not scene.world.tombs
        profiles = {each.name: each.profiles[0] for each in scene.models}
        assert all(placed.profile == profiles[placed.model] for placed in scene.world.replicas.values())
        scene.events.clear()
        assert scene.run(100) == 0
        assert not scene.events

    def teardown(self) -> None:
        if hasattr(self, "scene"):
            self.calms_down()


TestFleets = Fleets.TestCase
TestFleets.settings = hypothesis_settings(max_examples=60, stateful_step_count=30, deadline=None)

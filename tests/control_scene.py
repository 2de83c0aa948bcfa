"""A control plane for tests: its store in memory, decisions by hand, agents that speak the link."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator, Mapping
from contextlib import aclosing, asynccontextmanager
from random import Random
from typing import Any

import attrs
import trio
import trio.testing

from appliance.control.claims import Claim
from appliance.control.plane import Plane
from appliance.facts.catalog import Model, Profile
from appliance.facts.control import ControlSettings
from appliance.facts.demand import Demand
from appliance.facts.endpoint import Endpoint
from appliance.facts.hardware import Gpu, Inventory
from appliance.facts.link import PROTOCOL, Message, Refused, Register, Renewed, Welcome
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.facts.settings import Settings
from appliance.rules.fleet.actions import Actions
from appliance.store.failed import StoreFailed
from appliance.store.rows import Certificate, Cordon
from appliance.wire.link import Link, LinkClosed, memory_links

WALL = 1_700_000_000.0
MODEL = Model("m", profiles=(Profile("p", "sim"),))
SETTINGS = Settings(models=(MODEL,), control=ControlSettings(settle_s=0.0))


def shard(replica: str = "m.abcde", rank: int = 0, node: str = "node-a") -> Shard:
    return Shard(replica, "m", MODEL.profiles[0], rank, node, gpus=("G0",))


def report(state: str = "ready", replica: str = "m.abcde", node: str = "node-a") -> Report:
    return Report(shard(replica, node=node), state, 1.0, url="http://10.0.0.1:20000", port=20000)  # type: ignore[arg-type]


def register(
    node: str = "node-a", boot_id: str = "boot-1", reports: tuple[Report, ...] = (), **others: Any
) -> Register:
    inventory = Inventory(node, "10.0.0.1", gpus=(Gpu("G0", 0, "NVIDIA L40S", "l40s-45g", 45 << 30),))
    whole = Register(PROTOCOL, "1.0", node, boot_id, WALL, inventory, (20000, 20100), reports)
    return attrs.evolve(whole, **others)


def claim(node: str = "node-a", serial: str = "") -> Claim:
    return Claim(node, serial or f"5e41{node[-1]}", "10.0.0.1:4711")


class FakeStore:
    """The store's methods that the plane uses, in memory. `failed` makes them raise, `gate` makes writes wait."""

    def __init__(self) -> None:
        self.cordoned: dict[str, Cordon] = {}
        self.rows: list[Certificate] = []
        self.lines: list[tuple[str, str, str, str]] = []
        self.failed = ""
        self.gate: trio.Event | None = None

    def give(self, node: str, serial: str = "", *, until: float = WALL + 1e6, revoked: bool = False) -> None:
        row = Certificate(node, serial or claim(node).serial, until, WALL - 10, WALL - 5 if revoked else None)
        self.rows.append(row)

    def take_back(self, node: str) -> None:
        self.rows = [attrs.evolve(each, revoked_at=WALL) if each.node == node else each for each in self.rows]

    async def _work(self) -> None:
        await trio.lowlevel.checkpoint()
        if self.gate is not None:
            await self.gate.wait()
        if self.failed:
            raise StoreFailed(self.failed)

    async def cordons(self) -> dict[str, Cordon]:
        await self._work()
        return dict(self.cordoned)

    async def certificates(self, node: str | None = None) -> tuple[Certificate, ...]:
        await self._work()
        return tuple(each for each in self.rows if node is None or each.node == node)

    async def cordon(self, node: str, by: str, at: float) -> bool:
        await self._work()
        made = node not in self.cordoned
        self.cordoned.setdefault(node, Cordon(node, at, by))
        return made

    async def drain(self, node: str, by: str, at: float) -> bool:
        await self.cordon(node, by, at)
        begun = self.cordoned[node].drained_at is None
        if begun:
            self.cordoned[node] = attrs.evolve(self.cordoned[node], drained_at=at)
            self.lines.append((by, "drain", node, ""))
        return begun

    async def uncordon(self, node: str, by: str, at: float) -> bool:
        await self._work()
        return self.cordoned.pop(node, None) is not None

    async def audit(self, by: str, action: str, target: str, detail: str, at: float) -> None:
        await self._work()
        self.lines.append((by, action, target, detail))


class FakeJoining:
    """Signs whatever it is given; revokes in the store."""

    def __init__(self, store: FakeStore) -> None:
        self.store = store
        self.renewed: list[tuple[str, str]] = []

    async def renew(self, node: str, csr: str) -> Renewed:
        await trio.lowlevel.checkpoint()
        self.renewed.append((node, csr))
        return Renewed(f"certificate {len(self.renewed)}")

    async def revoke(self, node: str, by: str) -> list[str]:
        await self.store._work()
        self.store.take_back(node)
        return [each.serial for each in self.store.rows if each.node == node]


class FakeFleet:
    """Says what a test has put into `next`, once; counts its steps."""

    def __init__(self) -> None:
        self.models = {"m": MODEL}
        self.settings = SETTINGS.control
        self.next = Actions()
        self.again_at = math.inf
        self.steps: list[float] = []
        self.demands: list[Mapping[str, Demand]] = []
        self.ready: tuple[Endpoint, ...] = ()
        self.awake: dict[str, str] = {}
        self.scaled: list[tuple[str, int | None]] = []
        self.fault: Exception | None = None

    def configure(self, models: Any, settings: ControlSettings) -> None:
        self.models = {model.name: model for model in models}

    def step(self, demand: Mapping[str, Demand], now: float, rng: Random) -> Actions:
        self.steps.append(now)
        self.demands.append(demand)
        if self.fault is not None:
            raise self.fault
        said, self.next = self.next, Actions()
        return attrs.evolve(said, again_at=min(said.again_at, self.again_at))

    def endpoints(self) -> tuple[Endpoint, ...]:
        return self.ready

    def waking(self, now: float) -> Mapping[str, str]:
        return dict(self.awake)

    def troubles(self, now: float) -> Mapping[str, str]:
        return {"n": "no node has room"}

    def scale(self, model: str, replicas: int | None, now: float) -> None:
        self.scaled.append((model, replicas))


@attrs.define
class Scene:
    """A plane that runs. `call` connects an agent, which is closed with the scene."""

    plane: Plane
    store: FakeStore
    fleet: FakeFleet
    joining: FakeJoining
    nursery: trio.Nursery
    demand: dict[str, Demand]
    wall: list[float]

    async def call(self, message: Register | None = None, proof: Claim | None = None) -> Link:
        """A connection on which the agent has registered already."""
        ours, theirs = memory_links("10.0.0.1:4711")
        self.nursery.start_soon(self.plane.attend, theirs, proof)
        await ours.send(message or register())
        return ours

    async def join(self, message: Register | None = None, proof: Claim | None = None) -> Link:
        """As `call`, and welcomed."""
        link = await self.call(message, proof)
        first = await link.receive()
        assert isinstance(first, Welcome), first
        return link

    async def refused(self, message: Register | None = None, proof: Claim | None = None) -> Refused:
        link = await self.call(message, proof)
        first = await link.receive()
        assert isinstance(first, Refused), first
        try:
            await link.receive()
        except LinkClosed:
            return first
        raise AssertionError("a refusal ends the connection")

    async def pass_over(self) -> None:
        """Until the loop has made a pass, and everything else has come to rest."""
        self.plane.wake()
        await trio.testing.wait_all_tasks_blocked()
        await trio.sleep(0.05)
        await trio.testing.wait_all_tasks_blocked()


@asynccontextmanager
async def control(*, real: bool = False, settings: Settings = SETTINGS) -> AsyncIterator[Scene]:
    """A control plane on Trio's clock. `real`: it decides by itself."""
    store, fleet, wall = FakeStore(), FakeFleet(), [WALL]
    demand: dict[str, Demand] = {}
    joining = FakeJoining(store)
    plane = Plane(
        settings,
        store,  # type: ignore[arg-type]
        Random(1),
        trio.current_time,
        lambda: demand,
        wall=lambda: wall[0],
        joining=joining,  # type: ignore[arg-type]
    )
    if not real:
        plane.fleet = fleet  # type: ignore[assignment]
    async with trio.open_nursery() as nursery:
        await nursery.start(plane.run)
        yield Scene(plane, store, fleet, joining, nursery, demand, wall)
        nursery.cancel_scope.cancel()


async def next_of(link: Link, kind: type) -> Any:
    """The next message of that kind; others are passed over."""
    while True:
        message: Message = await link.receive()
        if isinstance(message, kind):
            return message


async def read_log(scene: Scene, *, follow: bool = True) -> list[tuple[str, ...]]:
    pieces = []
    async with aclosing(scene.plane.log("m.abcde", 0, 10, follow)) as log:
        async for piece in log:
            pieces.append(piece)
    return pieces

"""A control plane without links, for tests of what operators see: a real world, a real fleet and a real store, and
agents that are played by the test.

    async with scene(tmp_path, models, {"a": machine(4)}) as plane:
        plane.act()                              # one pass; its commands are kept in `plane.commands`
        plane.says("llama", "ready")             # the nodes report every shard of that model they were told to start
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from random import Random
from typing import NoReturn

import attrs
import trio

from appliance.facts.catalog import Model
from appliance.facts.control import ControlSettings
from appliance.facts.demand import Demand
from appliance.facts.errors import Refusal
from appliance.facts.hardware import GIB, Cpus, Fabric, Gpu, Hindrance, Inventory, Memory, Rail
from appliance.facts.link import Forget, Register, Start, Stop
from appliance.facts.report import Report, State
from appliance.rules.fleet.reconcile import Fleet
from appliance.rules.fleet.world import World
from appliance.store.store import Store, open_store

QUICK = ControlSettings(settle_s=0.0)


def machine(gpus: int = 0, kind: str = "h100-80g", fabric: str = "", bad: Mapping[int, str] | None = None) -> Inventory:
    """A node of so many GPUs of one class; `bad` says by index what is wrong with one."""
    cards = tuple(
        Gpu(
            f"GPU-{index}", index, kind, kind, 80 * GIB,
            hindrances=(Hindrance("ecc", bad[index]),) if bad and index in bad else (),
        )
        for index in range(gpus)
    )  # fmt: skip
    return Inventory(
        cpus=Cpus(count=16),
        memory=Memory(64 * GIB, 32 * GIB),
        gpus=cards,
        gpu_backend="file" if gpus else "none",
        fabrics=(Fabric(fabric, "ib", (Rail("mlx5_0", rate_gbps=400.0),)),) if fabric else (),
    )


@attrs.define(eq=False)
class ScenePlane:
    """What the management API needs of a plane. `logs` are the pieces that `log` gives, by shard id; `followed` are
    those that somebody follows now. `serving`: what `go_on` starts is ready at once."""

    store: Store
    world: World
    fleet: Fleet
    rng: Random
    commands: list[tuple[str, object]] = attrs.field(factory=list)
    logs: dict[str, list[Sequence[str]]] = attrs.field(factory=dict)
    followed: list[str] = attrs.field(factory=list)
    serving: bool = True
    ended: set[str] = attrs.field(factory=set)

    def act(self, demand: Mapping[str, Demand] | None = None) -> None:
        """One pass, as the loop makes them. Nodes stop at once what they are told to."""
        said = self.fleet.step(demand or {}, time.monotonic(), self.rng).commands
        self.commands += said
        for name, command in said:
            reports = self.world.nodes[name].reports
            if isinstance(command, Stop) and command.shard_id in reports:
                ended = attrs.evolve(reports[command.shard_id], state="stopped", since=time.time(), url="")
                self.world.report(name, [ended], (), time.monotonic())
                self.ended.add(command.shard_id)
            elif isinstance(command, Forget):
                self.world.report(name, [], [command.shard_id], time.monotonic())

    async def go_on(self) -> NoReturn:
        """Pass after pass, as long as a test has ctl wait for what comes of it."""
        while True:
            self.act()
            for model in self.fleet.models if self.serving else ():
                self.says(model, "ready", fresh=True)
            await trio.sleep(0.02)

    def join(self, name: str, inventory: Inventory, clock_off_s: float = 0.0) -> None:
        """Its agent calls, with nothing running."""
        named = attrs.evolve(
            inventory,
            node=name,
            address=f"10.0.0.{len(self.world.nodes) + 1}",
            gpus=tuple(attrs.evolve(gpu, uuid=f"{name}-{gpu.index}") for gpu in inventory.gpus),
        )
        register = Register(1, "1.2.3", name, f"boot-{name}", time.time(), named, (20000, 20999))
        self.world.register(register, time.monotonic(), clock_off_s)

    def says(self, model: str, state: State, *, rank: int | None = None, fresh: bool = False, **more: object) -> None:
        """The nodes report every shard of a model that was commanded so far and has not ended; `fresh`: only those of
        which they have said nothing yet."""
        for name, command in self.commands:
            if not isinstance(command, Start) or command.shard.model != model:
                continue
            shard = command.shard
            placed = self.world.replicas.get(shard.replica)
            if placed is None or (rank is not None and shard.rank != rank) or shard.id in self.ended:
                continue
            if fresh and shard.id in self.world.nodes[name].reports:
                continue
            url = f"http://{shard.address}:20000" if shard.leads and state == "ready" else ""
            fields = {"pid": 4000 + shard.rank, "port": 20000 if url else 0, "url": url, **more}
            report = Report(shard, state, time.time(), **fields)  # type: ignore[arg-type]
            self.world.report(name, [report], (), time.monotonic())

    # -- what the management API calls ---------------------------------------------------------------------------------

    async def cordon(self, node: str, by: str) -> bool:
        done = await self.store.cordon(node, by, time.time())
        self.world.cordon(node)
        return done

    async def uncordon(self, node: str, by: str) -> bool:
        done = await self.store.uncordon(node, by, time.time())
        self.world.uncordon(node)
        return done

    async def drain(self, node: str, by: str) -> bool:
        fresh = await self.store.drain(node, by, time.time())
        self.world.drain(node, time.monotonic())
        return fresh

    async def scale(self, model: str, replicas: int | None, by: str) -> str:
        await self.store.audit(by, "scale", model, "by demand" if replicas is None else f"{replicas}", time.time())
        self.fleet.scale(model, replicas, time.monotonic())
        self.act()
        return ""

    async def log(self, replica: str, rank: int, lines: int, follow: bool) -> AsyncGenerator[Sequence[str], None]:
        shard = f"{replica}/{rank}"
        if shard not in self.logs:
            raise Refusal(404, "replica_not_found", f"{shard} is no part of a replica that is known here")
        for piece in self.logs[shard]:
            yield piece[-lines:]
        if follow:
            self.followed.append(shard)
            try:
                await trio.sleep_forever()
            finally:
                self.followed.remove(shard)


@asynccontextmanager
async def scene(
    folder: Path, models: Iterable[Model], nodes: Mapping[str, Inventory], settings: ControlSettings = QUICK
) -> AsyncIterator[ScenePlane]:
    """A plane in which these nodes have called and nothing was decided yet."""
    async with open_store("", str(folder / "store")) as store:
        world = World()
        fleet = Fleet(world, settings, time.monotonic())
        fleet.configure(models, settings)
        plane = ScenePlane(store, world, fleet, Random(1))
        for name, inventory in nodes.items():
            plane.join(name, inventory)
        yield plane

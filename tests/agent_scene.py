"""Parts of an agent without processes: shards that only remember what they were told, and a machine that is said."""

from __future__ import annotations

from typing import Any

import attrs

from appliance.agent.discovery.gpus import GpuProbe
from appliance.agent.discovery.inventory import Place
from appliance.agent.discovery.reading import Ours
from appliance.agent.machine import Machine
from appliance.facts.catalog import Model, Profile, Scaling
from appliance.facts.hardware import GIB, Gpu, Hindrance, Interface, Inventory
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.nursery.news import News

SIM = Profile("cpu", "sim", gpus_per_node=0)
NODE = Inventory(
    node="box",
    address="10.0.0.1",
    interfaces=(
        Interface("lo", ("127.0.0.1", "::1")),
        Interface("eth0", ("10.0.0.1", "fd00::1", "fe80::1")),
        Interface("ib0", ("192.168.5.1",)),
    ),
)


def gpu(number: int, **more: Any) -> Gpu:
    return Gpu(f"GPU-{number}", number, "NVIDIA L40S", "l40s-45g", 45 * GIB, **more)


def hindered(number: int, code: str, message: str) -> Gpu:
    return gpu(number, hindrances=(Hindrance(code, message),))


def model(name: str = "m", *profiles: Profile, replicas: int = 1) -> Model:
    return Model(name, scaling=Scaling(replicas), profiles=profiles or (SIM,))


class FakeShards:
    """What was asked for stands in `asked`; reports are what a test says they are."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.told: dict[str, Report] = {}
        self.changed = News()

    def start(self, shard: Shard) -> None:
        self.asked.append(f"start {shard.id}")
        self.say(Report(shard, "starting", 0.0))

    def stop(self, shard_id: str, *, drain_s: float = 0) -> None:
        self.asked.append(f"stop {shard_id} {drain_s:g}")
        self.become(shard_id, "draining")

    def forget(self, shard_id: str) -> None:
        self.asked.append(f"forget {shard_id}")
        del self.told[shard_id]
        self.changed.tell()

    def reports(self) -> dict[str, Report]:
        return dict(self.told)

    def say(self, report: Report) -> None:
        self.told[report.shard.id] = report
        self.changed.tell()

    def become(self, shard_id: str, state: str, since: float = 0.0, **more: Any) -> None:
        self.say(attrs.evolve(self.told[shard_id], state=state, since=since, **more))

    def taken(self) -> list[str]:
        """What was asked for since the last call."""
        asked, self.asked = self.asked, []
        return asked


def machine(inventory: Inventory = NODE) -> Machine:
    made = Machine(Place(), GpuProbe("none"), Ours)
    made.inventory = inventory
    return made

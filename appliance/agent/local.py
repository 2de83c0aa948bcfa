"""Local mode: an agent without a control plane keeps the models of its own file running.

The decisions are `rules/fleet/alone.py`; here they are carried out, and told when something changes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from random import Random
from typing import NoReturn, Protocol

import structlog
import trio

from appliance.agent.changes import Changes
from appliance.agent.machine import Machine
from appliance.facts.catalog import Model
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.nursery.news import News
from appliance.rules.fleet.alone import Alone, Waiting

DRAIN_S = 30.0
"""How long a replica that is no longer wanted goes on with the requests it has."""

SHORTEST_S = 0.05
LONGEST_S = 60.0
"""Bounds of a sleep. The clock of the decisions is the wall's, which may be set while one sleeps."""

log = structlog.get_logger("local")


class Commands(Protocol):
    """What local mode needs of the shards."""

    def start(self, shard: Shard) -> None: ...
    def stop(self, shard_id: str, *, drain_s: float = 0) -> None: ...
    def forget(self, shard_id: str) -> None: ...
    def reports(self) -> dict[str, Report]: ...


class Local:
    """Made once. `keep` in a nursery, `configure` at the start and whenever the file has changed."""

    def __init__(self, shards: Commands, machine: Machine, rng: Random, now: Callable[[], float]) -> None:
        self.waiting: tuple[Waiting, ...] = ()
        self.changed = News()
        self.wake = News()
        """Told by whoever changes what a decision depends on: reports, the machine, the configuration."""
        self.alone = Alone()
        self._shards = shards
        self._machine = machine
        self._rng = rng
        self._now = now
        self._told: dict[str, str] = {}
        self._changes = Changes("local")

    def configure(self, models: Iterable[Model], address: str = "") -> None:
        """Keep these models from now on."""
        self.alone.configure(models, address)
        self.wake.tell()

    async def keep(self) -> NoReturn:
        """Decide, carry out, and wait for something to change or for a wait to be over; for ever."""
        while True:
            again_at = self.step()
            with trio.move_on_after(min(max(again_at - self._now(), SHORTEST_S), LONGEST_S)):
                await self.wake.wait()

    def step(self) -> float:
        """One decision, carried out; when to look again at the latest."""
        reports = self._shards.reports()
        self._changes.tell(reports)
        decision = self.alone.decide(reports, self._machine.inventory, self._now(), self._rng)
        for stop in decision.stops:
            log.info("stopping", shard=stop.shard_id, reason=stop.reason)
            self._shards.stop(stop.shard_id, drain_s=DRAIN_S)
        for shard_id in decision.forgets:
            self._shards.forget(shard_id)
        for shard in decision.starts:
            log.info("starting", shard=shard.id, profile=shard.profile.name, gpus=",".join(shard.gpus) or "none")
            self._shards.start(shard)
        self._tell_waiting(decision.waiting)
        return decision.again_at

    def _tell_waiting(self, waiting: tuple[Waiting, ...]) -> None:
        told = {each.replica: each.reason for each in waiting}
        for each in waiting:
            if self._told.get(each.replica) != each.reason:
                again = {"again_in_s": round(each.again_at - self._now(), 1)} if each.again_at else {}
                log.warning("not running", replica=each.replica, reason=each.reason, **again)
        self._told = told
        if waiting != self.waiting:
            self.waiting = waiting
            self.changed.tell()

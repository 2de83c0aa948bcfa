"""One node by itself, without a control plane: its own models, kept running.

Each model that has a profile for one node gets `min_replicas` places, named `MODEL.1`, `MODEL.2` and so on; a place is
empty or holds one replica, which is one shard. `decide` looks at everything and says what to do now; whatever it says
is done at once, and the next report is the answer. It never moves what runs: a replica is stopped only when nobody
wants it any more, or when it runs by a profile that is no longer written down so.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from random import Random

import attrs

from appliance.facts.catalog import Model
from appliance.facts.hardware import Inventory
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.rules.fleet.backoff import STEADY_S, Backoff, failed
from appliance.rules.fleet.room import NoRoom, choose_gpus, holders
from appliance.rules.fleet.written import why_not_written


@attrs.frozen
class Stop:
    """Stop a shard, because of `reason`."""

    shard_id: str
    reason: str


@attrs.frozen
class Waiting:
    """A replica that is wanted and not there. `again_at`: not tried before then (0: as soon as there is room)."""

    replica: str
    model: str
    reason: str
    again_at: float = 0.0


@attrs.frozen
class Decision:
    """What to do now, in this order, and when to look again at the latest (infinity: at the next change)."""

    stops: tuple[Stop, ...] = ()
    forgets: tuple[str, ...] = ()
    starts: tuple[Shard, ...] = ()
    waiting: tuple[Waiting, ...] = ()
    again_at: float = math.inf


@attrs.define
class Alone:
    """What must be remembered between two decisions: how often each model failed, and which failures were counted."""

    models: tuple[Model, ...] = ()
    address: str = ""
    """Set by the operator: replicas at another address are stopped. "" leaves them where they are."""
    backoffs: dict[str, Backoff] = attrs.field(factory=dict)
    failures: dict[str, int] = attrs.field(factory=dict)
    """All failures of each model that is configured, for metrics."""
    _counted: set[tuple[str, float]] = attrs.field(factory=set)

    def configure(self, models: Iterable[Model], address: str = "") -> None:
        """Take other models over. One that was changed is tried at once, whatever it did before."""
        new = tuple(models)
        same = {model.name for model in new if model in self.models}
        self.backoffs = {name: backoff for name, backoff in self.backoffs.items() if name in same}
        names = {model.name for model in new}
        self.failures = {name: count for name, count in self.failures.items() if name in names}
        self.models = new
        self.address = address

    def decide(self, reports: Mapping[str, Report], inventory: Inventory, now: float, rng: Random) -> Decision:
        """What to do about `reports`, by shard id."""
        self._learn(reports.values(), now, rng)
        places = {f"{model.name}.{number}": model for model in self.models for number in _numbers(model)}
        stops, forgets = [], []
        for shard_id, report in reports.items():
            reason = self._unwanted(report, places)
            if reason and report.ended:
                forgets.append(shard_id)
            elif reason and report.state not in ("draining", "stopping"):
                stops.append(Stop(shard_id, reason))
        starts: list[Shard] = []
        waiting: list[Waiting] = []
        held = [report.shard for report in reports.values() if not report.ended]
        for replica, model in places.items():
            there = reports.get(f"{replica}/0")
            if there is not None and not there.ended:
                continue
            backoff = self.backoffs.get(model.name, Backoff())
            if backoff.waits(now):
                waiting.append(Waiting(replica, model.name, backoff.reason, backoff.until))
                continue
            taken = holders([(shard.replica, shard.gpus) for shard in (*held, *starts)])
            placed = self._place(replica, model, inventory, taken)
            if isinstance(placed, Waiting):
                waiting.append(placed)
            else:
                starts.append(placed)
        again = [_steady_at(name, reports.values()) for name in self.backoffs] + [each.again_at for each in waiting]
        return Decision(
            tuple(stops),
            tuple(forgets),
            tuple(starts),
            tuple(waiting),
            min((at for at in again if at > now), default=math.inf),
        )

    def _learn(self, reports: Collection[Report], now: float, rng: Random) -> None:
        seen = set()
        names = {model.name for model in self.models}
        for report in reports:
            name = report.shard.model
            if name not in names:
                continue
            if report.state == "failed":
                key = (report.shard.id, report.since)
                seen.add(key)
                if key not in self._counted:
                    reason = report.reason or "it failed without saying why"
                    self.failures[name] = self.failures.get(name, 0) + 1
                    self.backoffs[name] = failed(self.backoffs.get(name, Backoff()), reason, now, rng)
        self._counted = seen
        for name in [name for name in self.backoffs if now >= _steady_at(name, reports)]:
            del self.backoffs[name]

    def _unwanted(self, report: Report, places: Mapping[str, Model]) -> str:
        """Why nobody wants this shard any more, "" if somebody does."""
        shard = report.shard
        model = places.get(shard.replica)
        if model is None or shard.rank or shard.profile.nodes > 1:
            return "it is no longer in the configuration"
        if why := why_not_written(model, (shard,)):
            return why
        if self.address and shard.address != self.address:
            return f"it listens on {shard.address}, and agent.address is {self.address}"
        return ""

    def _place(self, replica: str, model: Model, inventory: Inventory, taken: Mapping[str, str]) -> Shard | Waiting:
        reasons = []
        for profile in sorted(model.profiles, key=lambda each: -each.priority):
            try:
                gpus = choose_gpus(profile, inventory, taken)
            except NoRoom as none:
                reasons.append(f"{profile.name}: {none}")
                continue
            return Shard(
                replica=replica,
                model=model.name,
                profile=profile,
                node=inventory.node,
                address=self.address or inventory.address,
                gpus=tuple(gpu.uuid for gpu in gpus),
                gpu_class=gpus[0].gpu_class if gpus else "",
                context_tokens=model.context_tokens,
            )
        return Waiting(replica, model.name, "; ".join(reasons))


def _steady_at(model: str, reports: Iterable[Report]) -> float:
    """When a model that failed before has recovered, if all of it goes on serving. One replica that never failed says
    nothing of another one that always does: by its word that one would be started without a wait, for ever."""
    ready = (report.since if report.state == "ready" else math.inf for report in reports if report.shard.model == model)
    return max(ready, default=math.inf) + STEADY_S


def _numbers(model: Model) -> Sequence[int]:
    return range(1, model.scaling.min_replicas + 1) if model.profiles else ()

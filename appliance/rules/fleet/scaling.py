"""How many replicas of a model are to run, between its limits, from how much it is asked for.

Up is quick and down is slow, and the two thresholds do not touch: after one has gone, the rest stay below the line at
which one more would come. One step at a time, and none up while the last one is not there yet, since a replica that
loads for minutes shows nothing of what it will take.

A model with `min_replicas` 0 sleeps at zero until it is asked for. What was woken is kept until it has served and then
nobody asked for `idle_s`, whether the one who woke it is still there or not: loading is a job, not a request.
"""

from __future__ import annotations

import math

import attrs

from appliance.facts.catalog import Scaling
from appliance.facts.demand import Demand

UP_SHARE = 0.8
"""More than this share of the known slots in use is busy."""

UP_AFTER_S = 5.0
"""Busy, or with requests waiting, for so long without a break: one more."""

DOWN_SHARE = 0.7
"""One less only when the rest would use less than this share of theirs."""

DOWN_AFTER_S = 180.0
"""... for so long without a break."""

UNASKED_S = 60.0
"""A model that sleeps when it is idle, and of which nothing could be started, is tried again only if somebody has asked
for it in this time (or in `idle_s`, where that is longer)."""


@attrs.frozen
class Scaler:
    """How many are `wanted` of one model, and what must be remembered from step to step.

    `because` is for operators. `busy_since` and `calm_since` are when the present run of it began (None: it is not).
    `used_at` is when it was last asked for, or first served; `slept_at` when it went to zero, and only requests after
    that wake it. `served`: it had a replica that serves at the last look.
    """

    wanted: int
    because: str
    used_at: float
    busy_since: float | None = None
    calm_since: float | None = None
    slept_at: float = -math.inf
    served: bool = False


def begin(scaling: Scaling, running: int, now: float) -> Scaler:
    """The first word on a model: what runs already stays, within the limits."""
    wanted = min(max(running, scaling.min_replicas), scaling.most)
    return Scaler(wanted, _limit(scaling, wanted) or "as many were running", now)


def follow(before: Scaler, scaling: Scaling, demand: Demand, serving: int, alive: int, now: float) -> Scaler:
    """What is wanted now. `serving` replicas take requests, `alive` are those and the ones that are being started."""
    used_at = max(before.used_at, demand.asked_at if demand.asked_at <= now else now)
    if demand.waiting or demand.running or (serving and not before.served):
        used_at = now
    wanted = min(max(before.wanted, scaling.min_replicas), scaling.most)
    because = before.because if wanted == before.wanted else _limit(scaling, wanted)
    after = attrs.evolve(before, wanted=wanted, because=because, used_at=used_at, served=serving > 0)
    if wanted == 0:
        if not demand.waiting and not demand.running and demand.asked_at <= before.slept_at:
            return attrs.evolve(after, busy_since=None, calm_since=None)
        return attrs.evolve(after, wanted=1, because="it was asked for", used_at=now)
    if scaling.min_replicas == 0 and (why := _idle(after, scaling, serving, alive, now)):
        return attrs.evolve(after, wanted=0, because=why, slept_at=now, busy_since=None, calm_since=None)
    return _by_load(after, scaling, demand, serving, now)


def _idle(scaler: Scaler, scaling: Scaling, serving: int, alive: int, now: float) -> str:
    """Why it may sleep, "" if it may not."""
    unused_s = now - scaler.used_at
    if serving:
        if scaling.idle_s > 0 and unused_s >= scaling.idle_s:
            return f"nobody asked for it for {scaling.idle_s:g} s"
    elif alive == 0 and unused_s >= max(scaling.idle_s, UNASKED_S):
        return "it could not be started, and nobody asks for it any more"
    return ""


def _by_load(scaler: Scaler, scaling: Scaling, demand: Demand, serving: int, now: float) -> Scaler:
    wanted = scaler.wanted
    full = demand.slots > 0 and demand.running > UP_SHARE * demand.slots
    busy = serving >= wanted and wanted < scaling.most and (demand.waiting > 0 or full)
    busy_since = (now if scaler.busy_since is None else scaler.busy_since) if busy else None
    if busy_since is not None and now - busy_since >= UP_AFTER_S:
        told = f"{demand.waiting} requests waited" if demand.waiting else f"{demand.running} of {demand.slots} ran"
        return attrs.evolve(scaler, wanted=wanted + 1, because=told, busy_since=None, calm_since=None)
    calm = wanted > max(1, scaling.min_replicas) and _rest_is_enough(demand, serving, wanted - 1)
    calm_since = (now if scaler.calm_since is None else scaler.calm_since) if calm else None
    if calm_since is not None and now - calm_since >= DOWN_AFTER_S:
        told = f"{demand.running} requests ran, and fewer can take them"
        return attrs.evolve(scaler, wanted=wanted - 1, because=told, busy_since=None, calm_since=now)
    return attrs.evolve(scaler, busy_since=busy_since, calm_since=calm_since)


def _rest_is_enough(demand: Demand, serving: int, rest: int) -> bool:
    """Whether `rest` replicas could do what there is to do. Without known slots only if there is nothing."""
    if demand.waiting:
        return False
    if demand.running == 0:
        return True
    return serving > 0 and demand.running < DOWN_SHARE * demand.slots * min(1.0, rest / serving)


def _limit(scaling: Scaling, wanted: int) -> str:
    """Which limit gives this number, "" if none does."""
    if wanted == scaling.min_replicas:
        return f"min_replicas is {wanted}"
    return f"max_replicas is {wanted}" if wanted == scaling.most else ""

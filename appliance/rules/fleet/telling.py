"""Sentences on where a model stands: for the clients that wait for it, for operators, and for the log."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

import attrs

from appliance.facts.catalog import Model
from appliance.rules.fleet.actions import Why
from appliance.rules.fleet.keeping import Team, places
from appliance.rules.fleet.members import Placed
from appliance.rules.fleet.reports import phase, since
from appliance.rules.fleet.rooming import spot_of
from appliance.rules.placement.rooms import Rooms

if TYPE_CHECKING:
    from appliance.rules.fleet.reconcile import Fleet

TOLD = 3
"""How many reasons a sentence names."""


def absent(fleet: Fleet, now: float) -> Iterator[tuple[str, str, str]]:
    """Every model without an endpoint: how far it is, or why waiting does not help. The other one is ""."""
    serving = {name for each in fleet.endpoints() for name in each.models or ()}
    starting: dict[str, Placed] = {}
    for placed in fleet.world.replicas.values():
        if placed.model not in serving and placed.stage == "running" and not placed.broken:
            first = starting.get(placed.model)
            if (first is None or placed.made_at < first.made_at) and phase(fleet.world, placed) != "stopping":
                starting[placed.model] = placed
    for name in fleet.models:
        if name in serving:
            continue
        if fleet.overrides.get(name) == 0:
            yield name, "", "an operator has stopped it"
        elif name in starting:
            yield name, _starting(fleet, starting[name], now), ""
        elif not fleet.settled:
            yield name, _settling(fleet, now), ""
        elif fleet.history.waiting(name, now) or fleet.unplaced.get(name):
            yield name, "", _missing(fleet, name, now)
        else:
            yield name, _missing(fleet, name, now) or "it is about to be started", ""


def explain(fleet: Fleet, name: str, now: float) -> Why:
    """Where a model stands, and every reason against one more replica. Raises KeyError for one without profiles."""
    rooms = Rooms(spot_of(node, now=now) for node in fleet.world.nodes.values())
    against = rooms.explain(fleet.models[name], avoid=fleet.history.shunned(name))
    return attrs.evolve(stand(fleet, name, now), rejections=against)


def stand(fleet: Fleet, name: str, now: float) -> Why:
    """Where a model stands, without what speaks against each place: that costs a look at every node."""
    team = fleet.teams.get(name) or Team()
    wanted = fleet.wanted(name)
    backoff = fleet.history.waiting(name, now)
    missing = ""
    if wanted > len(team.current):
        missing = _missing(fleet, name, now) if fleet.settled else _settling(fleet, now)
        if not missing and places(team, wanted) == 0:
            missing = "a changed profile is rolled out one replica at a time"
    return Why(
        model=name,
        wanted=wanted,
        because=fleet.because(name),
        serving=len(team.serving),
        starting=sum(placed.id not in team.serving for placed in team.current),
        leaving=len(team.ending),
        missing=missing,
        retry_in_s=backoff.until - now if backoff is not None else 0.0,
        failures=fleet.history.failures.get(name, ()),
    )


def why_no_replacement(fleet: Fleet, name: str, team: Team, now: float) -> str:
    """Why nothing has taken the place of a replica that must go now."""
    for placed in team.current:
        if placed.id not in team.serving:
            return f"the replacement {placed.id} does not serve yet: {_starting(fleet, placed, now)}"
    return _missing(fleet, name, now) or "there was no time to start one"


def nowhere(rooms: Rooms, model: Model, avoid: Collection[str]) -> str:
    """Why a model fits nowhere: the first few reasons, and how many there are besides."""
    first, total = rooms.why_nowhere(model, TOLD, avoid)
    if not first:
        return "there is no node to run it on"
    several = len(model.profiles) > 1
    told = [
        f"{rejection.profile + ' on ' if several else ''}{rejection.candidate}: {rejection.reason}"
        for rejection in first
    ]
    rest = total - TOLD
    more = [f"and {rest} more reason{'s' if rest > 1 else ''}"] if rest > 0 else []
    return "; ".join(told + more)


def _missing(fleet: Fleet, name: str, now: float) -> str:
    if (backoff := fleet.history.waiting(name, now)) is not None:
        again = f"{backoff.reason}; it is tried again in {_seconds(backoff.until - now)}"
        times = "once" if backoff.failures == 1 else f"{backoff.failures} times in a row"
        return f"it failed {times}: {again}" if backoff.failures else again
    if name in fleet.unplaced:
        reason = fleet.unplaced[name]
        return f"no node has room for it: {reason}" if reason else "it waits for room that another replica is leaving"
    return ""


def _settling(fleet: Fleet, now: float) -> str:
    names = sorted(name for name, node in fleet.world.nodes.items() if node.state == "expected")
    awaited = f"{', '.join(names[:TOLD])}{' and others' if len(names) > TOLD else ''}" if names else "its nodes"
    return f"the control plane started {_seconds(now - fleet.started_at)} ago and waits for {awaited} to call"


def _starting(fleet: Fleet, placed: Placed, now: float) -> str:
    word = phase(fleet.world, placed)
    where = " and ".join(placed.nodes) if len(placed.nodes) < TOLD else f"{len(placed.nodes)} nodes"
    # One that was taken in from reports may have been in this state for longer than we know.
    least = "at least " if placed.adopted else ""
    what = {
        "fetching": f"its weights are being fetched on {where}",
        "loading": f"it is loading on {where}",
        "ready": f"it is ready on {where} and gets its first requests",
        "incomplete": f"a part of it runs on {where}, and the rest has not been heard of",
    }.get(word, f"it is being started on {where}")
    away = [name for name in placed.nodes if (node := fleet.world.nodes.get(name)) is None or not node.reachable]
    gone = f" ({away[0]} is not connected)" if away else ""
    return f"{what}, for {least}{_seconds(now - since(placed))}{gone}"


def _seconds(seconds: float) -> str:
    return f"{max(0.0, seconds):.0f} s"

"""Which replicas of one model stay, which go, and how many more there should be. Where they go is not decided here."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from appliance.facts.catalog import Model
from appliance.rules.fleet.members import Placed
from appliance.rules.fleet.reports import serves
from appliance.rules.fleet.world import World
from appliance.rules.fleet.written import as_written, why_not_written

SURGE = 1
"""How many replicas more than wanted there may be while a changed profile is rolled out."""


@attrs.frozen
class Old:
    """A replica that must go once others serve: because of `reason`, at `ends_at` in any case."""

    placed: Placed
    reason: str
    ends_at: float = float("inf")


@attrs.define
class Team:
    """The replicas of one model. `current` are those that count. `changed` run by what is no longer configured so,
    `moving` are on nodes that are drained; both serve until others do. `ending` have been told to end, `serving` are
    ids of those that take requests."""

    current: list[Placed] = attrs.field(factory=list)
    changed: list[Old] = attrs.field(factory=list)
    moving: list[Old] = attrs.field(factory=list)
    ending: list[Placed] = attrs.field(factory=list)
    serving: set[str] = attrs.field(factory=set)

    @property
    def alive(self) -> int:
        """How many serve, or are on their way to it."""
        return len(self.current) + len(self.changed) + len(self.moving)


@attrs.frozen
class Leave:
    """One that goes now. `forced`: its time is over, though nothing has taken its place."""

    placed: Placed
    reason: str
    drain_s: float
    forced: bool = False


def teams(world: World, models: dict[str, Model], grace_s: float) -> dict[str, Team]:
    """All replicas, by model; also those of models that are no longer configured."""
    found: dict[str, Team] = {}
    drained = {
        name: node.draining_since + grace_s for name, node in world.nodes.items() if node.draining_since is not None
    }
    for placed in world.replicas.values():
        team = found.get(placed.model)
        if team is None:
            team = found[placed.model] = Team()
        if placed.stage != "running":
            team.ending.append(placed)
            continue
        if serves(world, placed):
            team.serving.add(placed.id)
        if reason := why_changed(models.get(placed.model), placed):
            team.changed.append(Old(placed, reason))
        elif drained and (on := [name for name in placed.nodes if name in drained]):
            first = min(on, key=drained.__getitem__)
            team.moving.append(Old(placed, f"{first} is drained", drained[first]))
        else:
            team.current.append(placed)
    return found


def why_changed(model: Model | None, placed: Placed) -> str:
    """Why it would not be started like this any more, "" if it would: then its profile is the one written down now."""
    if model is None:
        return "it is no longer in the configuration"
    if placed.checked is model:
        return ""
    profile = as_written(model, placed.shards.values())
    if profile is None:
        return why_not_written(model, placed.shards.values())
    placed.profile = profile
    # An adopted one may get further shards, which were not looked at.
    placed.checked = model if placed.complete else None
    return ""


def leaves(world: World, team: Team, wanted: int, because: str, grace_s: float, now: float) -> list[Leave]:
    """Those that go now, in this order. They are taken out of the team."""
    gone: list[Leave] = []
    if (extra := len(team.current) - wanted) > 0:
        for placed in sorted(team.current, key=lambda placed: _worth(world, team, placed))[:extra]:
            gone.append(Leave(placed, because, grace_s if placed.id in team.serving else 0.0))
    old = [*team.moving, *team.changed]
    # What does not serve has nobody to finish with, and holds room that others may need.
    gone += [Leave(each.placed, each.reason, 0.0) for each in old if each.placed.id not in team.serving]
    there = {leave.placed.id for leave in gone}
    serving = [each for each in old if each.placed.id not in there]
    spare = len(team.serving - there) - wanted
    for each in serving:
        if spare > 0:
            spare -= 1
            gone.append(Leave(each.placed, each.reason, min(grace_s, max(0.0, each.ends_at - now))))
        elif now >= each.ends_at:
            gone.append(Leave(each.placed, each.reason, 0.0, forced=True))
    _take_out(team, {leave.placed.id for leave in gone})
    return gone


def places(team: Team, wanted: int) -> int:
    """How many more are to be started now."""
    missing = wanted - len(team.current)
    if team.changed:
        missing = min(missing, wanted + SURGE - len(team.current) - len(team.changed))
    return max(0, missing)


def may_make_way(team: Team) -> Iterable[Old]:
    """Changed ones, one of which may go before its replacement is there, since there is no room for both. One at a
    time: none while another one ends, or while a replacement is not serving yet."""
    if team.ending or any(placed.id not in team.serving for placed in team.current):
        return ()
    return sorted(team.changed, key=lambda old: old.placed.made_at)


def _worth(world: World, team: Team, placed: Placed) -> tuple[bool, bool, int, float]:
    """The one with the least goes first: what does not serve, what is on doubtful nodes, then the youngest."""
    nodes = [world.nodes.get(name) for name in placed.nodes]
    sound = placed.complete and all(node is not None and node.reachable and not node.cordoned for node in nodes)
    return placed.id in team.serving, sound, placed.profile.priority, -placed.made_at


def _take_out(team: Team, ids: set[str]) -> None:
    if not ids:
        return
    team.current = [placed for placed in team.current if placed.id not in ids]
    team.changed = [old for old in team.changed if old.placed.id not in ids]
    team.moving = [old for old in team.moving if old.placed.id not in ids]
    team.serving -= ids

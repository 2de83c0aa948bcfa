"""The documents about models that are placed on nodes: how many are wanted, where they are, and what speaks against
each place."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..facts.catalog import Model, Profile
from ..facts.errors import Refusal
from ..rules.engines import capability
from ..rules.fleet.actions import Why
from ..rules.fleet.moving import to_drain
from ..rules.fleet.rooming import spot_of
from ..rules.placement import fit
from ..rules.placement.rooms import Rooms, by_priority
from ..rules.placement.spots import Placement
from .fleet import Document, failures, missing, replicas_of, states_of, unknown

if TYPE_CHECKING:
    from ..control.plane import Plane


def of_model(plane: Plane, name: str, now: float) -> Document | None:
    """`replicas` in the documents of `/models`; None for a model that nothing places."""
    if name not in plane.fleet.models:
        return None
    why = plane.fleet.stand(name, now)
    return {
        "wanted": why.wanted,
        "ready": why.serving,
        "starting": why.starting,
        "leaving": why.leaving,
        "at_zero": why.wanted == 0,
        "because": why.because,
        "why": _why(plane, why, now),
        "again_s": why.retry_in_s or None,
        "states": states_of(plane, name),
    }


def _why(plane: Plane, why: Why, now: float) -> str:
    """Why it does not serve, or not as often as is wanted; how far it is where it is on its way."""
    if why.wanted == 0:
        return "" if plane.fleet.overrides.get(why.model) is None else "an operator has stopped it"
    return why.missing if why.serving else plane.fleet.waking(now).get(why.model) or why.missing


def placement(plane: Plane, name: str, now: float) -> Document:
    """`/placement/{model}`. Raises Refusal."""
    model = known_model(plane, name)
    why = plane.fleet.explain(model.name, now)
    rooms = Rooms(spot_of(node, now=now) for node in plane.world.nodes.values())
    avoid = plane.fleet.history.shunned(model.name)
    reasons: dict[str, list[Document]] = {}
    for each in why.rejections:
        reasons.setdefault(each.profile, []).append({"candidate": each.candidate, "reason": each.reason})
    return {
        "model": model.name,
        "asked_for": name,
        "state": _state(why),
        "told": _told(why),
        "wanted": why.wanted,
        "wanted_because": why.because,
        "ready": why.serving,
        "starting": why.starting,
        "replicas": replicas_of(plane, model.name, now),
        "missing": [{**each, "reason": _short(plane, each)} for each in missing(plane, now, model.name)],
        "failures": failures(why, now),
        "profiles": [
            _profile(plane, profile, rooms.find(profile, avoid), reasons.get(profile.name, []))
            for profile in by_priority(model.profiles)
        ],
    }


def _short(plane: Plane, absent: Document) -> str:
    """Why one is missing, without what speaks against each node: that stands with the profiles."""
    reason: str = absent["reason"]
    unplaced = plane.fleet.unplaced.get(absent["model"])
    return reason.removesuffix(f": {unplaced}") if unplaced else reason


def _state(why: Why) -> str:
    if why.serving:
        return "ready"
    if not why.wanted:
        return "at zero"
    return "starting" if why.starting and not why.missing else "missing"


def _told(why: Why) -> list[str]:
    serve = f"{why.serving} of {why.wanted} wanted replicas serve"
    parts = [serve if why.wanted or why.serving else "no replica is wanted now"]
    if why.starting:
        parts.append(f"{why.starting} on the way")
    if why.leaving:
        parts.append(f"{why.leaving} leaving")
    told = ", ".join(parts)
    return [f"{told[0].upper()}{told[1:]}."]


def _profile(plane: Plane, profile: Profile, place: Placement | None, against: list[Document]) -> Document:
    drain = to_drain(plane.world, plane.fleet.models, profile) if place is None else ()
    return {
        "name": profile.name,
        "priority": profile.priority,
        "engine": profile.engine,
        "needs": needs(profile),
        "place": None if place is None else _place(place),
        "drain": list(drain),
        "told": f"one more would go to {_where(plane, place)}" if place else _nowhere(drain),
        "rejections": against,
    }


def _nowhere(drain: Sequence[str]) -> str:
    if not drain:
        return "it fits nowhere now"
    where, commands = " and ".join(drain), " and ".join(f"'ctl drain {name}'" for name in drain)
    return (
        f"it fits nowhere now; it would on {where} if what runs there were elsewhere, and there is room for that:"
        f" {commands}, and 'ctl uncordon' once that is done"
    )


def needs(profile: Profile) -> str:
    """What a replica takes, in words."""
    each = fit.wanted_gpus(profile) if profile.gpus_per_node else "CPUs only"
    if (need := capability.needed(profile)) is not None:
        each += f" of compute capability {capability.said(need)} or more"
    if profile.nodes == 1:
        return f"one node, {each}"
    return f"{profile.nodes} nodes of one fabric, {each}{' each' if profile.gpus_per_node else ''}"


def _place(place: Placement) -> Document:
    return {
        "nodes": [{"node": seat.node, "gpus": list(seat.gpus)} for seat in place.seats],
        "gpu_class": place.gpu_class,
        "fabric": place.fabric,
    }


def _where(plane: Plane, place: Placement) -> str:
    seats = []
    for seat in place.seats:
        inventory = plane.world.nodes[seat.node].inventory
        gpus = ", ".join(str(gpu.index) for gpu in inventory.gpus if gpu.uuid in seat.gpus)
        seats.append(f"{seat.node} (GPU{'s' if len(seat.gpus) > 1 else ''} {gpus})" if gpus else seat.node)
    return ", ".join(seats) + (f" on fabric {place.fabric}" if place.fabric else "")


def known_model(plane: Plane, name: str) -> Model:
    """A model that is placed, by its name or an alias. Raises Refusal."""
    models = plane.fleet.models
    for model in models.values():
        if name == model.name or name in model.aliases:
            return model
    raise Refusal(404, "model_not_placed", f"{unknown('model', name, models)} (only models with profiles are placed)")


def scaled(plane: Plane, name: str, unnoted: str) -> Document:
    """The answer to a start, a stop or a scale: what is wanted now. `unnoted`: why the audit has nothing of it."""
    wanted, because = plane.fleet.wanted(name), plane.fleet.because(name)
    told = [f"{name}: {wanted} replica{'' if wanted == 1 else 's'} wanted now: {because}"]
    if name in plane.fleet.overrides:
        told.append(f"this holds until 'ctl models scale {name} auto' or a restart of the router")
    if unnoted:
        told.append(f"it is in the router's log, and not in the audit: {unnoted}")
    return {"model": name, "wanted": wanted, "told": told}

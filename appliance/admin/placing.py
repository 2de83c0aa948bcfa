"""The documents about models that are placed on nodes: how many are wanted, where they are, and what speaks against
each place."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ..facts.catalog import Model, Profile
from ..facts.errors import Refusal
from ..rules.fleet.actions import Why
from ..rules.placement import fit
from ..rules.placement.rooms import Rooms, by_priority
from ..rules.placement.spots import Placement
from .fleet import Document, failures, missing, replica_states, replicas, unknown

if TYPE_CHECKING:
    from ..control.plane import Plane


def of_model(plane: Plane, name: str, now: float) -> Document | None:
    """`replicas` in the documents of `/models`; None for a model that nothing places."""
    if name not in plane.fleet.models:
        return None
    why = plane.fleet.explain(name, now)
    return {
        "wanted": why.wanted,
        "ready": why.serving,
        "starting": why.starting,
        "leaving": why.leaving,
        "at_zero": why.wanted == 0,
        "because": why.because,
        "why": why.missing,
        "again_s": why.retry_in_s or None,
        "states": replica_states(plane)[name],
    }


def placement(plane: Plane, name: str, now: float) -> Document:
    """`/placement/{model}`. Raises Refusal."""
    model = known_model(plane, name)
    why = plane.fleet.explain(model.name, now)
    rooms = plane.fleet.rooms(now)
    avoid = plane.fleet.avoided(model.name, now)
    reasons: dict[str, list[Document]] = {}
    for each in rooms.explain(model, avoid=avoid):
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
        "replicas": [each for each in replicas(plane, now)["replicas"] if each["model"] == model.name],
        "missing": list(missing(plane, now, model.name)),
        "failures": failures(why, now),
        "profiles": [
            _profile(profile, rooms, rooms.find(profile, avoid), reasons.get(profile.name, []))
            for profile in by_priority(model.profiles)
        ],
    }


def _state(why: Why) -> str:
    if why.serving:
        return "ready"
    if not why.wanted:
        return "at zero"
    return "starting" if why.starting and not why.missing else "missing"


def _told(why: Why) -> list[str]:
    parts = [f"{why.serving} of {why.wanted} wanted replicas serve"]
    if why.starting:
        parts.append(f"{why.starting} on the way")
    if why.leaving:
        parts.append(f"{why.leaving} leaving")
    return [", ".join(parts) + "."]


def _profile(profile: Profile, rooms: Rooms, place: Placement | None, against: list[Document]) -> Document:
    return {
        "name": profile.name,
        "priority": profile.priority,
        "engine": profile.engine,
        "needs": needs(profile),
        "place": None if place is None else _place(place),
        "told": "it fits nowhere now" if place is None else f"one more would go to {_where(place)}",
        "rejections": against,
    }


def needs(profile: Profile) -> str:
    """What a replica takes, in words."""
    each = fit.wanted_gpus(profile) if profile.gpus_per_node else "CPUs only"
    if profile.nodes == 1:
        return f"one node, {each}"
    return f"{profile.nodes} nodes of one fabric, {each}{' each' if profile.gpus_per_node else ''}"


def _place(place: Placement) -> Document:
    return {
        "nodes": [{"node": seat.node, "gpus": list(seat.gpus)} for seat in place.seats],
        "gpu_class": place.gpu_class,
        "fabric": place.fabric,
    }


def _where(place: Placement) -> str:
    seats = ", ".join(f"{seat.node}{f' ({len(seat.gpus)} GPUs)' if seat.gpus else ''}" for seat in place.seats)
    return f"{seats} on fabric {place.fabric}" if place.fabric else seats


def known_model(plane: Plane, name: str) -> Model:
    """A model that is placed, by its name or an alias. Raises Refusal."""
    models = plane.fleet.models
    for model in models.values():
        if name == model.name or name in model.aliases:
            return model
    raise Refusal(404, "model_not_placed", f"{unknown('model', name, models)} (only models with profiles are placed)")


def scaled(plane: Plane, name: str, now: float) -> Document:
    """The answer to a start, a stop or a scale: what is wanted now."""
    why = plane.fleet.explain(name, now)
    wanted = f"{why.wanted} replica{'' if why.wanted == 1 else 's'}"
    return {"model": name, "wanted": why.wanted, "told": [f"{name}: {wanted} wanted now: {why.because}"]}

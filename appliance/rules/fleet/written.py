"""Whether what runs is what is written down now: which changes of the file an engine would notice.

An engine has its command line, its environment and its GPUs from the start to the end, so another word there is a new
engine. Every other key is for whoever places, scales and routes, and takes hold at once.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from appliance.facts.catalog import Model, Profile
from appliance.facts.replica import Shard

IN_PLACE = ("name", "priority", "gpu_class", "context_tokens")
"""Keys of a profile that are compared by what they come to, if at all: the class by the GPUs the engine has, the
context by what it was given, which may be the model's."""


def as_written(model: Model, shards: Iterable[Shard]) -> Profile | None:
    """The profile of `model` by which these shards of one replica would be started just as they were; None where none
    is left. Of several the one they were started by, then the one of its name."""
    there = tuple(shards)
    found = [profile for profile in model.profiles if all(_same(profile, model, shard) for shard in there)]
    if not found or not there:
        return None
    old = there[0].profile
    return max(found, key=lambda profile: (profile == old, profile.name == old.name))


def why_not_written(model: Model, shards: Iterable[Shard]) -> str:
    """What has been changed, "" where nothing has that the engine would notice."""
    there = tuple(shards)
    if as_written(model, there) is not None or not there:
        return ""
    alike = [profile for profile in model.profiles if all(_alike(profile, shard.profile) for shard in there)]
    old = there[0].profile
    if any(all(_takes(profile, shard) for shard in there) for profile in alike):
        whose = "the model" if old in model.profiles else f"its profile {old.name}"
        return f"context_tokens of {whose} has been changed"
    return f"its profile {old.name} has been changed or taken out"


def _same(profile: Profile, model: Model, shard: Shard) -> bool:
    context = profile.context_tokens or model.context_tokens
    return _alike(profile, shard.profile) and _takes(profile, shard) and context == shard.context


def _takes(profile: Profile, shard: Shard) -> bool:
    """Whether it may have the GPUs it has."""
    return not shard.gpus or profile.gpu_class in ("", shard.gpu_class)


def _alike(one: Profile, other: Profile) -> bool:
    return attrs.evolve(one, **{key: getattr(other, key) for key in IN_PLACE}) == other

"""Models that something must be started for: what decides whether a router needs a control plane."""

from __future__ import annotations

import attrs

from appliance.facts.catalog import Scaling
from appliance.facts.settings import Settings


def profiled(settings: Settings) -> tuple[str, ...]:
    """Names of the models that have a profile."""
    return tuple(model.name for model in settings.models if model.profiles)


def without_profiles(settings: Settings) -> Settings:
    """What holds in a router that began without a control plane: its models are served by endpoints of the file."""
    plain = (attrs.evolve(model, profiles=(), scaling=Scaling()) for model in settings.models)
    return attrs.evolve(settings, models=tuple(plain))

"""Ways to run a model: what a launch would refuse whatever the node is like is refused at load already."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence

from appliance.cli.config.quote import toml_value
from appliance.facts.catalog import Model, Profile, Scaling
from appliance.facts.errors import Fault
from appliance.rules.engines.flags import owned_flags
from appliance.rules.engines.plan import ENGINES
from appliance.rules.engines.refuse import HUB_ID, arithmetic, variables


def faults(models: Sequence[Model], faulty: Collection[str]) -> Iterator[Fault]:
    """All faults of all profiles; one with a faulty key of its own is not looked at further."""
    for i, model in enumerate(models):
        path = f"models[{i}]"
        if model.scaling != Scaling() and not model.profiles:
            yield Fault(f"{path}.scaling", f"expected a [[models.profiles]] of {model.name} too, to run replicas by")
        if model.profiles and f"{path}.name" not in faulty:
            yield from _served(f"{path}.name", model.name)
        names: dict[str, str] = {}
        for j, profile in enumerate(model.profiles):
            here = f"{path}.profiles[{j}]"
            if any(each.startswith(f"{here}.") for each in faulty):
                continue
            if profile.name in names:
                told = f"expected a unique name within the model, got {toml_value(profile.name)}"
                yield Fault(f"{here}.name", f"{told}, which is {names[profile.name]} already")
            names.setdefault(profile.name, f"{here}.name")
            yield from _profile(here, profile)


def _served(path: str, name: str) -> Iterator[Fault]:
    if " " in name or name.startswith("-"):
        yield Fault(path, f"expected no space and no leading dash, which engines misread, got {toml_value(name)}")


def _profile(path: str, profile: Profile) -> Iterator[Fault]:
    engine = ENGINES[profile.engine]
    for fault in arithmetic(profile):
        yield Fault(f"{path}.{fault.path}", fault.message)
    absolute = profile.source.startswith("/")
    if profile.engine == "llamacpp" and not absolute:
        yield Fault(f"{path}.source", f"expected the absolute path of a GGUF file, got {toml_value(profile.source)}")
    elif profile.engine != "sim" and not absolute and not HUB_ID.fullmatch(profile.source):
        told = f"expected an absolute path or a hub id (org/name), got {toml_value(profile.source)}"
        yield Fault(f"{path}.source", told)
    for reason in owned_flags(profile.args, engine.owned):
        yield Fault(f"{path}.args", reason.removeprefix("args: "))
    for reason in variables(profile.env, engine):
        yield Fault(f"{path}.env", reason.removeprefix("env: "))

"""Reasons not to start a shard that hold for every engine, all of them at once.

A job that is started anyway mostly does not fail but hangs: ranks wait for each other, ports are shared in silence, one
card of another kind slows down or stops the rest. So whatever can be known beforehand is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from appliance.facts.catalog import LAUNCH_MODES, LAUNCHABLE, Profile
from appliance.facts.errors import Fault
from appliance.facts.replica import Shard
from appliance.rules.engines import capability, environment
from appliance.rules.engines.engine import Engine, Site
from appliance.rules.engines.flags import flag_values, owned_flags

HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


def arithmetic(profile: Profile) -> list[Fault]:
    """What does not add up in a profile, by its fields: for the loader of the configuration, and once more before a
    launch."""
    faults = []
    if profile.engine not in LAUNCHABLE:
        faults.append(Fault("engine", f"expected one of {', '.join(LAUNCHABLE)}"))
    for name in ("nodes", "tensor_parallel", "pipeline_parallel"):
        if getattr(profile, name) < 1:
            faults.append(Fault(name, "expected at least 1"))
    if profile.gpus_per_node < 0:
        faults.append(Fault("gpus_per_node", "expected 0 (CPU) or more"))
    if profile.launch_mode not in LAUNCH_MODES:
        faults.append(Fault("launch_mode", f"expected one of {', '.join(LAUNCH_MODES)}"))
    elif profile.launch_mode == "ray" and profile.engine != "vllm":
        faults.append(Fault("launch_mode", "ray is a way to launch vllm only"))
    if profile.engine == "llamacpp" and profile.nodes > 1:
        faults.append(Fault("nodes", "llamacpp runs on one node"))
    if not faults:
        faults += _parallel(profile)
    return faults


def refusals(shard: Shard, site: Site, engine: Engine) -> list[str]:
    """Every reason of a kind that all engines share, as sentences for operators."""
    return [
        *map(str, arithmetic(shard.profile)),
        *_ranks(shard, site),
        *_gpus(shard, site),
        *_programs(shard, site, engine),
        *_files(shard, site),
        *_names(shard),
        *owned_flags(shard.profile.args, engine.owned),
        *variables(shard.profile.env, engine),
    ]


def _parallel(profile: Profile) -> list[Fault]:
    tensor, pipeline, gpus = profile.tensor_parallel, profile.pipeline_parallel, profile.gpus
    made = tensor * pipeline
    if gpus == 0:
        # On CPUs a rank is a process, and each node gets equally many.
        if made % profile.nodes:
            return [Fault("tensor_parallel", f"{made} ranks cannot be spread evenly over {profile.nodes} nodes")]
        return []
    if gpus % tensor:
        return [Fault("tensor_parallel", f"{tensor} does not divide {gpus} GPUs")]
    if made != gpus:
        there = f"nodes {profile.nodes} x gpus_per_node {profile.gpus_per_node}"
        return [
            Fault("pipeline_parallel", f"tensor_parallel {tensor} x {pipeline} makes {made}, but {there} is {gpus}")
        ]
    return []


def _ranks(shard: Shard, site: Site) -> list[str]:
    nodes = shard.profile.nodes
    found = []
    if not 0 <= shard.rank < nodes:
        found.append(f"rank {shard.rank} is not one of {nodes}")
    known = site.inventory.interfaces
    if known and not site.inventory.interface_of(shard.address):
        found.append(f"address {shard.address} is on no interface of this node")
    if nodes == 1:
        return found
    if not shard.leader:
        found.append("a replica on several nodes needs its leader's address")
    if not 1 <= shard.rendezvous_port <= 65535:
        found.append("a replica on several nodes needs a rendezvous port")
    elif shard.leads:
        why_not = site.ports.why_not(shard.rendezvous_port)
        found += [f"rendezvous {why_not}"] if why_not else []
    if shard.fabric and site.inventory.fabric(shard.fabric) is None:
        names = ", ".join(fabric.name for fabric in site.inventory.fabrics if fabric.name) or "none"
        found.append(f"fabric {shard.fabric} is not here (fabrics of this node: {names})")
    return found


def _gpus(shard: Shard, site: Site) -> list[str]:
    profile = shard.profile
    found = []
    if len(shard.gpus) != profile.gpus_per_node or len(set(shard.gpus)) != len(shard.gpus):
        found.append(f"{len(set(shard.gpus))} GPUs were given, gpus_per_node is {profile.gpus_per_node}")
    chosen = []
    for uuid in shard.gpus:
        gpu = site.inventory.gpu(uuid)
        if gpu is None:
            found.append(f"GPU {uuid} is not on this node")
            continue
        chosen.append(gpu)
        found += [f"GPU {gpu.index} is not free: {each.code}: {each.message}" for each in gpu.hindrances]
    classes = sorted({gpu.gpu_class for gpu in chosen})
    if len(classes) > 1:
        found.append(f"mixed GPU types in one group: {', '.join(classes)}")
    wanted = profile.gpu_class or shard.gpu_class
    if len(classes) == 1 and wanted and classes[0] != wanted:
        found.append(f"the GPUs are {classes[0]}, the replica is made of {wanted}")
    if why := capability.why_not(chosen, capability.needed(profile)):
        found.append(why)
    return found


def _programs(shard: Shard, site: Site, engine: Engine) -> list[str]:
    found = []
    for program in engine.programs(shard):
        if site.path_of(program) is None:
            name = site.executables.get(program.name) or program.executable
            say = f"say in agent.executables.{program.name} where it is"
            found.append(f"{name} is not installed here: install it, or {say}")
    return found


def _files(shard: Shard, site: Site) -> list[str]:
    found = []
    if shard.profile.engine != "sim":
        weights = shard.weights
        if weights.startswith("/"):
            if not site.exists(weights):
                found.append(f"source {weights} is not on this node")
        elif not HUB_ID.fullmatch(weights):
            found.append(f"source {weights!r}: expected an absolute path or a hub id (org/name)")
    for adapter in shard.adapters:
        if not site.exists(adapter.path):
            found.append(f"adapter {adapter.name}: {adapter.path} is not on this node")
    return found


def _names(shard: Shard) -> list[str]:
    found = []
    names = [shard.model, *(adapter.name for adapter in shard.adapters)]
    for name in names:
        if not name or name.startswith("-") or not name.isprintable() or name != name.strip() or " " in name:
            found.append(f"served name {name!r}: engines would misread it (no spaces, no leading dash)")
    if len(set(names)) != len(names):
        found.append("an adapter has the name of the model, or of another adapter")
    return found


def variables(env: Mapping[str, str], engine: Engine) -> list[str]:
    """Reasons against the variables that a profile sets, for the loader of the configuration and before a launch."""
    owned = (*environment.OWNED, *engine.owned_env)
    found = [f"env: {name} is set by the agent" for name in env if name in owned]
    found += [
        f"env: {name} must not be empty"
        for name, text in env.items()
        if name.startswith("NCCL_") and not text and name not in owned
    ]
    return found


def data_parallel(shard: Shard, *names: str) -> int:
    """How many copies of itself the profile's arguments ask the engine to run."""
    values = flag_values(shard.profile.args)
    return max((int(values[name]) for name in names if values.get(name, "").isdecimal()), default=1)

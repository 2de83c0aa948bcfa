"""Which GPUs of one node a replica on this node alone would get, or why it cannot run here."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping

from appliance.facts.catalog import Profile
from appliance.facts.hardware import Gpu, Inventory


class NoRoom(Exception):
    """The profile does not fit; the message is a sentence for operators."""


def choose_gpus(profile: Profile, inventory: Inventory, taken: Mapping[str, str]) -> tuple[Gpu, ...]:
    """GPUs for one replica, none for a profile on CPUs. `taken` says by UUID who has a GPU. Raises NoRoom.

    All are of one class, free, and not taken. Of several classes that would do the one with the fewest free is chosen,
    so that the larger ones stay whole; GPUs joined by NVLink go together, else the lowest places are taken.
    """
    if profile.nodes > 1:
        raise NoRoom(f"it needs {profile.nodes} nodes, and this agent runs replicas on one node only")
    count = profile.gpus_per_node
    if count == 0:
        return ()
    classes: dict[str, list[Gpu]] = {}
    for gpu in inventory.gpus:
        if gpu.placeable and gpu.uuid not in taken and profile.gpu_class in ("", gpu.gpu_class):
            classes.setdefault(gpu.gpu_class, []).append(gpu)
    enough = [(len(free), name) for name, free in classes.items() if len(free) >= count]
    if not enough:
        raise NoRoom(_why_not(profile, inventory, taken, max(map(len, classes.values()), default=0)))
    return _together(classes[min(enough)[1]], count)


def _together(free: Iterable[Gpu], count: int) -> tuple[Gpu, ...]:
    """`count` of the free GPUs, from one NVLink domain where one has enough: the fullest of those."""
    ordered = sorted(free, key=lambda gpu: gpu.index)
    domains: dict[int, list[Gpu]] = {}
    for gpu in ordered:
        if gpu.nvlink_domain is not None:
            domains.setdefault(gpu.nvlink_domain, []).append(gpu)
    fitting = [members for members in domains.values() if len(members) >= count]
    return tuple(min(fitting, key=lambda members: (len(members), members[0].index), default=ordered)[:count])


def _why_not(profile: Profile, inventory: Inventory, taken: Mapping[str, str], free: int) -> str:
    count = profile.gpus_per_node
    wanted = f"{count} GPU{'s' if count > 1 else ''}"
    wanted += f" of class {profile.gpu_class}" if profile.gpu_class else " of one class" if count > 1 else ""
    if not inventory.gpus:
        unseen = ", as far as could be seen" if inventory.partial else ""
        return f"it needs {wanted}, and this node has none{unseen}"
    fitting = [gpu for gpu in inventory.gpus if profile.gpu_class in ("", gpu.gpu_class)]
    if not fitting:
        here = ", ".join(sorted({gpu.gpu_class for gpu in inventory.gpus}))
        return f"it needs {wanted}, and the GPUs here are {here}"
    details = [text for gpu in fitting if (text := _of(gpu, taken))]
    return f"it needs {wanted}, and {free} of {len(fitting)} are free" + (f" ({'; '.join(details)})" if details else "")


def _of(gpu: Gpu, taken: Mapping[str, str]) -> str:
    if gpu.uuid in taken:
        return f"GPU {gpu.index} has {taken[gpu.uuid]}"
    return "".join(f"GPU {gpu.index}: {each.code}: {each.message}" for each in gpu.hindrances[:1])


def holders(shards: Collection[tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """Who has which GPU: from pairs of a replica and its GPUs."""
    return {gpu: replica for replica, gpus in shards for gpu in gpus}

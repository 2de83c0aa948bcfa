"""Whether one node's hardware can take one part of a replica: which GPUs, room on its disk, and the words for no.

An agent without a control plane and the control plane ask the same functions, so a GPU that one of them calls free is
free for the other too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

from appliance.facts.catalog import Profile
from appliance.facts.hardware import GIB, Gpu, Inventory
from appliance.rules.engines import capability
from appliance.rules.placement.topology import together

HEADROOM_BYTES = 10 * GIB
"""What the disk of a node must have free before a source is fetched to it. How large a source is nobody knows before
it is asked for, and the fetch itself checks that; a disk with less than this is full already."""


class NoRoom(Exception):
    """The profile does not fit; the message is a sentence for operators."""


def is_free(gpu: Gpu, taken: Mapping[str, str]) -> bool:
    """Whether a GPU may be had. One of unknown memory or class may not, even if its agent did not object to it.

    Two unknown classes are not known to be one.
    """
    return not gpu.hindrances and gpu.memory_bytes is not None and gpu.gpu_class != "" and gpu.uuid not in taken


def free_gpus(gpus: Iterable[Gpu], taken: Mapping[str, str]) -> dict[str, list[Gpu]]:
    """Those of a node's GPUs that may be had, by class. `taken` says by UUID who has a GPU."""
    found: dict[str, list[Gpu]] = {}
    for gpu in gpus:
        if is_free(gpu, taken):
            found.setdefault(gpu.gpu_class, []).append(gpu)
    return found


def choose(profile: Profile, free: Mapping[str, Sequence[Gpu]], gpu_class: str = "") -> tuple[Gpu, ...] | None:
    """GPUs of one class for one node's part: none for a profile on CPUs, None where there are too few.

    `gpu_class` is what the replica agreed on, "" when the profile alone decides. Of several classes that would do the
    one with the fewest free is chosen, so that the larger ones stay whole. A class is as old as the oldest free GPU of
    it here: they are of one kind, so that more than one age is a doubt and no choice.
    """
    count = profile.gpus_per_node
    if count == 0:
        return ()
    wanted = gpu_class or profile.gpu_class
    enough = [
        (len(gpus), name)
        for name, gpus in free.items()
        if len(gpus) >= count and wanted in ("", name) and is_young(profile, gpus)
    ]
    return together(free[min(enough)[1]], count) if enough else None


def is_young(profile: Profile, gpus: Iterable[Gpu]) -> bool:
    """Whether these GPUs know what the profile asks of them."""
    need = capability.needed(profile)
    return need is None or capability.suffices(capability.least(gpus), need)


def choose_gpus(profile: Profile, inventory: Inventory, taken: Mapping[str, str]) -> tuple[Gpu, ...]:
    """GPUs for one node's part of a replica, none for a profile on CPUs. Raises NoRoom."""
    gpus = choose(profile, free_gpus(inventory.gpus, taken))
    if gpus is None:
        raise NoRoom(why_no_gpus(profile, inventory, taken))
    return gpus


def why_no_cpus(profile: Profile, inventory: Inventory, cpu_replicas: int) -> str:
    """The sentence for a node whose processors have as many replicas as they can have, "" while they have fewer.

    Each has one processor at least, else more of them only take each other's time; and what nothing else bounds must
    not become ten thousand processes on one machine because somebody typed a zero too many.
    """
    count = max(1, inventory.cpus.count)
    if profile.gpus_per_node or cpu_replicas < count:
        return ""
    there = "replica there that runs" if cpu_replicas == 1 else f"{cpu_replicas} replicas there that run"
    return f"it has {count} CPU{'s' if count > 1 else ''} for the {there} on CPUs"


def is_fetched(profile: Profile) -> bool:
    """Whether its weights must be brought to the node first. An absolute path is there already, the sim needs none."""
    return profile.engine != "sim" and profile.source != "" and not profile.source.startswith("/")


def is_cramped(inventory: Inventory) -> bool:
    """Whether the disk is too full to fetch anything. What is unknown is not below anything."""
    free = inventory.disk.free_bytes if inventory.disk else None
    return free is not None and free < HEADROOM_BYTES


def wanted_gpus(profile: Profile) -> str:
    """What each node must give, in words: `8 GPUs of class h100-80g`."""
    count = profile.gpus_per_node
    of = f" of class {profile.gpu_class}" if profile.gpu_class else " of one class" if count > 1 else ""
    return f"{count} GPU{'s' if count > 1 else ''}{of}"


def why_no_gpus(profile: Profile, inventory: Inventory, taken: Mapping[str, str]) -> str:
    """The sentence for `choose` having found too few."""
    wanted = wanted_gpus(profile)
    unseen = ", as far as could be seen" if inventory.partial else ""
    if not inventory.gpus:
        return f"it needs {wanted}, and this node has none{unseen}"
    fitting = [gpu for gpu in inventory.gpus if profile.gpu_class in ("", gpu.gpu_class)]
    if not fitting:
        here = ", ".join(sorted({gpu.gpu_class or "of unknown class" for gpu in inventory.gpus}))
        return f"it needs {wanted}, and the GPUs here are {here}{unseen}"
    need = capability.needed(profile)
    if all(capability.why_not([gpu], need) for gpu in fitting):
        return f"{capability.why_not(fitting, need)}{unseen}"
    free = max((len(gpus) for gpus in free_gpus(fitting, taken).values() if is_young(profile, gpus)), default=0)
    details = [*_held(fitting, taken), *_ill(fitting, taken), *_old(fitting, taken, need)]
    told = f" ({'; '.join(details)})" if details else ""
    return f"it needs {wanted}, and {free} of {len(fitting)} are free{unseen}{told}"


def _held(gpus: Iterable[Gpu], taken: Mapping[str, str]) -> Iterator[str]:
    """Who has which: `GPUs 0-3, 6 have llama.x7k2q`."""
    places: dict[str, list[int]] = {}
    for gpu in gpus:
        if gpu.uuid in taken:
            places.setdefault(taken[gpu.uuid], []).append(gpu.index)
    for holder, numbers in places.items():
        yield f"GPU {numbers[0]} has {holder}" if len(numbers) == 1 else f"GPUs {_ranges(numbers)} have {holder}"


def _ranges(numbers: Iterable[int]) -> str:
    """`0-3, 6`."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def _ill(gpus: Iterable[Gpu], taken: Mapping[str, str]) -> Iterator[str]:
    """What is wrong with those that nobody has."""
    return (text for gpu in gpus if gpu.uuid not in taken and (text := why_not_free(gpu, taken)))


def _old(gpus: Iterable[Gpu], taken: Mapping[str, str], need: capability.Capability | None) -> Iterator[str]:
    """Which could be had, and are too old."""
    old = [gpu for gpu in gpus if is_free(gpu, taken) and capability.why_not([gpu], need)]
    if old:
        word = "GPUs" if len(old) > 1 else "GPU"
        yield f"{word} {_ranges(gpu.index for gpu in old)}: {capability.why_not(old, need)}"


def why_not_free(gpu: Gpu, taken: Mapping[str, str]) -> str:
    """Who has it or what is wrong with it, "" when it may be had."""
    if gpu.uuid in taken:
        return f"GPU {gpu.index} has {taken[gpu.uuid]}"
    if is_free(gpu, taken):
        return ""
    for each in gpu.hindrances:
        return f"GPU {gpu.index}: {each.code}: {each.message}"
    return f"GPU {gpu.index}: memory: how much memory it has is unknown"


def why_no_disk(profile: Profile, inventory: Inventory) -> str:
    """The sentence for a disk that is too full for what must be fetched, "" when it is not."""
    disk = inventory.disk
    if not is_fetched(profile) or not is_cramped(inventory) or disk is None or disk.free_bytes is None:
        return ""
    return (
        f"{profile.source} must be fetched, and its disk has {disk.free_bytes / GIB:.1f} GiB free at {disk.path}"
        f" (at least {HEADROOM_BYTES // GIB} GiB must be)"
    )

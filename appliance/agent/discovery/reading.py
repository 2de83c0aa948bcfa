"""What a GPU backend found, and the judgement on it that does not depend on the backend."""

from __future__ import annotations

from collections.abc import Callable, Collection

import attrs

from appliance.agent.discovery.classes import gpu_class, is_unified, is_virtual
from appliance.facts.hardware import GIB, MIB, Gpu, Hindrance, Holder

HELD_BYTES = GIB
"""Memory of other people's processes from which on a GPU is not free. Display servers, monitoring and idle contexts
stay below it; an engine that asks for nine tenths of the card does not start above it."""


@attrs.frozen
class Reading:
    """GPUs as a backend saw them, before judgement.

    `lost` are bus ids of cards the driver knows of and cannot reach. `partial`: something was there that could not be
    read; `notes` say what.
    """

    gpus: tuple[Gpu, ...] = ()
    lost: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    partial: bool = False


@attrs.frozen
class Ours:
    """What belongs to this agent: `is_pid` knows its processes with all their descendants, `gpus` are UUIDs its shards
    were given. Memory there is not held against a GPU."""

    is_pid: Callable[[int], bool] = lambda pid: False
    gpus: Collection[str] = ()


def judge(gpu: Gpu, *, system_memory_bytes: int | None, ours: Ours) -> Gpu:
    """The GPU with class, memory pool and every reason why it is not free."""
    gpu = describe(gpu, system_memory_bytes=system_memory_bytes)
    held = held_by(gpu, ours)
    return attrs.evolve(gpu, hindrances=(*gpu.hindrances, Hindrance("held", held))) if held else gpu


def describe(gpu: Gpu, *, system_memory_bytes: int | None) -> Gpu:
    """The GPU with its class, its pool of memory, and what follows from them. Doing it twice changes nothing."""
    unified = gpu.unified or (gpu.memory_bytes is None and is_unified(gpu.name))
    memory = gpu.memory_bytes or (system_memory_bytes if unified else None)
    gpu = attrs.evolve(
        gpu,
        memory_bytes=memory,
        unified=unified,
        virtual=gpu.virtual or is_virtual(gpu.name),
        gpu_class=gpu.gpu_class or gpu_class(gpu.name, memory, unified=unified),
    )
    found = {each.code: each for each in gpu.hindrances}
    if gpu.ecc_uncorrected:
        text = f"{gpu.ecc_uncorrected} uncorrected memory errors since the driver was loaded"
        found.setdefault("ecc", Hindrance("ecc", text))
    if gpu.mig:
        found.setdefault("mig", Hindrance("mig", "split into MIG instances; turn MIG off to use it whole"))
    elif memory is None:
        found.setdefault("memory", Hindrance("memory", "how much memory it has is unknown"))
    return attrs.evolve(gpu, hindrances=tuple(found.values()))


def held_by(gpu: Gpu, ours: Ours) -> str:
    """Who else holds memory of the GPU, as a sentence with process ids; "" when nobody does, or it is unknown."""
    foreign = [holder for holder in gpu.holders or () if not ours.is_pid(holder.pid)]
    known = sum(holder.used_bytes or 0 for holder in foreign)
    if known > HELD_BYTES:
        return f"{known // MIB} MiB held by processes that are not ours: {_pids(foreign)}"
    if gpu.uuid in ours.gpus or gpu.used_bytes is None or gpu.used_bytes <= HELD_BYTES:
        return ""
    # More than a driver keeps for itself, and we have nothing there.
    if foreign:
        return f"{gpu.used_bytes // MIB} MiB in use, and processes that are not ours are on it: {_pids(foreign)}"
    return f"{gpu.used_bytes // MIB} MiB in use by processes that this agent cannot see"


def carry_over(previous: tuple[Gpu, ...], reading: Reading) -> tuple[Gpu, ...]:
    """The GPUs of `reading`, and after a partial reading those seen before that are missing now, as not placeable.

    Without this a card that falls off the bus would simply cease to exist, and nobody would be told; nothing is made
    up, since each was described by its driver once.
    """
    if not reading.partial:
        return reading.gpus
    seen = {gpu.uuid for gpu in reading.gpus}
    kept = []
    for gpu in previous:
        if gpu.uuid in seen:
            continue
        if gpu.bus_id and gpu.bus_id in reading.lost:
            hindrance = Hindrance("lost", "fell off the bus; the driver no longer reaches it")
        else:
            hindrance = Hindrance("unseen", "was there before, and the last probe could not see it")
        kept.append(attrs.evolve(gpu, used_bytes=None, utilization=None, holders=None, hindrances=(hindrance,)))
    return reading.gpus + tuple(kept)


def short_bus_id(bus_id: str) -> str:
    """A PCI address as the kernel writes it: `00000000:BA:00.0` is `0000:ba:00.0`. "" stays ""."""
    domain, _, rest = bus_id.lower().partition(":")
    return f"{domain[-4:].rjust(4, '0')}:{rest}" if rest else ""


def _pids(holders: list[Holder]) -> str:
    return ", ".join(f"pid {holder.pid}" for holder in holders)

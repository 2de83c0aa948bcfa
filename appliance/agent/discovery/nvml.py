"""GPUs through the driver's own library. Every call may fail for one card and work for the next.

The library is handed in as a module, so that tests and machines without a driver can play it. All calls block, and a
wedged driver blocks them for ever: run `read` in a thread that may be left behind.
"""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable
from typing import Any

import attrs

from appliance.agent.discovery.reading import Reading, short_bus_id
from appliance.facts.hardware import Gpu, Hindrance, Holder

_LOST, _RESET_REQUIRED = 15, 16
"""NVML's error numbers for a GPU that fell off the bus and one that waits for a reset."""

_RECOVERY_FIELD = 230
_RECOVERY = {1: "reset", 2: "reboot", 4: "reset", 6: "reset", 7: "reboot"}
"""NVML's recovery actions that keep a card from being used, by number; 0 is none, the others concern links only."""

_VGPU_MODE = 2
_P2P_NVLINK = 2


class NoNvml(Exception):
    """NVML cannot be used here; the text says why."""


def load() -> Any:
    """The library's Python module. Raises NoNvml."""
    with warnings.catch_warnings():
        # The package `pynvml` warns that it became `nvidia-ml-py`; both bring the same module.
        warnings.simplefilter("ignore", FutureWarning)
        try:
            import pynvml  # type: ignore[import-untyped]
        except ImportError as missing:
            raise NoNvml(f"pynvml is not installed ({missing})") from missing
    return pynvml


def read(nvml: Any) -> Reading:
    """All GPUs the driver knows. Raises NoNvml when the library cannot be started or does not answer at all."""
    error: type[Exception] = nvml.NVMLError
    try:
        nvml.nvmlInit()
    except error as refused:
        raise NoNvml(f"NVML: {refused}") from refused
    try:
        try:
            count = nvml.nvmlDeviceGetCount()
        except error as refused:
            raise NoNvml(f"NVML counts no devices: {refused}") from refused
        gpus, handles, notes = [], {}, []
        for index in range(count):
            try:
                handle = nvml.nvmlDeviceGetHandleByIndex(index)
                uuid = _text(nvml.nvmlDeviceGetUUID(handle))
                name = _text(nvml.nvmlDeviceGetName(handle))
            except error as refused:
                # Without an identity it is no GPU anybody could place on, but it was counted.
                notes.append(f"GPU {index} cannot be identified: {refused}")
                continue
            handles[index] = handle
            gpus.append(_describe(nvml, handle, index, uuid, name))
        domains = _nvlink(nvml, handles)
        if domains is None and len(handles) > 1:
            notes.append("NVML does not tell which GPUs are joined by NVLink")
        for at, gpu in enumerate(gpus):
            gpus[at] = _with_domain(gpu, domains)
        return Reading(tuple(gpus), (), tuple(notes), partial=len(gpus) < count)
    finally:
        # Nothing follows that would need it to have ended well.
        with contextlib.suppress(error):
            nvml.nvmlShutdown()


def _describe(nvml: Any, handle: Any, index: int, uuid: str, name: str) -> Gpu:
    codes: set[int] = set()

    def get(function: str, *args: Any) -> Any:
        """What a call answers, None when it is not supported, not there, or fails; its error number is kept."""
        call: Callable[..., Any] | None = getattr(nvml, function, None)
        if call is None:
            return None
        try:
            return call(handle, *args)
        except nvml.NVMLError as refused:
            codes.add(getattr(refused, "value", 0))
            return None

    # Version 2 keeps what the driver reserves apart from what is used; drivers before 510 know only version 1.
    memory = get("nvmlDeviceGetMemoryInfo", getattr(nvml, "nvmlMemory_v2", None)) or get("nvmlDeviceGetMemoryInfo")
    usage = get("nvmlDeviceGetUtilizationRates")
    mig = get("nvmlDeviceGetMigMode")
    capability = get("nvmlDeviceGetCudaComputeCapability")
    pci = get("nvmlDeviceGetPciInfo")
    holders = _holders(get("nvmlDeviceGetComputeRunningProcesses"), get("nvmlDeviceGetGraphicsRunningProcesses"))
    rows = get("nvmlDeviceGetRemappedRows")
    # Uncorrected, since the driver was loaded.
    ecc = get("nvmlDeviceGetTotalEccErrors", 1, 0)
    action = _RECOVERY.get(_recovery_action(get("nvmlDeviceGetFieldValues", [_RECOVERY_FIELD])) or 0, "")
    hindrances = []
    if _LOST in codes:
        hindrances.append(Hindrance("lost", "fell off the bus; the driver no longer reaches it"))
    if action == "reboot":
        hindrances.append(Hindrance("reboot", "the driver says that the machine must be restarted"))
    elif action == "reset" or _RESET_REQUIRED in codes or (rows and rows[2]):
        hindrances.append(Hindrance("reset", "the driver says that it needs a reset"))
    if rows and rows[3]:
        hindrances.append(Hindrance("remap", "faulty memory rows can no longer be replaced; the card needs service"))
    return Gpu(
        uuid=uuid,
        index=index,
        name=name,
        memory_bytes=int(memory.total) or None if memory else None,
        used_bytes=int(memory.used) if memory else None,
        utilization=min(1.0, usage.gpu / 100) if usage else None,
        compute_cap=(int(capability[0]), int(capability[1])) if capability else None,
        bus_id=short_bus_id(_text(pci.busId)) if pci else "",
        ecc_uncorrected=None if ecc is None else int(ecc),
        mig=None if mig is None else mig[0] == 1,
        virtual=get("nvmlDeviceGetVirtualizationMode") == _VGPU_MODE,
        holders=holders,
        hindrances=tuple(hindrances),
    )


def _holders(compute: Any, graphics: Any) -> tuple[Holder, ...] | None:
    if compute is None:
        return None
    found: dict[int, int | None] = {}
    for process in [*compute, *(graphics or ())]:
        used = process.usedGpuMemory
        # A process may be listed as both; it holds its memory once.
        found[process.pid] = max(used or 0, found.get(process.pid) or 0) or None
    return tuple(Holder(pid, used) for pid, used in sorted(found.items()))


def _recovery_action(values: Any) -> int | None:
    if not values or values[0].nvmlReturn != 0:
        return None
    return int(values[0].value.uiVal)


def _nvlink(nvml: Any, handles: dict[int, Any]) -> dict[int, int] | None:
    """NVLink domain by index, numbered by their lowest member; None when one pair does not say."""
    domain = {index: index for index in handles}
    for one in handles:
        for other in handles:
            if one >= other:
                continue
            try:
                status = nvml.nvmlDeviceGetP2PStatus(handles[one], handles[other], _P2P_NVLINK)
            except (nvml.NVMLError, AttributeError):
                return None
            if status == 0:
                low, high = sorted((domain[one], domain[other]))
                domain = {each: low if at == high else at for each, at in domain.items()}
    return domain


def _with_domain(gpu: Gpu, domains: dict[int, int] | None) -> Gpu:
    return gpu if domains is None else attrs.evolve(gpu, nvlink_domain=domains[gpu.index])


def _text(value: str | bytes) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else value

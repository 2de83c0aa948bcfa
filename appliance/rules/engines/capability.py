"""Which generation of GPU a profile needs, as NVIDIA counts them: the compute capability.

Placement and the agent both ask here, so that a replica is never sent where it would be refused. Only what is known to
fail is written down: what an engine works around on older cards is its own affair.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from appliance.facts.catalog import Profile
from appliance.facts.hardware import Gpu

Capability = tuple[int, int]

FP8 = (8, 9)
"""Ada and Hopper are the first whose tensor cores know fp8."""


def needed(profile: Profile) -> Capability | None:
    """The least that each GPU must have; None where any will do, as on CPUs."""
    return FP8 if profile.gpus_per_node and (_is_fp8(profile.quantization) or _is_fp8(profile.dtype)) else None


def least(gpus: Iterable[Gpu]) -> Capability | None:
    """The lowest of these that is known, None where none is."""
    found: Capability | None = None
    for gpu in gpus:  # asked of every node of a cluster: a generator would cost three times as much
        there = gpu.compute_cap
        if there is not None and (found is None or there < found):
            found = there
    return found


def suffices(there: Capability | None, need: Capability | None) -> bool:
    """Whether GPUs of the capability `there` will do. An unknown one is not below anything."""
    return there is None or need is None or there >= need


def said(capability: Capability) -> str:
    return f"{capability[0]}.{capability[1]}"


def why_not(gpus: Iterable[Gpu], need: Capability | None) -> str:
    """What is wrong with the oldest of these GPUs, "" where all will do."""
    there = least(gpus)
    if need is None or there is None or suffices(there, need):
        return ""
    return f"fp8 needs compute capability {said(need)}, the GPUs have {said(there)}"


def _is_fp8(word: str) -> bool:
    return word != "" and any(part in ("fp8", "mxfp8") for part in re.split(r"[_-]", word.lower()))

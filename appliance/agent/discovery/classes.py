"""The word by which profiles and people name a kind of GPU: model plus memory, `h100-80g`.

Two cards of one class may share a tensor-parallel group, two of different classes never. So the class must not hang on
what differs between equal cards (vendor prefix, socket, marketing memory), and must hang on what the driver says of the
memory, since that is what a model has to fit into: an L40S, sold with 48 GB, is `l40s-45g`.
"""

from __future__ import annotations

import re

from appliance.facts.hardware import GIB

KNOWN = {
    "a100-sxm4-40gb": "a100",
    "a100-sxm4-80gb": "a100",
    "a100-pcie-40gb": "a100",
    "a100 80gb pcie": "a100",
    "a100-sxm-64gb": "a100",
    "a800-sxm4-80gb": "a800",
    "h100 80gb hbm3": "h100",
    "h100 pcie": "h100",
    "h100 nvl": "h100",
    "h100 96gb hbm3": "h100",
    "h100 64gb hbm2": "h100",
    "h200 nvl": "h200",
    "h20-3e": "h20",
    "gh200 480gb": "gh200",
    "gh200 120gb": "gh200",
    "gh200 144g hbm3e": "gh200",
    "b300 sxm6 ac": "b300",
    "b200 sxm6 lc": "b200",
    "v100-sxm3-32gb-h": "v100",
    "rtx 6000 ada generation": "rtx-6000-ada",
    "rtx 4000 sff ada generation": "rtx-4000-sff-ada",
    "rtx pro 6000 blackwell server edition": "rtx-pro-6000",
    "rtx pro 6000 blackwell workstation edition": "rtx-pro-6000",
    "rtx pro 6000 blackwell max-q workstation edition": "rtx-pro-6000-max-q",
    "orin (nvgpu)": "orin",
    "thor (nvgpu)": "thor",
    "xavier (nvgpu)": "xavier",
}
"""Model words of names for which the rule is not to be trusted, by lower-case name without the vendor."""

UNIFIED = ("gb10", "orin", "thor", "xavier", "tegra")
"""Parts that have no memory of their own and use the system's (DGX Spark, the Jetsons): words of their names."""

_VENDOR = {"nvidia", "tesla", "quadro", "geforce", "grid", "corporation"}
_FORM = re.compile(r"(sxm|hbm|gddr)\d*[a-z]?|pcie|nvl|gpu|server|workstation|edition|generation|ac|lc")
_MEMORY = re.compile(r"\d+gb?")
_VGPU = re.compile(r"[a-z0-9]+(?:-\d{1,2})?-\d{1,3}[abcq](?:me)?")


def gpu_class(name: str, memory_bytes: int | None, *, unified: bool = False) -> str:
    """The class of a GPU that its driver calls `name`. Without a known memory it is the model alone.

    On a unified part the driver names no memory, and the system's total differs by some MiB with kernel and firmware;
    two equal machines must not get two classes for that, so there the next power of two is taken: the 119.7 GiB that
    Linux sees on a GB10 are `gb10-128g`.
    """
    model = _model(name)
    if memory_bytes is None:
        return model
    gib = _power_of_two(memory_bytes) if unified else (memory_bytes + GIB // 2) // GIB
    return f"{model}-{gib}g"


def is_unified(name: str) -> bool:
    """Whether a part of this name shares the system's memory."""
    return any(word in UNIFIED for word in re.split(r"[^a-z0-9]+", name.lower()))


def is_virtual(name: str) -> bool:
    """Whether `name` is that of a vGPU (`H100L-2-24C`: two slices, 24 GB, compute series): part of a card, whole."""
    words = name.lower().split()
    return bool(words) and _VGPU.fullmatch(words[-1]) is not None


def _model(name: str) -> str:
    words = [word for word in name.lower().split() if word not in _VENDOR]
    known = KNOWN.get(" ".join(words))
    if known:
        return known
    if is_virtual(name):
        # Every letter of such a name is part of what it is: slices, profile size, series.
        return re.sub(r"[^a-z0-9.-]+", "-", "-".join(words))
    kept = []
    for word in words:
        parts = [part for part in re.split(r"[^a-z0-9.]+", word) if part]
        kept += [part for part in parts if not _FORM.fullmatch(part) and not _MEMORY.fullmatch(part)]
    return "-".join(kept) or "gpu"


def _power_of_two(memory_bytes: int) -> int:
    gib = 1
    while gib * GIB < memory_bytes:
        gib *= 2
    return gib

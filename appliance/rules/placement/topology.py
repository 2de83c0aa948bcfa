"""Who reaches whom: the fabrics that join nodes, and the NVLink domains inside one."""

from __future__ import annotations

from collections.abc import Iterable

from appliance.facts.hardware import Fabric, Gpu, Inventory

Network = tuple[str, str]
"""A fabric as nodes share it: name and transport. InfiniBand and RoCE under one name do not reach each other."""


def networks_of(inventory: Inventory) -> dict[Network, float]:
    """The named fabrics of a node, with their rates in Gb/s. Without one it is an island: single-node work only.

    Of two under one name the first counts, as everywhere a fabric is looked up by name.
    """
    found: dict[str, Fabric] = {}
    for fabric in inventory.fabrics:
        found.setdefault(fabric.name, fabric)
    return {(name, each.transport): each.rate_gbps for name, each in found.items() if name and each.rails}


def together(free: Iterable[Gpu], count: int) -> tuple[Gpu, ...]:
    """`count` of the free GPUs, from one NVLink domain where one has enough: the fullest of those.

    Where none has, or nothing is known of domains, those with the lowest index.
    """
    ordered = sorted(free, key=lambda gpu: gpu.index)
    domains: dict[int, list[Gpu]] = {}
    for gpu in ordered:
        if gpu.nvlink_domain is not None:
            domains.setdefault(gpu.nvlink_domain, []).append(gpu)
    fitting = [members for members in domains.values() if len(members) >= count]
    return tuple(min(fitting, key=lambda members: (len(members), members[0].index), default=ordered)[:count])

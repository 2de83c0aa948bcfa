"""An inventory as text: JSON for programs, columns for people, and the file that stands in for hardware.

The file has the form that `appliance agent inventory --json` prints, so a real machine can be copied into a rehearsal;
of a GPU only `name` and `memory_bytes` must be written by hand, the rest has defaults.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import attrs
import msgspec

from appliance.agent.discovery.plausible import faults
from appliance.agent.discovery.reading import describe
from appliance.agent.wording import plain, visible
from appliance.facts.hardware import (
    GIB,
    Cpus,
    Disk,
    Fabric,
    Gid,
    Gpu,
    Hindrance,
    Holder,
    Interface,
    Inventory,
    Memory,
    Port,
    Rail,
    RdmaAdapter,
)

VERSION = 1
_NESTED: dict[tuple[type, str], type] = {
    (Inventory, "cpus"): Cpus,
    (Inventory, "memory"): Memory,
    (Inventory, "disk"): Disk,
    (Inventory, "gpus"): Gpu,
    (Inventory, "adapters"): RdmaAdapter,
    (Inventory, "fabrics"): Fabric,
    (Inventory, "interfaces"): Interface,
    (Gpu, "holders"): Holder,
    (Gpu, "hindrances"): Hindrance,
    (RdmaAdapter, "ports"): Port,
    (Port, "gids"): Gid,
    (Fabric, "rails"): Rail,
}
"""Which fields hold further objects, for the check of unknown keys."""


class BadInventory(Exception):
    """The inventory file cannot be used; the text names it, the place in it and what was expected there."""


def to_json(inventory: Inventory) -> str:
    """The inventory as indented JSON with a final newline; `read_inventory` takes it back."""
    document = {"version": VERSION, **msgspec.to_builtins(inventory)}
    return msgspec.json.format(msgspec.json.encode(document), indent=2).decode() + "\n"


def read_inventory(path: Path, node: str = "") -> Inventory:
    """The inventory in a file, JSON or (by its suffix `.toml`) TOML, for the node of that name. Blocks. Raises
    BadInventory."""
    try:
        text = path.read_text("utf-8")
        document = tomllib.loads(text) if path.suffix == ".toml" else msgspec.json.decode(text)
    except OSError as broken:
        raise BadInventory(f"{path}: cannot be read: {broken.strerror}") from broken
    except RecursionError:
        raise BadInventory(f"{path}: it is nested too deeply") from None
    except ValueError as wrong:
        # Not TOML, not JSON, not text, or a figure of thousands of digits.
        raise BadInventory(f"{path}: {wrong}") from wrong
    try:
        return parse_inventory(document, node)
    except RecursionError:
        raise BadInventory(f"{path}: it is nested too deeply") from None
    except BadInventory as wrong:
        raise BadInventory(f"{path}: {wrong}") from wrong


def parse_inventory(document: Any, node: str = "") -> Inventory:
    """The inventory that a decoded document describes. `node` is in the identities that are made up, before the name in
    the document, so that several nodes can be rehearsed with one. Raises BadInventory with the place in it."""
    if not isinstance(document, dict):
        raise BadInventory("expected an object with `gpus`, `memory` and so on")
    document = dict(document)
    version = document.pop("version", VERSION)
    if version != VERSION:
        raise BadInventory(f"version: expected {VERSION}")
    document.setdefault("gpu_backend", "file")
    wrong_keys = list(_unknown_keys(document, Inventory, ""))
    if wrong_keys:
        raise BadInventory(plain("; ".join(wrong_keys)))
    if wrong_values := list(faults(document)):
        raise BadInventory("; ".join(wrong_values))
    if isinstance(document.get("gpus"), list):
        whose = node or document.get("node") or "file"
        document["gpus"] = [_with_defaults(each, at, whose) for at, each in enumerate(document["gpus"])]
    try:
        inventory = msgspec.convert(document, Inventory)
    except msgspec.ValidationError as wrong:
        raise BadInventory(str(wrong).replace("`$.", "`")) from wrong
    except UnicodeEncodeError as half:
        # JSON may name half of a character, and text with one can be sent to nobody.
        raise BadInventory(f"expected whole characters, got half of one in {half.object[:40]!a}") from None
    for key in ("uuid", "index"):
        values = [getattr(gpu, key) for gpu in inventory.gpus]
        if len(set(values)) != len(values):
            raise BadInventory(f"gpus: {key} must be unique")
    pool = inventory.memory.total_bytes
    return attrs.evolve(inventory, gpus=tuple(describe(gpu, system_memory_bytes=pool) for gpu in inventory.gpus))


def to_lines(inventory: Inventory) -> list[str]:
    """The inventory for people, without colours: what is there first, then what hinders, then what was odd."""
    cpus, memory, disk = inventory.cpus, inventory.memory, inventory.disk
    lines = [
        f"node      {inventory.node} at {inventory.address}" + _labels(inventory.labels),
        f"cpus      {cpus.count}"
        + (f" x {cpus.model}" if cpus.model else "")
        + (f", {cpus.arch}" if cpus.arch else "")
        + (f", {cpus.numa_nodes} NUMA nodes" if cpus.numa_nodes > 1 else ""),
        f"memory    {_gib(memory.total_bytes)}"
        + (f", {_gib(memory.available_bytes)} available" if memory.available_bytes is not None else ""),
    ]
    if disk is not None:
        lines.append(f"disk      {_gib(disk.free_bytes)} free of {_gib(disk.total_bytes)} at {disk.path}")
    lines.append(f"gpus      {len(inventory.gpus)} ({inventory.gpu_backend})" if inventory.gpus else "gpus      none")
    if inventory.gpus:
        lines += _columns(
            ("", "gpu", "class", "memory", "used", "cuda", "nvlink", "numa", "state"), map(_gpu_row, inventory.gpus)
        )
    lines += [_fabric_line(fabric) for fabric in inventory.fabrics] or ["fabric    none: this node is an island"]
    for adapter in inventory.adapters:
        for port in adapter.ports:
            if port.why_not:
                lines.append(f"          {adapter.name} port {port.number} left out: {port.why_not}")
    lines += [f"note      {visible(note)}" for note in inventory.notes]
    if inventory.partial:
        lines.append("partial   there may be more here than could be seen")
    return lines


def _gpu_row(gpu: Gpu) -> tuple[str, ...]:
    state = "; ".join(f"{each.code}: {each.message}" for each in gpu.hindrances) or "free"
    return (
        "",
        str(gpu.index),
        gpu.gpu_class,
        _gib(gpu.memory_bytes) + (" shared" if gpu.unified else ""),
        _gib(gpu.used_bytes),
        ".".join(map(str, gpu.compute_cap)) if gpu.compute_cap else "unknown",
        "unknown" if gpu.nvlink_domain is None else str(gpu.nvlink_domain),
        "-" if gpu.numa_node is None else str(gpu.numa_node),
        state,
    )


def _fabric_line(fabric: Fabric) -> str:
    rails = ", ".join(rail.adapter if rail.only_port else f"{rail.adapter}:{rail.port}" for rail in fabric.rails)
    name = fabric.name or "unnamed, so this node is an island (agent.fabric names it)"
    gid = "" if fabric.gid_index is None else f", GID {fabric.gid_index}"
    rate = f"{fabric.rate_gbps:g} Gb/s " if fabric.rate_gbps else ""
    return f"fabric    {name}: {fabric.transport}, {rate}over {rails}{gid}"


def _columns(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    table = [head, *rows]
    widths = [max(len(row[at]) for row in table) for at in range(len(head))]
    widths[0] = 8
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in table]


def _labels(labels: Mapping[str, str]) -> str:
    return f" ({', '.join(f'{key}={value}' for key, value in sorted(labels.items()))})" if labels else ""


def _gib(figure: int | None) -> str:
    return "unknown" if figure is None else f"{figure / GIB:.1f} GiB"


def _unknown_keys(document: Any, kind: type, at: str) -> Iterable[str]:
    if not isinstance(document, dict):
        return
    known = {field.name for field in attrs.fields(kind)}
    for key, value in document.items():
        if key not in known:
            yield f"{at}{key}: unknown key (known: {', '.join(sorted(known))})"
        elif (kind, key) in _NESTED:
            nested = _NESTED[kind, key]
            if isinstance(value, list):
                for number, each in enumerate(value):
                    yield from _unknown_keys(each, nested, f"{at}{key}[{number}].")
            else:
                yield from _unknown_keys(value, nested, f"{at}{key}.")


def _with_defaults(gpu: Any, at: int, node: str) -> Any:
    """A GPU written by hand gets a place in the row and an identity that stays, and differs between nodes."""
    if not isinstance(gpu, dict):
        return gpu
    return {"index": at, "uuid": f"GPU-{node}-{at}", **gpu}

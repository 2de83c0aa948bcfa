"""Processors, memory and disk of this node, as far as this process may use them.

Files are read below a root that can be replaced, so that tests can build a machine. All of it blocks; a file system
that hangs (a network share without its server) hangs `disk` too.
"""

from __future__ import annotations

import os
import platform
import re
from collections.abc import Iterator
from pathlib import Path

from appliance.facts.hardware import Cpus, Disk, Memory


def cpus(root: Path = Path("/"), *, allowed: int | None = None) -> Cpus:
    """The processors. `allowed` is how many this process may run on (None: ask the kernel); a quota lowers it."""
    count = allowed if allowed is not None else len(os.sched_getaffinity(0))
    quotas = [quota for quota in (_quota(text) for text in _limits(root, "cpu.max")) if quota is not None]
    info = _read(root / "proc/cpuinfo") or ""
    model = re.search(r"^model name\s*:\s*(.+)$", info, re.MULTILINE)
    numa = [path for path in _list(root / "sys/devices/system/node") if re.fullmatch(r"node[0-9]+", path.name)]
    return Cpus(
        count=max(1, min([count, *quotas])),
        model=" ".join(model[1].split()) if model else "",
        arch=platform.machine(),
        numa_nodes=max(1, len(numa)),
    )


def memory(root: Path = Path("/")) -> Memory:
    """The system's memory; a control group's limit lowers it."""
    figures = {
        found[1]: int(found[2]) * 1024
        for found in re.finditer(r"^(\w+):\s+([0-9]{1,15}) kB$", _read(root / "proc/meminfo") or "", re.MULTILINE)
    }
    limits = [int(text) for text in _limits(root, "memory.max") if re.fullmatch(r"[0-9]{1,18}", text)]
    totals = [figures["MemTotal"], *limits] if "MemTotal" in figures else limits
    total = min(totals, default=None)
    available = figures.get("MemAvailable")
    if available is not None and total is not None:
        available = min(available, total)
    return Memory(total, available)


def disk(path: Path) -> Disk:
    """The file system that `path` is on, or will be on: the nearest folder above it that exists is asked."""
    for at in (path, *path.parents):
        try:
            found = os.statvfs(at)
        except FileNotFoundError:
            continue
        except OSError:
            break
        return Disk(str(path), found.f_frsize * found.f_blocks, found.f_frsize * found.f_bavail)
    return Disk(str(path))


def numa_node_of(bus_id: str, root: Path = Path("/")) -> int | None:
    """The NUMA node of a PCI device; None when it has none, or it is unknown."""
    text = (_read(root / "sys/bus/pci/devices" / bus_id / "numa_node") or "") if bus_id else ""
    return int(text) if re.fullmatch(r"[0-9]{1,4}", text) else None


def _limits(root: Path, name: str) -> Iterator[str]:
    """What the file `name` says in our control group and in each one above it (version 2)."""
    own = re.search(r"^0::(/.*)$", _read(root / "proc/self/cgroup") or "", re.MULTILINE)
    top = root / "sys/fs/cgroup"
    at = top / own[1].lstrip("/") if own else top
    for folder in (at, *at.parents):
        text = _read(folder / name)
        if text is not None:
            yield text
        if folder == top:
            return


def _quota(text: str) -> int | None:
    """Whole processors of a `cpu.max` line, at least one; None without a limit."""
    found = re.fullmatch(r"([0-9]{1,15}) ([1-9][0-9]{0,14})", text)
    return max(1, -(-int(found[1]) // int(found[2]))) if found else None


def _read(path: Path) -> str | None:
    try:
        return path.read_text("utf-8", "replace").strip()
    except OSError:
        return None


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []

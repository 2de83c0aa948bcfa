"""`/debug/memory`: what the process holds. Counts and places in code, never contents."""

from __future__ import annotations

import gc
import sys
import tracemalloc
from collections import Counter
from typing import Any

MOST_ROWS = 200


def document(top: int = 0) -> dict[str, Any]:
    """Resident bytes and the collector's counts. `top` above 0 adds the most frequent types of objects, for which every
    object is looked at: a million hold up the loop for about a fifth of a second. While allocations are traced
    (`trace`), the places that hold most are added too."""
    figures: dict[str, Any] = {
        **resident(),
        "gc": {
            "counts": list(gc.get_count()),
            "collections": [generation["collections"] for generation in gc.get_stats()],
            "uncollectable": len(gc.garbage),
        },
        "modules": len(sys.modules),
        "tracing": tracemalloc.is_tracing(),
    }
    top = min(top, MOST_ROWS)
    if top > 0:
        types = Counter(type(thing) for thing in gc.get_objects())
        figures["objects"] = types.total()
        figures["types"] = [
            {"type": f"{kind.__module__}.{kind.__qualname__}", "count": count} for kind, count in types.most_common(top)
        ]
        if tracemalloc.is_tracing():
            figures["allocations"] = _allocations(top)
    return figures


def trace(on: bool) -> None:
    """Begin or end tracing allocations; while it is on, everything allocates at about half the speed."""
    if on and not tracemalloc.is_tracing():
        tracemalloc.start()
    elif not on:
        tracemalloc.stop()


def _allocations(top: int) -> list[dict[str, Any]]:
    found = tracemalloc.take_snapshot().statistics("lineno")[:top]
    return [
        {"at": f"{entry.traceback[0].filename}:{entry.traceback[0].lineno}", "bytes": entry.size, "count": entry.count}
        for entry in found
    ]


def resident() -> dict[str, int]:
    """Linux's own figures, in bytes; empty elsewhere."""
    wanted = {"VmRSS": "rss_bytes", "VmHWM": "peak_rss_bytes", "Threads": "threads"}
    figures = {}
    try:
        with open("/proc/self/status", encoding="ascii", errors="replace") as status:
            for line in status:
                name, _, rest = line.partition(":")
                if name in wanted:
                    figures[wanted[name]] = int(rest.split()[0]) * (1024 if rest.strip().endswith("kB") else 1)
    except OSError:
        return {}
    return figures

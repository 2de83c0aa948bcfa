"""Durations in sentences for operators."""

from __future__ import annotations


def span(seconds: float) -> str:
    """4 s, 75 s, 12 min, 3 h, 4 d."""
    for limit, divisor, unit in ((119.5, 1, "s"), (7170, 60, "min"), (171000, 3600, "h")):
        if seconds < limit:
            return f"{max(0.0, seconds) / divisor:.0f} {unit}"
    return f"{seconds / 86400:.0f} d"

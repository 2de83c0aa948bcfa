"""What a configuration allows and an operator should know of: told at a start, refused nowhere."""

from __future__ import annotations

from collections.abc import Iterator

from appliance.cli.config.loaded import Loaded

PROBE_TIMINGS = ("probe_interval_s", "probe_timeout_s", "probe_fresh_s", "probe_promote_s")
"""These hang together: how often, how long, and for how long the result is believed."""


def advice(loaded: Loaded) -> tuple[str, ...]:
    """One sentence each, with the key in front."""
    return tuple(_probes(loaded))


def _probes(loaded: Loaded) -> Iterator[str]:
    groups = loaded.settings.groups
    given = [name for name in PROBE_TIMINGS if loaded.origins.get(f"groups.{name}", "default") != "default"]
    if not groups.enabled:
        return
    if groups.fresh_s < groups.probe_interval_s + groups.probe_timeout_s:
        yield (
            f"groups.probe_fresh_s: {groups.fresh_s:g} s is less than an interval and a timeout"
            f" ({groups.probe_interval_s + groups.probe_timeout_s:g} s): groups come and go between two probes"
        )
    elif len(given) == 1:
        others = ", ".join(name for name in PROBE_TIMINGS if name != given[0])
        yield f"groups.{given[0]} is set alone: groups may come and go, unless {others} still suit it"

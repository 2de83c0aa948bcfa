"""What one connection has told the control plane already, so that only the rest is told.

Nothing is queued. What is to be said next is found by comparing what is with what was said, when the link can take
another message: a slow one gets fewer and newer reports, and costs no memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from appliance.agent.machine import placing
from appliance.facts.hardware import Inventory
from appliance.facts.link import Look, News
from appliance.facts.report import Report

REFRESH_S = 300.0
"""How old figures that change all the time (free disk, memory in use) may be on the other side. They are not told when
they change; but a headroom must not be judged by what was free last week."""


class Said:
    """The state of the other side, as far as we have brought it. A plain object of one connection."""

    def __init__(self, inventory: Inventory, reports: Mapping[str, Report], now: float) -> None:
        """What the registration says."""
        self._inventory = inventory
        self._looked_at = now
        self._reports = dict(reports)
        self._denied: set[str] = set()

    def deny(self, shard_id: str) -> None:
        """We were told to do something about a shard that is not here: the other side must hear so."""
        self._denied.add(shard_id)

    def news(self, reports: Mapping[str, Report]) -> News | None:
        """What has to be said about shards, as if it were said now; None when all is known."""
        changed = tuple(
            report for shard_id, report in reports.items() if not _same(self._reports.get(shard_id), report)
        )
        gone = tuple(sorted(({*self._reports} | self._denied) - {*reports}))
        if not changed and not gone:
            return None
        self._reports = dict(reports)
        self._denied.clear()
        return News(changed, gone)

    def look(self, inventory: Inventory, now: float) -> Look | None:
        """The inventory where it has to be said, as if it were said now."""
        if inventory is self._inventory:
            return None
        if now - self._looked_at < REFRESH_S and placing(inventory) == placing(self._inventory):
            return None
        self._inventory = inventory
        self._looked_at = now
        return Look(inventory)


def _same(before: Report | None, now: Report) -> bool:
    return before is now or before == now

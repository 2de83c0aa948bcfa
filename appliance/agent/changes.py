"""What becomes of the shards, as an operator reads it: one line for each change of a state, and a count of failures."""

from __future__ import annotations

from collections.abc import Mapping

import structlog

from appliance.facts.report import Report


class Changes:
    """Made once. `failures` counts by model since the start; `logger` is the name that the lines carry."""

    def __init__(self, logger: str) -> None:
        self.failures: dict[str, int] = {}
        self._states: dict[str, tuple[str, float]] = {}
        self._log = structlog.get_logger(logger)

    def tell(self, reports: Mapping[str, Report]) -> None:
        """Log what is other than at the last call."""
        for shard_id, report in reports.items():
            if self._states.get(shard_id) == (report.state, report.since):
                continue
            known = {"pid": report.pid or None, "url": report.url or None, "exit": report.exit or None}
            known |= {"reason": report.reason or None, "adopted": report.adopted or None}
            told = {name: value for name, value in known.items() if value is not None}
            if report.state == "failed":
                model = report.shard.model
                self.failures[model] = self.failures.get(model, 0) + 1
                last_line = report.tail[-1] if report.tail else ""
                self._log.error("shard failed", shard=shard_id, **told, last_line=last_line)
            else:
                self._log.info(f"shard is {report.state}", shard=shard_id, **told)
        self._states = {shard_id: (report.state, report.since) for shard_id, report in reports.items()}

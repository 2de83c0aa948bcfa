"""What a row is given: where to print, where to run, how much to do."""

from __future__ import annotations

from pathlib import Path

import attrs

from tests.bench.machine import Cores
from tests.bench.report import Report


@attrs.frozen
class Plan:
    report: Report
    cores: Cores
    folder: Path
    routers: tuple[str, ...]
    rounds: int
    quick: bool

    def times(self, usual: int) -> int:
        """How often each router is measured: what was asked for, else a smoke run's two, else the row's own number."""
        return self.rounds or (2 if self.quick else usual)

    def amount(self, usual: int, smoke: int) -> int:
        """A count of requests, connections or streams."""
        return smoke if self.quick else usual

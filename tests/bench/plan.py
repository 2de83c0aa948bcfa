"""What a row is given: where to print, where to run, how much to do."""

from __future__ import annotations

import time
from pathlib import Path

import attrs

from tests.bench.machine import Cores, core_busy_s
from tests.bench.report import Report

_CALM = 0.15  # share of a core that may be busy with other things
_LOOK_S = 0.5


@attrs.define
class Patience:
    """Seconds that a row may still spend waiting for a shared machine to fall quiet."""

    left_s: float

    def wait(self, cores: Cores) -> None:
        """Return when both cores were calm for half a second, or when no patience is left."""
        while self.left_s > 0:
            began, before = time.monotonic(), [core_busy_s(core) for core in (cores.router, cores.rest)]
            time.sleep(_LOOK_S)
            took_s = time.monotonic() - began
            self.left_s -= took_s
            after = [core_busy_s(core) for core in (cores.router, cores.rest)]
            if all(now - then < _CALM * took_s for now, then in zip(after, before, strict=True)):
                return


@attrs.frozen
class Plan:
    report: Report
    cores: Cores
    folder: Path
    routers: tuple[str, ...]
    rounds: int
    quick: bool
    patience: Patience = attrs.field(factory=lambda: Patience(0.0))

    def times(self, usual: int) -> int:
        """How often each router is measured: what was asked for, else a smoke run's two, else the row's own number."""
        return self.rounds or (2 if self.quick else usual)

    def amount(self, usual: int, smoke: int) -> int:
        """A count of requests, connections or streams."""
        return smoke if self.quick else usual

"""One line of JSON per figure, and the verdicts that decide the exit status."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from statistics import median
from typing import IO

import attrs

from tests.bench import machine
from tests.bench.routers import Running, Skipped


def paired_ratio(ours: Sequence[float], theirs: Sequence[float]) -> float | None:
    """Median of ours/theirs, round by round: what both met at the same time cancels out."""
    pairs = [mine / other for mine, other in zip(ours, theirs, strict=False) if other]
    return median(pairs) if pairs else None


def paired_difference(ours: Sequence[float], theirs: Sequence[float]) -> float:
    """Median of ours-theirs, round by round."""
    return median(mine - other for mine, other in zip(ours, theirs, strict=False))


def _short(value: float) -> float:
    return float(f"{value:.4g}")


@attrs.define
class Report:
    """Prints lines; remembers whether an answer was wrong."""

    row: str
    sink: IO[str] = attrs.field(factory=lambda: sys.stdout)
    wrong: bool = False
    measured: int = 0

    def line(self, **fields: object) -> None:
        print(json.dumps({"row": self.row, **fields}), file=self.sink, flush=True)

    def conditions(self, cores: machine.Cores, up: Sequence[Running], **more: object) -> None:
        """The first line of a row: everything that a figure depends on and a reader cannot guess."""
        self.line(
            conditions={
                **machine.conditions(cores),
                **more,
                "routers": {each.name: {"version": each.version, "switched_on": each.switched_on} for each in up},
            }
        )

    def skipped(self, those: Sequence[Skipped]) -> None:
        for each in those:
            self.line(router=each.name, skipped=each.reason)

    def figures(self, figure: str, unit: str, samples: Mapping[str, Sequence[float]], *, better: str) -> None:
        """One figure of every router: the median, the samples, and the paired ratio to each of the others."""
        for name, values in samples.items():
            ratios = {
                other: _short(ratio)
                for other, theirs in samples.items()
                if other != name and (ratio := paired_ratio(values, theirs)) is not None
            }
            self.measured += 1
            self.line(
                figure=figure,
                router=name,
                unit=unit,
                better=better,
                median=_short(median(values)),
                ratio_to=ratios,
                samples=[_short(value) for value in values],
            )

    def figure(self, figure: str, unit: str, router: str, value: float, **more: object) -> None:
        """One figure that stands alone."""
        self.measured += 1
        self.line(figure=figure, router=router, unit=unit, value=_short(value), **more)

    def target(self, text: str, value: float | None, met: bool | None) -> None:
        """A target of the performance page. Not met is news, not an error: the machine may be the reason."""
        self.line(target=text, value=None if value is None else _short(value), met=met)

    def check(self, text: str, ok: bool, **seen: object) -> None:
        """Something that must hold on any machine. When it does not, the command fails."""
        self.wrong = self.wrong or not ok
        self.line(check=text, ok=ok, **seen)

    @property
    def status(self) -> int:
        """Exit status: 0 when something was measured and every answer was right."""
        return 0 if self.measured and not self.wrong else 1

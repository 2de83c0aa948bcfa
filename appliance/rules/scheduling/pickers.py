"""Which of the scored candidates is taken."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

Picker = Callable[[Sequence[float], Random], int]
LEAST_WEIGHT = 1e-3
"""What a candidate with no score, or less, weighs in a weighted draw: it stays possible, or a pool of penalised
endpoints would have nothing to draw from."""
SAME = 1e-9


def best(totals: Sequence[float], rng: Random) -> int:
    """The index of the highest total; ties by chance, or the first endpoint of the file would take every idle hour."""
    top = max(totals) - SAME
    tied = []
    for index, total in enumerate(totals):
        if total >= top:
            tied.append(index)
    return tied[0] if len(tied) == 1 else tied[int(rng.random() * len(tied))]


def weighted(totals: Sequence[float], rng: Random) -> int:
    """An index by chance, in proportion to the totals."""
    weights = [total if total > LEAST_WEIGHT else LEAST_WEIGHT for total in totals]
    mark = rng.random() * sum(weights)
    for index, weight in enumerate(weights):
        mark -= weight
        if mark < 0.0:
            return index
    return len(weights) - 1


PICKERS: dict[str, Picker] = {"best": best, "weighted": weighted}

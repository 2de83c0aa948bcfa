"""Room in a pool: whether one more request of a band may be let in, and where its lease is booked.

A pool's saturation is the mean over its endpoints. What a grant would do to it is worked out before it is made: the
lease goes to the least saturated endpoint that is open, the mean is taken with it, and the band's ceiling decides:

- up to the healthy limit (ceiling at most 1.0) the request must fit whole: of 8 slots bronze (0.7) gets 5, silver
  (0.9) 7, gold (1.0) 8. The price: of 2 slots silver gets 1. A pool where nothing of ours runs always takes one, or an
  engine with a single slot would never serve a band below 1.0;
- a ceiling above 1.0 means "not held back", so the request that crosses it is still let in: with 8 slots platinum (1.2)
  goes to 10, which is 2 waiting.

With several pools a band takes the first, in the order of their priority, that has room below the healthy limit; only
when all are beyond it may a band with a higher ceiling wait in the first one.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from appliance.facts.endpoint import Endpoint
from appliance.rules.admission.capacity import QUEUE_LIMIT, Load
from appliance.rules.admission.ticket import Blocker

HEALTHY = 1.0
SLACK = 1e-9
"""For what sums of fractions lose: without it gold would not get the last of 3 x 10 slots."""


class Pool:
    """The endpoints of a model that share a pool name and a priority. `silent` counts those that count as full."""

    __slots__ = ("loads", "name", "silent")

    def __init__(self, name: str, loads: Sequence[Load]) -> None:
        self.name = name
        self.loads = tuple(loads)
        self.silent = 0
        self.count_silent()

    def count_silent(self) -> None:
        """Call when one of the endpoints fell silent or was heard again."""
        self.silent = sum(load.silent_until is not None for load in self.loads)

    @property
    def saturation(self) -> float:
        """The mean over the endpoints; a silent one counts as at its healthy limit, unless all of them are."""
        if self.silent and self.silent < len(self.loads):
            total = sum(max(load.saturation, 0.0 if load.silent_until is None else HEALTHY) for load in self.loads)
        else:
            total = sum(load.saturation for load in self.loads)
        return total / len(self.loads)

    def place(self, ceiling: float) -> Load | None:
        """Where a request under this ceiling could go now; None when it has to wait."""
        loads = self.loads
        some_silent = self.silent and self.silent < len(loads)
        total = 0.0
        best = None
        least = 0.0
        for load in loads:
            figure = load.saturation
            if some_silent and load.silent_until is not None:
                total += max(HEALTHY, figure)
                continue
            total += figure
            if load.open and (best is None or figure < least):
                best = load
                least = figure
        if best is None:
            return None
        count = len(loads)
        if (total - least + best.after()) / count <= ceiling + SLACK or (ceiling > HEALTHY and total / count < ceiling):
            return best
        if best.waiting / QUEUE_LIMIT <= ceiling and all(load.idle for load in loads):
            return best
        return None

    def blocker(self) -> Blocker:
        """Why `place` found nothing."""
        return "saturation" if any(load.open for load in self.loads) else "unproven"


def pools_of(endpoints: Iterable[Endpoint], loads: dict[str, Load]) -> tuple[Pool, ...]:
    """A model's endpoints as pools, in the order they are filled: the highest `pool_priority` first, then by name.

    `loads` has every endpoint by id.
    """
    tiers: dict[tuple[int, str], list[Load]] = {}
    for endpoint in endpoints:
        tiers.setdefault((-endpoint.pool_priority, endpoint.pool), []).append(loads[endpoint.id])
    return tuple(Pool(name, tiers[rank, name]) for rank, name in sorted(tiers))


def place(pools: tuple[Pool, ...], ceiling: float) -> tuple[Pool, Load] | None:
    """The pool and the endpoint where a request under this ceiling could go now."""
    if len(pools) > 1 and ceiling > HEALTHY:
        found = place(pools, HEALTHY)
        if found is not None:
            return found
    for pool in pools:
        load = pool.place(ceiling)
        if load is not None:
            return pool, load
    return None

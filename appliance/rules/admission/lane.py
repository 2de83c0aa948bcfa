"""A lane: everything that concerns one model alone. A waiter in it blocks nobody in another."""

from __future__ import annotations

from appliance.rules.admission.capacity import Load
from appliance.rules.admission.fairness import Rotation
from appliance.rules.admission.pools import Pool, place
from appliance.rules.admission.refusals import Pace
from appliance.rules.admission.ticket import Blocker, Ticket


class Lane:
    """The queues of one model, and the pools that serve it.

    `top` is the rank of the highest band that has waiters, the number of bands when none has: whoever ranks above it
    may look for a place at once, everybody else would overtake somebody. `wakes`: the model is scaled to zero, so
    requests wait although no endpoint is there. `turn` is the number of the last grant, for models that share an
    endpoint. `loads` are all endpoints that serve it.
    """

    __slots__ = ("loads", "model", "pace", "pools", "rotations", "top", "turn", "wakes")

    def __init__(self, model: str, bands: int, by_work: bool) -> None:
        self.model = model
        self.pools: tuple[Pool, ...] = ()
        self.loads: tuple[Load, ...] = ()
        self.wakes = False
        self.turn = 0
        self.pace = Pace()
        self.clear(bands, by_work)

    def __len__(self) -> int:
        """How many wait here."""
        return sum(map(len, self.rotations))

    def clear(self, bands: int, by_work: bool) -> None:
        """Begin with empty queues for so many bands; debts between tenants are forgotten."""
        self.rotations = [Rotation(by_work) for _ in range(bands)]
        self.top = bands

    def supply(self, pools: tuple[Pool, ...], wakes: bool) -> None:
        """Take the pools that serve the model now, and tell their endpoints so."""
        loads = {load.id: load for pool in pools for load in pool.loads}
        self.pools = pools
        self.loads = tuple(loads.values())
        self.wakes = wakes
        for load in loads.values():
            load.lanes = (*load.lanes, self)

    def place(self, ceiling: float) -> tuple[Pool, Load] | None:
        """The pool and the endpoint where a request under this ceiling could go now."""
        return place(self.pools, ceiling)

    def anywhere(self) -> tuple[Pool, Load]:
        """The least saturated endpoint of the first pool, whatever the ceilings say. IndexError without pools."""
        pool = self.pools[0]
        return pool, min(pool.loads, key=lambda load: load.saturation)

    def add(self, ticket: Ticket, now: float) -> None:
        self.rotations[ticket.rank].add(ticket, now)
        self.top = min(self.top, ticket.rank)

    def take(self, now: float) -> Ticket:
        """The next ticket of the highest band that has waiters."""
        ticket = self.rotations[self.top].take(now)
        self.pace.note(now)
        self._find_top()
        return ticket

    def drop(self, ticket: Ticket, now: float) -> None:
        self.rotations[ticket.rank].drop(ticket, now)
        self._find_top()

    def ahead(self, rank: int) -> int:
        """Waiters of this band and of those above it."""
        return sum(len(rotation) for rotation in self.rotations[: rank + 1])

    def blocker(self) -> tuple[Blocker, float]:
        """What holds a newcomer back now, and the saturation of the pool it would go to first."""
        if not self.pools:
            return "loading", 0.0
        return self.pools[0].blocker(), self.pools[0].saturation

    def _find_top(self) -> None:
        rotations = self.rotations
        top = self.top
        while top < len(rotations) and not rotations[top]:
            top += 1
        self.top = top

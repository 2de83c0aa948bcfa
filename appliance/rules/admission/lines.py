"""The waiters of all models together: who is the newest, who expires next, how many there may be."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator

import attrs

from appliance.facts.bands import AdmissionSettings, Band
from appliance.rules.admission.ticket import Ticket


@attrs.frozen
class BandFigures:
    """One band as it stands. `oldest_s` is the longest wait among those that wait, `models` counts them by model."""

    name: str
    ceiling: float
    capacity: int
    ttl_s: float
    waiting: int
    oldest_s: float
    models: dict[str, int]


class Line:
    """The waiters of one band, oldest first. Those that wait for a model to wake have another time limit, so they
    stand in a row of their own: in each of the two rows the first is the next to expire.

    Rows are ordered by links, not by position: to take from either end of a plain dict costs more the more has gone.
    """

    __slots__ = ("band", "loading", "waiting")

    def __init__(self, band: Band) -> None:
        self.band = band
        self.waiting: OrderedDict[Ticket, None] = OrderedDict()
        self.loading: OrderedDict[Ticket, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self.waiting) + len(self.loading)

    def __iter__(self) -> Iterator[Ticket]:
        yield from self.waiting
        yield from self.loading

    def row(self, ticket: Ticket) -> OrderedDict[Ticket, None]:
        return self.loading if ticket.blocker == "loading" else self.waiting

    def oldest(self) -> list[Ticket]:
        """The first of each row that is not empty."""
        return [next(iter(row)) for row in (self.waiting, self.loading) if row]

    def newest(self) -> Ticket:
        """Who came last. Raises ValueError when nobody waits."""
        return max((next(reversed(row)) for row in (self.waiting, self.loading) if row), key=lambda t: t.number)


class Lines:
    """One line per band, the highest first, and the bounds on them."""

    def __init__(self, settings: AdmissionSettings) -> None:
        self.lines = tuple(Line(band) for band in settings.bands)
        self.ceilings = tuple(band.ceiling for band in settings.bands)
        self.ranks = {band.name: rank for rank, band in enumerate(settings.bands)}
        self.total = settings.total
        self.count = 0

    def __getitem__(self, rank: int) -> Line:
        return self.lines[rank]

    def __len__(self) -> int:
        """How many bands there are; `count` is the number of waiters."""
        return len(self.lines)

    def add(self, ticket: Ticket) -> None:
        self.lines[ticket.rank].row(ticket)[ticket] = None
        self.count += 1

    def drop(self, ticket: Ticket) -> None:
        del self.lines[ticket.rank].row(ticket)[ticket]
        self.count -= 1

    def tickets(self) -> list[Ticket]:
        """Everybody who waits, in the order they came."""
        return sorted((ticket for line in self.lines for ticket in line), key=lambda t: t.number)

    def victim(self, rank: int) -> Ticket | None:
        """Whom a newcomer of this rank may displace: the newest of the lowest band below it; None if there is none."""
        for line in reversed(self.lines[rank + 1 :]):
            if len(line):
                return line.newest()
        return None

    def expired(self, now: float) -> list[Ticket]:
        """Those whose time is up. They are still in line afterwards."""
        found: list[Ticket] = []
        for line in self.lines:
            for row in (line.waiting, line.loading):
                for ticket in row:
                    if ticket.expires_at > now:
                        break
                    found.append(ticket)
        return found

    def next_expiry(self) -> float:
        return min((t.expires_at for line in self.lines for t in line.oldest()), default=float("inf"))

    def figures(self, now: float) -> list[BandFigures]:
        """All bands, the highest first. Walks over every waiter: for pages and `ctl`, not for each request."""
        found: list[BandFigures] = []
        for line in self.lines:
            models: dict[str, int] = {}
            for ticket in line:
                models[ticket.model] = models.get(ticket.model, 0) + 1
            oldest_s = max((now - ticket.asked_at for ticket in line.oldest()), default=0.0)
            band = line.band
            found.append(BandFigures(band.name, band.ceiling, band.capacity, band.ttl_s, len(line), oldest_s, models))
        return found

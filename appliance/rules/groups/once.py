"""What is told: faults once, by kind and source, so that one fault does not hide another of the same machine; changes
as long as there are not too many of them."""

from __future__ import annotations

MOST_SOURCES = 16
"""Of how many sources one kind of fault is told. Whoever sends datagrams may put any source into them, and must not be
able to fill a disk."""


class Once:
    def __init__(self) -> None:
        self._told: dict[str, set[str]] = {}

    def first(self, kind: str, source: str) -> bool:
        """Whether this is to be told now; it is not again."""
        told = self._told.setdefault(kind, set())
        if source in told or len(told) >= MOST_SOURCES:
            return False
        told.add(source)
        return True

    def last_one(self, kind: str) -> bool:
        """Whether no further source of this kind will be told."""
        return len(self._told.get(kind, ())) >= MOST_SOURCES

    def __len__(self) -> int:
        return sum(map(len, self._told.values()))


MOST_LINES = 300
"""Lines about changes that may follow each other at once: a rack of machines comes and goes in fewer."""
LINES_PER_S = 0.5
"""From then on. A daemon whose groups come and go all the time is told of all the same, and fills no disk."""


class Allowance:
    """How many lines may be written yet. `now` in seconds of any clock that goes on."""

    def __init__(self) -> None:
        self._left = float(MOST_LINES)
        self._at: float | None = None
        self.passed_over = 0

    def take(self, now: float) -> bool:
        """Whether this line may be written."""
        since = 0.0 if self._at is None else max(0.0, now - self._at)
        self._left, self._at = min(float(MOST_LINES), self._left + since * LINES_PER_S), now
        if self._left < 1:
            self.passed_over += 1
            return False
        self._left -= 1
        return True

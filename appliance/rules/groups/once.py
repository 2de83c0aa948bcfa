"""Faults told once: by kind and source, so that one fault does not hide another of the same machine."""

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

"""Where something was served before: sessions and response ids, in bounded tables."""

from __future__ import annotations

from collections import OrderedDict

LONGEST_KEY = 512
MOST_KEYS = 100_000


class Remembered:
    """key -> endpoint id, least recently used out first. Keys longer than `LONGEST_KEY` are not kept: they come from
    clients, and a table bounded in keys alone would not be bounded in bytes."""

    __slots__ = ("_most", "_places")

    def __init__(self, most: int = MOST_KEYS) -> None:
        self._most = most
        self._places: OrderedDict[str | bytes, str] = OrderedDict()

    def __len__(self) -> int:
        return len(self._places)

    def get(self, key: str | bytes) -> str:
        """The endpoint id, "" when unknown."""
        place = self._places.get(key)
        if place is None:
            return ""
        self._places.move_to_end(key)
        return place

    def put(self, key: str | bytes, endpoint: str) -> None:
        if len(key) > LONGEST_KEY:
            return
        places = self._places
        places[key] = endpoint
        places.move_to_end(key)
        if len(places) > self._most:
            places.popitem(last=False)

    def forget(self, endpoint: str) -> None:
        """Drop all that points to an endpoint that is gone. Walks the table: for removals, not for requests."""
        for key in [key for key, place in self._places.items() if place == endpoint]:
            del self._places[key]

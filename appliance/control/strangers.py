"""Room for connections that have not proven to be a node's.

They are few at a time, in all and from each address, and none stays long. Where there are as many as may be, a new one
takes the place of the one that has been about it for the longest, if that is longer than a handshake takes: otherwise
whoever opens connections and says nothing, from a few addresses and again and again, would keep every node away that
has to call anew. When many nodes call at the same moment nobody has been slow, and the last ones come in at their next
try.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import trio


@attrs.define(eq=False)
class Stranger:
    """One connection. `scope` ends it."""

    address: str
    since: float
    scope: trio.CancelScope
    ended: bool = False


class Strangers:
    """At most `most` at a time, `most_each` from one address; those older than `slow_s` seconds make way."""

    def __init__(self, most: int, most_each: int, slow_s: float) -> None:
        self._most = most
        self._most_each = most_each
        self._slow_s = slow_s
        self._all: list[Stranger] = []  # the oldest first

    def __len__(self) -> int:
        return len(self._all)

    @contextmanager
    def room(self, address: str) -> Iterator[bool]:
        """A place for as long as the block lasts; whether there was one. A block that has to make way is cancelled."""
        if not self._make_way(address):
            yield False
            return
        with trio.CancelScope() as scope:
            stranger = Stranger(address, trio.current_time(), scope)
            self._all.append(stranger)
            try:
                yield True
            finally:
                self._leave(stranger)

    def _make_way(self, address: str) -> bool:
        same = [each for each in self._all if each.address == address]
        if len(same) >= self._most_each:
            return self._end_first(same)
        return len(self._all) < self._most or self._end_first(self._all)

    def _end_first(self, among: list[Stranger]) -> bool:
        if trio.current_time() - among[0].since < self._slow_s:
            return False
        among[0].scope.cancel()
        self._leave(among[0])
        return True

    def _leave(self, stranger: Stranger) -> None:
        if not stranger.ended:
            stranger.ended = True
            self._all.remove(stranger)

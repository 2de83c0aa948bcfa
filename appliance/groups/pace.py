"""How much of the process finding groups may take, whatever daemons say and however often: a tenth.

Each piece of work that others can cause is measured, and followed by a rest nine times as long. Where there is little
to do, as everywhere but under attack, a piece takes a millisecond or less, and nobody notices the rest.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

import trio

REST = 9
MOST_REST_S = 10.0


class Pace:
    """Shared by all that wait for each other's rests."""

    def __init__(self) -> None:
        self._free_at = float("-inf")

    @property
    def free(self) -> bool:
        return trio.current_time() >= self._free_at

    async def turn(self) -> None:
        """Wait until there may be work again. No other task runs between its return and what the caller does next."""
        while not self.free:  # noqa: ASYNC110  others who waited as well may have worked meanwhile
            await trio.sleep_until(self._free_at)

    @contextmanager
    def work(self) -> Iterator[None]:
        """Around one piece of work that waits for nothing."""
        begun = time.perf_counter()
        try:
            yield
        finally:
            rest_s = min(REST * (time.perf_counter() - begun), MOST_REST_S)
            self._free_at = max(self._free_at, trio.current_time()) + rest_s

"""The one task that decides about the fleet: look, say, wait until something changes or a wait is over.

A fault of a decision must not take the request road down with it, which runs in the same process and has endpoints to
serve. It is logged once and the pass is made again a little later.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import structlog
import trio

from appliance.nursery.news import News

SHORTEST_S = 0.02
"""Between two passes. When a hundred agents register at once, one pass is made for many of them."""

LONGEST_S = 60.0
FAULT_S = 2.0

log = structlog.get_logger("control")


class Loop:
    """`look` is one pass: it does what is to be done, and returns when the next is due by the clock of `now`."""

    def __init__(self, look: Callable[[], float], now: Callable[[], float]) -> None:
        self.passes = 0
        self._look = look
        self._now = now
        self._news = News()
        self._woken = False
        self._fault = ""

    def wake(self) -> None:
        """Something a decision depends on has changed."""
        self._woken = True
        self._news.tell()

    async def run(self) -> NoReturn:
        """For ever."""
        while True:
            self._woken = False
            wait_s = self._pass()
            await trio.sleep(FAULT_S if self._fault else SHORTEST_S)
            if not self._woken:
                with trio.move_on_after(wait_s):
                    await self._news.wait()

    def _pass(self) -> float:
        self.passes += 1
        try:
            again_at = self._look()
        except Exception as fault:
            if repr(fault) != self._fault:
                self._fault = repr(fault)
                log.error("a fault in deciding about the fleet, nothing is started or stopped", exc_info=fault)
            return 0.0
        if self._fault:
            self._fault = ""
            log.info("decisions about the fleet are made again")
        return min(max(again_at - self._now(), 0.0), LONGEST_S)

"""Questions to disks and drivers that may never be answered.

A file system whose server is gone holds whoever asks it, for ever and against every signal. So each question has a
thread of its own that may be left behind. One that was left behind is not joined by a second one: asked again every few
seconds, they would use up all threads there are, and with them whatever else needs one.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TypeVar

import trio

T = TypeVar("T")


class Unanswered(Exception):
    """There is no answer yet; the text says since when it is waited for."""


class Questions:
    """Made once for everything that asks. `ask` from one Trio run."""

    def __init__(self) -> None:
        self._out: set[str] = set()
        self._threads = trio.CapacityLimiter(math.inf)

    async def ask(self, what: str, read: Callable[[], T], limit_s: float) -> T:
        """What `read` returns or raises, in a thread. Raises Unanswered when that takes longer than `limit_s`, and at
        once while an earlier question of the name `what` is still out."""
        if what in self._out:
            raise Unanswered(f"{what}: an earlier question has not been answered yet")
        self._out.add(what)

        def answer() -> T:
            try:
                return read()
            finally:
                self._out.discard(what)

        with trio.move_on_after(limit_s):
            return await trio.to_thread.run_sync(answer, abandon_on_cancel=True, limiter=self._threads)
        raise Unanswered(f"{what}: no answer within {limit_s:g} s")

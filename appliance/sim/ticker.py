"""The one task that lets time pass for the engine.

It sleeps until the batch has something due, takes one turn (all streams are written in it), and sleeps again. An order
that makes something due earlier moves the deadline of the sleep. There is no timer and no task per stream or event.
"""

from __future__ import annotations

import math
from typing import NoReturn

import trio

from .engine import Engine

LEAST_SLEEP_S = 0.001
"""Between two turns: a decoder faster than this gives several tokens a turn instead of a turn per token."""


class Ticker:
    """Owns the engine's clock. `run` until cancelled."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._scope = trio.CancelScope()
        engine.on_due = self._hasten

    async def run(self) -> NoReturn:
        while True:
            now = trio.current_time()
            self._engine.turn(now)
            due = self._engine.next_at(now)
            with trio.CancelScope() as self._scope:
                self._scope.deadline = math.inf if due is None else max(due, trio.current_time() + LEAST_SLEEP_S)
                await trio.sleep_forever()

    def _hasten(self) -> None:
        now = trio.current_time()
        due = self._engine.next_at(now)
        if due is not None and due < self._scope.deadline:
            self._scope.deadline = max(due, now + LEAST_SLEEP_S)

"""Answers made by ordinary Trio code, on connections that know only sleepers.

A connection is one task that waits in its sleeper, where departed clients and deadlines cut it (`nursery/sleeper.py`).
Code that waits in nurseries, channels and libraries cannot be cut there. So it runs in a task aside, hands over what it
writes piece by piece, and is cancelled when the connection's own task is cut. Costs two task switches a piece: for the
tool servers and the like, not for the request road.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import trio

from ..facts.call import Fields
from ..nursery.sleeper import Sleeper
from .reply import HttpReply


class Aside:
    """The reply as the task aside sees it: `start` once, `send` as often as needed, `end` once. `send` and `end` return
    when the connection's task has taken the piece, so a slow client slows its answer down."""

    def __init__(self, sleeper: Sleeper) -> None:
        self._sleeper = sleeper
        self._steps: list[Callable[[HttpReply], Awaitable[None]]] = []
        self._taken = trio.Event()
        self._done = False
        self._failed: Exception | None = None

    def start(self, status: int, fields: Fields, length: int | None) -> None:
        async def begin(reply: HttpReply) -> None:
            reply.start(status, fields, length)

        self._steps.append(begin)  # leaves with what follows

    async def send(self, data: bytes) -> None:
        await self._hand_over(lambda reply: reply.send(data))

    async def end(self) -> None:
        await self._hand_over(lambda reply: reply.end())

    async def _hand_over(self, step: Callable[[HttpReply], Awaitable[None]]) -> None:
        self._steps.append(step)
        self._taken = trio.Event()
        self._sleeper.wake()
        await self._taken.wait()

    async def run(self, work: Callable[[Aside], Awaitable[None]]) -> None:
        """The task aside."""
        try:
            await work(self)
        except Exception as error:
            self._failed = error
        self._done = True
        self._sleeper.wake()

    async def write(self, reply: HttpReply) -> None:
        """The connection's task. Raises a cut, ClientLeft, and what the work raised."""
        while True:
            # no checkpoint between this look and the sleep, so no wake is lost
            while not (self._steps or self._done):
                await self._sleeper.sleep()
            steps, self._steps = self._steps, []
            for step in steps:
                await step(reply)
            self._taken.set()
            if self._done and not self._steps:
                if self._failed is not None:
                    raise self._failed
                return


async def aside(reply: HttpReply, work: Callable[[Aside], Awaitable[None]]) -> None:
    """Have `work` make the answer in a task of its own, and write it. A client that leaves cancels the work. Raises a
    cut, ClientLeft, or what the work raised, bare."""
    made = Aside(reply.sleeper)
    failed: Exception | None = None
    async with trio.open_nursery() as nursery:
        nursery.start_soon(made.run, work)
        try:
            await made.write(reply)
        except Exception as error:
            failed = error
        nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed

"""Where one task sleeps until there is news, or until somebody cuts it with a reason.

The request road has one task per connection and moves hundreds of thousands of events a minute, so what a task pays for
waiting decides what a request costs. Measured on one core, Python 3.11, 64 pairs of sockets:
`trio.lowlevel.wait_readable` 6.2 microseconds a hop (two epoll_ctl calls each time), a sleeper woken by an
edge-triggered poller 4.5, a cancel scope per request another 4.4. A sleeper replaces both: sockets wake it
(`wire/line.py`), and deadlines, departed clients and lost endpoints cut it.

A cut is an exception that the sleeping task raises at its next or present `sleep`. Only the task itself raises, so no
exception group reaches a caller, and the reason says who ended the wait. Trio's own cancellation works as everywhere.

Deadlines: `arm(due, name)` is two assignments; the sweeper (`sweep`) looks at all sleepers a few times a second and
cuts the overdue with `DeadlinePassed(name)`. A deadline is therefore late by at most one sweep, and costs no timer.
"""

from __future__ import annotations

import math
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator, Iterable
from typing import Any, NoReturn, TypeVar

import outcome
import trio

SWEEP_S = 0.2
"""Seconds between two looks of the sweeper: how late a deadline may strike."""


class Cut(Exception):
    """Ends a sleep from outside. Subclasses say why."""


class DeadlinePassed(Cut):
    """The named deadline struck; `args[0]` is the name of its setting."""

    @property
    def name(self) -> str:
        return str(self.args[0])


Result = TypeVar("Result")


class _News(outcome.Outcome[None]):
    """What a sleep ends with when there is news: one object for all of them. Trio's own value may be used only once,
    and making and marking one for every wake is a hundredth of what a short request costs."""

    def unwrap(self) -> None:
        return None

    def send(self, gen: Generator[Result, None, object]) -> Result:
        return gen.send(None)

    async def asend(self, agen: AsyncGenerator[Result, None]) -> Result:
        return await agen.asend(None)


NEWS = _News()
"""What a wake hands to a task."""


class Sleeper:
    """One task's place to sleep: the first that sleeps here stays the only one. A wake without a sleeper is no event
    and is not remembered.

    The pattern is always: try, and sleep while there was nothing. No checkpoint lies between the try and the sleep, so
    no wake can be lost.
    """

    __slots__ = ("_abandon", "_cut", "_owner", "_task", "due", "due_name", "on_sweep")

    def __init__(self) -> None:
        self._abandon = self._abandoned  # a bound method, made once
        self._owner: trio.lowlevel.Task | None = None
        self._task: trio.lowlevel.Task | None = None
        self._cut: Cut | None = None
        self.due: float = math.inf
        self.due_name = ""
        self.on_sweep: Callable[[float], None] | None = None

    def sleep(self) -> Awaitable[None]:
        """Wait for the next `wake`: to be awaited at once. Raises the reason of a cut, be it made before or during the
        sleep.

        No coroutine of its own: every wake would have to pass through it on its way to the task.
        """
        if self._cut is not None:
            cut, self._cut = self._cut, None
            raise cut
        owner = self._owner
        if owner is None:
            owner = self._owner = trio.lowlevel.current_task()
        self._task = owner
        return trio.lowlevel.wait_task_rescheduled(self._abandon)  # noqa: ASYNC105 - the caller awaits it

    def wake(self) -> None:
        """End the present sleep, if there is one."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task, NEWS)

    def cut(self, reason: Cut) -> None:
        """End the present or the next sleep by raising `reason` there. The first reason stands."""
        task = self._task
        if task is not None:
            self._task = None
            trio.lowlevel.reschedule(task, outcome.Error(reason))
        elif self._cut is None:
            self._cut = reason

    def check(self) -> None:
        """Raise the reason of a cut that has not been raised yet."""
        if self._cut is not None:
            cut, self._cut = self._cut, None
            raise cut

    def arm(self, due: float, name: str) -> None:
        """Let the sweeper cut this sleeper once `due` (seconds of `time.monotonic`) has passed."""
        self.due = due
        self.due_name = name

    def disarm(self) -> None:
        """Forget the deadline, and a cut that came too late to matter."""
        self.due = math.inf
        self._cut = None

    def forget_deadline(self) -> None:
        """Forget the deadline, also one that has struck and was not raised yet. Every other cut stands."""
        self.due = math.inf
        if isinstance(self._cut, DeadlinePassed):
            self._cut = None

    # -- what `Carried` does otherwise: a coroutine that pauses is carried on by whoever has news for it ---------------

    pause = sleep
    """A `sleep` after which the caller may find itself in the poller, and must not use Trio but through a sleep."""
    carry_on = wake
    """There is news. Not to be called by what may run in a carried coroutine: that one calls `wake`."""

    def run(self, coroutine: Coroutine[Any, Any, None]) -> Awaitable[None]:
        """What the task of this sleeper awaits, once."""
        return coroutine

    # ------------------------------------------------------------------------------------------------------------------

    def _abandoned(self, _: object) -> trio.lowlevel.Abort:
        self._task = None
        return trio.lowlevel.Abort.SUCCEEDED


def sweep_once(sleepers: Iterable[Sleeper], now: float) -> None:
    """Cut what is overdue at `now`; let those who asked look at the clock."""
    for sleeper in sleepers:
        if sleeper.due <= now:
            sleeper.due = math.inf
            sleeper.cut(DeadlinePassed(sleeper.due_name))
        elif sleeper.on_sweep is not None:
            sleeper.on_sweep(now)


async def sweep(sleepers: set[Sleeper], clock: Callable[[], float] = time.monotonic) -> NoReturn:
    """Look at all sleepers for ever. One task for a whole process; its owner cancels it."""
    while True:
        await trio.sleep(SWEEP_S)
        sweep_once(tuple(sleepers), clock())


async def breathe(turns: int) -> None:
    """A checkpoint for loops over sockets that are always ready: without it one such loop starves every other task and
    cannot be cancelled. Costs a scheduler round, so callers take it every 16 operations."""
    if turns & 15 == 0:
        await trio.lowlevel.checkpoint()

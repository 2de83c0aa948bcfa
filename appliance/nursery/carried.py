"""A coroutine that pauses while its task sleeps: whoever has news for it carries it on, right there.

Waking a task costs about 350 bytecodes in Trio's scheduler, and a short request had to be woken twice: for its own
bytes and for the engine's. Here the poller that sees the bytes runs the coroutine up to its next pause, in its own
breath, as it does with the pumps of streams; the task sleeps on. Everything else goes on in the task, as ever:

    poller:               carry_on            carry_on
    coroutine:   ... pause ------- ... pause ------- ... sleep ... pause
    task:        ... asleep --------------------------- runs ...... asleep

A coroutine that comes back from a pause may be in the poller, where others wait for it, and Trio takes what it does for
the poller's doing. So it pauses only where no scope and no nursery of its own is open, and opens none before it has
passed a checkpoint or a `sleep`: these bring it home by themselves, into its own task. Wakes, cuts and cancellations
reach it there, always.

The states, by `_task` (the task while it is asleep, else None) and `_pausing`:

- both: paused. News carries the coroutine on; a wake, a cut or a cancellation wakes the task, which does it.
- `_task` alone: an ordinary sleep.
- `_pausing` alone: paused, and its task has been woken: it will go on there, whatever news comes before.
- neither, `_away`: carried on at this moment. A wake is no event then, as for any task that is awake.
- neither: the task runs, or has been woken to.
"""

from __future__ import annotations

import types
from collections.abc import Awaitable, Coroutine, Generator
from typing import Any, ClassVar

import trio

from .sleeper import NEWS, Sleeper


class _Trap:
    """What the coroutine hands to whoever runs it; none of Trio's own."""

    __slots__ = ()

    def __await__(self) -> Generator[_Trap, None, None]:
        return iter((self,))  # type: ignore[return-value]  # yields it once; a generator costs twice as much


_PAUSE = _Trap()
_HOME = _Trap()
"""On with it, but in its own task."""


class Carried(Sleeper):
    """The place to sleep of a task that awaits its coroutine through `run`."""

    __slots__ = ("_away", "_called_off", "_coroutine", "_ended", "_error", "_pausing", "_trap")

    def __init__(self) -> None:
        super().__init__()
        self._away = False
        self._called_off = False
        """Trio wanted to cancel the task while its coroutine was away."""
        self._coroutine: Coroutine[Any, Any, None] | None = None
        self._ended = False
        self._error: BaseException | None = None
        self._pausing = False
        self._trap: object = None

    def pause(self) -> Awaitable[None]:
        if self._coroutine is None:
            return self.sleep()
        self.check()
        return _PAUSE

    def sleep(self) -> Awaitable[None]:
        if self._away:
            self.check()
            return _HOME  # like a wake for nothing: whoever sleeps looks again, and sleeps at home
        return super().sleep()

    def carry_on(self) -> None:
        task = self._task
        if task is None:
            return
        self._task = None
        if self._pausing:
            assert self._coroutine is not None, "run"
            self._pausing = False
            self._away = True
            try:
                trap = self._coroutine.send(None)
            except StopIteration:
                self._ended = True
            except BaseException as error:  # its task's to raise
                self._error = error
            else:
                if trap is _PAUSE and not self._called_off:
                    self._away = False
                    self._pausing = True
                    self._task = task
                    return
                self._trap = trap
            self._away = False
        trio.lowlevel.reschedule(task, NEWS)

    @types.coroutine
    def _run(self, coroutine: Coroutine[Any, Any, None]) -> Generator[Any, Any, None]:
        self._coroutine = coroutine
        try:
            trap: object = coroutine.send(None)
            while True:
                if trap is _HOME:
                    trap = coroutine.send(None)
                elif trap is not _PAUSE:
                    trap = coroutine.send((yield trap))  # Trio's own; its answer is an outcome, a cancellation too
                else:
                    yield from self._asleep()
                    if self._pausing:
                        self._pausing = False
                        trap = coroutine.send(None) if self._error is None else coroutine.throw(self._taken())
                    elif self._error is not None:
                        raise self._taken()
                    elif self._ended:
                        return
                    else:
                        trap, self._trap = self._trap, None
        except StopIteration:
            return
        finally:
            self._coroutine = None

    def _asleep(self) -> Generator[Any, Any, None]:
        """The task, while its coroutine pauses. What ends that other than news is noted."""
        self._pausing = True
        self._called_off = False
        try:
            yield from super().sleep().__await__()
        except BaseException as reason:
            self._error = reason

    def run(self, coroutine: Coroutine[Any, Any, None]) -> Awaitable[None]:
        return self._run(coroutine)

    def _taken(self) -> BaseException:
        """The error, which must not stay here: its traceback holds the coroutine."""
        error, self._error = self._error, None
        assert error is not None
        return error

    STEERS: ClassVar[types.CodeType] = _run.__code__
    """The frame of a task that runs a coroutine, which is its `coroutine`: no await leads there from the task."""

    def _abandoned(self, reason: object) -> trio.lowlevel.Abort:
        if self._away:
            self._called_off = True
            return trio.lowlevel.Abort.FAILED
        return super()._abandoned(reason)

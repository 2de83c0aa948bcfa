"""What signals mean to a program that serves: SIGTERM and SIGINT end it, SIGHUP has it read its configuration again."""

from __future__ import annotations

import signal
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import NoReturn

import trio

ALL = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def held() -> Iterator[None]:
    """Keep signals for `heeded`, and have them do nothing from its end on: for a process that ends after the block, in
    its main thread. Else one that comes while Python puts itself away would make a failure of a stop."""
    signal.pthread_sigmask(signal.SIG_BLOCK, ALL)
    for number in ALL:
        # Not ignored yet: that would drop one which is being kept.
        signal.signal(number, _do_nothing)
    try:
        yield
    finally:
        for number in ALL:
            # For good: Python gives up handlers of its own before its end.
            signal.signal(number, signal.SIG_IGN)


def _do_nothing(number: int, frame: object) -> None:
    return


class Heeding:
    """Signals as they are heeded. Until `begun` a SIGHUP is kept: there is nothing yet that could take a configuration
    over, and nothing is ended by it, which is what that signal does by itself."""

    def __init__(self, stop: Callable[[int], None], reload: Callable[[], object] | None) -> None:
        self._stop = stop
        self._reload = reload
        self._begun = False
        self._kept = False

    def begun(self) -> None:
        """From now on a SIGHUP reloads; one that came before does so now."""
        self._begun = True
        if self._kept and self._reload is not None:
            self._reload()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        stops = 0
        numbers = (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if self._reload is not None else ()))
        with trio.open_signal_receiver(*numbers) as signals:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, numbers)
            task_status.started()
            async for number in signals:
                if number != signal.SIGHUP:
                    stops += 1
                    self._stop(stops)
                elif self._begun and self._reload is not None:
                    self._reload()
                else:
                    self._kept = True
        raise AssertionError("signals do not end")


@asynccontextmanager
async def heeded(stop: Callable[[int], None], reload: Callable[[], object] | None = None) -> AsyncIterator[Heeding]:
    """Heed signals for as long as the block runs, to its very end: one more that comes while everything ends must not
    cut that short. `stop` is called with how many there were, from 1. Without `reload` SIGHUP is left as it is.
    """
    failed: Exception | None = None
    heeding = Heeding(stop, reload)
    async with trio.open_nursery() as nursery:
        await nursery.start(heeding.run, name="signals")
        try:
            yield heeding
        except Exception as error:
            failed = error  # out of a nursery it would come as a group
        nursery.cancel_scope.cancel()
    if failed is not None:
        raise failed

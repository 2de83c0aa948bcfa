"""A place to wait for "something has changed", for as many as like."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import NoReturn

import trio


class News:
    """Whoever changes something tells; whoever waits looks again. News carry nothing: the state itself is read."""

    def __init__(self) -> None:
        self._event = trio.Event()

    def tell(self) -> None:
        """Wake all who wait now."""
        event, self._event = self._event, trio.Event()
        event.set()

    async def wait(self) -> None:
        """Return at the next `tell`. Between a look at the state and this call there must be no checkpoint, or what
        was told in between is missed."""
        await self._event.wait()

    async def relay(
        self,
        changed: Callable[[], Awaitable[object]],
        task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED,
    ) -> NoReturn:
        """Tell each time `changed` returns, for ever. Started once it would notice."""
        task_status.started()  # no checkpoint follows before it waits
        while True:
            await changed()
            self.tell()

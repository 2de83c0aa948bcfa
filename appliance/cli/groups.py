"""Announced groups inside a router: what they come to reaches the road, and what an operator asks of them the door.

run
|- groups        finds them (`groups/groups.py`)
'- publish       endpoints, and why the others are none, to the gateway and its watches
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

import structlog
import trio

from ..facts.endpoint import Endpoint
from ..facts.settings import Settings
from ..gateway.service import Gateway
from ..groups.groups import Groups
from ..groups.pace import Pace
from ..rules.groups.published import PREFIX
from .announcekey import secret

MOST_TOLD = 2000
"""Groups that are remembered as told of."""

log = structlog.get_logger("groups")


class AnnouncedGroups:
    """Made once; `run` in the router's nursery. `follow` has the watches look at the table again. `handed` are daemons
    that a router watched which was taken over from: it may be seconds until they announce themselves here; `listening`
    the sockets of this router. Raises StartFailed."""

    def __init__(
        self,
        settings: Settings,
        gateway: Gateway,
        follow: Callable[[], None],
        handed: Sequence[str] = (),
        listening: Callable[[], Sequence[tuple[str, int]]] = tuple,
    ) -> None:
        self.groups = Groups(settings.groups, secret(settings), handed=handed, listening=listening)
        self._gateway = gateway
        self._follow = follow
        self._scope = trio.CancelScope()
        self._told: Mapping[str, tuple[str, ...]] = {}
        self._said: tuple[Endpoint, ...] = ()
        self._pace = Pace()
        gateway.refused = self._refused

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Find groups until cancelled, or told to `end`."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._publish, name="publish groups")
                await nursery.start(self.groups.run, name="find groups")
                task_status.started()

    @property
    def heard_out(self) -> bool:
        """Whether what can be known by now is, and has reached the road."""
        return self.groups.heard_out and self._said == self.groups.endpoints()

    def configure(self, settings: Settings) -> None:
        """Take changed settings, as far as they need no restart."""
        if not self._scope.cancel_called:  # else another process looks for groups, by its own settings
            self.groups.configure(settings.groups)
            self._say()

    def end(self) -> None:
        """Look for nothing more: another process does. What was found goes on serving here."""
        self._scope.cancel()

    async def _publish(self) -> NoReturn:
        while True:
            await self._pace.turn()  # laying the table anew is work, and others can bring it about
            with self._pace.work():
                self._say()
            await self.groups.published.wait()

    def _refused(self, endpoint: str) -> None:
        """A request found that a group's engine is gone. The request that asks this waits for it to come back, so the
        table has to say so at once."""
        self.groups.refused(endpoint.removeprefix(PREFIX))
        self._say()

    def _say(self) -> None:
        groups = self.groups
        self._said = groups.endpoints()
        self._gateway.announce(
            groups.endpoints(), groups.listed(), groups.gated(), groups.missed(), groups.settings.model_wait_s
        )
        self._follow()
        withheld = dict(self._gateway.table.withheld)
        for endpoint, names in withheld.items():
            if self._told.get(endpoint) != names:
                log.warning(
                    "a group announces names of this router's own file, and gets none of their requests",
                    group=endpoint,
                    models=",".join(names),
                    next="groups = true in the [[models]] that it may join",
                )
        # Also of those that are gone for now, so that a group which comes and goes is told of once.
        self._told = {**(self._told if len(self._told) < MOST_TOLD else {}), **withheld}

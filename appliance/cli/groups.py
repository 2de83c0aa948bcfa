"""Announced groups inside a router: what they come to reaches the road, and what an operator asks of them the door.

run
|- groups        finds them (`groups/groups.py`)
'- publish       endpoints, and why the others are none, to the gateway and its watches
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import structlog
import trio

from ..facts.settings import Settings
from ..gateway.service import Gateway
from ..groups.groups import NETWORKS_S, Groups
from ..rules.groups.sources import Network, Sources
from ..wire.interfaces import networks
from .announcekey import secret
from .config import Loaded

log = structlog.get_logger("groups")


def wanted(settings: Settings) -> bool:
    """Whether anything could ever be found."""
    groups = settings.groups
    return groups.enabled and bool(groups.announce_port or groups.daemons)


class AnnouncedGroups:
    """Made once; `run` in the router's nursery. `follow` has the watches look at the table again. Raises
    StartFailed."""

    def __init__(self, settings: Settings, gateway: Gateway, follow: Callable[[], None]) -> None:
        self.groups = Groups(settings.groups, secret(settings))
        self._gateway = gateway
        self._follow = follow
        self._scope = trio.CancelScope()
        self._told: Mapping[str, tuple[str, ...]] = {}

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Find groups until cancelled, or told to `end`."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._publish, name="publish groups")
                await nursery.start(self.groups.run, name="find groups")
                task_status.started()

    def end(self) -> None:
        """Look for nothing more: another process does. What was found goes on serving here."""
        self._scope.cancel()

    async def _publish(self) -> NoReturn:
        while True:
            self._say()
            await self.groups.published.wait()

    def _say(self) -> None:
        groups = self.groups
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
        self._told = withheld


def client_gate(loaded: Loaded) -> Callable[[str], bool] | None:
    """Who may use the door at all, where an operator has said so; None: everybody.

    Only an allowlist that was set counts: the default one is about announcements, and would shut out every client of
    another network.
    """
    if loaded.origins.get("groups.allowed_sources", "default") == "default":
        return None
    sources = Sources(loaded.settings.groups.allowed_sources)
    own: tuple[Network, ...] = ()
    until = 0.0

    def passes(address: str) -> bool:
        nonlocal own, until
        now = time.monotonic()
        if now >= until:
            own, until = networks(), now + NETWORKS_S
        return sources.allow(address, own)

    return passes


def status(groups: AnnouncedGroups | None) -> Mapping[str, Any]:
    """What the door's status document says of them; nothing where nobody looks for any."""
    return groups.groups.status() if groups is not None else {}

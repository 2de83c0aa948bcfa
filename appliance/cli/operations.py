"""The operator's listeners of a router: metrics over TCP, administration over a Unix socket.

Both outlive the door: while a stop waits for running requests, they say what it waits for. They end with the process,
or when another one takes over: it answers at the same addresses from then on.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import attrs
import trio

from ..admin.handover import HandOver
from ..admin.metrics import MetricsSite, Scrapes
from ..admin.running import Running
from ..admin.site import AdminSite, Serve
from ..door.accept import Listeners
from ..door.buffers import Buffers
from ..door.connection import Limits
from ..rules.groups.gate import NO_ENDPOINT
from .config import show
from .listening import address_of
from .succession import give_way, offer

if TYPE_CHECKING:
    from .router import Router

_LIMITS = Limits(head_s=15.0, keepalive_s=75.0, write_stall_s=30.0, max_body_bytes=1 << 20)
_BUFFER_BYTES = 8 << 20
GIVE_UP_S = 5.0
LAST_WORDS_S = 1.0


class Operations:
    """Made with the router; `start` in the outermost nursery, once its sockets are open."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._given_up = trio.Event()
        self._sites: list[MetricsSite | AdminSite] = []
        self._addresses: tuple[str, ...] = ()

    @property
    def metrics(self) -> tuple[str, ...]:
        """The addresses of the metrics listener, as they came out."""
        return self._addresses

    async def start(self, ground: trio.Nursery) -> None:
        """Serve in `ground` until it is cancelled."""
        router = self._router
        self._addresses = tuple(str(address_of(sock)) for sock in router.sockets.metrics)
        router.door.replicas = self._replicas
        site = MetricsSite(
            Scrapes(router.gateway, lambda: router.plane), router.door.not_ready, lambda: router.door.draining
        )
        self._sites.append(site)
        listening = router.sockets.metrics
        await ground.start(self._listeners(site).serve, listening, self._given_up, _give_up_s, name="metrics")
        await ground.start(self._administrate, name="admin")

    def give_up(self) -> None:
        """Another process answers from now on: listen no more, and close what is still open here within seconds."""
        for site in self._sites:
            site.draining = True
        self._given_up.set()

    async def last_words(self) -> None:
        """Let answers that are on their way leave, for a moment: whoever cancelled the last request that a stop waited
        for would otherwise be told nothing."""
        with trio.move_on_after(LAST_WORDS_S):
            for site in self._sites:
                if isinstance(site, AdminSite):
                    await site.quiet()

    async def _administrate(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        router = self._router
        assert router.sockets.admin is not None, "opened before it is started"
        handover = HandOver(lambda: offer(router), lambda: give_way(router))
        async with trio.open_nursery() as apps:
            site = AdminSite(self._prepare, router.settings.runtime_dir, router.poller, apps, handover)
            self._sites.append(site)
            listening = [router.sockets.admin.sock]
            await self._listeners(site).serve(listening, self._given_up, _give_up_s, task_status=task_status)
            apps.cancel_scope.cancel()

    def _prepare(self) -> Serve:
        """Called in a thread, by the first request."""
        from ..admin.app import server

        return server(self._running())

    def _replicas(self) -> Mapping[str, Mapping[str, int]]:
        """Of each model that is placed: how many replicas are in which state, for the door's status document."""
        plane = self._router.plane
        if plane is None:
            return {}
        from ..admin.fleet import replica_states

        return replica_states(plane)

    def _groups(self) -> Mapping[str, str]:
        """Announced groups, each with why it gets no requests. One that has tools alone is to get none."""
        announced = self._router.groups
        rows = announced.groups.status()["groups"] if announced is not None else {}
        return {
            name: "" if row["mcp"] and row["why_not"] == NO_ENDPOINT else row["why_not"] or ""
            for name, row in rows.items()
        }

    def _listeners(self, site: MetricsSite | AdminSite) -> Listeners:
        return Listeners(site, self._router.poller, self._router.sleepers, _LIMITS, Buffers(_BUFFER_BYTES))

    def _running(self) -> Running:
        router = self._router
        return Running(
            gateway=router.gateway,
            started_at=router.started_at,
            listen=router.urls,
            metrics=self.metrics,
            admin_socket=router.settings.server.admin_socket,
            keys=False,
            loopback=router.loopback,
            connections=lambda: len(router.listeners.connections),
            draining=lambda: router.door.draining,
            configuration=lambda: configuration(router),
            reload=router.reload,
            plane=lambda: router.plane,
            joining=lambda: None if router.plane is None else router.plane.joining,
            groups=self._groups,
            tool_troubles=router.tools.troubles,
        )


def configuration(router: Router) -> dict[str, Any]:
    """`/config`: what holds in the running process, and which changes in the file wait for a restart."""
    loaded = router.loaded
    effective = attrs.evolve(loaded, settings=router.settings)
    return {
        "file": os.path.abspath(loaded.file) if loaded.file else None,
        "values": [row._asdict() for row in show(effective)],
        "needs_restart": list(router.waiting()),
    }


def _give_up_s() -> float:
    """What an open connection gets when another process has taken over: answers here take milliseconds."""
    return GIVE_UP_S

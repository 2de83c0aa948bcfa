"""The operator's listeners of a router: metrics over TCP, administration over a Unix socket.

Both outlive the door: while a stop waits for running requests, they say what it waits for. They end with the process.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import attrs
import trio

from ..admin.metrics import MetricsSite, Scrapes
from ..admin.running import Running
from ..admin.site import AdminSite, Serve
from ..admin.sockets import CannotListen, UnixSocket, listen
from ..door.accept import Listeners
from ..door.buffers import Buffers
from ..door.connection import Limits
from ..facts.settings import Address
from .config import changes, show

if TYPE_CHECKING:
    from .serve import Router

_LIMITS = Limits(head_s=15.0, keepalive_s=75.0, write_stall_s=30.0, max_body_bytes=1 << 20)
_BUFFER_BYTES = 8 << 20


class Operations:
    """Made with the router. `open` before Trio's nurseries, `start` in the outermost one, `close` at the very end."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._metrics: list[socket.socket] = []
        self._admin: UnixSocket | None = None

    def open(self, metrics: Iterable[socket.socket]) -> None:
        """Take the bound metrics sockets and make the admin socket. Raises CannotListen."""
        self._metrics = list(metrics)
        try:
            self._admin = listen(self._router.settings.server.admin_socket, 0o660)
        except CannotListen as error:
            raise CannotListen(f"server.admin_socket: {error}") from None

    @property
    def metrics(self) -> tuple[str, ...]:
        """The addresses of the metrics listener, as they came out."""
        return tuple(str(Address(*sock.getsockname()[:2])) for sock in self._metrics)

    async def start(self, ground: trio.Nursery) -> None:
        """Serve in `ground` until it is cancelled."""
        door, gateway = self._router.door, self._router.gateway
        site = MetricsSite(Scrapes(gateway), door.not_ready, lambda: door.draining)
        await ground.start(self._listeners(site).serve, self._metrics, trio.Event(), _at_once, name="metrics")
        await ground.start(self._administrate, name="admin")

    def close(self) -> None:
        for sock in self._metrics:
            sock.close()
        if self._admin is not None:
            self._admin.close()

    async def _administrate(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        assert self._admin is not None, "opened before it is started"
        router = self._router
        async with trio.open_nursery() as nursery:
            site = AdminSite(self._prepare, router.settings.runtime_dir, router.poller, nursery)
            serve = self._listeners(site).serve
            await nursery.start(serve, [self._admin.sock], trio.Event(), _at_once, name="admin socket")
            task_status.started()

    def _prepare(self) -> Serve:
        """Called in a thread, by the first request."""
        from ..admin.app import server

        return server(self._running())

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
        )


def configuration(router: Router) -> dict[str, Any]:
    """`/config`: what holds in the running process, and which changes in the file wait for a restart."""
    loaded = router.loaded
    effective = attrs.evolve(loaded, settings=router.settings)
    _, waiting = changes(router.settings, loaded.settings)
    return {
        "file": os.path.abspath(loaded.file) if loaded.file else None,
        "values": [row._asdict() for row in show(effective)],
        "needs_restart": list(waiting),
    }


def _at_once() -> float:
    """These listeners are never drained: they are cancelled with everything else."""
    return 0.0

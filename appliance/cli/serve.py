"""`appliance serve`: the router. Here the parts are put together; what they do is theirs.

ground
|- poller                every socket of the road
|- sweeper               every deadline of the road
|- signals               first SIGTERM or SIGINT: staged stop; second: now; SIGHUP: reload
|- watches               one task per endpoint
|- metrics, admin        beside the road
'- door                  accept loops end first, connections get `drain_s`; its end is the end of all
"""

from __future__ import annotations

import errno
import ipaddress
import os
import signal
import socket
import ssl
import time
from collections.abc import Callable
from typing import NoReturn

import click
import structlog
import trio

from .. import __version__
from ..admin.sockets import CannotListen
from ..door.accept import Listeners, bind
from ..door.buffers import Buffers
from ..door.connection import Limits
from ..door.site import Door
from ..facts.settings import Address, Settings
from ..gateway.service import Gateway
from ..gateway.watch import Watches
from ..nursery.sleeper import Sleeper, sweep
from ..wire.line import Poller
from ..wire.tls import server_context
from . import logs
from .config import ConfigError, Loaded, changes, keep_fixed, load
from .operations import Operations

log = structlog.get_logger("serve")


class StartFailed(Exception):
    """The router cannot start; the message is one line with the next step."""


@click.command()
@click.option(
    "--config", "config", metavar="FILE", help="Configuration file (default: APPLIANCE_CONFIG, then the usual places)."
)
@click.option(
    "--listen",
    "listen",
    metavar="ADDRESS",
    multiple=True,
    help="Address of the door, instead of server.listen; may be repeated.",
)
def serve(config: str | None, listen: tuple[str, ...]) -> int:
    """Run the router: one endpoint in front of all engines."""
    arguments: dict[str, object] = {"server.listen": list(listen)} if listen else {}

    def read() -> Loaded:
        return load(config, os.environ, arguments=arguments)

    try:
        loaded = read()
        logs.set_up(loaded.settings.logging.level, loaded.settings.logging.format)
        trio.run(Router(loaded, read).run)
    except ConfigError as error:
        for fault in error.faults:
            click.echo(f"appliance serve: {fault}", err=True)
        return 1
    except (StartFailed, CannotListen) as error:
        click.echo(f"appliance serve: {error}", err=True)
        return 1
    return 0


class Router:
    """All parts of one running router."""

    def __init__(self, loaded: Loaded, read: Callable[[], Loaded]) -> None:
        self.loaded = loaded
        self.settings = settings = loaded.settings
        self._read = read
        self.started_at = time.time()
        self.poller = Poller()
        self.sleepers: set[Sleeper] = set()
        self.gateway = Gateway(settings, self.poller)
        self.door = Door(self.gateway)
        self.door.ready = lambda: any(member.up for member in self.gateway.table.members.values())
        self.buffers = Buffers(settings.server.max_buffered_bytes)
        self.listeners = Listeners(self.door, self.poller, self.sleepers, _limits(settings), self.buffers)
        self.operations = Operations(self)
        self.stop = trio.Event()
        self.addresses: list[str] = []
        self._configure(settings, _context(settings))

    async def run(self) -> None:
        """Serve until a signal ends it. Raises StartFailed."""
        settings = self.settings
        sockets = [_bind(address, "server.listen") for address in settings.server.listen]
        self.addresses = [_shown(sock) for sock in sockets]
        metrics = [_bind(address, "server.metrics_listen") for address in settings.server.metrics_listen]
        try:
            self.operations.open(metrics)
            async with trio.open_nursery() as ground:
                ground.start_soon(self.poller.run, name="poller")
                ground.start_soon(sweep, self.sleepers, name="sweeper")
                ground.start_soon(self.gateway.gate.run, name="admission time limits")
                ground.start_soon(self._drop_stale, name="idle connections to engines")
                self.watches = Watches(self.gateway, self.sleepers, ground)
                self.watches.follow()
                await ground.start(self._handle_signals, ground.cancel_scope, name="signals")
                await self.operations.start(ground)
                async with trio.open_nursery() as front:
                    await front.start(self.listeners.serve, sockets, self.stop, self._drain_s, name="door")
                    self._announce()
                ground.cancel_scope.cancel()
        finally:
            for sock in sockets:
                sock.close()
            self.operations.close()
            self.gateway.close()
            self.poller.close()
        log.info("stopped")

    # -- tasks ---------------------------------------------------------------------------------------------------------

    async def _handle_signals(
        self, ground: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> NoReturn:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP:
                    self.reload()
                elif self.stop.is_set():
                    log.warning("stopping now, running requests are cut", requests=len(self.gateway.books.live))
                    ground.cancel()
                else:
                    self.begin_stop()
        raise AssertionError("signals do not end")

    async def _drop_stale(self) -> NoReturn:
        while True:
            await trio.sleep(1.0)
            self.gateway.drop_stale(time.monotonic())

    # -- what others may ask for ---------------------------------------------------------------------------------------

    @property
    def urls(self) -> tuple[str, ...]:
        """The door's addresses, as they came out."""
        scheme = "https" if self.listeners.context else "http"
        return tuple(f"{scheme}://{address}" for address in self.addresses)

    @property
    def loopback(self) -> bool:
        """Whether nobody outside this machine reaches the door."""
        return all(_is_loopback(address.host) for address in self.settings.server.listen)

    def begin_stop(self) -> None:
        """No new connections; running requests get `drain_s`."""
        self.door.draining = True
        self.stop.set()
        running = len(self.gateway.books.live)
        log.info("stopping", requests=running, drain_s=self.settings.server.drain_s)

    def reload(self) -> str:
        """Take the configuration as it is now; "" when it was taken, otherwise why not. A bad file changes nothing."""
        try:
            loaded = self._read()
            live, fixed = changes(self.settings, loaded.settings)
            settings = keep_fixed(self.settings, loaded.settings)
            context = _context(settings)
        except (ConfigError, StartFailed) as error:
            log.error("configuration refused, the old one goes on", reason="; ".join(str(error).splitlines()))
            return str(error)
        self.loaded = loaded
        self.settings = settings
        self.gateway.configure(settings)
        self.watches.follow()
        self._configure(settings, context)
        log.info("configuration reloaded", changed=",".join(live) or "nothing")
        if fixed:
            log.warning("some changes need a restart", keys=",".join(fixed))
        return ""

    # -- small steps ---------------------------------------------------------------------------------------------------

    def _configure(self, settings: Settings, context: ssl.SSLContext | None) -> None:
        server = settings.server
        self.door.configure(server.cors_origins, server.max_body_bytes, server.access_log)
        self.listeners.limits = _limits(settings)
        self.listeners.context = context
        self.buffers.limit_bytes = server.max_buffered_bytes
        logs.set_up(settings.logging.level, settings.logging.format)

    def _drain_s(self) -> float:
        return self.settings.server.drain_s

    def _announce(self) -> None:
        """The lines of a start."""
        log.info(
            "serving",
            version=__version__,
            listen=",".join(self.urls),
            metrics=",".join(self.operations.metrics),
            admin=self.settings.server.admin_socket,
            pid=os.getpid(),
        )
        if not self.loopback:
            log.warning(
                "anybody who can reach this address can use every model: the door has no keys",
                listen=",".join(self.addresses),
            )


def _limits(settings: Settings) -> Limits:
    deadlines = settings.deadlines
    return Limits(deadlines.head_s, deadlines.keepalive_s, deadlines.write_stall_s, settings.server.max_body_bytes)


def _context(settings: Settings) -> ssl.SSLContext | None:
    server = settings.server
    if not server.tls_cert:
        return None
    try:
        return server_context(server.tls_cert, server.tls_key)
    except (OSError, ssl.SSLError) as error:
        raise StartFailed(f"server.tls_cert: {server.tls_cert} and server.tls_key cannot be used: {error}") from None


def _bind(address: Address, setting: str) -> socket.socket:
    try:
        return bind(address.host, address.port)
    except OSError as error:
        if error.errno == errno.EADDRINUSE:
            raise StartFailed(
                f"{setting}: {address} is in use by another process; stop that one or choose another address"
            ) from None
        raise StartFailed(f"{setting}: cannot listen on {address}: {error.strerror}") from None


def _shown(sock: socket.socket) -> str:
    host, port = sock.getsockname()[:2]
    return str(Address(host, port))


def _is_loopback(host: str) -> bool:
    return ipaddress.ip_address(host).is_loopback

"""The router as a tree of tasks. Here the parts are put together; what they do is theirs.

signals                  first SIGTERM or SIGINT: staged stop; second: now; SIGHUP: reload
'- ground
   |- poller             every socket of the road
   |- sweeper            every deadline of the road
   |- watches            one task per endpoint
   |- control            only when a model has a profile (`plane.py`)
   |- groups             unless groups.enabled is false (`groups.py`)
   |- mcp                tools of groups, once somebody asks for them (`toolservers.py`)
   |- metrics, admin     beside the road
   |- spans              only with a collector; at a stop it delivers what is left
   '- door               accept loops end first, connections get `drain_s`; its end is the end of all
"""

from __future__ import annotations

import gc
import math
import os
import ssl
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, NoReturn

import structlog
import trio

from .. import __version__
from ..door.accept import Listeners
from ..door.buffers import Buffers
from ..door.connection import Limits
from ..door.site import Door
from ..facts.mcp import Source
from ..facts.settings import Address, Settings
from ..gateway.service import Gateway
from ..gateway.watch import Watches
from ..nursery.sleeper import Sleeper, sweep
from ..rules.scheduling.member import Member
from ..wire.line import Poller
from ..wire.tls import server_context
from . import logs
from .clientgate import client_gate
from .config import ConfigError, Loaded, advice, changes, keep_fixed, profiled, without_profiles
from .listening import address_of, is_loopback, open_sockets
from .operations import Operations
from .signals import Heeding, heeded
from .startfailed import StartFailed
from .supervisor import Passed, Supervisor
from .takeover import Taken
from .toolservers import ToolServers

if TYPE_CHECKING:
    from ..control.plane import Plane
    from ..gateway.otlp import Exporter
    from .groups import AnnouncedGroups
    from .plane import Control

HEAR_S = 6.0
"""How long a router whose clients wait already lets endpoints say which models they serve before it accepts: a little
more than such a question may take. Otherwise the first of them would be told that their model is not ready."""

log = structlog.get_logger("serve")

GC_THRESHOLDS = (50_000, 20, 100)
"""Allocations before a collection of the youngest, and collections of one generation before one of the next."""


class Router:
    """All parts of one running router.

    `supervisor` hears how it is, `passed` are sockets that came with the start, `taken` those of a router that still
    runs: then this one takes over from it. `with_agent`: an agent runs in this process. Raises StartFailed.
    """

    def __init__(
        self,
        loaded: Loaded,
        read: Callable[[], Loaded],
        supervisor: Supervisor | None = None,
        passed: Passed | None = None,
        taken: Taken | None = None,
        *,
        with_agent: bool = False,
    ) -> None:
        self.loaded = loaded
        self.settings = settings = loaded.settings
        self._read = read
        self._supervisor = supervisor or Supervisor()
        self._passed = passed or Passed()
        self._taken = taken
        self.started_at = time.time()
        self.poller = Poller()
        self.sleepers: set[Sleeper] = set()
        self.gateway = Gateway(settings, self.poller)
        self.buffers = Buffers(settings.server.max_buffered_bytes)
        self.door = Door(self.gateway, self.buffers)
        self.door.ready = self._serves_something
        self.listeners = Listeners(self.door, self.poller, self.sleepers, _limits(settings), self.buffers)
        self.operations = Operations(self)
        self.control = self._control(with_agent)
        self.groups = self._announced()
        self.tools = ToolServers(settings.groups, self._tool_servers, self.door.status)
        self.door.tools = self.tools.answer
        self.door.groups = lambda: self.tools.shown(self.groups.groups.status() if self.groups is not None else {})
        self.door.permits = client_gate(loaded)
        self.stop = trio.Event()
        self._stopping = False
        self._all = trio.CancelScope()
        self._listening: tuple[Address, ...] = ()
        self.exporter = self._exporter()
        self._configure(settings, _context(settings))
        # What the modules brought stays for ever, and requests leave no cycles behind: with Python's own thresholds the
        # collector took a tenth of the road's time to find nothing.
        gc.freeze()
        gc.set_threshold(*GC_THRESHOLDS)

    async def run(self) -> None:
        """Serve until a signal ends it, or until another process has taken over. Raises StartFailed."""
        taken = self._taken
        self.sockets = sockets = taken.sockets if taken else open_sockets(self.settings, self._passed)
        self.listeners.shared = sockets.shared
        self._listening = tuple(address_of(sock) for sock in sockets.door)
        failed: StartFailed | None = None
        try:
            async with heeded(self._heed_stop, self.reload) as signals:
                with self._all:
                    failed = await self._run(signals)
        finally:
            sockets.close()
            if taken:
                taken.close()
            self.gateway.close()
            self.poller.close()
        if failed:
            raise failed
        log.info("stopped")

    async def _run(self, signals: Heeding) -> StartFailed | None:
        failed: StartFailed | None = None
        async with trio.open_nursery() as ground:
            ground.start_soon(self.poller.run, name="poller")
            ground.start_soon(sweep, self.sleepers, name="sweeper")
            ground.start_soon(self.gateway.gate.run, name="admission time limits")
            ground.start_soon(self._drop_stale, name="idle connections to engines")
            ground.start_soon(self.listeners.watch_silence, name="silent clients")
            self.watches = Watches(self.gateway, self.sleepers, ground)
            self._follow()
            signals.begun()
            await ground.start(self.tools.run, name="mcp")
            if self.groups is not None:
                await ground.start(self.groups.run, name="groups")
            try:
                await self._until_due()
                if self.control is not None:
                    await ground.start(self.control.run, name="control")
            except StartFailed as error:
                failed = error  # out of a nursery it would come as a group
            else:
                await self._serve(ground)
            ground.cancel_scope.cancel()
        return failed

    async def _until_due(self) -> None:
        """Where clients wait already: be as good as the router before this one, then make it give way. Raises
        StartFailed; that one goes on then."""
        if self._passed or self._taken:
            with trio.move_on_after(HEAR_S):
                while self._unheard():  # noqa: ASYNC110 - many tasks bring it about, and this waits once in a life
                    await trio.sleep(0.02)
        if self._taken and not self.stop.is_set():
            await trio.to_thread.run_sync(self._taken.done)

    def _unheard(self) -> bool:
        """Whether an endpoint that names its models itself has neither done so nor failed; or a daemon was not read."""
        if self.groups is not None and not self.groups.heard_out:
            return True
        return any(not _names_known(member) and member.up for member in self.gateway.table.members.values())

    def _serves_something(self) -> bool:
        """Whether there is an endpoint that requests can be sent to, and a name to ask for it; or a model that is
        started for whoever asks."""
        table = self.gateway.table
        return bool(table.waking) or any(_names_known(member) and member.up for member in table.members.values())

    async def _serve(self, ground: trio.Nursery) -> None:
        await self.operations.start(ground)
        if self.exporter is not None:
            ground.start_soon(self.exporter.run, name="spans")
        if self._supervisor.watchdog_s:
            ground.start_soon(self._supervisor.watch, name="watchdog")
        async with trio.open_nursery() as front:
            await front.start(self.listeners.serve, self.sockets.door, self.stop, self._drain_s, name="door")
            self._announce()
        if self.exporter is not None:
            await self.exporter.finish()
        await self.operations.last_words()

    # -- tasks ---------------------------------------------------------------------------------------------------------

    async def _drop_stale(self) -> NoReturn:
        while True:
            await trio.sleep(1.0)
            self.gateway.drop_stale(time.monotonic())

    # -- what others may ask for ---------------------------------------------------------------------------------------

    @property
    def addresses(self) -> list[str]:
        """Where the door listens, as it came out."""
        return [str(address) for address in self._listening]

    @property
    def urls(self) -> tuple[str, ...]:
        """The door's addresses, as they came out."""
        scheme = "https" if self.listeners.context else "http"
        return tuple(f"{scheme}://{address}" for address in self.addresses)

    @property
    def loopback(self) -> bool:
        """Whether nobody outside this machine reaches the door."""
        return all(map(is_loopback, self._listening))

    @property
    def requests(self) -> int:
        """Those that a stop waits for: to models, and to tools."""
        return len(self.gateway.books.live) + self.tools.running

    def _heed_stop(self, times: int) -> None:
        if self._all.cancel_called:
            return
        if self._stopping:
            log.warning("stopping now, running requests are cut", requests=self.requests)
            self._all.cancel()
        else:
            self.begin_stop()

    def begin_stop(self) -> None:
        """No new connections; running requests get `drain_s`, also those that had no bound since a takeover."""
        self._stopping = True
        self.door.draining = True
        self._supervisor.stopping()
        self.stop.set()
        self.listeners.finish_within(self._drain_s())
        log.info("stopping", requests=self.requests, drain_s=self._drain_s())

    @property
    def successor_refused(self) -> str:
        """Why no other process may take over from this one, "" where one may."""
        if self._supervisor or self._passed:
            return "a supervisor (systemd) started it, which must restart it too (systemctl restart)"
        if self.stop.is_set():
            return "it is stopping; start the new one without --takeover when it has"
        return ""

    def reload(self) -> str:
        """Take the configuration as it is now; "" when it was taken, otherwise why not. A bad file changes nothing."""
        try:
            loaded = self._read()
            live, fixed = changes(self.settings, loaded.settings)
            settings = keep_fixed(self.settings, loaded.settings)
            context = _context(settings)
            if self.control is None:
                settings = without_profiles(settings)
        except (ConfigError, StartFailed) as error:
            log.error("configuration refused, the old one goes on", reason="; ".join(str(error).splitlines()))
            return str(error)
        self._supervisor.reloading()
        self.loaded = loaded
        self.settings = settings
        self.gateway.configure(settings)
        self._follow()
        self._configure(settings, context)
        self.door.permits = client_gate(loaded)
        self.tools.configure(settings.groups)
        if self.groups is not None:
            self.groups.configure(settings)
        if self.control is not None:
            self.control.configure(settings)
        log.info("configuration reloaded", changed=",".join(live) or "nothing")
        if fixed := (*fixed, *self._without_plane()):
            log.warning("some changes need a restart", keys=",".join(fixed))
        self._supervisor.ready()
        return ""

    @property
    def plane(self) -> Plane | None:
        """The control plane while it runs; None where no model has a profile."""
        return self.control.plane if self.control is not None else None

    def waiting(self) -> tuple[str, ...]:
        """Keys whose value in the file waits for a restart."""
        _, fixed = changes(self.settings, self.loaded.settings)
        return (*fixed, *self._without_plane())

    # -- small steps ---------------------------------------------------------------------------------------------------

    def _control(self, with_agent: bool) -> Control | None:
        """Who places models; None, and nothing of it imported, where no model has a profile."""
        if not (with_agent or profiled(self.settings)):
            return None
        from .plane import Control

        handed = self._taken.replicas if self._taken else None
        return Control(self.settings, self.gateway, self._follow, with_agent=with_agent, handed=handed)

    def _announced(self) -> AnnouncedGroups | None:
        """Who finds groups; None, and nothing of it imported, where none could ever be found. Raises StartFailed."""
        groups = self.settings.groups
        if not groups.enabled or not (groups.announce_port or groups.daemons):
            return None
        from .groups import AnnouncedGroups

        handed = self._taken.daemons if self._taken else ()
        return AnnouncedGroups(
            self.settings,
            self.gateway,
            self._follow,
            handed,
            lambda: tuple(sock.getsockname()[:2] for sock in (*self.sockets.door, *self.sockets.metrics)),
        )

    def _follow(self) -> None:
        self.watches.follow()

    def _tool_servers(self) -> tuple[Source, ...]:
        return self.groups.groups.tool_servers() if self.groups is not None else ()

    def _without_plane(self) -> tuple[str, ...]:
        """Profiles in the file that a router which began without one does not place."""
        names = profiled(self.loaded.settings) if self.control is None else ()
        return tuple(f"models.{name}.profiles" for name in names)

    def _configure(self, settings: Settings, context: ssl.SSLContext | None) -> None:
        server = settings.server
        self.door.configure(server.cors_origins, server.max_body_bytes, server.access_log, server.trusted_proxies)
        self.listeners.limits = _limits(settings)
        self.listeners.context = context
        self.buffers.limit_bytes = server.max_buffered_bytes
        logs.set_up(settings.logging.level, settings.logging.format)

    def _exporter(self) -> Exporter | None:
        """Who delivers spans; None, and nothing of it imported, where no collector is set."""
        if not self.settings.tracing.endpoint:
            return None
        from ..gateway.otlp import Exporter

        headers = os.environ.get("OTEL_EXPORTER_OTLP_HEADERS", "")
        try:
            exporter = Exporter(self.settings.tracing, headers, self.gateway.meters, self.poller, self.sleepers)
        except ValueError as error:
            raise StartFailed(f"OTEL_EXPORTER_OTLP_HEADERS: {error}") from None
        self.gateway.tracer = exporter.tracer
        return exporter

    def _drain_s(self) -> float:
        return self.settings.server.drain_s if self._stopping else math.inf

    def _announce(self) -> None:
        """The lines of a start."""
        log.info(
            "serving",
            version=__version__,
            listen=",".join(self.urls),
            metrics=",".join(self.operations.metrics),
            admin=self.settings.server.admin_socket,
            **({"agents": ",".join(self.control.addresses) or "this process"} if self.control is not None else {}),
            pid=os.getpid(),
        )
        if self._taken:
            log.info("took over", pid=self._taken.pid, requests_finishing_there=self._taken.running)
        self._supervisor.ready()
        for text in advice(self.loaded):
            log.warning("configuration", advice=text)
        if not self.loopback:
            log.warning(
                "anybody who can reach this address can use every model: the door has no keys",
                listen=",".join(self.addresses),
            )


def _names_known(member: Member) -> bool:
    return member.endpoint.models is not None or member.heard is not None


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

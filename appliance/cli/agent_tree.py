"""One agent as a tree of tasks, for whoever holds the process: `appliance agent`, or a `serve --with-agent`.

run
|- shards         one tree per shard; cancelling it touches no engine
|- machine        the hardware, looked at again and again
|- news           what changed is passed on to whoever waits for it
|- announcer      routers are told that it is here
|- local mode     which of its own models run; or
|- link           the control plane is called, which says what runs
'- http           /status, /events, /metrics, /healthz
"""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import socket
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from random import Random
from typing import TYPE_CHECKING, NoReturn

import structlog
import trio

from .. import __version__
from ..agent.announce import Announcer
from ..agent.discovery.gpus import GpuProbe
from ..agent.discovery.inventory import Place
from ..agent.discovery.writing import BadInventory
from ..agent.events import Board
from ..agent.home import NotOurs
from ..agent.local import Local
from ..agent.machine import Machine
from ..agent.ownership import StateInUse
from ..agent.shards import Shards
from ..agent.status import Identity, Seen
from ..agent.web import Render, Site
from ..facts.settings import Address, Settings
from ..nursery.news import News
from ..rules.groups.registered import Unregistered, registered
from .announcekey import secret
from .firstprocess import ends_everything
from .listening import address_of, bind_all, is_loopback
from .program import bundle, own_argv
from .startfailed import StartFailed

if TYPE_CHECKING:
    from ..agent.credentials import Credentials
    from ..agent.link import Caller
    from ..wire.link import Link

AGAIN_S = 0.2
"""Between two tries to own a state directory that is about to be given up."""

log = structlog.get_logger("agent")

Dial = Callable[[], "AbstractAsyncContextManager[Link]"]


def place(settings: Settings) -> Place:
    """Where and how to look, as configured."""
    own = settings.agent
    return Place(
        node=own.node or socket.gethostname(),
        address=own.address,
        labels=own.labels,
        fabric=own.fabric,
        models=f"{settings.state_dir}/models",
        inventory_file=own.inventory_file,
    )


class AgentTree:
    """All parts of one agent but the process itself: no signals, no supervisor.

        tree = AgentTree(settings, within(plane.attend))
        await ground.start(tree.run, name="agent")

    `run` owns STATE/shards (its lock is STATE/shards/lock, and does not meet a router's STATE/serve.lock), adopts what
    runs there, and has started when `agent.listen` answers; before that it raises StartFailed. Cancelling it ends the
    agent within a second, leaves every engine running, and gives the directory up, also while the process lives on. So
    a router that hands over to another one cancels it first; that one's `run`, with `wait_s`, waits for it.

    `dial` opens a link to a control plane within the process, see `within`. Without it `agent.control_url` says where
    to call, and local mode holds where that is empty. `wait_s` is how long somebody else may still own the directory.
    An engine that MENTAT_GROUP and its companions name is published beside what runs here. Raises StartFailed.
    """

    def __init__(self, settings: Settings, dial: Dial | None = None, *, wait_s: float = 0.0) -> None:
        self.settings = settings
        self._wait_s = wait_s
        self._started_at = time.time()
        self._boot_id = secrets.token_hex(8)
        own = settings.agent
        self.node = own.node or socket.gethostname()
        self.machine = Machine(place(settings), GpuProbe(own.gpus.backend), lambda: self.shards.ours())
        self.shards = Shards(
            settings.state_dir,
            settings.runtime_dir,
            self.node,
            own.executables,
            own_argv(),
            own.log_bytes,
            own.memory_wait_s,
            lambda: self.machine.inventory,
            (own.port_range[0], own.port_range[1]),
            dict(os.environ),
            read_gpus=None if own.inventory_file else self.machine.read_gpus,
            bundle=bundle(),
            llamacpp_threads=own.llamacpp.threads,
        )
        self.changed = News()
        self.caller = self._caller(dial)
        self.local = None if self.caller else Local(self.shards, self.machine, Random(), time.time)
        if self.local:
            self.local.configure(settings.models, own.address)
        self._embedded = dial is not None
        self._adopted = False
        try:
            self._registered = registered(os.environ)
        except Unregistered as wrong:
            raise StartFailed(str(wrong)) from None

    def configure(self, settings: Settings) -> None:
        """Take other settings over, as far as an agent can while it runs."""
        before, self.settings = self.settings, settings
        if self.local:
            self.local.configure(settings.models, settings.agent.address)
        elif before.models != settings.models:
            self._warn_of_models()

    async def adopt(self) -> None:
        """Own the state directory and what runs there; `run` does it where that was not done. Raises StartFailed."""
        folder = self.settings.state_dir
        until = trio.current_time() + self._wait_s
        while True:
            try:
                os.makedirs(self.settings.runtime_dir, mode=0o750, exist_ok=True)
                found = await self.shards.adopt()
                break
            except StateInUse as used:
                if trio.current_time() >= until:
                    raise StartFailed(f"{used}: stop that one, or set STATE_DIRECTORY to another folder") from None
                await trio.sleep(AGAIN_S)
            except NotOurs as why:
                raise StartFailed(str(why)) from None
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE):
                    raise StartFailed(
                        "engines that may run here cannot be looked at, since there are too many open files:"
                        " allow more (LimitNOFILE of the unit, ulimit -n); the engines go on"
                    ) from None
                step = "set STATE_DIRECTORY and RUNTIME_DIRECTORY to folders that this user can write"
                if error.errno in (errno.ENOSPC, errno.EDQUOT):
                    step = "make room there, then start the agent again; engines that run go on"
                raise StartFailed(f"{error.filename or folder} cannot be used: {error.strerror}; {step}") from None
        self._adopted = True
        adopted = [report.shard.id for report in found if not report.ended]
        if adopted:
            log.info("adopted", shards=",".join(adopted))
        if lost := self.shards.sorted.lost:
            log.warning("records of engines were removed while they ran, they are ended", shards=",".join(lost))
        if killed := self.shards.sorted.killed:
            log.warning("killed what an earlier agent left and nobody can describe", pids=",".join(map(str, killed)))
        for trouble in self.shards.sorted.troubles:
            log.error("trouble with what an earlier agent left", reason=trouble)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Be an agent until cancelled. Raises StartFailed before it has started, and not after."""
        failed: StartFailed | None = None
        if not self._adopted:
            await self.adopt()
        try:
            async with trio.open_nursery() as ground:
                try:
                    await self._begin(ground)
                except StartFailed as error:
                    failed = error  # out of a nursery it would come as a group
                    ground.cancel_scope.cancel()
                else:
                    task_status.started()
        finally:
            if failed is None:
                self._tell_end()
            self.shards.close()
        if failed:
            raise failed
        raise AssertionError("it ends only by cancellation")

    async def _begin(self, ground: trio.Nursery) -> None:
        try:
            await self.machine.look()
        except BadInventory as wrong:
            raise StartFailed(f"agent.inventory_file: {wrong}") from None
        # Only now: a start that the agent before this one did not finish is planned anew, on the hardware that is here.
        await ground.start(lambda task_status: self.shards.run(task_status=task_status), name="shards")
        sockets: list[socket.socket] = []
        try:
            bind_all(sockets, self.settings.agent.listen, "agent.listen")
        except StartFailed:
            for sock in sockets:
                sock.close()
            raise
        inventory = self.machine.inventory
        identity = Identity(inventory.node, inventory.address, self._boot_id, self._started_at)
        board = Board(lambda: self._look(identity), time.time)
        listen = [str(address_of(sock)) for sock in sockets]
        await ground.start(Site(board, lambda: self._renderer(identity)).serve, sockets, name="http")
        leads = self.caller or self.local
        assert leads is not None
        for changed in (self.shards.changed, self.machine.changed.wait):
            await ground.start(leads.wake.relay, changed, name="news for the link" if self.caller else "news for local")
            await ground.start(self.changed.relay, changed, name="news for /events")
        await ground.start(self.changed.relay, leads.changed.wait, name="news for /events")
        ground.start_soon(self._follow, board, name="events")
        ground.start_soon(self.machine.watch, name="machine")
        self._announce(ground, identity, [address_of(sock) for sock in sockets])
        ground.start_soon(leads.keep, name="link" if self.caller else "local mode")
        log.info("agent runs", **self._told(listen), pid=os.getpid())
        self._warn_of_models()
        if self.local and any(model.profiles for model in self.settings.models):
            self._warn_of_ports(inventory.address)

    async def _follow(self, board: Board) -> NoReturn:
        """Turn what changed into events for those who listen."""
        while True:
            board.read()
            await self.changed.wait()

    def _announce(self, ground: trio.Nursery, identity: Identity, listen: list[Address]) -> None:
        settings = self.settings.groups
        if settings.enabled:
            announcer = Announcer(settings, secret(self.settings), identity, listen, changed=self._look_again)
            if announcer.useful:
                ground.start_soon(announcer.run, name="announcer")

    async def _look_again(self) -> None:
        with contextlib.suppress(Exception):  # the machine's own watch looks soon too, and tells what is wrong
            await self.machine.look()

    # -- small steps ---------------------------------------------------------------------------------------------------

    def _caller(self, dial: Dial | None) -> Caller | None:
        """Who follows a control plane; None, and nothing of it imported, in local mode."""
        own = self.settings.agent
        if dial is None and not own.control_url:
            return None
        from ..agent.conversation import Standing
        from ..agent.credentials import Credentials
        from ..agent.link import Caller
        from ..store.papers import Papers

        credentials: Credentials | None = None
        url = "this process"
        if dial is None:
            url, credentials = own.control_url, Credentials(Papers.of(self.settings.state_dir))
            dial = secured(url, credentials)
        return Caller(
            url,
            dial,
            Standing(self.node, __version__, self._boot_id, (own.port_range[0], own.port_range[1])),
            self.shards,
            self.machine,
            Random(),
            time.time,
            credentials=credentials,
        )

    def _told(self, listen: list[str]) -> Mapping[str, object]:
        inventory = self.machine.inventory
        own = {"control_url": self.settings.agent.control_url} if self.caller and not self._embedded else {}
        models = [model.name for model in self.settings.models if model.profiles] if self.local else []
        return {
            "version": __version__,
            "node": inventory.node,
            "address": inventory.address,
            "listen": ",".join(f"http://{each}" for each in listen),
            "gpus": len(inventory.gpus),
            **({"models": ",".join(models) or "none"} if self.local else own),
        }

    def _tell_end(self) -> None:
        running = [shard_id for shard_id, report in self.shards.reports().items() if report.pid]
        if ends_everything():
            log.info("agent stopped, and its container with it", engines_ended=",".join(running) or "none")
            return
        what = "agent stopped; engines go on and are taken over by the next one" if running else "agent stopped"
        log.info(what, engines_left_running=",".join(running) or "none")

    def _warn_of_models(self) -> None:
        ignored = [model.name for model in self.settings.models if model.profiles]
        if ignored and self.caller and not self._embedded:
            log.warning(
                "models of this file are ignored: an agent with agent.control_url follows the control plane",
                models=",".join(ignored),
            )

    def _warn_of_ports(self, address: str) -> None:
        if not is_loopback(Address(address, 0)):
            log.warning(
                "engines of local mode ask for no key: let only the routers reach these ports",
                address=address,
                ports="-".join(map(str, self.settings.agent.port_range)),
            )

    def _look(self, identity: Identity) -> Seen:
        inventory, reports = self.machine.inventory, self.shards.reports()
        if self.local:
            waiting, failures = self.local.waiting, self.local.alone.failures
            return Seen(identity, inventory, reports, waiting, failures, registered=self._registered)
        assert self.caller is not None
        failures = self.caller.changes.failures
        return Seen(
            identity, inventory, reports, failures=failures, control=self.caller.line, registered=self._registered
        )

    def _renderer(self, identity: Identity) -> Render:
        from ..agent.measures import renderer  # an agent that nobody scrapes does not carry it

        return renderer(lambda: self._look(identity))


def within(attend: Callable[[Link], Awaitable[object]]) -> Dial:
    """Calls that go to a control plane in this process, which attends to the other end of each until it ends. What goes
    wrong there is logged and ends that link; the agent calls again."""

    @asynccontextmanager
    async def dial() -> AsyncIterator[Link]:
        from ..wire.link import memory_links

        ours, theirs = memory_links()

        async def hold() -> None:
            try:
                await attend(theirs)
            except Exception as fault:
                log.error("fault of the control plane's end of the link", exc_info=fault)
            finally:
                await theirs.aclose()

        async with trio.open_nursery() as nursery:
            nursery.start_soon(hold, name="link: the control plane's end")
            try:
                yield ours
            finally:
                await ours.aclose()
                nursery.cancel_scope.cancel()

    return dial


def secured(url: str, credentials: Credentials) -> Dial:
    """Calls over TLS, with the papers as they are at that moment."""

    @asynccontextmanager
    async def dial() -> AsyncIterator[Link]:
        from ..wire.calls import call
        from ..wire.tls import CONTROL_NAME

        context = await trio.to_thread.run_sync(credentials.context)
        async with call(url, context, name=CONTROL_NAME) as link:
            yield link

    return dial

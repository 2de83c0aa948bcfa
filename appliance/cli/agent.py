"""`appliance agent`: what runs on every node with hardware. Here the parts are put together; what they do is theirs.

ground
|- signals        SIGTERM or SIGINT: the agent ends, engines stay; SIGHUP: reload
|- machine        the hardware, looked at again and again
|- shards         one tree per shard; cancelling it touches no engine
|- news           what changed is passed on to whoever waits for it
|- local mode     which of its own models run
'- http           /status, /events, /metrics, /healthz
"""

from __future__ import annotations

import os
import secrets
import signal
import socket
import time
from collections.abc import Callable
from random import Random
from typing import NoReturn

import click
import structlog
import trio

from .. import __version__
from ..agent.discovery.gpus import GpuProbe
from ..agent.discovery.inventory import Place, gather
from ..agent.discovery.writing import BadInventory, to_json, to_lines
from ..agent.events import Board
from ..agent.local import Local
from ..agent.machine import Machine
from ..agent.records import StateInUse
from ..agent.shards import Shards
from ..agent.status import Identity, Seen
from ..agent.web import Render, Site
from ..facts.settings import Address, Settings
from ..nursery.news import News
from . import logs
from .config import ConfigError, Loaded, changes, keep_fixed, load
from .listening import address_of, bind_all, is_loopback, raise_open_files
from .program import bundle, own_argv
from .startfailed import StartFailed
from .supervisor import Supervisor

SECTIONS = ("agent", "models", "logging")
"""What an agent takes from the file, so what a reload tells of."""

log = structlog.get_logger("agent")

_config = click.option(
    "--config", "config", metavar="FILE", help="Configuration file (default: APPLIANCE_CONFIG, then the usual places)."
)


@click.group(invoke_without_command=True)
@_config
@click.pass_context
def agent(ctx: click.Context, config: str | None) -> int:
    """Find the hardware of this node and keep the models of the configuration running on it.

    Ending the agent leaves the engines running; the next one takes them over.
    """
    if ctx.invoked_subcommand is not None:
        ctx.obj = config
        return 0

    def read() -> Loaded:
        return load(config, os.environ)

    try:
        supervisor = Supervisor.of(os.environ)
        loaded = read()
        logs.set_up(loaded.settings.logging.level, loaded.settings.logging.format)
        raise_open_files()
        trio.run(Agent(loaded, read, supervisor).run)
    except ConfigError as error:
        for fault in error.faults:
            click.echo(f"appliance agent: {fault}", err=True)
        return 1
    except StartFailed as error:
        click.echo(f"appliance agent: {error}", err=True)
        return 1
    return 0


@agent.command()
@_config
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in the form that agent.inventory_file takes.")
@click.pass_context
def inventory(ctx: click.Context, config: str | None, as_json: bool) -> int:
    """Print what the scheduler would see of this node. Starts nothing."""
    try:
        settings = load(config or ctx.obj, os.environ).settings
    except ConfigError as error:
        for fault in error.faults:
            click.echo(f"appliance agent: {fault}", err=True)
        return 1
    try:
        found = trio.run(gather, place(settings), GpuProbe(settings.agent.gpus.backend))
    except BadInventory as wrong:
        raise click.ClickException(f"agent.inventory_file: {wrong}") from None
    click.echo(to_json(found) if as_json else "\n".join(to_lines(found)), nl=not as_json)
    return 0


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


class Agent:
    """All parts of one running agent. `read` reads the configuration again, `supervisor` hears how the agent is."""

    def __init__(self, loaded: Loaded, read: Callable[[], Loaded], supervisor: Supervisor | None = None) -> None:
        self.settings = settings = loaded.settings
        self._read = read
        self._supervisor = supervisor or Supervisor()
        self._started_at = time.time()
        self._boot_id = secrets.token_hex(8)
        own = settings.agent
        probe = GpuProbe(own.gpus.backend)
        self.machine = Machine(place(settings), probe, lambda: self.shards.ours())
        self.shards = Shards(
            settings.state_dir,
            settings.runtime_dir,
            own.node or socket.gethostname(),
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
        self.local = Local(self.shards, self.machine, Random(), time.time)
        self.local.configure(settings.models, own.address)
        self.changed = News()

    async def run(self) -> None:
        """Run until a signal ends it. Raises StartFailed."""
        await self._adopt()
        failed: StartFailed | None = None
        async with trio.open_nursery() as ground:
            await ground.start(self._handle_signals, ground.cancel_scope, name="signals")
            try:
                await self._begin(ground)
            except StartFailed as error:
                failed = error  # out of a nursery it would come as a group
                ground.cancel_scope.cancel()
        running = [shard_id for shard_id, report in self.shards.reports().items() if report.pid]
        if failed:
            raise failed
        told = {"engines_left_running": ",".join(running) or "none"}
        log.info("stopped; engines go on and are taken over by the next agent" if running else "stopped", **told)

    async def _adopt(self) -> None:
        """Own the state directory and what runs there. Raises StartFailed."""
        folder = self.settings.state_dir
        try:
            os.makedirs(self.settings.runtime_dir, mode=0o750, exist_ok=True)
            found = await self.shards.adopt()
        except StateInUse as used:
            raise StartFailed(f"{used}: stop that one, or set STATE_DIRECTORY to another folder") from None
        except OSError as error:
            raise StartFailed(
                f"{error.filename or folder} cannot be used: {error.strerror}; set STATE_DIRECTORY and"
                " RUNTIME_DIRECTORY to folders that this user can write"
            ) from None
        adopted = [report.shard.id for report in found if not report.ended]
        if adopted:
            log.info("adopted", shards=",".join(adopted))
        if killed := self.shards.sorted.killed:
            log.warning("killed what an earlier agent left and nobody can describe", pids=",".join(map(str, killed)))
        for trouble in self.shards.sorted.troubles:
            log.error("trouble with what an earlier agent left", reason=trouble)

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
        for changed in (self.shards.changed, self.machine.changed.wait):
            await ground.start(self.local.wake.relay, changed, name="news for local mode")
            await ground.start(self.changed.relay, changed, name="news for /events")
        await ground.start(self.changed.relay, self.local.changed.wait, name="news for /events")
        ground.start_soon(self._follow, board, name="events")
        ground.start_soon(self.machine.watch, name="machine")
        ground.start_soon(self.local.keep, name="local mode")
        if self._supervisor.watchdog_s:
            ground.start_soon(self._supervisor.watch, name="watchdog")
        log.info(
            "agent runs",
            version=__version__,
            node=inventory.node,
            address=inventory.address,
            listen=",".join(f"http://{each}" for each in listen),
            gpus=len(inventory.gpus),
            models=",".join(model.name for model in self.settings.models if model.profiles) or "none",
            pid=os.getpid(),
        )
        if any(model.profiles for model in self.settings.models) and not is_loopback(Address(inventory.address, 0)):
            log.warning(
                "engines of local mode ask for no key: let only the routers reach these ports",
                address=inventory.address,
                ports="-".join(map(str, self.settings.agent.port_range)),
            )
        self._supervisor.ready()

    async def _follow(self, board: Board) -> NoReturn:
        """Turn what changed into events for those who listen."""
        while True:
            board.read()
            await self.changed.wait()

    async def _handle_signals(
        self, ground: trio.CancelScope, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT, signal.SIGHUP) as signals:
            task_status.started()
            async for number in signals:
                if number == signal.SIGHUP:
                    self.reload()
                else:
                    self._supervisor.stopping()
                    ground.cancel()
                    return

    def reload(self) -> None:
        """Take the configuration as it is now. A bad file changes nothing."""
        try:
            loaded = self._read()
        except ConfigError as error:
            log.error("configuration refused, the old one goes on", reason="; ".join(str(error).splitlines()))
            return
        self._supervisor.reloading()
        live, fixed = changes(self.settings, loaded.settings)
        self.settings = settings = keep_fixed(self.settings, loaded.settings)
        logs.set_up(settings.logging.level, settings.logging.format)
        self.local.configure(settings.models, settings.agent.address)
        log.info("configuration reloaded", changed=",".join(filter(_ours, live)) or "nothing")
        if waiting := ",".join(filter(_ours, fixed)):
            log.warning("some changes need a restart of the agent, which leaves engines running", keys=waiting)
        self._supervisor.ready()

    def _look(self, identity: Identity) -> Seen:
        return Seen(
            identity, self.machine.inventory, self.shards.reports(), self.local.waiting, self.local.alone.failures
        )

    def _renderer(self, identity: Identity) -> Render:
        from ..agent.measures import renderer  # an agent that nobody scrapes does not carry it

        return renderer(lambda: self._look(identity))


def _ours(path: str) -> bool:
    return path.split(".")[0] in SECTIONS

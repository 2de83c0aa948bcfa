"""`appliance agent`: what runs on every node with hardware.

signals           SIGTERM or SIGINT: the agent ends, engines stay; SIGHUP: reload
'- ground
   |- watchdog    where a supervisor wants to hear that the loop still turns
   '- agent       all the rest (`agent_tree.py`)
"""

from __future__ import annotations

import os
from collections.abc import Callable

import click
import structlog
import trio

from ..agent.discovery.gpus import GpuProbe
from ..agent.discovery.inventory import gather
from ..agent.discovery.writing import BadInventory, to_json, to_lines
from . import logs
from .agent_join import join
from .agent_register import register
from .agent_tree import AgentTree, place
from .config import ConfigError, Loaded, changes, keep_fixed, load
from .listening import raise_open_files
from .signals import heeded, held
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
    """Find the hardware of this node, and run what the control plane says; without one, the models of the file.

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
        process = Agent(loaded, read, supervisor)
        with held():
            trio.run(process.run)
    except ConfigError as error:
        for fault in error.faults:
            click.echo(f"appliance agent: {fault}", err=True)
        return 1
    except StartFailed as error:
        click.echo(f"appliance agent: {error}", err=True)
        return 1
    return 0


agent.add_command(join)
agent.add_command(register)


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


class Agent:
    """The process of one agent. `read` reads the configuration again, `supervisor` hears how the agent is."""

    def __init__(self, loaded: Loaded, read: Callable[[], Loaded], supervisor: Supervisor | None = None) -> None:
        self.settings = loaded.settings
        self.tree = AgentTree(loaded.settings)
        self._read = read
        self._supervisor = supervisor or Supervisor()
        self._all = trio.CancelScope()

    async def run(self) -> None:
        """Run until a signal ends it. Raises StartFailed."""
        failed: StartFailed | None = None
        async with heeded(self._stop, self.reload) as signals:
            with self._all:
                async with trio.open_nursery() as ground:
                    try:
                        await ground.start(self.tree.run, name="agent")
                    except StartFailed as error:
                        failed = error  # out of a nursery it would come as a group
                        ground.cancel_scope.cancel()
                    else:
                        if self._supervisor.watchdog_s:
                            ground.start_soon(self._supervisor.watch, name="watchdog")
                        self._supervisor.ready()
                        signals.begun()
        if failed:
            raise failed

    def _stop(self, times: int) -> None:
        """It takes less than a second, so that asking once more changes nothing."""
        self._supervisor.stopping()
        self._all.cancel()

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
        self.tree.configure(settings)
        log.info("configuration reloaded", changed=",".join(filter(_ours, live)) or "nothing")
        if waiting := ",".join(filter(_ours, fixed)):
            log.warning("some changes need a restart of the agent, which leaves engines running", keys=waiting)
        self._supervisor.ready()


def _ours(path: str) -> bool:
    return path.split(".")[0] in SECTIONS

"""`appliance serve`: the router, which `router.py` puts together, as a process."""

from __future__ import annotations

import os

import click
import trio

from . import logs, takeover
from .config import ConfigError, Loaded, load
from .listening import raise_open_files
from .router import Router
from .signals import held
from .startfailed import StartFailed
from .supervisor import Supervisor, passed_sockets


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
@click.option(
    "--with-agent", "with_agent", is_flag=True, help="Run an agent in this process too: models run on this machine."
)
@click.option(
    "--takeover", "take_over", is_flag=True, help="Take over from the router that runs here, without losing a request."
)
def serve(config: str | None, listen: tuple[str, ...], with_agent: bool, take_over: bool) -> int:
    """Run the router: one endpoint in front of all engines. It places models that have profiles on nodes."""
    arguments: dict[str, object] = {"server.listen": list(listen)} if listen else {}

    def read() -> Loaded:
        return load(config, os.environ, arguments=arguments)

    try:
        supervisor, passed = Supervisor.of(os.environ), passed_sockets(os.environ)
        loaded = read()
        logs.set_up(loaded.settings.logging.level, loaded.settings.logging.format)
        raise_open_files()
        if take_over and passed:
            raise StartFailed(
                "--takeover: a supervisor has passed the listening sockets already (LISTEN_FDS); leave it out"
            )
        taken = takeover.take(loaded.settings) if take_over else None
        router = Router(loaded, read, supervisor, passed, taken, with_agent=with_agent)
        with held():
            trio.run(router.run)
    except ConfigError as error:
        for fault in error.faults:
            click.echo(f"appliance serve: {fault}", err=True)
        return 1
    except StartFailed as error:
        click.echo(f"appliance serve: {error}", err=True)
        return 1
    return 0

"""`appliance agent register`: nothing but telling routers of an engine that somebody else started.

It runs beside the engine, in its container for example: no hardware is looked for, no directory is owned, no engine is
touched.

ground
|- signals        SIGTERM or SIGINT: it ends, and with it the group
|- http           /status, /events, /metrics, /healthz
|- look           addresses that changed become events
'- announcer
"""

from __future__ import annotations

import os
import secrets
import socket
import time
from typing import NoReturn

import click
import structlog
import trio

from .. import __version__
from ..agent.announce import Announcer
from ..agent.discovery.interfaces import interfaces, own_address
from ..agent.events import Board
from ..agent.status import Identity, Seen
from ..agent.web import Render, Site
from ..facts.groups import Registered
from ..facts.hardware import Inventory
from ..facts.settings import Settings
from ..rules.groups.registered import GROUP, Unregistered, registered
from . import logs
from .announcekey import secret
from .config import ConfigError, load
from .listening import address_of, bind_all
from .signals import heeded
from .startfailed import StartFailed

LOOK_S = 2.0

log = structlog.get_logger("agent")


@click.command(short_help="Tell routers of an engine that runs already.")
@click.option(
    "--config", "config", metavar="FILE", help="Configuration file (default: APPLIANCE_CONFIG, then the usual places)."
)
@click.pass_context
def register(ctx: click.Context, config: str | None) -> int:
    """Tell routers of an engine that runs already: MENTAT_GROUP names it, MENTAT_OPENAI_API says where it answers, and
    MENTAT_MCP_API where its tools are."""
    try:
        settings = load(config or ctx.obj, os.environ).settings
        logs.set_up(settings.logging.level, settings.logging.format)
        group = registered(os.environ)
        if group is None:
            raise StartFailed(f"{GROUP} is not set: it names the group, and MENTAT_OPENAI_API says where it answers")
        trio.run(Registration(settings, group).run)
    except (StartFailed, Unregistered) as error:
        click.echo(f"appliance agent register: {error}", err=True)
        return 1
    except ConfigError as error:
        for fault in error.faults:
            click.echo(f"appliance agent register: {fault}", err=True)
        return 1
    return 0


class Registration:
    """One group, published until a signal ends it."""

    def __init__(self, settings: Settings, group: Registered) -> None:
        self._settings = settings
        self._group = group
        node = settings.agent.node or socket.gethostname()
        address = settings.agent.address or own_address(interfaces())
        self._identity = Identity(node, address, secrets.token_hex(8), time.time())

    async def run(self) -> None:
        """Raises StartFailed."""
        sockets: list[socket.socket] = []
        try:
            bind_all(sockets, self._settings.agent.listen, "agent.listen")
        except StartFailed:
            for sock in sockets:
                sock.close()
            raise
        key = secret(self._settings)
        listen = [address_of(sock) for sock in sockets]
        board = Board(self._look, time.time)
        announcer = Announcer(self._settings.groups, key, self._identity, listen)
        everything = trio.CancelScope()
        async with heeded(lambda times: everything.cancel()):
            with everything:
                async with trio.open_nursery() as ground:
                    await ground.start(Site(board, self._renderer).serve, sockets, name="http")
                    ground.start_soon(self._follow, board, name="look")
                    if self._settings.groups.enabled and announcer.useful:
                        ground.start_soon(announcer.run, name="announcer")
                    shown = ",".join(f"http://{address}" for address in listen)
                    log.info("registered", version=__version__, group=self._group.group, listen=shown, pid=os.getpid())
        log.info("stopped", group=self._group.group)

    def _look(self) -> Seen:
        found = interfaces()
        address = self._settings.agent.address or own_address(found)
        inventory = Inventory(node=self._identity.node, address=address, interfaces=found)
        return Seen(self._identity, inventory, {}, registered=self._group)

    async def _follow(self, board: Board) -> NoReturn:
        while True:
            board.read()
            await trio.sleep(LOOK_S)

    def _renderer(self) -> Render:
        from ..agent.measures import renderer

        return renderer(self._look)

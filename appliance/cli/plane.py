"""The control plane inside a router: its parts are put together here, and what it publishes reaches the road.

run
|- store           open for as long as the rest
|- plane           decides (`control/plane.py`)
|- publish         replicas and models that wake, to the gateway and its watches
|- link door       where agents call and machines join; only where 'ctl init' was run
|- certificate     the control plane's own is renewed
'- agent           only with --with-agent: linked through memory

It ends with the router and stops no engine. A router whose models have no profile has none of this, and imports none
of it.
"""

from __future__ import annotations

import math
import socket
import ssl
import time
from collections.abc import Callable, Sequence
from random import SystemRandom
from typing import TYPE_CHECKING, NoReturn

import structlog
import trio

from ..control import pki
from ..control.joining import Joining
from ..control.links import LinkDoor
from ..control.plane import Plane
from ..facts.endpoint import Endpoint
from ..facts.settings import Settings
from ..gateway.service import Gateway
from ..store.failed import StoreFailed
from ..store.papers import Papers
from ..store.store import Store, open_store
from ..wire.tls import FreshContext, link_server_context
from .config import profiled
from .listening import address_of, bind_all
from .startfailed import StartFailed

if TYPE_CHECKING:
    from .agent_tree import AgentTree

AGENT_WAIT_S = 5.0
"""How long the agent of a router that was taken over may still own the state directory."""

END_S = 3.0
"""What the end of a control plane may take before another one begins: an agent that ends within a second, a database
that is closed. Its decisions end at once."""

LOOK_S = 1.0
"""Between two looks at whether replicas that were handed over still have to be believed in."""

log = structlog.get_logger("control")


def check(settings: Settings, *, with_agent: bool) -> None:
    """Raises StartFailed where nothing could ever run what the models' profiles say."""
    if with_agent:
        if settings.agent.control_url:
            raise StartFailed(
                "--with-agent: the agent of this process follows this router; take agent.control_url out of the file,"
                " or run 'appliance agent' as a process of its own"
            )
    elif not Papers.of(settings.state_dir).initialised():
        raise StartFailed(
            f"there is no node to run {', '.join(profiled(settings))} on: run 'appliance ctl init' here and let"
            " machines join ('appliance ctl node add'), or use this machine with 'appliance serve --with-agent'"
        )


class Control:
    """Made once; `run` in the router's nursery. `follow` has the watches look at the table again. `handed` are the
    replicas of a router that was taken over from: they serve until this one has heard of them, or has settled and so
    knows that nobody has them."""

    def __init__(
        self,
        settings: Settings,
        gateway: Gateway,
        follow: Callable[[], None],
        *,
        with_agent: bool,
        handed: Sequence[Endpoint] | None = None,
    ) -> None:
        """`handed` None: no router was taken over from. Raises StartFailed."""
        check(settings, with_agent=with_agent)
        self.plane: Plane | None = None
        self.addresses: tuple[str, ...] = ()
        """Where agents call, as it came out."""
        self.agent: AgentTree | None = None
        self._settings = settings
        self._gateway = gateway
        self._follow = follow
        self._with_agent = with_agent
        self._agent_wait_s = 0.0 if handed is None else AGENT_WAIT_S
        self._handed = tuple(handed or ())
        self._unplaced: tuple[str, ...] = ()
        self._scope = trio.CancelScope()
        self._ended = trio.Event()

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Run until cancelled or told to `end`. Started once requests can wait for models; before that it raises
        StartFailed."""
        settings = self._settings
        failed: StartFailed | None = None
        try:
            with self._scope:
                async with open_store(settings.store.url, settings.state_dir) as store, trio.open_nursery() as nursery:
                    try:
                        await self._begin(store, nursery)
                    except (StartFailed, StoreFailed, pki.PkiFailed) as error:
                        failed = StartFailed(str(error))  # out of a nursery it would come as a group
                        nursery.cancel_scope.cancel()
                    else:
                        task_status.started()
        except StoreFailed as error:
            failed = StartFailed(str(error))
        finally:
            self._ended.set()
        if failed:
            raise failed

    def configure(self, settings: Settings) -> None:
        """Take other settings over after a reload."""
        self._settings = settings
        if self.plane is not None:
            self.plane.configure(settings)
        if self.agent is not None:
            self.agent.configure(settings)

    async def end(self) -> None:
        """Decide nothing more, and give up database, port and agent, engines untouched: another process takes them.
        What it published goes on serving here."""
        self._scope.cancel()
        with trio.move_on_after(END_S):
            await self._ended.wait()
        # Nobody wakes anything here any more. Who waits for that is better off asking again.
        self._gateway.why_not = lambda model: "another process takes over this router, ask again"
        self._gateway.publish(self._gateway.published(), {})

    # -- steps of the above ------------------------------------------------------------------------------------------

    async def _begin(self, store: Store, nursery: trio.Nursery) -> None:
        """All parts, one after the other. Raises StartFailed, StoreFailed, PkiFailed."""
        settings, gateway = self._settings, self._gateway
        joining = await self._joining(store)
        plane = Plane(settings, store, SystemRandom(), time.monotonic, gateway.demand, joining=joining)
        await nursery.start(plane.run, name="control plane")
        gateway.wanted = lambda model: plane.wake()
        gateway.why_not = plane.why_not
        self.plane = plane
        nursery.start_soon(self._publish, plane, name="publish")
        self._say(plane)
        if joining is not None:
            await self._open_door(plane, joining, nursery)
        if self._with_agent:
            from .agent_tree import AgentTree, within

            self.agent = AgentTree(settings, within(plane.attend), wait_s=self._agent_wait_s)
            await nursery.start(self.agent.run, name="agent")

    async def _joining(self, store: Store) -> Joining | None:
        """Who lets machines join; None where there is no root to sign by."""
        papers = Papers.of(self._settings.state_dir)
        if not papers.initialised():
            return None
        authority = await trio.to_thread.run_sync(pki.load, papers, time.time())
        return Joining(store, authority, self._settings.control.listen)

    async def _open_door(self, plane: Plane, joining: Joining, nursery: trio.Nursery) -> None:
        papers = Papers.of(self._settings.state_dir)
        sockets: list[socket.socket] = []
        try:
            bind_all(sockets, self._settings.control.listen, "control.listen")
            joining.listen = tuple(map(address_of, sockets))
            await joining.renew_own()
            context = _context(papers)
        except BaseException:
            for sock in sockets:
                sock.close()
            raise
        self.addresses = tuple(map(str, joining.listen))
        nursery.start_soon(joining.keep_certificate, name="certificate of the control plane")
        await nursery.start(LinkDoor(plane, joining, context.get).serve, sockets, name="link door")

    async def _publish(self, plane: Plane) -> NoReturn:
        """Have the road follow what the control plane says."""
        while True:
            self._say(plane)
            with trio.move_on_after(LOOK_S if self._handed else math.inf):
                await plane.published.wait()

    def _say(self, plane: Plane) -> None:
        if plane.fleet.settled:
            self._handed = ()
        known = plane.world.replicas
        still = [endpoint for endpoint in self._handed if endpoint.id not in known]
        self._gateway.publish((*plane.endpoints(), *still), plane.waking())
        self._follow()
        if self._gateway.unplaced != self._unplaced:
            self._unplaced = self._gateway.unplaced
            for replica in self._unplaced:
                log.error("a replica serves nobody: endpoints of the file has its id", replica=replica)


def _context(papers: Papers) -> FreshContext:
    """What agents are shown. Raises StartFailed."""
    try:
        return FreshContext(link_server_context, papers.server, papers.server_key, papers.root)
    except (OSError, ssl.SSLError) as error:
        raise StartFailed(
            f"the control plane's certificate {papers.server} cannot be used: {error}; remove it, and a new one is made"
            " at the next start"
        ) from None

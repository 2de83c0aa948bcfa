"""Who is connected: agents are judged when they register, and parted with when they or their certificates are over.

What a certificate proves is looked up in the store at each registration, and every few seconds for those who are
connected: another process may revoke them, nodes join, and time goes by. While the store cannot be read the last look
counts. Whoever could revoke a certificate then is this process, which knows; and a damaged file must not cost the
cluster every node whose agent starts anew.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable, Collection
from contextlib import asynccontextmanager
from typing import NoReturn

import structlog
import trio

from appliance import __version__
from appliance.control.claims import Claim, judge, no_certificate, taken
from appliance.control.logs import Logs
from appliance.control.session import Rhythm, Session
from appliance.control.told import Told
from appliance.facts.link import PROTOCOL, Refused, Register, Renewed, Welcome
from appliance.rules.fleet.sense import nonsense
from appliance.rules.fleet.world import World
from appliance.store.failed import StoreFailed
from appliance.store.rows import Certificate
from appliance.store.store import Store
from appliance.wire.link import Link, LinkClosed, Malformed, UnknownMessage

REGISTER_S = 15.0
"""How long an agent may take to register: its inventory is sent as a whole."""

REFUSE_S = 5.0
"""How long a refusal may take to reach it."""

PAPERS_S = 15.0
"""Between two looks at the certificates."""

log = structlog.get_logger("control")


class Attendance:
    """`sessions` are the agents that are connected, by node. `revoked` are serials taken back by this process.

    `rhythm` is that of new connections, `renew` signs for a node (None: there is no root), `wake` is called after every
    change of the world.
    """

    def __init__(
        self,
        world: World,
        logs: Logs,
        store: Store,
        *,
        rhythm: Callable[[], Rhythm],
        now: Callable[[], float],
        wall: Callable[[], float],
        wake: Callable[[], None],
        renew: Callable[[str, str], Awaitable[Renewed]] | None,
    ) -> None:
        self.sessions: dict[str, Session] = {}
        self.revoked: set[str] = set()
        self._world = world
        self._logs = logs
        self._store = store
        self._rhythm = rhythm
        self._now = now
        self._wall = wall
        self._wake = wake
        self._renew = renew
        self._told = Told()
        self._store_fault = ""
        self._looked: dict[str, tuple[Certificate, ...]] = {}

    async def attend(self, link: Link, claim: Claim | None = None) -> None:
        """One agent's connection, from its registration to its end; the link is closed then. `claim` is what the
        connection proves, None for a link within the process."""
        ending = ""
        try:
            session = await self._admit(link, claim)
            if session is not None:
                async with self._attended(session):
                    await session.hold()
                ending = session.ended
        except Exception as fault:
            # Whatever is wrong with this one, it must reach neither the other agents nor the request road.
            log.error("fault of a link", peer=link.peer, exc_info=fault)
            ending = "a fault of the control plane; its log says more"
        finally:
            await link.aclose(ending)

    async def _admit(self, link: Link, claim: Claim | None) -> Session | None:
        """The session of an agent that may register; None for one that may not, which was told so."""
        register: Register | None = None
        refused: Refused | None = None
        known: tuple[Certificate, ...] = ()
        try:
            with trio.move_on_after(REGISTER_S):
                register = await self._registration(link)
            if claim is not None and not claim.name:
                refused = no_certificate(claim, register.node if register else "")
            elif register is None:
                refused = Refused("malformed", f"{_says(claim)}; it did not register within {REGISTER_S:g} s")
            elif claim is not None:
                known = await self._known(claim)
        except LinkClosed:
            if claim is None or claim.name:
                return None  # an agent that was stopped just now
            refused = no_certificate(claim, "")
        except (Malformed, UnknownMessage) as wrong:
            refused = Refused("malformed", f"{_says(claim)}; the first message is no registration: {wrong}")
        except StoreFailed as failed:
            self._tell_store(str(failed))
            await link.aclose("the control plane cannot use its database; call again")
            return None
        # From here to the end without a checkpoint: two agents of one name are judged one after the other.
        if refused is None and register is not None:
            refused = judge(register, claim, known, self.revoked, self._wall())
            if refused is None and (why := nonsense(register, {})):
                refused = Refused("malformed", f"{_says(claim)}, agent claims {register.node}; it registers that {why}")
            holder = self.sessions.get(register.node)
            if refused is None and holder is not None:
                if holder.boot_id != register.boot_id:
                    refused = taken(register, claim, holder.peer)
                else:
                    self.part(holder, "the same agent has called again")
            if refused is None:
                return self._register(link, register, claim)
        assert refused is not None
        await self._refuse(link, refused)
        return None

    async def _known(self, claim: Claim) -> tuple[Certificate, ...]:
        """The certificates of the name that is claimed. Raises StoreFailed where they cannot be read, and this one was
        not there at the last look."""
        try:
            known = self._looked[claim.name] = await self._store.certificates(claim.name)
        except StoreFailed as failed:
            known = self._looked.get(claim.name, ())
            if all(each.serial != claim.serial for each in known):
                raise
            self._tell_store(str(failed))
        return known

    async def _registration(self, link: Link) -> Register:
        message = await link.receive()
        if not isinstance(message, Register):
            raise Malformed(f"it is {type(message).__name__}")
        return message

    def _register(self, link: Link, register: Register, claim: Claim | None) -> Session:
        rhythm = self._rhythm()
        session = Session(
            link,
            register,
            claim,
            self._world,
            self._logs,
            rhythm,
            now=self._now,
            wall=self._wall,
            wake=self._wake,
            renew=self._renew,
        )
        self.sessions[session.name] = session
        self._world.register(register, self._now(), session.compare_clocks(register.clock))
        session.say(Welcome(PROTOCOL, __version__, self._wall(), rhythm.beat_s, rhythm.silence_s))
        self._told.succeeded(_host(link.peer))
        log.info(
            "agent connected",
            node=session.name,
            peer=link.peer,
            version=register.version,
            shards=len(register.reports),
        )
        self._wake()
        return session

    @asynccontextmanager
    async def _attended(self, session: Session) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self.part(session, session.ended or "the control plane is stopping")

    def part(self, session: Session, reason: str) -> None:
        """The session is over, whether its task has noticed or not. Harmless when repeated."""
        session.end(reason)
        if self.sessions.get(session.name) is not session:
            return
        del self.sessions[session.name]
        self._world.parted(session.name, self._now())
        self._logs.parted(session, f"{session.name} has no connection any more: {session.ended}")
        log.info("agent's connection ended", node=session.name, peer=session.peer, reason=session.ended)
        self._wake()

    async def _refuse(self, link: Link, refused: Refused) -> None:
        if self._told.worth(_host(link.peer), f"{refused.code} {refused.message}", self._now()):
            log.warning("agent refused", peer=link.peer, code=refused.code, reason=refused.message)
        with trio.move_on_after(REFUSE_S):
            try:
                await link.send(refused)
                await link.aclose(refused.code)
            except LinkClosed:
                return  # it did not wait for the answer

    # -- certificates --------------------------------------------------------------------------------------------------

    async def keep_looking(self) -> NoReturn:
        """For ever. A fault of it is survived, as one of the loop that decides: requests are served in this process."""
        told = ""
        while True:
            await trio.sleep(PAPERS_S)
            try:
                await self.look_at_papers()
            except Exception as fault:
                if repr(fault) != told:
                    log.error("a fault in looking at the certificates", exc_info=fault)
                told = repr(fault)
            else:
                told = ""

    async def look_at_papers(self) -> None:
        """Expect nodes that joined, part with those whose certificates were revoked or are over. Done every few
        seconds; whoever changed something in the store may have it done at once."""
        try:
            self.compare(await self._store.certificates())
        except StoreFailed as failed:
            self._tell_store(str(failed))

    def compare(self, certificates: Collection[Certificate]) -> None:
        self._store_fault = ""
        self._looked = {}
        for each in certificates:
            self._looked[each.node] = (*self._looked.get(each.node, ()), each)
        wall, now = self._wall(), self._now()
        good = {each.node for each in certificates if each.good(wall)}
        revoked = {each.node for each in certificates if each.revoked_at is not None} - good
        for name in sorted(good - self._world.nodes.keys()):
            self._world.expect(name, now)
            self._wake()
        own = {name for name, session in self.sessions.items() if session.claim is None}
        for name in sorted((revoked & self._world.nodes.keys()) - own):
            self.forget(name)
        by_serial = {each.serial: each for each in certificates}
        for session in tuple(self.sessions.values()):
            row = by_serial.get(session.claim.serial) if session.claim is not None else None
            if row is not None and row.revoked_at is not None:
                self._part_revoked(session)
            elif session.claim is not None and (row is None or row.not_after <= wall):
                # Should it have another by now, it is back in a moment.
                self.part(session, "the certificate it called with is over")

    def forget(self, name: str) -> None:
        if (session := self.sessions.get(name)) is not None:
            self._part_revoked(session)
        self._world.forget(name, self._now())
        self._wake()

    def _part_revoked(self, session: Session) -> None:
        why = f"{_says(session.claim)}, agent claims {session.name}; this certificate was revoked"
        session.end(why, Refused("revoked", f"{why}: ctl node add {session.name}"))
        self.part(session, why)

    def _tell_store(self, reason: str) -> None:
        if reason != self._store_fault:
            self._store_fault = reason
            log.error("the database cannot be used", reason=reason)


def _says(claim: Claim | None) -> str:
    return claim.sentence if claim is not None else "the agent of this process"


def _host(peer: str) -> str:
    """The address without the port, which is another one at each try."""
    return peer.rpartition(":")[0] or peer

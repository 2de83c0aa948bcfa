"""The control plane: which models run where, and who has a say in it.

    run
    |- loop           decides: one pass after every change and when a wait is over
    '- papers         looks what the store says of certificates, every few seconds
    attend            one task per agent's connection, in the nursery of whoever accepts them

It keeps no rows about the fleet. Agents register with all that they run, and the world is rebuilt from that; what is in
the store is what operators decided. Their actions are written there first, with their line in the audit, and then to
the world; a client of the management API that leaves in between does not part the two.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Collection, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from random import Random
from typing import NoReturn

import structlog
import trio

from appliance import __version__
from appliance.control.claims import Claim, judge, no_certificate, taken
from appliance.control.joining import Joining
from appliance.control.logs import Logs, Sayable
from appliance.control.loop import Loop
from appliance.control.publish import Published
from appliance.control.session import Rhythm, Session
from appliance.control.told import Told
from appliance.facts.demand import Demand
from appliance.facts.endpoint import Endpoint
from appliance.facts.errors import Refusal
from appliance.facts.link import PROTOCOL, Refused, Register, Welcome
from appliance.facts.settings import Settings
from appliance.nursery.news import News
from appliance.rules.fleet.reconcile import Fleet
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
"""Between two looks at the certificates: another process may revoke them, nodes join, and time goes by."""

SENTENCES_S = 1.0
"""How old a sentence on why a model does not serve may be: every request that is refused asks for one."""

STORE_S = 30.0
"""Most that an operator's action outlives the client who asked for it. The store gives up before."""

log = structlog.get_logger("control")


class Plane:
    """Made once; `run` in a nursery. All plain methods may be called from anywhere in the same thread.

    `rng` gives ids and the keys of engines: one that cannot be guessed. `now` never steps, `wall` is the time of day.
    `demand` says how much each model is asked for. `joining` signs certificates, None where there is no root yet; then
    links within the process are the only ones there are.
    """

    def __init__(
        self,
        settings: Settings,
        store: Store,
        rng: Random,
        now: Callable[[], float] = time.monotonic,
        demand: Callable[[], Mapping[str, Demand]] = dict,
        *,
        wall: Callable[[], float] = time.time,
        joining: Joining | None = None,
    ) -> None:
        self.settings = settings
        self.store = store
        self.joining = joining
        self.world = World()
        self.fleet = Fleet(self.world, settings.control, now())
        self.fleet.configure(settings.models, settings.control)
        self.sessions: dict[str, Session] = {}
        self.logs = Logs()
        self.told = Told()
        self._rng = rng
        self._now = now
        self._wall = wall
        self._demand = demand
        self._published = Published()
        self._loop = Loop(self._pass, now)
        self._revoked: set[str] = set()
        self._store_fault = ""
        self._sentences: Mapping[str, str] = {}
        self._sentences_until = now()

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Decide for ever. Started once it knows what operators decided before. Raises StoreFailed where that cannot be
        read: without cordons and certificates it would do what somebody forbade."""
        for node in await self.store.cordons():
            self.world.cordon(node)
        self._compare(await self.store.certificates())
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._loop.run, name="control: loop")
            nursery.start_soon(self._look_at_papers, name="control: papers")
            task_status.started()
        raise AssertionError("the loop does not end")

    def wake(self) -> None:
        """Demand, or something else a decision depends on, has changed."""
        self._loop.wake()

    def configure(self, settings: Settings) -> None:
        """Take a configuration over, after a reload."""
        self.settings = settings
        self.fleet.configure(settings.models, settings.control)
        self.wake()

    def _pass(self) -> float:
        now = self._now()
        actions = self.fleet.step(self._demand(), now, self._rng)
        for event in actions.events:
            getattr(log, event.level)(event.name.replace("_", " "), **event.fields)
        for name, command in actions.commands:
            if (session := self.sessions.get(name)) is not None:
                session.say(command)
        for session in tuple(self.sessions.values()):
            node = self.world.nodes.get(session.name)
            if node is None or not node.connected:  # silent until it was given up: only a registration brings it back
                self._part(session, "it has said nothing until it was taken for lost")
        self._published.say(self.fleet.endpoints(), self.fleet.waking(now))
        self._sentences_until = now
        return actions.again_at

    # -- what the router uses ------------------------------------------------------------------------------------------

    @property
    def published(self) -> News:
        """Told when `endpoints`, or the models in `waking`, are others than before."""
        return self._published.news

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Replicas that take requests, as of the last pass."""
        return self._published.endpoints

    def waking(self) -> Mapping[str, str]:
        """Models whose requests may wait, each with how far it is now."""
        return self.fleet.waking(self._now())

    def why_not(self, model: str) -> str:
        """Why a model has no replica that serves, as half a sentence for clients; "" where there is nothing to say."""
        now = self._now()
        if now >= self._sentences_until:
            self._sentences = {**self.fleet.troubles(now), **self.fleet.waking(now)}
            self._sentences_until = now + SENTENCES_S
        return self._sentences.get(model, "")

    # -- agents --------------------------------------------------------------------------------------------------------

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
                known = await self.store.certificates(claim.name)
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
            refused = judge(register, claim, known, self._revoked, self._wall())
            holder = self.sessions.get(register.node)
            if refused is None and holder is not None:
                if holder.boot_id != register.boot_id:
                    refused = taken(register, claim, holder.peer)
                else:
                    self._part(holder, "the same agent has called again")
            if refused is None:
                return self._register(link, register, claim)
        assert refused is not None
        await self._refuse(link, refused)
        return None

    async def _registration(self, link: Link) -> Register:
        message = await link.receive()
        if not isinstance(message, Register):
            raise Malformed(f"it is {type(message).__name__}")
        return message

    def _register(self, link: Link, register: Register, claim: Claim | None) -> Session:
        rhythm = Rhythm.of(self.settings.control.unreachable_after_s)
        session = Session(
            link,
            register,
            claim,
            self.world,
            self.logs,
            rhythm,
            now=self._now,
            wall=self._wall,
            wake=self.wake,
            renew=self.joining.renew if self.joining is not None else None,
        )
        self.sessions[session.name] = session
        self.world.register(register, self._now(), session.compare_clocks(register.clock))
        session.say(Welcome(PROTOCOL, __version__, self._wall(), rhythm.beat_s, rhythm.silence_s))
        self.told.succeeded(_host(link.peer))
        log.info(
            "agent connected",
            node=session.name,
            peer=link.peer,
            version=register.version,
            shards=len(register.reports),
        )
        self.wake()
        return session

    @asynccontextmanager
    async def _attended(self, session: Session) -> AsyncIterator[None]:
        try:
            yield
        finally:
            self._part(session, session.ended or "the control plane is stopping")

    def _part(self, session: Session, reason: str) -> None:
        """The session is over, whether its task has noticed or not. Harmless when repeated."""
        session.end(reason)
        if self.sessions.get(session.name) is not session:
            return
        del self.sessions[session.name]
        self.world.parted(session.name, self._now())
        self.logs.parted(session, f"{session.name} has no connection any more: {session.ended}")
        log.info("agent's connection ended", node=session.name, peer=session.peer, reason=session.ended)
        self.wake()

    async def _refuse(self, link: Link, refused: Refused) -> None:
        if self.told.worth(_host(link.peer), f"{refused.code} {refused.message}", self._now()):
            log.warning("agent refused", peer=link.peer, code=refused.code, reason=refused.message)
        with trio.move_on_after(REFUSE_S):
            try:
                await link.send(refused)
                await link.aclose(refused.code)
            except LinkClosed:
                return  # it did not wait for the answer

    # -- certificates --------------------------------------------------------------------------------------------------

    async def _look_at_papers(self) -> NoReturn:
        while True:
            await trio.sleep(PAPERS_S)
            await self.look_at_papers()

    async def look_at_papers(self) -> None:
        """Expect nodes that joined, part with those whose certificates were revoked or are over. Done every few
        seconds; whoever changed something in the store may have it done at once."""
        try:
            self._compare(await self.store.certificates())
        except StoreFailed as failed:
            self._tell_store(str(failed))

    def _compare(self, certificates: Collection[Certificate]) -> None:
        self._store_fault = ""
        wall, now = self._wall(), self._now()
        good = {each.node for each in certificates if each.good(wall)}
        revoked = {each.node for each in certificates if each.revoked_at is not None} - good
        for name in sorted(good - self.world.nodes.keys()):
            self.world.expect(name, now)
            self.wake()
        own = {name for name, session in self.sessions.items() if session.claim is None}
        for name in sorted((revoked & self.world.nodes.keys()) - own):
            self._forget(name)
        by_serial = {each.serial: each for each in certificates}
        for session in tuple(self.sessions.values()):
            row = by_serial.get(session.claim.serial) if session.claim is not None else None
            if row is not None and row.revoked_at is not None:
                self._part_revoked(session)
            elif session.claim is not None and (row is None or row.not_after <= wall):
                # Should it have another by now, it is back in a moment.
                self._part(session, "the certificate it called with is over")

    def _forget(self, name: str) -> None:
        if (session := self.sessions.get(name)) is not None:
            self._part_revoked(session)
        self.world.forget(name, self._now())
        self.wake()

    def _part_revoked(self, session: Session) -> None:
        why = f"{_says(session.claim)}, agent claims {session.name}; this certificate was revoked"
        session.end(why, Refused("revoked", f"{why}: ctl node add {session.name}"))
        self._part(session, why)

    def _tell_store(self, reason: str) -> None:
        if reason != self._store_fault:
            self._store_fault = reason
            log.error("the database cannot be used", reason=reason)

    # -- operators -----------------------------------------------------------------------------------------------------

    async def cordon(self, node: str, by: str) -> bool:
        """Let nothing new go to `node`. False: it was cordoned before. Raises StoreFailed."""
        with _both():
            made = await self.store.cordon(node, by, self._wall())
            self.world.cordon(node)
            self.wake()
        return made

    async def uncordon(self, node: str, by: str) -> bool:
        """Undo a cordon and a drain. False: there was neither. Raises StoreFailed."""
        with _both():
            gone = await self.store.uncordon(node, by, self._wall())
            self.world.uncordon(node)
            self.wake()
        return gone

    async def drain(self, node: str, by: str) -> bool:
        """Cordon `node`, and have what runs there replaced elsewhere and stopped. False: that was going on. The cordon
        outlives this process, the drain does not. Raises StoreFailed."""
        there = self.world.nodes.get(node)
        if there is not None and there.draining_since is not None:
            return False
        with _both():
            await self.store.cordon(node, by, self._wall(), "to drain it")
            await self.store.audit(by, "drain", node, "", self._wall())
            self.world.drain(node, self._now())
            self.wake()
        return True

    async def scale(self, model: str, replicas: int | None, by: str) -> None:
        """Run so many replicas whatever the load and the limits of scaling, until the next start; None: by demand
        again. Raises Refusal, StoreFailed."""
        if model not in self.fleet.models:
            raise Refusal(404, "model_not_found", f"{model[:100]} is no model with a profile")
        with _both():
            detail = "by demand" if replicas is None else f"{replicas} replicas"
            await self.store.audit(by, "scale", model, detail, self._wall())
            self.fleet.scale(model, replicas, self._now())
            self.wake()

    async def revoke(self, node: str, by: str) -> list[str]:
        """Take `node` out of the cluster: its certificates are revoked and its connection ends. The serials of those
        that were good until now. Raises Refusal, StoreFailed."""
        if self.joining is None:
            raise Refusal(409, "no_root", "this control plane has no root, so it gave out no certificate: run ctl init")
        with _both():
            serials = await self.joining.revoke(node, by)
            self._revoked.update(serials)
            self._forget(node)
        return serials

    def log(self, replica: str, rank: int, lines: int, follow: bool) -> AsyncGenerator[tuple[str, ...], None]:
        """The last `lines` lines of a shard's log in pieces, with `follow` also later ones. Close it (`aclosing`). It
        raises Refusal while it is read."""
        return self.logs.read(lambda: self._find(replica, rank), lines, follow)

    def _find(self, replica: str, rank: int) -> tuple[Sayable, str]:
        shard_id = f"{replica}/{rank}"
        placed = self.world.replicas.get(replica)
        shard = placed.shards.get(rank) if placed is not None else None
        # One that has ended and was given up may have left a log with its node.
        node = (
            shard.node
            if shard is not None
            else next((each.name for each in self.world.nodes.values() if shard_id in each.reports), "")
        )
        if not node:
            known = f"{replica[:100]} has no rank {rank}" if placed is not None else f"{replica[:100]} is no replica"
            raise Refusal(404, "replica_not_found", f"{known} that is known here")
        session = self.sessions.get(node)
        if session is None:
            raise Refusal(503, "node_unreachable", f"{shard_id} is on {node}, which has no connection at the moment")
        return session, shard_id


@contextmanager
def _both() -> Iterator[None]:
    """What is written must be done too, even if the client that asked for it has left meanwhile: a thread that writes
    finishes anyway."""
    with trio.CancelScope(shield=True, deadline=trio.current_time() + STORE_S) as bound:
        yield
    if bound.cancelled_caught:
        raise StoreFailed(f"the database has not answered for {STORE_S:g} s; 'ctl audit' shows whether it was done")


def _says(claim: Claim | None) -> str:
    return claim.sentence if claim is not None else "the agent of this process"


def _host(peer: str) -> str:
    """The address without the port, which is another one at each try."""
    return peer.rpartition(":")[0] or peer

"""The control plane: which models run where, and who has a say in it.

    run
    |- loop           decides: one pass after every change and when a wait is over
    '- papers         looks what the store says of certificates, every few seconds
    attend            one task per agent's connection, in the nursery of whoever accepts them

It keeps no rows about the fleet. Agents register with all that they run, and the world is rebuilt from that; what is in
the store is what operators decided. Their actions are written there first, with their line in the audit, and then to
the world; a client of the management API that leaves in between does not part the two. What would not outlive this
process anyway is done first.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from random import Random
from typing import NoReturn

import structlog
import trio

from appliance.control.attendance import Attendance
from appliance.control.claims import Claim
from appliance.control.joining import Joining
from appliance.control.logs import Logs, Sayable
from appliance.control.loop import Loop
from appliance.control.publish import Published
from appliance.control.session import Rhythm
from appliance.facts.demand import Demand
from appliance.facts.endpoint import Endpoint
from appliance.facts.errors import Refusal
from appliance.facts.settings import Settings
from appliance.nursery.news import News
from appliance.rules.fleet.expiry import drained_since
from appliance.rules.fleet.reconcile import Fleet
from appliance.rules.fleet.world import World
from appliance.store.failed import StoreFailed
from appliance.store.store import Store
from appliance.wire.link import Link

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
        self.logs = Logs()
        self._rng = rng
        self._now = now
        self._wall = wall
        self._demand = demand
        self._published = Published()
        self._loop = Loop(self._pass, now)
        self.attendance = Attendance(
            self.world,
            self.logs,
            store,
            rhythm=lambda: Rhythm.of(self.settings.control.unreachable_after_s),
            now=now,
            wall=wall,
            wake=self.wake,
            renew=joining.renew if joining is not None else None,
        )
        self.sessions = self.attendance.sessions
        self._sentences: Mapping[str, str] = {}
        self._sentences_until = now()
        self._ended = False

    # -- the loop ------------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Decide for ever. Started once it knows what operators decided before. Raises StoreFailed where that cannot be
        read: without cordons and certificates it would do what somebody forbade."""
        for node, cordon in (await self.store.cordons()).items():
            if cordon.drained_at is None:
                self.world.cordon(node)
            else:
                grace_s = self.settings.control.drain_grace_s
                self.world.drain(node, drained_since(cordon.drained_at, self._wall(), self._now(), grace_s))
        self.attendance.compare(await self.store.certificates())
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._loop.run, name="control: loop")
                nursery.start_soon(self.attendance.keep_looking, name="control: papers")
                task_status.started()
        finally:
            self._ended = True
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
        # First of all: each is given once for a connection, and would be lost with a fault of what follows.
        for name, command in actions.commands:
            if (session := self.sessions.get(name)) is not None:
                session.say(command)
        for event in actions.events:
            getattr(log, event.level)(event.name.replace("_", " "), **event.fields)
        for session in tuple(self.sessions.values()):
            node = self.world.nodes.get(session.name)
            if node is None or not node.connected:  # silent until it was given up: only a registration brings it back
                self.attendance.part(session, "it has said nothing until it was taken for lost")
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
        """Models whose requests may wait, as of the last pass, each with how far it is now. As of the same pass as
        `endpoints`: a replica that was reported ready since then would be in neither, and who waits for it refused."""
        words = self.fleet.waking(self._now())
        return {name: words.get(name, said) for name, said in self._published.waking.items()}

    def why_not(self, model: str) -> str:
        """Why a model has no replica that serves, as half a sentence for clients; "" where there is nothing to say."""
        now = self._now()
        if now >= self._sentences_until:
            self._sentences = {**self.fleet.troubles(now), **self.fleet.waking(now)}
            self._sentences_until = now + SENTENCES_S
        return self._sentences.get(model, "")

    async def attend(self, link: Link, claim: Claim | None = None) -> None:
        """One agent's connection, from its registration to its end; the link is closed then. `claim` is what the
        connection proves, None for a link within the process."""
        await self.attendance.attend(link, claim)

    # -- operators -----------------------------------------------------------------------------------------------------

    async def cordon(self, node: str, by: str) -> bool:
        """Let nothing new go to `node`. False: it was cordoned before. Raises Refusal, StoreFailed."""
        self._check_in_charge()
        with _both():
            made = await self.store.cordon(node, by, self._wall())
            self.world.cordon(node)
            self.wake()
        return made

    async def uncordon(self, node: str, by: str) -> bool:
        """Undo a cordon and a drain. False: there was neither. Raises Refusal, StoreFailed."""
        self._check_in_charge()
        with _both():
            gone = await self.store.uncordon(node, by, self._wall())
            self.world.uncordon(node)
            self.wake()
        return gone

    async def drain(self, node: str, by: str) -> bool:
        """Cordon `node`, and have what runs there replaced elsewhere and stopped, over restarts. False: that was going
        on. Raises Refusal, StoreFailed."""
        self._check_in_charge()
        with _both():
            begun = await self.store.drain(node, by, self._wall())
            self.world.drain(node, self._now())
            self.wake()
        return begun

    async def scale(self, model: str, replicas: int | None, by: str) -> str:
        """Run so many replicas whatever the load and the limits of scaling, until the next start; None: by demand
        again. Raises Refusal.

        The store keeps no more of it than a line in the audit, and whoever stops a model because the disk is full must
        not be told to free some room first. So it is done, and where there can be no such line the log has it; why not
        is returned, "" where it was noted.
        """
        self._check_in_charge()
        if model not in self.fleet.models:
            raise Refusal(404, "model_not_found", f"{model[:100]} is no model with a profile")
        self.fleet.scale(model, replicas, self._now())
        self.wake()
        detail = "by demand" if replicas is None else f"{replicas} replica{'' if replicas == 1 else 's'}"
        try:
            with _both():
                await self.store.audit(by, "scale", model, detail, self._wall())
        except StoreFailed as failed:
            told = {"by": by, "action": "scale", "target": model, "detail": detail, "reason": str(failed)}
            log.error("an operator's word is not in the audit", **told)
            return str(failed)
        return ""

    def own(self, node: str) -> bool:
        """Whether `node` is the machine of this process, whose agent runs in it and has no certificate."""
        session = self.sessions.get(node)
        return session is not None and session.claim is None

    async def revoke(self, node: str, by: str) -> list[str]:
        """Take `node` out of the cluster: its certificates are revoked and its connection ends. The serials of those
        that were good until now. Raises Refusal, StoreFailed."""
        self._check_in_charge()
        if self.joining is None:
            raise Refusal(409, "no_root", "this control plane has no root, so it gave out no certificate: run ctl init")
        with _both():
            serials = await self.joining.revoke(node, by)
            self.attendance.revoked.update(serials)
            if not self.own(node):  # its agent is here and shows no certificate: only tokens for the name are gone
                self.attendance.forget(node)
        return serials

    def _check_in_charge(self) -> None:
        """Raises Refusal where this control plane has ended: what it would be told, nobody would do."""
        if self._ended:
            raise Refusal(503, "draining", "this router ends, or another process takes over from it: ask again")

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

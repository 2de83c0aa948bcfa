"""One agent's connection after its registration, until it ends.

    hold              the body: reads, and notices silence
    |- writer         what the outbox holds, and a beat where it holds nothing
    '- renewal        of the node's certificate, one at a time

Whoever wants it to end says why (`end`); the first word stands. What an agent says is taken into the world in the step
in which it arrives, and the loop is woken where that changed anything.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable

import attrs
import structlog
import trio

from appliance.control.claims import Claim
from appliance.control.logs import Logs
from appliance.control.outbox import Outbox
from appliance.facts import link as facts
from appliance.rules.fleet.sense import nonsense
from appliance.rules.fleet.world import World
from appliance.wire.link import CLOSE_S, Link, LinkClosed, Malformed, UnknownMessage, Unsendable

CLOCK_OFF_S = 30.0
"""A clock that differs by more is named: certificates begin and end by it, and reports carry times of day."""

RENEW_S = 60.0
"""Between two renewals on one connection; each is a row in the store."""

MOST_TROUBLES = 20
"""Complaints of one agent that are logged on one connection, and answers to what it says and we do not understand."""

log = structlog.get_logger("control")


@attrs.frozen
class Rhythm:
    """Each side says something every `beat_s` seconds, and gives the other up after `silence_s`."""

    beat_s: float
    silence_s: float

    @classmethod
    def of(cls, unreachable_after_s: float) -> Rhythm:
        """Four beats fit into the silence that makes a node unreachable. The connection is ended a little later: a node
        that is slow for once loses new work before it has to register again."""
        beat_s = min(unreachable_after_s / 4, 5.0)
        return cls(beat_s, unreachable_after_s + 2 * beat_s)


class Session:
    """Made in the step in which the agent registers. `hold` runs once; the link is its caller's to close.

    `wake` is called when the world has changed, `renew` signs a request for a node's name (None: there is no root).
    """

    def __init__(
        self,
        link: Link,
        register: facts.Register,
        claim: Claim | None,
        world: World,
        logs: Logs,
        rhythm: Rhythm,
        *,
        now: Callable[[], float],
        wall: Callable[[], float],
        wake: Callable[[], None],
        renew: Callable[[str, str], Awaitable[facts.Renewed]] | None,
    ) -> None:
        self.name = register.node
        self.boot_id = register.boot_id
        self.peer = link.peer
        self.claim = claim
        self.ended = ""
        self.outbox = Outbox()
        self._link = link
        self._world = world
        self._logs = logs
        self._rhythm = rhythm
        self._now = now
        self._wall = wall
        self._wake = wake
        self._renew = renew
        self._renewing = False
        self._renewed_at: float | None = None
        before = world.nodes.get(register.node)
        self._clock_off = before is not None and abs(before.clock_off_s) > CLOCK_OFF_S  # told on an earlier connection
        self._troubles = 0
        self._refusal: facts.Refused | None = None
        self._scope = trio.CancelScope()

    def say(self, message: facts.Down) -> None:
        """Have it sent. A node that reads so slowly that there is no room for it is cut off: what was decided for it is
        decided anew when it is back."""
        if not self.ended and not self.outbox.put(message):
            self.end(f"it does not read: {len(self.outbox)} messages wait for it")

    def end(self, reason: str, refusal: facts.Refused | None = None) -> None:
        """End it. With `refusal` that is the last message the agent gets."""
        if not self.ended:
            self.ended, self._refusal = reason, refusal
            self._scope.cancel()

    async def hold(self) -> None:
        """Until the connection is over; `ended` says why."""
        with self._scope:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(self._write, name=f"link of {self.name}: writer")
                await self._read(nursery)
                nursery.cancel_scope.cancel()
        if self._refusal is not None:
            with trio.move_on_after(CLOSE_S):
                await self._last_word(self._refusal)

    async def _last_word(self, refusal: facts.Refused) -> None:
        try:
            await self._link.send(refusal)
        except LinkClosed:
            return  # it has left already

    # -- down ----------------------------------------------------------------------------------------------------------

    async def _write(self) -> None:
        silence_s = self._rhythm.silence_s
        while True:
            message = await self.outbox.take(self._rhythm.beat_s) or facts.Beat(self._wall())
            with trio.move_on_after(silence_s) as bound:
                try:
                    await self._link.send(message)
                except LinkClosed as closed:
                    self.end(str(closed))
                    return
                except Unsendable as fault:
                    log.error("a message cannot be sent", node=self.name, reason=str(fault))
            if bound.cancelled_caught:
                self.end(f"it has read nothing for {silence_s:g} s")
                return

    # -- up ------------------------------------------------------------------------------------------------------------

    async def _read(self, nursery: trio.Nursery) -> None:
        silence_s = self._rhythm.silence_s
        while True:
            message: facts.Message | None = None
            with trio.move_on_after(silence_s) as bound:
                try:
                    message = await self._link.receive()
                except LinkClosed as closed:
                    return self.end(str(closed))
                except UnknownMessage as unknown:
                    self._not_understood(str(unknown))
                except Malformed as wrong:
                    reason = f"{self.name} has sent {wrong}"
                    return self.end(reason, facts.Refused("malformed", reason))
            if bound.cancelled_caught:
                return self.end(f"it has said nothing for {silence_s:g} s")
            changes = self._world.changes
            self._world.heard(self.name, self._now())
            if message is not None:
                if why := self._nonsense(message):
                    reason = f"{self.name} has sent a {type(message).__name__} by which {why}"
                    return self.end(reason, facts.Refused("malformed", reason))
                self._hear(message, nursery)
            if self._world.changes != changes:
                self._wake()

    def _nonsense(self, message: facts.Message) -> str:
        node = self._world.nodes.get(self.name)
        return nonsense(message, node.reports if node is not None else {})

    def _hear(self, message: facts.Message, nursery: trio.Nursery) -> None:
        world, now = self._world, self._now()
        match message:
            case facts.News(reports, gone):
                world.report(self.name, reports, gone, now)
            case facts.Look(inventory):
                world.looked(self.name, inventory, now)
            case facts.Beat(clock):
                self.compare_clocks(clock)
            case facts.LogLines():
                self._logs.arrived(self, message)
            case facts.Renew(csr):
                self._ask_renewal(csr, now, nursery)
            case facts.Trouble(text):
                self._troubles += 1
                if self._troubles <= MOST_TROUBLES:
                    log.warning("agent did not understand, or could not do it", node=self.name, reason=text[:500])
            case _:
                self._not_understood(f"{type(message).__name__} means nothing to a control plane that knows the agent")

    def _not_understood(self, why: str) -> None:
        self._troubles += 1
        if self._troubles <= MOST_TROUBLES:
            log.warning("agent said what is not understood", node=self.name, reason=why)
            self.say(facts.Trouble(why))

    def compare_clocks(self, clock: float) -> float:
        """How far the agent's clock is ahead of ours; told once when that is much, and once more when it is not."""
        ahead_s = clock - self._wall()
        off = abs(ahead_s) > CLOCK_OFF_S
        if off and not self._clock_off:
            direction = "ahead of" if ahead_s > 0 else "behind"
            log.warning(
                f"the clock of {self.name} is {abs(ahead_s):.0f} s {direction} the control plane's",
                node=self.name,
                next_step="set it, and have it kept (timedatectl, chrony): certificates begin and end by it",
            )
        elif self._clock_off and not off:
            log.info(f"the clock of {self.name} agrees with the control plane's again", node=self.name)
        self._clock_off = off
        if (node := self._world.nodes.get(self.name)) is not None:
            node.clock_off_s = ahead_s
        return ahead_s

    # -- renewal -------------------------------------------------------------------------------------------------------

    def _ask_renewal(self, csr: str, now: float, nursery: trio.Nursery) -> None:
        if self._renew is None or self.claim is None:
            self.say(facts.Renewed(reason="this link has no certificate that could be renewed"))
        elif self._renewing or (self._renewed_at is not None and now - self._renewed_at < RENEW_S):
            self.say(facts.Renewed(reason=f"a certificate is renewed once in {RENEW_S:g} s"))
        else:
            self._renewing, self._renewed_at = True, now
            nursery.start_soon(self._sign, self._renew, csr, name=f"link of {self.name}: renewal")

    async def _sign(self, renew: Callable[[str, str], Awaitable[facts.Renewed]], csr: str) -> None:
        try:
            self.say(await renew(self.name, csr))
        finally:
            self._renewing = False

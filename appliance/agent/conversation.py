"""One connection to the control plane, from the registration to its end.

    hold              the body: registers, hears welcome, then reads
    |- writer         says what changed since it was last said, and a beat where there is nothing to say
    |- renewal        asks for another certificate before ours ends
    '- readers of logs, one for each that was asked for

Nothing is queued for the peer but a few words about messages that were not understood. Reports and the inventory are
compared with what was said when the link can take a message, and logs are read as far as they were sent; so a peer that
reads slowly gets less and newer things, and one that does not read at all is given up after `silence_s`.

Commands are plain calls on the shards, which outlive this. All that can end it (silence, a broken link, a refusal) is
an `End`; helpers only say so and cancel, so nothing comes out of the nursery as a group.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import NoReturn, Protocol

import attrs
import structlog
import trio

from appliance.agent.credentials import Credentials, NoCertificate
from appliance.agent.following import Following
from appliance.agent.machine import Machine
from appliance.agent.said import Said
from appliance.facts import link as say
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.nursery.news import News
from appliance.wire.link import Link, LinkClosed, Malformed, UnknownMessage, Unsendable

WELCOME_S = 10.0
"""How long the control plane may take to answer the registration."""

SHORTEST_BEAT_S = 0.05
LONGEST_SILENCE_S = 600.0
"""Bounds of what a control plane may ask for."""

MOST_ANSWERS = 16
"""Answers to what was not understood, or not done, that wait to be sent; a peer that talks nonsense gets no more."""

MOST_LOGS = 8
LOG_LINES = 256
"""Readers of logs at one time, and lines in one message of theirs."""

LOG_LOOK_S = 0.5
"""Between two looks at a log that is followed. With `following.READ_BYTES` for each it bounds what one reader costs."""

RENEW_LOOK_S = 3600.0
"""Between two looks whether the certificate ends soon, and between two requests for another one."""

log = structlog.get_logger("link")


class Commands(Protocol):
    """What the control plane may do with the shards."""

    def start(self, shard: Shard) -> None: ...
    def stop(self, shard_id: str, *, drain_s: float = 0) -> None: ...
    def forget(self, shard_id: str) -> None: ...
    def reports(self) -> dict[str, Report]: ...
    async def log_lines(self, shard_id: str, n: int) -> list[str]: ...
    def follow_log(self, shard_id: str) -> Following: ...


@attrs.frozen
class Standing:
    """Who this agent is, as it registers; `boot_id` is new at each start."""

    node: str
    version: str
    boot_id: str
    port_range: tuple[int, int]


@attrs.frozen
class End:
    """How a connection ended. `welcomed`: the control plane had taken us on. `refused` is its word where it had not."""

    reason: str
    welcomed: bool = False
    refused: say.Refused | None = None


class Conversation:
    """Made for one link; `hold` runs once. `wake` is told whenever something changed that the peer may have to hear.

    `now` is the wall's clock. `welcomed` is called with the peer's Welcome and how far its clock is ahead of ours,
    `clock` with the latter at each beat. `credentials` None: there is no certificate to renew.
    """

    def __init__(
        self,
        link: Link,
        standing: Standing,
        shards: Commands,
        machine: Machine,
        wake: News,
        now: Callable[[], float],
        *,
        credentials: Credentials | None = None,
        welcomed: Callable[[say.Welcome], None] = lambda _: None,
        clock: Callable[[float], None] = lambda _: None,
    ) -> None:
        self._link = link
        self._standing = standing
        self._shards = shards
        self._machine = machine
        self._wake = wake
        self._now = now
        self._credentials = credentials
        self._welcomed = welcomed
        self._clock = clock
        self._beat_s = SHORTEST_BEAT_S
        self._silence_s = WELCOME_S
        self._said = Said(machine.inventory, {}, trio.current_time())
        self._answers: deque[say.Trouble | say.LogLines] = deque(maxlen=MOST_ANSWERS)
        self._request = ""
        self._logs: dict[str, trio.CancelScope] = {}
        self._sending = trio.Lock()
        self._scope = trio.CancelScope()
        self._end: End | None = None
        self._on = False

    async def hold(self) -> End:
        """Talk until it ends; how it did. The link is the caller's to close."""
        with self._scope:
            try:
                with trio.fail_after(WELCOME_S):
                    await self._register()
                    welcome = await self._hear_welcome()
            except trio.TooSlowError:
                return End(f"no answer to the registration within {WELCOME_S:g} s")
            except LinkClosed as closed:
                return End(f"it ended before an answer to the registration: {closed}")
            except (Malformed, UnknownMessage, Unsendable) as wrong:
                return End(f"registration: {wrong}")
            if isinstance(welcome, say.Refused):
                return End(welcome.message, refused=welcome)
            self._on = True
            self._silence_s = _within(welcome.silence_s, 2 * SHORTEST_BEAT_S, LONGEST_SILENCE_S)
            self._beat_s = _within(welcome.beat_s, SHORTEST_BEAT_S, self._silence_s / 2)
            self._welcomed(welcome)
            self._clock(welcome.clock - self._now())
            async with trio.open_nursery() as helpers:
                helpers.start_soon(self._write, name="link: writer")
                if self._credentials is not None:
                    helpers.start_soon(self._renew, self._credentials, name="link: renewal")
                await self._read(helpers)
        return self._end or End("it was ended", welcomed=self._on)

    def _end_with(self, reason: str, refused: say.Refused | None = None) -> None:
        """The first word stands."""
        if self._end is None:
            self._end = End(reason, welcomed=self._on, refused=refused)
        self._scope.cancel()

    # -- up ------------------------------------------------------------------------------------------------------------

    async def _register(self) -> None:
        """Everything, whatever was said on an earlier connection: the control plane may be another one by now."""
        inventory, reports, standing = self._machine.inventory, self._shards.reports(), self._standing
        self._said = Said(inventory, reports, trio.current_time())
        await self._link.send(
            say.Register(
                protocol=say.PROTOCOL,
                version=standing.version,
                node=standing.node,
                boot_id=standing.boot_id,
                clock=self._now(),
                inventory=inventory,
                port_range=standing.port_range,
                reports=tuple(reports.values()),
            )
        )

    async def _write(self) -> NoReturn:
        while True:
            message = self._next()
            if message is None:
                with trio.move_on_after(self._beat_s) as quiet:
                    await self._wake.wait()
                if not quiet.cancelled_caught:
                    continue
                message = self._next() or say.Beat(self._now())
            await self._send(message)

    def _next(self) -> say.Up | None:
        """What has to be said first. Without a checkpoint, or what changes meanwhile would be missed."""
        if self._answers:
            return self._answers.popleft()
        if news := self._said.news(self._shards.reports()):
            return news
        if look := self._said.look(self._machine.inventory, trio.current_time()):
            return look
        if self._request:
            csr, self._request = self._request, ""
            return say.Renew(csr)
        return None

    async def _send(self, message: say.Up) -> None:
        """One at a time, and none for longer than silence may last: a peer that does not read is as good as gone."""
        try:
            with trio.fail_after(self._silence_s):
                async with self._sending:
                    await self._link.send(message)
        except trio.TooSlowError:
            self._end_with(f"it has read nothing for {self._silence_s:g} s")
            await trio.sleep_forever()
        except LinkClosed as closed:
            self._end_with(str(closed))
            await trio.sleep_forever()
        except Unsendable as fault:
            log.error("a message cannot be sent", kind=type(message).__name__, reason=str(fault))

    # -- down ----------------------------------------------------------------------------------------------------------

    async def _hear_welcome(self) -> say.Welcome | say.Refused:
        while True:
            message = await self._link.receive()
            if isinstance(message, say.Welcome | say.Refused):
                return message
            if not isinstance(message, say.Beat):
                raise UnknownMessage(f"it was answered with {type(message).__name__}")

    async def _read(self, helpers: trio.Nursery) -> None:
        while True:
            try:
                with trio.fail_after(self._silence_s):
                    message = await self._link.receive()
            except trio.TooSlowError:
                self._end_with(f"it has said nothing for {self._silence_s:g} s")
                return
            except LinkClosed as closed:
                self._end_with(str(closed))
                return
            except UnknownMessage as unknown:
                self._complain(str(unknown))
            except Malformed as wrong:
                with trio.move_on_after(SHORTEST_BEAT_S):
                    await self._send(say.Trouble(str(wrong)))
                self._end_with(str(wrong))
                return
            else:
                self._heed(message, helpers)

    def _heed(self, message: say.Message, helpers: trio.Nursery) -> None:
        match message:
            case say.Beat():
                self._clock(message.clock - self._now())
            case say.Start():
                self._start(message.shard)
            case say.Stop():
                self._about(message.shard_id)
                log.info("told to stop", shard=message.shard_id, reason=message.reason, drain_s=message.drain_s)
                self._shards.stop(message.shard_id, drain_s=_within(message.drain_s, 0.0, math.inf))
            case say.Forget():
                self._about(message.shard_id)
                self._shards.forget(message.shard_id)
            case say.AskLog():
                self._ask(message, helpers)
            case say.EndLog():
                if scope := self._logs.pop(message.request, None):
                    scope.cancel()
            case say.Renewed():
                helpers.start_soon(self._take, message, name="link: new certificate")
            case say.Refused():
                self._end_with(message.message, message)
            case say.Trouble():
                log.warning("the control plane could not do what it was told", reason=message.message)
            case say.Welcome():
                self._complain("welcome was said already")
            case _:
                self._complain(f"{type(message).__name__} is not for an agent")

    def _start(self, shard: Shard) -> None:
        if shard.node and shard.node != self._standing.node:
            self._complain(f"{shard.id} is for node {shard.node}, and this is {self._standing.node}")
            return
        gpus = ",".join(shard.gpus) or "none"
        log.info("told to start", shard=shard.id, profile=shard.profile.name, gpus=gpus)
        self._shards.start(shard)

    def _about(self, shard_id: str) -> None:
        """A command about a shard that is not here is answered: otherwise the other side would go on waiting for it."""
        if shard_id not in self._shards.reports():
            self._said.deny(shard_id)
            self._wake.tell()

    def _complain(self, text: str) -> None:
        self._reply(say.Trouble(text))

    def _reply(self, answer: say.Trouble | say.LogLines) -> None:
        self._answers.append(answer)
        self._wake.tell()

    # -- logs ----------------------------------------------------------------------------------------------------------

    def _ask(self, ask: say.AskLog, helpers: trio.Nursery) -> None:
        if ask.request in self._logs:
            self._complain(f"log request {ask.request} runs already")
        elif len(self._logs) >= MOST_LOGS:
            self._reply(say.LogLines(ask.request, ended=True, reason=_TOO_MANY))
        else:
            self._logs[ask.request] = scope = trio.CancelScope()
            helpers.start_soon(self._answer, ask, scope, name=f"link: log of {ask.shard_id}")

    async def _answer(self, ask: say.AskLog, scope: trio.CancelScope) -> None:
        try:
            with scope:
                await self._send(say.LogLines(ask.request, ended=True, reason=await self._tell_log(ask)))
        finally:
            if self._logs.get(ask.request) is scope:
                del self._logs[ask.request]

    async def _tell_log(self, ask: say.AskLog) -> str:
        """Send what was asked for; why there is no more ("": that was all)."""
        try:
            if not ask.follow:
                await self._lines(ask.request, await self._shards.log_lines(ask.shard_id, ask.lines))
                return ""
            following = self._shards.follow_log(ask.shard_id)
        except KeyError:
            return f"there is no shard {ask.shard_id} on {self._standing.node}"
        await self._lines(ask.request, await trio.to_thread.run_sync(following.last, ask.lines))
        while True:
            report = self._shards.reports().get(ask.shard_id)
            lines = await trio.to_thread.run_sync(following.more)
            await self._lines(ask.request, lines)
            if not lines and report is None:
                return "the shard is gone"
            if not lines and report is not None and report.ended:
                return "the shard has failed" if report.state == "failed" else "the shard was stopped"
            await trio.sleep(LOG_LOOK_S)

    async def _lines(self, request: str, lines: list[str]) -> None:
        for first in range(0, len(lines), LOG_LINES):
            await self._send(say.LogLines(request, tuple(lines[first : first + LOG_LINES])))

    # -- the certificate -----------------------------------------------------------------------------------------------

    async def _renew(self, credentials: Credentials) -> NoReturn:
        while True:
            try:
                ours = await trio.to_thread.run_sync(credentials.read)
                if self._now() >= ours.renew_at():
                    self._request = await trio.to_thread.run_sync(credentials.request)
                    self._wake.tell()
            except NoCertificate as missing:
                log.error("the certificate cannot be renewed", reason=str(missing))
                ours = None
            left = max(0.0, ours.renew_at() - self._now()) if ours is not None else 0.0
            await trio.sleep(min(left, RENEW_LOOK_S) or RENEW_LOOK_S)

    async def _take(self, renewed: say.Renewed) -> None:
        if self._credentials is None or not renewed.certificate:
            log.error("the certificate was not renewed", reason=renewed.reason or "there is none to renew")
            return
        try:
            ours = await trio.to_thread.run_sync(self._credentials.renew, renewed.certificate)
        except NoCertificate as wrong:
            log.error("the new certificate is not taken", reason=str(wrong))
        else:
            log.info("certificate renewed, the next connection shows it", certificate=str(ours))


_TOO_MANY = f"{MOST_LOGS} logs are read on this node already; end one of them"


def _within(value: float, least: float, most: float) -> float:
    """`value` within bounds; one that is no number counts as the largest."""
    return most if math.isnan(value) else min(max(value, least), most)

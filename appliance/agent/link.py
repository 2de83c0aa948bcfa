"""The agent calls its control plane: again and again, for ever. Shards sit outside and notice nothing of it.

    keep
    '- connection     dial, then `conversation.py`; a scope of its own, closed with it
    then wait, as `redial.py` says

An operator hears of a trouble once, and once more when it is over: the reason of a failed call is logged when it is
another one than before. A refusal names what both sides go by: the certificate that was shown and the name that was
claimed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractAsyncContextManager
from random import Random
from typing import Any, NoReturn

import structlog
import trio

from appliance.agent.changes import Changes
from appliance.agent.conversation import Commands, Conversation, End, Standing
from appliance.agent.credentials import JOIN, Credentials, NoCertificate
from appliance.agent.machine import Machine
from appliance.agent.redial import Redial
from appliance.agent.status import Control
from appliance.facts.link import Welcome
from appliance.nursery.news import News
from appliance.wire.link import Link, LinkRefused

CLOCK_OFF_S = 30.0
"""A clock that differs by more is named: certificates and reports carry times of day."""

MOST_TOLD = 64
"""Reasons that are remembered as told: some hold numbers that are others each time."""

Dial = Callable[[], AbstractAsyncContextManager[Link]]
"""Opens one connection; raises LinkRefused, NoCertificate. It must bound itself, as `wire.calls.call` does."""

log = structlog.get_logger("link")


class Caller:
    """Made once; `keep` in a nursery, after the machine was looked at. `url` is how operators know the control plane,
    `credentials` what is shown to it (None within one process), `now` the wall's clock.

    `wake` is told by whoever changes reports or the inventory; `changed` is told when `line` is another one.
    """

    def __init__(
        self,
        url: str,
        dial: Dial,
        standing: Standing,
        shards: Commands,
        machine: Machine,
        rng: Random,
        now: Callable[[], float],
        *,
        credentials: Credentials | None = None,
    ) -> None:
        self.wake = News()
        self.changed = News()
        self.line = Control(url, False, now(), "not called yet")
        self.changes = Changes("link")
        self._url = url
        self._dial = dial
        self._standing = standing
        self._shards = shards
        self._machine = machine
        self._now = now
        self._credentials = credentials
        self._redial = Redial(rng)
        self._told: set[str] = set()
        self._clock_off = False
        self._welcomed_at = 0.0

    async def keep(self) -> NoReturn:
        """Have a connection for as long as this runs."""
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._tell_changes, name="link: changes of shards")
            while True:
                wait_s = await self._call()
                await trio.sleep(wait_s)

    async def _call(self) -> float:
        """One call from the dialling to its end; how long to wait before the next."""
        shown = await self._shown()
        try:
            async with self._dial() as link:
                end = await self._conversation(link).hold()
        except NoCertificate as missing:
            return self._refused("no_certificate", str(missing), shown)
        except LinkRefused as refused:
            return self._not_reached(refused, shown)
        except Exception as fault:
            # Whatever is wrong with this connection, the engines must not lose their agent over it.
            log.error("fault of the link", exc_info=fault)
            end = End(f"a fault of ours: {fault!r}", welcomed=self.line.connected)
        if end.refused is not None:
            return self._refused(end.refused.code, end.reason, shown)
        if not end.welcomed:
            return self._failed(end.reason)
        lasted_s = trio.current_time() - self._welcomed_at
        self._tell_line(False, end.reason)
        log.warning("control plane lost, engines go on", url=self._url, reason=end.reason, after_s=round(lasted_s, 1))
        return self._redial.lost(lasted_s)

    async def _shown(self) -> str:
        """What we are about to show, in words; why there is nothing to show."""
        if self._credentials is None:
            return ""
        try:
            return str(await trio.to_thread.run_sync(self._credentials.read))
        except NoCertificate as missing:
            return f"none ({missing})"

    def _conversation(self, link: Link) -> Conversation:
        return Conversation(
            link,
            self._standing,
            self._shards,
            self._machine,
            self.wake,
            self._now,
            credentials=self._credentials,
            welcomed=self._welcome,
            clock=self._compare_clocks,
        )

    # -- what came of it -----------------------------------------------------------------------------------------------

    def _welcome(self, welcome: Welcome) -> None:
        self._welcomed_at = trio.current_time()
        self._told.clear()
        self._tell_line(True)
        log.info("control plane answers", url=self._url, version=welcome.version, shards=len(self._shards.reports()))

    def _not_reached(self, refused: LinkRefused, shown: str) -> float:
        text = str(refused)
        if refused.by in ("tls", "http"):
            return self._refused(refused.by, text, shown)
        return self._failed(text)

    def _failed(self, reason: str) -> float:
        self._tell_line(False, reason)
        if self._is_new(reason):
            log.warning("control plane cannot be reached, engines go on", url=self._url, reason=reason)
        return self._redial.failed()

    def _refused(self, code: str, reason: str, shown: str) -> float:
        self._tell_line(False, reason)
        if self._is_new(f"{code}: {reason}"):
            known: dict[str, Any] = {"certificate": shown} if self._credentials is not None else {}
            log.error(
                "control plane refuses this agent, engines go on",
                url=self._url,
                code=code,
                reason=reason,
                **known,
                claim=self._standing.node,
                next_step=_NEXT_STEPS.get(code, _ASK),
            )
        return self._redial.refused()

    def _is_new(self, reason: str) -> bool:
        """Whether this was not told since the last welcome."""
        if reason in self._told:
            return False
        if len(self._told) >= MOST_TOLD:
            self._told.clear()
        self._told.add(reason)
        return True

    def _tell_line(self, connected: bool, reason: str = "") -> None:
        if (self.line.connected, self.line.reason) != (connected, reason):
            since = self.line.since if not connected and not self.line.connected else self._now()
            self.line = Control(self._url, connected, since, reason)
            self.changed.tell()

    def _compare_clocks(self, ahead_s: float) -> None:
        off = abs(ahead_s) > CLOCK_OFF_S
        if off and not self._clock_off:
            direction = "behind" if ahead_s > 0 else "ahead of"
            log.warning(
                f"the clock of this node is {abs(ahead_s):.0f} s {direction} the control plane's",
                next_step="set it, and have it kept (timedatectl, chrony): certificates begin and end by it",
            )
        elif self._clock_off and not off:
            log.info("the clock of this node agrees with the control plane's again")
        self._clock_off = off

    async def _tell_changes(self) -> NoReturn:
        while True:
            self.changes.tell(self._shards.reports())
            await self.wake.wait()


_ASK = "see what 'appliance ctl nodes' and the log of the control plane say about this node"
_NEXT_STEPS = {
    "no_certificate": JOIN,
    "wrong_name": f"set agent.node to the certificate's name, or {JOIN}",
    "revoked": f"if it may come back, {JOIN}",
    "unknown": f"if the control plane was set up anew, {JOIN}",
    "name_taken": "end the other agent, or give this one a name of its own (agent.node) and have it join",
    "protocol": "install the same version of appliance on both",
    "malformed": "install the same version of appliance on both",
    "tls": f"look at the clocks of both machines; if the control plane was set up anew, {JOIN}",
    "http": "look at agent.control_url: something else than a control plane may listen there",
}

"""The load of engines, read from their metrics: one task per endpoint that publishes any.

A sample goes to the table (for choosing) and, through `Gateway.sampled`, to whoever decides on entry. What an engine
breaks of its metric contract is told once when it starts and once when it clears; requests go on meanwhile.
"""

from __future__ import annotations

import time
from typing import NoReturn

import msgspec
import structlog
import trio

from ..nursery.sleeper import Cut, Sleeper
from ..rules.engines.metrics import Contract
from ..rules.scheduling.member import Member
from .fetch import fetch
from .service import Gateway
from .upstream import UpstreamFailed

LLAMACPP_LEAST_S = 2.5
"""llama.cpp looks for departed clients of non-streaming requests only after a second without any result, and a poll is
one: asked more often than that, it works for nobody until the end."""
PRESSED_S = 0.1
"""Seconds between two scrapes while requests wait for the endpoint: its next place is known that much sooner."""
WITHIN_S = 5.0
MOST_BYTES = 8 << 20

log = structlog.get_logger("endpoints")


class _Props(msgspec.Struct):
    total_slots: int = 0


async def scrape(gateway: Gateway, member: Member, sleeper: Sleeper, contract: Contract) -> NoReturn:
    """Read the endpoint's metrics for ever. The owner cancels it, and keeps `sleeper` among those swept."""
    silent = False
    slots_known = member.endpoint.engine != "llamacpp"
    while True:
        await trio.lowlevel.checkpoint_if_cancelled()  # its endpoint may be gone in the step that let it run
        every_s = interval_s(member.endpoint.engine, gateway.scrape_s, gateway.pressed(member))
        now = time.monotonic()
        try:
            status, text = await fetch(
                gateway.upstreams[member.id], sleeper, b"/metrics", within_s=WITHIN_S, bound=MOST_BYTES
            )
        except (UpstreamFailed, Cut):
            gateway.unheard(member)
            if not silent:
                silent = True
                log.info("endpoint does not answer its metrics page", endpoint=member.id)
        else:
            if silent:
                silent = False
                log.info("endpoint answers its metrics page again", endpoint=member.id)
            arrived = time.monotonic()
            verdict = contract.take(text, arrived) if status == 200 else contract.unavailable(status)
            if verdict.warning:
                log.warning(verdict.warning)
            if verdict.notice:
                log.info(verdict.notice)
            if verdict.restarted:
                slots_known = member.endpoint.engine != "llamacpp"
            if verdict.sample is not None:
                gateway.sampled(member, verdict.sample, gateway.scrape_s)
            else:
                gateway.unheard(member)
            if not slots_known:
                slots_known = await _ask_slots(gateway, member, sleeper)
        await _pause(gateway, member, now + every_s)


def interval_s(engine: str, configured_s: float, pressed: bool) -> float:
    """Seconds between two scrapes of an engine."""
    if engine == "llamacpp":
        return max(LLAMACPP_LEAST_S, configured_s)
    return min(PRESSED_S, configured_s) if pressed else configured_s


async def _pause(gateway: Gateway, member: Member, until: float) -> None:
    """Wait for the next turn. It comes early when requests begin to wait for the endpoint, so the wait is in steps."""
    quick = member.endpoint.engine != "llamacpp"
    while (left := until - time.monotonic()) > 0:
        if quick and gateway.pressed(member):
            left = min(left, PRESSED_S)
            await trio.sleep(left)
            return
        await trio.sleep(min(left, 2 * PRESSED_S) if quick else left)


async def _ask_slots(gateway: Gateway, member: Member, sleeper: Sleeper) -> bool:
    """llama.cpp tells its slots in `/props` only. True when it need not be asked again."""
    await trio.lowlevel.checkpoint_if_cancelled()
    try:
        status, body = await fetch(
            gateway.upstreams[member.id], sleeper, b"/props", within_s=WITHIN_S, bound=MOST_BYTES
        )
    except (UpstreamFailed, Cut):
        return False
    if status != 200:
        return status in (404, 501)
    try:
        slots = msgspec.json.decode(body, type=_Props).total_slots
    except (msgspec.MsgspecError, RecursionError):
        return True
    if slots > 0:
        gateway.told_capacity(member, slots)
    return True

"""What endpoints say of themselves: which models they serve, and (`scrape.py`) how loaded they are.

Two tasks per endpoint, ended when the endpoint goes. The answer of `/v1/models` matters twice: an endpoint without
`models` in its settings serves the names it reports, and `/v1/models` of the door shows the engine's own entries.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, NoReturn

import msgspec
import structlog
import trio

from ..nursery.sleeper import Cut, Sleeper
from ..rules.engines.metrics import Contract, scraped
from ..rules.scheduling.member import Member
from .fetch import fetch
from .scrape import scrape
from .service import Gateway
from .upstream import Upstream, UpstreamFailed

ASK_AGAIN_S = 1.0
"""Seconds between two questions while an endpoint has not answered."""
ASK_S = 10.0
"""Seconds between two questions afterwards."""
WITHIN_S = 5.0
MOST_BYTES = 4 << 20
LONGEST_NAME = 512
"""Names become labels of metrics, some fifty times each, and stand on operators' screens: longer ones, and those with
characters that are not printed, are passed over."""

log = structlog.get_logger("endpoints")


class Watches:
    """The watching tasks of all endpoints."""

    def __init__(self, gateway: Gateway, sleepers: set[Sleeper], nursery: trio.Nursery) -> None:
        self._gateway = gateway
        self._sleepers = sleepers
        self._nursery = nursery
        self._watched: dict[str, tuple[Member, Upstream, trio.CancelScope]] = {}

    def follow(self) -> None:
        """Watch exactly the endpoints of the table: call it after every change of settings. What has not changed keeps
        its tasks, and with them what they have learnt of the engine's counters."""
        members = self._gateway.table.members
        for identity, (member, upstream, scope) in list(self._watched.items()):
            if members.get(identity) is not member or self._gateway.upstreams[identity] is not upstream:
                scope.cancel()
                del self._watched[identity]
        for member in members.values():
            if member.id not in self._watched:
                scope = trio.CancelScope()
                self._watched[member.id] = (member, self._gateway.upstreams[member.id], scope)
                self._nursery.start_soon(self._watch, member, scope, name=f"endpoint {member.id}")

    async def _watch(self, member: Member, scope: trio.CancelScope) -> None:
        contract = Contract(member.endpoint.engine, member.id)
        with scope:
            # Its endpoint may be gone before this begins, and what is noted for it would stay for ever.
            await trio.lowlevel.checkpoint_if_cancelled()
            async with trio.open_nursery() as nursery:
                if not member.endpoint.announced:  # a group's are known from its probes
                    nursery.start_soon(self._with_sleeper, self._ask_for_ever, member, name=f"models of {member.id}")
                if scraped(member.endpoint.engine):
                    self._gateway.contracts[member.id] = contract
                    nursery.start_soon(self._with_sleeper, self._scrape, member, contract, name=f"load of {member.id}")

    async def _with_sleeper(self, work: Callable[..., Awaitable[NoReturn]], member: Member, *more: object) -> None:
        """Watch for ever. What an endpoint says may find a fault of ours, which then costs what is known of this
        endpoint and nothing else: requests go on, and it is asked again."""
        sleeper = Sleeper()
        self._sleepers.add(sleeper)
        told = ""
        try:
            while True:
                try:
                    await work(member, sleeper, *more)
                except Exception as fault:
                    if repr(fault) != told:
                        told = repr(fault)
                        log.exception("watching an endpoint failed inside the router", endpoint=member.id)
                    await trio.sleep(ASK_S)
        finally:
            self._sleepers.discard(sleeper)

    async def _scrape(self, member: Member, sleeper: Sleeper, contract: Contract) -> NoReturn:
        await scrape(self._gateway, member, sleeper, contract)

    async def _ask_for_ever(self, member: Member, sleeper: Sleeper) -> NoReturn:
        told = ""
        while True:
            # A cancelled task that was due to run anyway goes on to its next checkpoint, and its endpoint is gone.
            await trio.lowlevel.checkpoint_if_cancelled()
            trouble = await self._ask(member, sleeper)
            if trouble != told:
                if trouble:
                    log.warning("endpoint does not list its models", endpoint=member.id, reason=trouble)
                else:
                    log.info("endpoint lists its models again", endpoint=member.id)
                told = trouble
            await trio.sleep(ASK_AGAIN_S if trouble else ASK_S)

    async def _ask(self, member: Member, sleeper: Sleeper) -> str:
        """One question; what was wrong with the answer, "" for nothing."""
        gateway = self._gateway
        upstream = gateway.upstreams[member.id]
        never_heard = member.endpoint.models is None and member.heard is None
        try:
            status, body = await fetch(upstream, sleeper, b"/v1/models", within_s=WITHIN_S, bound=MOST_BYTES)
        except UpstreamFailed as failed:
            if never_heard:
                gateway.failing(member, "unreachable")
            return self._unanswered(member, upstream, failed.detail)
        except Cut:
            if never_heard:
                gateway.failing(member, "silent")
            return self._unanswered(member, upstream, f"no answer within {WITHIN_S:g} s")
        gateway.unanswered.pop(member.id, None)
        if status != 200:
            if never_heard:
                gateway.failing(member, "loading" if status == 503 else "without a list of models")
            return f"/v1/models answers {status}"
        entries = _entries(body)
        if entries is None:
            return "/v1/models is no list of models"
        gateway.failing(member, "")
        for name in gateway.heard(member, entries):
            log.warning("endpoint reports a name that is an alias here", endpoint=member.id, model=name)
        return ""

    def _unanswered(self, member: Member, upstream: Upstream, why: str) -> str:
        # An endpoint that has just been taken out fails its last question, and would stay noted for ever.
        if self._gateway.upstreams.get(member.id) is upstream:
            self._gateway.unanswered[member.id] = why
        return why


def _entries(body: bytes) -> dict[str, dict[str, Any]] | None:
    """The entries of a model list by id, None where it is none."""
    try:
        value = msgspec.json.decode(body)
    except (msgspec.MsgspecError, RecursionError):
        return None
    data = value.get("data") if isinstance(value, dict) else None
    if not isinstance(data, list):
        return None
    return {
        entry["id"]: entry
        for entry in data
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and _is_name(entry["id"])
    }


def _is_name(text: str) -> bool:
    return 0 < len(text) <= LONGEST_NAME and text.isprintable()

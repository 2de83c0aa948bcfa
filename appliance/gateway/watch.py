"""What endpoints say of themselves: which models they serve. One task per endpoint, ended when the endpoint goes.

The answer of `/v1/models` matters twice: an endpoint without `models` in its settings serves the names it reports, and
`/v1/models` of the door shows the engine's own entries.
"""

from __future__ import annotations

from typing import Any

import msgspec
import structlog
import trio

from ..nursery.sleeper import Cut, Sleeper
from ..rules.scheduling.member import Member
from .relay import fetch
from .service import Gateway
from .upstream import UpstreamFailed

ASK_AGAIN_S = 1.0
"""Seconds between two questions while an endpoint has not answered."""
ASK_S = 10.0
"""Seconds between two questions afterwards."""
WITHIN_S = 5.0
MOST_BYTES = 4 << 20

log = structlog.get_logger("endpoints")


class Watches:
    """The watching tasks of all endpoints."""

    def __init__(self, gateway: Gateway, sleepers: set[Sleeper], nursery: trio.Nursery) -> None:
        self._gateway = gateway
        self._sleepers = sleepers
        self._nursery = nursery
        self._scopes: dict[str, trio.CancelScope] = {}

    def follow(self) -> None:
        """Watch exactly the endpoints of the table: call it after every change of settings."""
        members = self._gateway.table.members
        for identity in list(self._scopes):
            self._scopes.pop(identity).cancel()
        for member in members.values():
            scope = self._scopes[member.id] = trio.CancelScope()
            self._nursery.start_soon(self._watch, member, scope, name=f"watch endpoint {member.id}")

    async def _watch(self, member: Member, scope: trio.CancelScope) -> None:
        sleeper = Sleeper()
        self._sleepers.add(sleeper)
        try:
            with scope:
                told = ""
                while True:
                    trouble = await self._ask(member, sleeper)
                    if trouble != told:
                        if trouble:
                            log.warning("endpoint does not list its models", endpoint=member.id, reason=trouble)
                        else:
                            log.info("endpoint lists its models again", endpoint=member.id)
                        told = trouble
                    await trio.sleep(ASK_AGAIN_S if trouble else ASK_S)
        finally:
            self._sleepers.discard(sleeper)

    async def _ask(self, member: Member, sleeper: Sleeper) -> str:
        """One question; what was wrong with the answer, "" for nothing."""
        gateway = self._gateway
        upstream = gateway.upstreams[member.id]
        never_heard = member.endpoint.models is None and member.heard is None
        try:
            status, body = await fetch(upstream, sleeper, b"/v1/models", within_s=WITHIN_S, bound=MOST_BYTES)
        except UpstreamFailed as failed:
            if never_heard:
                member.set_failing("unreachable")
            return failed.detail
        except Cut:
            if never_heard:
                member.set_failing("silent")
            return f"no answer within {WITHIN_S:g} s"
        if status != 200:
            if never_heard:
                member.set_failing("loading" if status == 503 else "without a list of models")
            return f"/v1/models answers {status}"
        entries = _entries(body)
        if entries is None:
            return "/v1/models is no list of models"
        member.set_failing("")
        gateway.listed[member.id] = entries
        for name in gateway.table.learn_names(member, entries):
            log.warning("endpoint reports a name that is an alias here", endpoint=member.id, model=name)
        return ""


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
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and entry["id"]
    }

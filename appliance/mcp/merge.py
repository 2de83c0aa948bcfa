"""All groups' tools in one list, and a call on its way to one of them.

The groups are asked side by side, each in a task of its own that outlives whoever asked for the list. A group that
hangs therefore costs the first list its bound, and the next ones only `FAILING_WAIT_S`, while its own task waits on.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Any

import attrs
import structlog
import trio

from ..facts.mcp import McpSettings, Source
from ..rules.mcp.naming import Dropped, Merged, NoRoute, Route, merge, route
from ..rules.mcp.translate import Asked
from . import native
from .conversation import Answered, Deliver
from .exchange import SessionLost, Trouble, Unreached
from .upstream import Upstream

FAILING_WAIT_S = 0.5
"""How long a list waits for a group whose last list failed. A healthy one answers well within."""

MOST_LIST_BYTES = 64 << 20
LEAST_LIST_BYTES = 64 << 10
"""Of all groups' lists together, and what each may have of it where there are many. Twenty tools with their schemas
take about 20 KiB."""

MOST_TOLD = 10
"""Tools whose names are taken that one list is told of by name."""

log = structlog.get_logger("mcp")

Sources = Callable[[], Sequence[Source]]
"""Every group that announces a tool server, healthy or not: one whose engine is loading or stuck is asked for most."""
Status = Callable[[], Mapping[str, Any]]
"""The status document, as /status.json gives it."""


@attrs.frozen
class Failed:
    """A call that the router could not bring to an end; `text` is for the model that made it."""

    text: str


@attrs.frozen(eq=False)
class Reading:
    """A list that is being read: first it is found out who is asked, `greeted`."""

    greeted: trio.Event = attrs.field(factory=trio.Event)
    done: trio.Event = attrs.field(factory=trio.Event)


@attrs.define(eq=False)
class Watched:
    """A group, its server, and when its list was last read. `trouble` says why it has none, "" while it has one."""

    upstream: Upstream
    read_at: float | None = None
    trouble: str = ""
    reading: Reading | None = None

    @property
    def group(self) -> str:
        return self.upstream.source.group


class Merge:
    """The merged tools of whatever `sources` names at the moment; made by `open_merge`."""

    def __init__(
        self,
        sources: Sources,
        status: Status,
        settings: McpSettings,
        client: Mapping[str, str],
        nursery: trio.Nursery,
    ) -> None:
        self.settings = settings
        self._sources = sources
        self._status = status
        self._client = client
        self._nursery = nursery
        self._watched: dict[Source, Watched] = {}
        self._merged: dict[bool, Merged] = {}
        """By whether it is for another router: that one gets nothing that we have from routers ourselves."""
        self._told_dropped: frozenset[Dropped] = frozenset()

    def configure(self, settings: McpSettings) -> None:
        """Take changed settings: calls and lists that are under way keep theirs."""
        self.settings = settings
        self._merged.clear()
        for one in self._watched.values():
            one.upstream.configure(settings)

    async def listing(self, *, to_router: bool = False) -> Sequence[Mapping[str, object]]:
        """The tools of all groups whose lists can be had in time, ours first. Fresh lists are not asked for again.
        `to_router`: another router asks. It is not waited for its own list while it waits for ours."""
        begun = trio.current_time()
        watched = self._follow()
        for one in watched:
            self._read(one)
        for one in watched:
            if one.reading is not None:
                bound = FAILING_WAIT_S if one.trouble else self.settings.list_timeout_s
                with trio.move_on_at(begun + bound):
                    reading = one.reading
                    await reading.greeted.wait()
                    if not (to_router and one.upstream.router):
                        await reading.done.wait()
        return self._tools(to_router).entries

    async def call(self, asked: Asked, name: str, deliver: Deliver) -> Answered | Failed | Mapping[str, object]:
        """Run the tool called `name`: its server's answer, why there is none, or the result of a tool of our own.
        What comes before the answer goes to `deliver`, with our number of the call."""
        found = await self._route(asked, name)
        if isinstance(found, NoRoute):
            return Failed(found.text)
        if found is None:
            return native.answer(name, self._status)
        watched = self._of(found.group)
        if watched is None:
            return Failed(f"Group {found.group} is gone. Groups: {', '.join(self._groups())}")
        limit_s = self.settings.call_timeout_s
        with trio.move_on_after(limit_s):
            try:
                return await watched.upstream.call(found, asked, deliver)
            except SessionLost as lost:
                return Failed(f"Group {found.group} did not run {found.tool}: {lost}. Call it again.")
            except Unreached as failed:
                return Failed(f"Group {found.group} did not answer: {failed}. Nothing was sent.")
            except Trouble as failed:
                return Failed(f"Group {found.group} gave no answer: {failed}. {found.tool} may have run all the same.")
        return Failed(
            f"Group {found.group} gave no answer within {limit_s:g} s. {found.tool} may have run all the same."
        )

    def rows(self) -> list[dict[str, object]]:
        """Each group's server as it is known now, for status pages. `tools` is their number, None while not known."""
        return [
            {
                "group": one.group,
                "url": one.upstream.source.url,
                "era": one.upstream.era,
                "tools": None if one.upstream.tools is None else len(one.upstream.tools),
                "error": one.trouble or None,
            }
            for one in self._follow()
        ]

    async def part(self) -> None:
        """End all sessions, side by side, within their bound. The last thing that is asked of a merge."""
        async with trio.open_nursery() as nursery:
            for one in self._watched.values():
                nursery.start_soon(_survived, one.upstream.part, ())
        self._watched.clear()

    # -- which groups there are ---------------------------------------------------------------------------------------

    def _follow(self) -> list[Watched]:
        """The groups of the moment in the order of their names. New ones get a server to talk to, and that of a group
        which is gone, or is announced elsewhere, is parted from."""
        wanted: dict[str, Source] = {}
        for source in self._sources():
            wanted.setdefault(source.group, source)
        kept = {wanted[group]: self._watched.get(wanted[group]) for group in sorted(wanted)}
        if list(kept) != list(self._watched):
            self._merged.clear()
            for source, one in self._watched.items():
                if source not in kept:
                    self._later(one.upstream.leave)
        self._watched = {source: one or self._new(source) for source, one in kept.items()}
        return list(self._watched.values())

    def _new(self, source: Source) -> Watched:
        return Watched(Upstream(source, self.settings, self._client, self._later))

    def _later(self, work: Callable[..., Any], *args: object) -> None:
        self._nursery.start_soon(_survived, work, args)

    def _groups(self) -> list[str]:
        return [one.group for one in self._follow()]

    def _of(self, group: str) -> Watched | None:
        return next((one for one in self._follow() if one.group == group), None)

    # -- lists --------------------------------------------------------------------------------------------------------

    def _read(self, one: Watched) -> None:
        """Have the group's list read, unless it is fresh or being read."""
        fresh = one.read_at is not None and trio.current_time() - one.read_at < self.settings.tools_ttl_s
        if not fresh and one.reading is None:
            one.reading = Reading()
            self._later(self._read_now, one, one.reading)

    async def _read_now(self, one: Watched, reading: Reading) -> None:
        bound, trouble = self.settings.list_timeout_s, ""
        try:
            with trio.move_on_after(bound) as limit:
                with suppress(Trouble):
                    await one.upstream.greet()  # what is wrong shows below
                reading.greeted.set()
                one.upstream.tools = tuple(await one.upstream.list_tools(self._share()))
                one.read_at = trio.current_time()
            if limit.cancelled_caught:
                trouble = f"no list of tools within {bound:g} s"
        except Trouble as failed:
            trouble = str(failed)
        except Exception as failed:
            log.exception("mcp_tools_fetch_failed", group=one.group)
            trouble = f"the router failed: {failed}"
        finally:
            one.reading = None
            reading.greeted.set()
            reading.done.set()
        if trouble:
            one.upstream.tools, one.read_at = None, None
            if not one.trouble:
                log.warning("mcp_tools_fetch_failed", group=one.group, url=one.upstream.source.url, reason=trouble)
        elif one.trouble:
            log.info("mcp_tools_fetched_again", group=one.group)
        one.trouble = trouble
        self._merged.clear()

    def _share(self) -> int:
        """What one group's list may take, so that all together stay within their bound however many there are."""
        return min(self.settings.max_body_bytes, max(LEAST_LIST_BYTES, MOST_LIST_BYTES // max(1, len(self._watched))))

    def _tools(self, to_router: bool) -> Merged:
        merged = self._merged.get(to_router)
        if merged is None:
            asked = [one for one in self._watched.values() if not (to_router and one.upstream.router)]
            lists = [(one.group, one.upstream.tools or ()) for one in asked]
            # That one may have an argument __group of its own to put in.
            naming = "prefix" if to_router else self.settings.naming
            merged = self._merged[to_router] = merge(lists, naming, native.TOOLS)
            if not to_router:
                self._tell_dropped(frozenset(merged.dropped))
        return merged

    def _tell_dropped(self, dropped: frozenset[Dropped]) -> None:
        new = sorted(dropped - self._told_dropped, key=lambda row: (row.group, row.tool))
        for row in new[:MOST_TOLD]:
            log.warning("mcp_tool_dropped", group=row.group, tool=row.tool, reason=row.reason)
        if len(new) > MOST_TOLD:
            log.warning("mcp_tools_dropped", more=len(new) - MOST_TOLD)
        self._told_dropped = dropped

    async def _route(self, asked: Asked, name: str) -> Route | NoRoute | None:
        """Where a call goes, None for a tool of our own. Lists are waited for only where the name says nothing without
        them, so that a hung group delays nobody's calls."""
        to_router = bool(asked.marks)
        watched = self._follow()
        arguments = asked.params.get("arguments")
        if name in self._tools(to_router).native:
            return None
        found = route(self._tools(to_router), self._groups(), name, arguments)
        if isinstance(found, NoRoute) and any(one.read_at is None for one in watched):
            await self.listing(to_router=to_router)
            return route(self._tools(to_router), self._groups(), name, arguments)
        one = self._of(found.group) if isinstance(found, Route) else None
        if one is not None and one.upstream.tools is None and not one.trouble and not asked.modern:
            # A modern server may want arguments repeated in headers, which only its list tells.
            self._read(one)
            if one.reading is not None:
                await one.reading.done.wait()
        return found


async def _survived(work: Callable[..., Any], args: tuple[object, ...]) -> None:
    """One group's trouble, of whatever kind, ends nobody else's tasks."""
    try:
        await work(*args)
    except Exception:
        log.exception("mcp_task_failed", task=work.__name__)


@asynccontextmanager
async def open_merge(
    sources: Sources, status: Status, settings: McpSettings, client: Mapping[str, str]
) -> AsyncIterator[Merge]:
    """A merge that works for as long as the block runs; at its end sessions are closed. `client` is how we name
    ourselves to tool servers: `name` and `version`."""
    async with trio.open_nursery() as nursery:
        merge_ = Merge(sources, status, settings, client, nursery)
        try:
            yield merge_
        finally:
            nursery.cancel_scope.cancel()
            with trio.CancelScope(shield=True):
                await merge_.part()  # bounded by itself

"""One tool server, spoken to in the era it speaks.

Which era that is shows in its answer to `server/discover`: only a modern server gives a list of versions with ours in
it. Everything else leads to the handshake. What was found is remembered, with the session where there is one, until the
server says something that does not fit (it was restarted, or replaced by another).

Servers that know no `initialize` either get bare requests: the routers this one takes the place of send nothing else,
so small servers exist that were only ever tried with those.

What may be done twice: asking for the era, shaking hands, listing tools. A call is sent once at most. Where it fails,
the caller is told, and the session is made anew for whatever comes next.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

import msgspec
import trio

from ..facts.mcp import McpSettings, Source
from ..rules.mcp import messages, protocol
from ..rules.mcp.naming import Route, Tool, tools_of
from ..rules.mcp.params import param_headers
from ..rules.mcp.translate import Asked, call_params, envelope
from ..wire import via
from .conversation import PARTING_S, Answered, Conversation, Deliver, Later, Session, ignored
from .exchange import Moved, SessionLost, Trouble, Unreached

PROBE_S = 3.0
"""How long a server may think about `server/discover` before it is taken for one that never heard of it."""
MOST_PAGES = 100
MOST_TOOLS = 10_000
MOST_COMMAS = 1_000_000
"""Of a list of tools: to make a list of five million empty ones takes half a second."""
FIELD_BYTES = 20
MOST_LIST_FIELDS = 200_000
"""A list may have one field in so many bytes, and so many at most: it is taken apart in one go, and fields take far
longer than bytes."""
_VERSION = re.compile(r"[0-9A-Za-z.-]{1,40}")
"""It goes into a header of every request, and into status pages."""


class Upstream(Conversation):
    """`client` names us to the server. Tasks that are nobody's go to `later`. `part` ends it."""

    def __init__(self, source: Source, settings: McpSettings, client: Mapping[str, str], later: Later) -> None:
        super().__init__(source, settings, client, later)
        self.tools: tuple[Tool, ...] | None = None
        """As last listed; None while they never were, or after a list failed."""
        self._greeting = trio.Lock()
        self._calls = 0
        self._rest = trio.Event()

    # -- what is asked of it ------------------------------------------------------------------------------------------

    async def greet(self) -> None:
        """Find out who it is, where that is not known yet. Raises Trouble; the caller sets the time."""
        await self._greeted()

    async def list_tools(self, most_bytes: int) -> list[Tool]:
        """All pages of its list, within `MOST_PAGES`, `MOST_TOOLS` and `most_bytes`. What does not fit a session of
        before is asked once more in a new one. Raises Trouble; the caller sets the time."""
        try:
            return await self._pages(most_bytes)
        except Unreached:
            raise
        except SessionLost:
            return await self._pages(most_bytes)
        except Trouble:
            self._forget()
            return await self._pages(most_bytes)

    async def call(self, route: Route, asked: Asked, deliver: Deliver) -> Answered:
        """Run a tool, or fail; nothing is sent a second time. Raises Trouble; the caller sets the time."""
        self._calls += 1
        try:
            return await self._call(route, asked, deliver)
        finally:
            self._calls -= 1
            if not self._calls:
                self._rest.set()

    async def _call(self, route: Route, asked: Asked, deliver: Deliver) -> Answered:
        await self._greeted()
        if asked.marks and self.router:
            raise Unreached("it is another router, which is asked nothing for a third one")
        modern = bool(self._modern)
        identity = next(self._ids)
        params = call_params(asked, route, modern=modern, token=identity, client=self._client)
        fields = {via.FIELD.decode(): via.value(asked.marks)}
        if modern:
            fields |= self._argument_fields(route, asked)
        return await self._ask(identity, "tools/call", params, deliver, route.tool, fields)

    async def leave(self) -> None:
        """Part when the calls that run have ended. A group that is told of no more may be there all the same: its
        daemon was started anew, and knows nobody yet."""
        try:
            while self._calls:
                self._rest = trio.Event()
                await self._rest.wait()
        finally:
            await self.part()

    async def part(self) -> None:
        """Say goodbye, within PARTING_S, and close all connections."""
        with trio.move_on_after(PARTING_S, shield=True):
            if self._session is not None:
                await self._end_session(self._session)
        with trio.CancelScope(shield=True):
            await self._http.aclose()  # closes sockets, and waits for nothing

    # -- greeting -----------------------------------------------------------------------------------------------------

    async def _greeted(self) -> None:
        async with self._greeting:
            if self._modern or self._session is not None:
                return
            with trio.move_on_after(self._settings.list_timeout_s) as limit:
                try:
                    await self._greet()
                except Moved as moved:  # from /mcp to /mcp/, mostly; calls are never redirected, so it is learnt here
                    self._url = moved.url
                    await self._greet()
        if limit.cancelled_caught:
            raise Trouble(f"no greeting within {self._settings.list_timeout_s:g} s")

    async def _greet(self) -> None:
        if self._modern is None and await self._is_modern():
            self._modern = True
        else:
            self._session = await self._shaken_hands()
            self._modern = False

    async def _is_modern(self) -> bool:
        """Raises Unreached where nobody answers: an outage says nothing about an era."""
        params = {"_meta": envelope(None, self._client)}
        with trio.move_on_after(PROBE_S):
            try:
                answer = await self._ask(next(self._ids), "server/discover", params, era=True)
            except (Unreached, Moved):
                raise
            except Trouble:
                return False
            versions = messages.value((answer.result or {}).get("supportedVersions"))
            return isinstance(versions, list) and protocol.MODERN in versions
        return False

    async def _shaken_hands(self) -> Session:
        params = {"protocolVersion": protocol.NEWEST_HANDSHAKE, "capabilities": {}, "clientInfo": self._client}
        identity = next(self._ids)
        body = messages.request(identity, "initialize", params)
        async with self._sent(body, {}) as answer:
            found = await self._found(answer, identity, ignored)
        if found.code == protocol.METHOD_NOT_FOUND:
            return Session("", "")
        version = messages.value((found.result or {}).get("protocolVersion"))
        if not isinstance(version, str) or not version:
            raise Trouble(f"initialize refused: {_shown(found)}")
        if not _VERSION.fullmatch(version):
            raise Trouble("initialize was answered with a version that is none")
        # Read from a welcome alone: some servers put a fresh session id on refusals too, and do not mean it.
        made = Session(answer.headers.get(protocol.SESSION_FIELD, ""), version)
        async with self._sent(messages.notification("notifications/initialized"), self._session_fields(made)):
            return made

    # -- listing ------------------------------------------------------------------------------------------------------

    async def _pages(self, most_bytes: int) -> list[Tool]:
        await self._greeted()
        tools: list[Tool] = []
        left = most_bytes
        fields_left = most_fields = min(MOST_LIST_FIELDS, most_bytes // FIELD_BYTES)
        seen: set[str] = set()
        cursor: str | None = None
        while True:
            params: dict[str, object] = {} if cursor is None else {"cursor": cursor}
            if self._modern:
                params["_meta"] = envelope(None, self._client)
            answer = await self._ask(next(self._ids), "tools/list", params or None, most_bytes=most_bytes)
            entries = _raws((answer.result or {}).get("tools"))
            if entries is None:
                raise Trouble(f"tools/list gave no tools: {_shown(answer)}")
            fields_left -= sum(bytes(entry).count(b":") for entry in entries)
            if fields_left < 0:
                raise Trouble(f"a list of tools of more than {most_fields} fields")
            left -= sum(len(bytes(entry)) for entry in entries)
            if left < 0:
                raise Trouble(f"a list of tools of more than {most_bytes} bytes")
            tools += tools_of(entries)
            cursor = messages.value((answer.result or {}).get("nextCursor"))
            # A cursor seen before leads round in a circle: servers exist that read none and always give one.
            if not isinstance(cursor, str) or cursor in seen or len(seen) + 1 >= MOST_PAGES or len(tools) > MOST_TOOLS:
                return tools[:MOST_TOOLS]
            seen.add(cursor)

    def _argument_fields(self, route: Route, asked: Asked) -> Mapping[str, str]:
        """Headers that repeat arguments: the client's own, or ours for a client that cannot know of them."""
        if asked.modern:
            return asked.param_fields
        entry = next((tool.entry for tool in self.tools or () if tool.name == route.tool), {})
        return param_headers(messages.value(entry.get("inputSchema")), messages.value(route.arguments))


def _raws(raw: msgspec.Raw | None) -> list[msgspec.Raw] | None:
    if raw is None:
        return None
    try:
        if bytes(raw).count(b",") > MOST_COMMAS:
            return None
        return msgspec.json.decode(raw, type=list[msgspec.Raw])[:MOST_TOOLS]
    except (msgspec.MsgspecError, RecursionError):
        return None


def _shown(answer: Answered) -> str:
    told = messages.value((messages.taken_apart(answer.error) or {}).get("message"))
    return f"HTTP {answer.status}{f', {told[:200]}' if isinstance(told, str) else ''}"

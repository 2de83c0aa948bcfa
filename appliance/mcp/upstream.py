"""One tool server, spoken to in the era it speaks.

Which era that is shows in its answer to `server/discover`: only a modern server gives a list of versions with ours in
it. Everything else leads to the handshake. What was found is remembered, with the session where there is one, until the
server says something that does not fit (it was restarted, or replaced by another).

Servers that know no `initialize` either get bare requests: the routers this one takes the place of send nothing else,
so small servers exist that were only ever tried with those.

What may be done twice: asking for the era, shaking hands, listing tools. A call is sent once at most. Where it fails,
the caller is told, and the session is made anew for whatever comes next.

A handshake session belongs to us and not to a client: all clients' calls share it, told apart by our own request ids.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

import attrs
import msgspec
import trio

from ..facts.mcp import McpSettings, Source
from ..rules.mcp import messages, protocol
from ..rules.mcp.messages import Fields, Message
from ..rules.mcp.naming import Route, Tool, tools_of
from ..rules.mcp.params import param_headers
from ..rules.mcp.translate import Asked, call_params, envelope
from ..wire import via
from .exchange import Exchange, Moved, SessionLost, Trouble, Unreached, exchange, open_client

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
MOST_REPLIES = 8
"""Questions of one server that are being answered. Each costs a request of ours, so further ones are passed over: they
are pings, and a server that asks so often knows that we are there."""
MOST_RESUMED = 20
"""Times that a stream which broke off is taken up again; the time of the whole call is bounded too."""
PARTING_S = 2.0
_MODERN_CODES = frozenset(
    (
        protocol.METHOD_NOT_FOUND,
        protocol.INVALID_PARAMS,
        protocol.HEADER_MISMATCH,
        protocol.MISSING_CAPABILITY,
    )
)

_VERSION = re.compile(r"[0-9A-Za-z.-]{1,40}")
"""It goes into a header of every request, and into status pages."""

Later = Callable[..., None]
"""Starts a task that outlives the present one."""
Deliver = Callable[[Message, int], Awaitable[None]]
"""Takes a notice that came before the answer, with our id of the request it belongs to."""


@attrs.define(eq=False)
class Session:
    """What the handshake agreed on; `id` "" with a server that keeps no sessions, `version` "" with one that knows no
    handshake. `running` requests are under way in it; one that is `left` is ended with the last of them, or clients
    whose calls a server cannot read would fill it with our sessions."""

    id: str
    version: str
    running: int = 0
    left: bool = False


@attrs.frozen
class Answered:
    """A server's own answer: a result, or a JSON-RPC error as it came, with the HTTP status."""

    status: int
    result: Fields | None = None
    error: msgspec.Raw | None = None

    @property
    def code(self) -> int:
        code = messages.value((messages.taken_apart(self.error) or {}).get("code"))
        return code if isinstance(code, int) else 0


class Upstream:
    """`client` names us to the server. Tasks that are nobody's go to `later`. `part` ends it."""

    def __init__(self, source: Source, settings: McpSettings, client: Mapping[str, str], later: Later) -> None:
        self.source = source
        self.tools: tuple[Tool, ...] | None = None
        """As last listed; None while they never were, or after a list failed."""
        self.router = False
        """Whether another router of this kind has answered last: its tools are not offered to a third one."""
        self._settings = settings
        self._client = client
        self._later = later
        self._http = open_client(source.url)
        self._url = source.url
        self._ids = itertools.count(1)
        self._greeting = trio.Lock()
        self._modern: bool | None = None
        self._session: Session | None = None
        self._replying = 0
        self._calls = 0
        self._rest = trio.Event()

    def configure(self, settings: McpSettings) -> None:
        self._settings = settings

    @property
    def era(self) -> str:
        """For operators: the version that is spoken with it, "bare" for none, "unknown" before the first greeting."""
        if self._modern:
            return protocol.MODERN
        return (self._session.version or "bare") if self._session is not None else "unknown"

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
            found = await self._found(answer, identity, _ignored)
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

    def _forget(self) -> None:
        """The next request asks for the era and greets anew. The session is ended when nothing runs in it any more."""
        session, self._modern, self._session = self._session, None, None
        if session is not None:
            session.left = True
            self._end_if_idle(session)

    def _doubt(self, session: Session | None) -> None:
        """What came does not fit what is known of the server, unless that has been learnt anew meanwhile."""
        if session is None or session is self._session:
            self._forget()

    def _end_if_idle(self, session: Session) -> None:
        if session.left and not session.running:
            self._later(self._end_session, session)

    async def _end_session(self, session: Session) -> None:
        if not session.id:
            return
        with trio.move_on_after(PARTING_S):
            try:
                headers = self._headers(self._session_fields(session))
                async with exchange(self._http, "DELETE", self._url, headers, b"", self._settings.max_body_bytes):
                    pass
            except Trouble:
                return  # gone already, or it will time out there

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

    # -- one request --------------------------------------------------------------------------------------------------

    async def _ask(
        self,
        identity: int,
        method: str,
        params: Mapping[str, object] | None,
        deliver: Deliver | None = None,
        name: str = "",
        more: Mapping[str, str] | None = None,
        era: bool = False,
        most_bytes: int = 0,
    ) -> Answered:
        """Send a request once and wait for its answer. `era`: in the modern form whatever is known of the server.
        `most_bytes` bounds the answer, 0: as the settings say."""
        modern = era or bool(self._modern)
        session = None if modern else self._session
        fields = self._modern_fields(method, name) if modern else self._session_fields(session)
        status = 0
        if session is not None:
            session.running += 1
        try:
            body = messages.request(identity, method, params)
            async with self._sent(body, {**fields, **(more or {})}, most_bytes) as answer:
                status = answer.status
                found = await self._found(answer, identity, deliver or _ignored, session)
        except trio.Cancelled:
            if session is not None:
                # Closing the stream cancels in the modern era alone; before, servers go on unless they are told.
                self._later(self._withdraw, identity, session)
            raise
        except SessionLost:
            if self._session is session:  # else a later request has made a new one already
                self._session = None
            raise
        except Trouble:
            if status >= 300 and not era:
                self._doubt(session)
            raise
        finally:
            if session is not None:
                session.running -= 1
                self._end_if_idle(session)
        if found.status >= 400 and not era and not (modern and found.code in _MODERN_CODES):
            self._doubt(session)  # no server says so to what it understands
        return found

    async def _found(
        self, answer: Exchange, identity: int, deliver: Deliver, session: Session | None = None
    ) -> Answered:
        """The answer to `identity`; what comes before it is handed over, or answered where the server asks us."""
        if answer.status == 200:
            self.router = bool(via.marks([answer.headers.get(via.FIELD.decode(), "")]))
        if answer.status == 404 and session is not None and session.id:
            raise SessionLost("the tool server does not know our session; it was restarted")
        if answer.status in (401, 403):
            raise Trouble(f"the tool server refuses us (HTTP {answer.status})")
        if answer.moved_to:
            raise Moved(answer.moved_to)
        if 300 <= answer.status < 400:
            raise Trouble(f"the tool server redirects (HTTP {answer.status})")
        while (message := await answer.next()) is not None:
            if message.is_request:
                if self._replying < MOST_REPLIES:
                    self._replying += 1
                    self._later(self._reply_to, message, session)
            elif not message.is_answer:
                await deliver(message, identity)
            elif message.id == identity or (message.error is not None and answer.status >= 400):
                return _answered(answer.status, message)
        if session is None or not answer.last_event:
            raise Trouble(f"the answer (HTTP {answer.status}) ended without a result")
        return await self._resumed(answer, identity, deliver, session)

    async def _resumed(self, broken: Exchange, identity: int, deliver: Deliver, session: Session) -> Answered:
        """Take a stream up again that its server closed on purpose: it names its events, and keeps what follows. This
        asks for the rest of an answer, and runs nothing again."""
        last, retry_s = broken.last_event, broken.retry_s
        for _ in range(MOST_RESUMED):
            await trio.sleep(retry_s)
            headers = self._headers({**self._session_fields(session), "last-event-id": last})
            most = self._settings.max_body_bytes
            async with exchange(self._http, "GET", self._url, headers, b"", most) as answer:
                if answer.status != 200 or not answer.streams:
                    raise Trouble(f"the answer broke off, and its rest is not to be had (HTTP {answer.status})")
                while (message := await answer.next()) is not None:
                    if message.is_answer and message.id == identity:
                        return _answered(answer.status, message)
                    if not message.is_answer and not message.is_request:
                        await deliver(message, identity)
                last, retry_s = answer.last_event or last, answer.retry_s
        raise Trouble("the answer broke off too often")

    async def _reply_to(self, asked: Message, session: Session | None) -> None:
        """Servers may ask whether we are there; everything else needs a client's own answer, and we said we have no
        such abilities."""
        if asked.method == "ping":
            body = messages.result(asked.id, {})
        else:
            body = messages.error(asked.id, protocol.METHOD_NOT_FOUND, f"{asked.method} is not answered here")
        try:
            await self._told(body, session)
        finally:
            self._replying -= 1

    async def _withdraw(self, identity: int, session: Session) -> None:
        body = messages.notification("notifications/cancelled", {"requestId": identity, "reason": "the client left"})
        await self._told(body, session)

    async def _told(self, body: bytes, session: Session | None) -> None:
        with trio.move_on_after(PARTING_S):
            try:
                async with self._sent(body, self._session_fields(session)):
                    pass
            except Trouble:
                return  # nobody waits for this

    # -- head ---------------------------------------------------------------------------------------------------------

    def _sent(self, body: bytes, fields: Mapping[str, str], most: int = 0) -> AbstractAsyncContextManager[Exchange]:
        most = most or self._settings.max_body_bytes
        return exchange(self._http, "POST", self._url, self._headers(fields), body, most)

    def _headers(self, fields: Mapping[str, str]) -> dict[str, str]:
        # Host is the server's own and there is no Origin, by construction: servers on loopback refuse foreign ones.
        return {
            "content-type": "application/json",
            "accept": "application/json, text/event-stream",
            "user-agent": self._client["name"],
            via.FIELD.decode(): via.value(),
            **dict(self.source.headers),
            **fields,
        }

    def _session_fields(self, session: Session | None) -> dict[str, str]:
        fields = {}
        if session is not None and session.version:
            fields[protocol.VERSION_FIELD] = session.version
        if session is not None and session.id:
            fields[protocol.SESSION_FIELD] = session.id
        return fields

    def _modern_fields(self, method: str, name: str) -> dict[str, str]:
        fields = {protocol.VERSION_FIELD: protocol.MODERN, protocol.METHOD_FIELD: method}
        if name:
            fields[protocol.NAME_FIELD] = protocol.header_value(name)
        return fields

    def _argument_fields(self, route: Route, asked: Asked) -> Mapping[str, str]:
        """Headers that repeat arguments: the client's own, or ours for a client that cannot know of them."""
        if asked.modern:
            return asked.param_fields
        entry = next((tool.entry for tool in self.tools or () if tool.name == route.tool), {})
        return param_headers(messages.value(entry.get("inputSchema")), messages.value(route.arguments))


def _answered(status: int, message: Message) -> Answered:
    """Raises Trouble for what clients could make nothing of: a result that is no object, an error without its code."""
    result, error = messages.taken_apart(message.result), messages.taken_apart(message.error)
    if result is None:
        code = messages.value((error or {}).get("code"))
        if not isinstance(code, int) or not isinstance(messages.value((error or {}).get("message")), str):
            raise Trouble(f"an answer (HTTP {status}) with neither a result nor an error")
    return Answered(status, result, message.error)


async def _ignored(message: Message, identity: int) -> None:
    """Nobody asked to hear of it."""


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

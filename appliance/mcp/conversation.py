"""One tool server and what is agreed with it: requests that are sent once each, and the session they are sent in.

A handshake session belongs to us and not to a client: all clients' calls share it, told apart by our own request ids.
What fits nothing that is known of the server makes us doubt that, so that the next request begins anew.
"""

from __future__ import annotations

import itertools
from collections.abc import Awaitable, Callable, Mapping
from contextlib import AbstractAsyncContextManager

import attrs
import msgspec
import trio

from ..facts.mcp import McpSettings, Source
from ..rules.mcp import messages, protocol
from ..rules.mcp.messages import Fields, Message
from ..wire import via
from .exchange import Exchange, Moved, SessionLost, Trouble, exchange, open_client

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


class Conversation:
    """`client` names us to the server. Tasks that are nobody's go to `later`."""

    def __init__(self, source: Source, settings: McpSettings, client: Mapping[str, str], later: Later) -> None:
        self.source = source
        self.router = False
        """Whether another router of this kind has answered last: its tools are not offered to a third one."""
        self._settings = settings
        self._client = client
        self._later = later
        self._http = open_client(source.url)
        self._url = source.url
        self._ids = itertools.count(1)
        self._modern: bool | None = None
        self._session: Session | None = None
        self._replying = 0

    def configure(self, settings: McpSettings) -> None:
        self._settings = settings

    @property
    def era(self) -> str:
        """For operators: the version that is spoken with it, "bare" for none, "unknown" before the first greeting."""
        if self._modern:
            return protocol.MODERN
        return (self._session.version or "bare") if self._session is not None else "unknown"

    # -- the session --------------------------------------------------------------------------------------------------

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
                found = await self._found(answer, identity, deliver or ignored, session)
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


def _answered(status: int, message: Message) -> Answered:
    """Raises Trouble for what clients could make nothing of: a result that is no object, an error without its code."""
    result, error = messages.taken_apart(message.result), messages.taken_apart(message.error)
    if result is None:
        code = messages.value((error or {}).get("code"))
        if not isinstance(code, int) or not isinstance(messages.value((error or {}).get("message")), str):
            raise Trouble(f"an answer (HTTP {status}) with neither a result nor an error")
    return Answered(status, result, message.error)


async def ignored(message: Message, identity: int) -> None:
    """Nobody asked to hear of it."""

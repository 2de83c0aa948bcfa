"""One HTTP request to a tool server, and the messages that come back: one in JSON, or several as events.

httpx and not the relay of the request road: these are few and small, and their servers need redirects, TLS and header
handling as clients of every kind do it.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager

import httpx
import trio

from ..rules.mcp.events import Events, EventTooLarge
from ..rules.mcp.messages import Message, NotMessage, read, read_all

MOST_CONNECTIONS = 100
"""To one tool server. A call that finds none free waits within its own time, and delays no other group."""
MOST_IDLE = 8
"""Of those that are kept for the next request. What a burst leaves behind is closed at once: idle ones are otherwise
looked after with the next request alone, whenever that comes."""
IDLE_S = 3.0
"""How long an idle connection is kept: below the 5 s after which common servers close theirs, since a call that meets a
closing connection fails and is never sent again."""
SHOWN_BYTES = 200


class Trouble(Exception):
    """A tool server gave no answer that means anything; the text says what happened instead, in letters that can be
    shown: some of them may be the server's own."""

    def __init__(self, text: str) -> None:
        super().__init__("".join(letter if letter.isprintable() else " " for letter in text))


class Unreached(Trouble):
    """No connection, so nothing has been sent."""


class Moved(Trouble):
    """The server names another path of its own; `url` is that one."""

    def __init__(self, url: str) -> None:
        super().__init__("the tool server redirects to another path")  # callers are told no addresses
        self.url = url


class SessionLost(Trouble):
    """The server does not know our session (any more), so it has done nothing."""


def open_client(url: str) -> httpx.AsyncClient:
    """The connections to one tool server. The environment's proxies are not used: groups are on our own network."""
    secure = url.lower().startswith("https:")
    return httpx.AsyncClient(
        verify=ssl.create_default_context() if secure else False,  # making a context takes 20 ms; plain HTTP needs none
        trust_env=False,
        timeout=None,  # every use has a deadline of its own
        limits=httpx.Limits(
            max_connections=MOST_CONNECTIONS, max_keepalive_connections=MOST_IDLE, keepalive_expiry=IDLE_S
        ),
    )


class Exchange:
    """An answer that has begun. `last_event` names the event after which a broken stream could be taken up again."""

    def __init__(self, response: httpx.Response, most_bytes: int) -> None:
        self.status = response.status_code
        self.headers: Mapping[str, str] = response.headers
        self.streams = response.headers.get("content-type", "").partition(";")[0].strip().lower() == "text/event-stream"
        self.moved_to = _within_origin(response) if response.has_redirect_location else ""
        self.packed = response.headers.get("content-encoding", "identity").strip().lower() not in ("", "identity")
        self.last_event = ""
        self.retry_s = 1.0
        self._bytes = response.aiter_raw()
        self._most_bytes = most_bytes
        self._events = Events(most_bytes) if self.streams else None
        self._ready: deque[Message] = deque()
        self._ended = False

    async def drop(self) -> None:
        """Leave what is still to come. A generator that is merely let go is finished by the garbage collector, at any
        time and in another task; a cancelled read ends all of httpx's own at once, and closes the connection."""
        with trio.CancelScope() as scope:
            scope.cancel()
            while not self._ended:
                self._ended = await anext(self._bytes, None) is None

    async def next(self) -> Message | None:
        """The next message, None after the last. Raises Trouble; of httpx what `exchange` turns into it."""
        if self.packed:
            raise Trouble("a compressed answer, though none was asked for")
        while not self._ready and not self._ended:
            if self._events is None:
                self._ready.extend(self._messages(await self._whole()))
                self._ended = True
                break
            piece = await anext(self._bytes, None)
            if piece is None:
                self._ended = True
            else:
                self._take(self._events, piece)
        return self._ready.popleft() if self._ready else None

    def _take(self, events: Events, piece: bytes) -> None:
        try:
            for event in events.feed(piece):
                self.last_event = event.id or self.last_event
                if event.retry_ms is not None:
                    self.retry_s = event.retry_ms / 1000
                if event.data and event.type == "message":
                    self._ready.append(read(event.data))
        except EventTooLarge as large:
            raise Trouble(str(large)) from None
        except NotMessage as wrong:
            raise Trouble(f"an event that is no message: {wrong}") from None

    async def _whole(self) -> bytes:
        body = bytearray()
        async for piece in self._bytes:
            body += piece
            if len(body) > self._most_bytes:
                raise Trouble(f"an answer of more than {self._most_bytes} bytes")
        return bytes(body)

    def _messages(self, body: bytes) -> list[Message]:
        try:
            return read_all(body) if body else []
        except NotMessage:
            shown = body[:SHOWN_BYTES].decode("utf-8", "replace").strip()
            raise Trouble(f"HTTP {self.status} without a message: {shown}") from None


@asynccontextmanager
async def exchange(
    client: httpx.AsyncClient, method: str, url: str, headers: Mapping[str, str], body: bytes, most_bytes: int
) -> AsyncIterator[Exchange]:
    """Send one request, once. Leaving early closes its connection. Raises Trouble."""
    # No compression: a bound on bytes is one on memory only where nothing grows while it is unpacked.
    fields = {"accept-encoding": "identity", **headers}
    try:
        async with client.stream(method, url, headers=fields, content=body or None) as response:
            answer = Exchange(response, most_bytes)
            try:
                yield answer
            finally:
                await answer.drop()
    except (httpx.ConnectError, httpx.UnsupportedProtocol, httpx.InvalidURL) as error:
        raise Unreached(f"no connection: {error}") from None
    except UnicodeEncodeError as error:
        raise Unreached(f"a header that is not ASCII: {error}") from None
    except httpx.HTTPError as error:
        raise Trouble(f"connection lost: {error or type(error).__name__}") from None


def _within_origin(response: httpx.Response) -> str:
    """Where a 307 or 308 leads, "" for other redirects and for other origins: our headers are for this one alone."""
    here = response.request.url
    try:
        there = here.join(response.headers["location"])
    except httpx.InvalidURL:
        return ""
    same = (here.scheme, here.host, here.port) == (there.scheme, there.host, there.port)
    return str(there) if same and response.status_code in (307, 308) else ""

"""Connections to one endpoint.

Idle ones are kept, last in first out, and watched by the poller: one that the engine closes leaves the pool at that
moment. The race that remains (closed while our request was on its way) shows as a reset or an end without a byte on a
`reused` connection; the service sends such a request once more on a fresh one.
"""

from __future__ import annotations

import contextlib
import functools
import socket
import ssl
import time

import trio

from ..facts.endpoint import Endpoint
from ..nursery.sleeper import Sleeper
from ..wire import head, tls
from ..wire.head import ResponseHead
from ..wire.line import Line, Poller, keep_alive_probes

IDLE_S = 4.0
"""How long an idle connection may be used again. uvicorn, under vLLM and SGLang, closes after 5 s."""
ADDRESS_S = 30.0
"""How long the answer of a name look-up is believed."""
KEY_S = 1.0
"""How long an endpoint's key is kept before its file is read again: a rotated key is seen within this time, and a busy
endpoint does not read a file for every request."""


class UpstreamFailed(Exception):
    """An exchange with an endpoint broke.

    `kind` is "refused" (no connection), "reset" (broken off), "closed" (ended before its end) or "garbage" (not HTTP).
    `sent` tells whether the whole request had been handed over, `answered` whether a byte had come back, `reused`
    whether the connection had served before.
    """

    def __init__(
        self, kind: str, detail: str, *, sent: bool = False, answered: bool = False, reused: bool = False
    ) -> None:
        super().__init__(detail)
        self.kind = kind
        self.detail = detail
        self.sent = sent
        self.answered = answered
        self.reused = reused


class Upstream:
    """The connection pool of an endpoint. `close` ends the idle connections; busy ones belong to their exchanges."""

    def __init__(self, endpoint: Endpoint, poller: Poller, context: ssl.SSLContext | None = None) -> None:
        self.endpoint = endpoint
        self.closed = False
        self._poller = poller
        self._context = context
        self._idle: list[tuple[float, Line]] = []
        self._addresses: list[tuple[int, tuple[object, ...]]] = []
        self._addresses_until = 0.0
        self._key = b""
        self._key_until = 0.0
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        default = 443 if endpoint.tls else 80
        self._host_field = (
            b"host: " + (host if endpoint.port == default else f"{host}:{endpoint.port}").encode() + b"\r\n"
        )
        self._base = endpoint.base.encode()

    # -- connections -----------------------------------------------------------------------------------------------

    def take(self, sleeper: Sleeper, now: float) -> Line | None:
        """An idle connection for the task of `sleeper`, or None: then `dial`."""
        idle = self._idle
        while idle:
            since, line = idle.pop()
            if line.hung_up or now - since > IDLE_S:
                line.close()
                continue
            line.on_news = None
            line.sleeper = sleeper
            return line
        return None

    def give_back(self, line: Line, now: float) -> None:
        """Keep a connection whose exchange ended cleanly."""
        if self.closed or line.hung_up:
            line.close()
            return
        line.sleeper = None
        line.on_news = functools.partial(self._idle_news, line)
        self._idle.append((now, line))

    async def dial(self, sleeper: Sleeper) -> Line:
        """A new connection. The caller has armed its deadline. Raises UpstreamFailed("refused"), or a cut."""
        try:
            addresses = await self._look_up()
        except OSError as error:
            raise UpstreamFailed("refused", f"cannot find the address of {self.endpoint.host}: {error}") from None
        failure: Exception | None = None
        for family, address in addresses:
            sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                keep_alive_probes(sock)
                with contextlib.suppress(BlockingIOError):
                    sock.connect(address)
            except OSError as error:
                sock.close()
                failure = error
                continue
            line = self._line(sock, sleeper)
            try:
                await line.connected()
                if isinstance(line, tls.TlsLine):
                    await line.handshake()
            except (OSError, ssl.SSLError) as error:
                line.abort()
                failure = error
                continue
            except BaseException:
                line.abort()
                raise
            return line
        reason = getattr(failure, "strerror", None) or str(failure)
        raise UpstreamFailed("refused", f"cannot connect to {self.endpoint.url}: {reason}")

    def drop_stale(self, now: float) -> None:
        """Close what has been idle for too long; called by the sweeper, so that engines are not left holding
        sockets.
        """
        idle = self._idle
        while idle and now - idle[0][0] > IDLE_S:
            idle.pop(0)[1].close()

    def close(self) -> None:
        self.closed = True
        while self._idle:
            self._idle.pop()[1].close()

    def _line(self, sock: socket.socket, sleeper: Sleeper) -> Line:
        if self.endpoint.tls:
            assert self._context is not None, "a TLS endpoint needs a context"
            return tls.TlsLine(
                sock, self._poller, self._context, sleeper, server_side=False, server_hostname=self.endpoint.host
            )
        return Line(sock, self._poller, sleeper)

    def _idle_news(self, line: Line) -> None:
        """An idle connection spoke or ended. A late report of bytes already read finds nothing and means nothing."""
        try:
            if line.try_recv() is None:
                return
        except OSError:
            line.hung_up = True
        with contextlib.suppress(ValueError):
            self._idle.remove(next(entry for entry in self._idle if entry[1] is line))
        line.close()

    async def _look_up(self) -> list[tuple[int, tuple[object, ...]]]:
        """Addresses to try in order. Numeric ones need no look-up; names are asked for again after ADDRESS_S."""
        now = time.monotonic()
        if now >= self._addresses_until:
            found = await trio.socket.getaddrinfo(self.endpoint.host, self.endpoint.port, type=socket.SOCK_STREAM)
            self._addresses = [(family, address) for family, _, _, _, address in found]
            self._addresses_until = now + ADDRESS_S
        return self._addresses

    # -- the request -------------------------------------------------------------------------------------------------

    def request_head(self, method: bytes, target: bytes, fields: bytes, length: int, now: float) -> bytes:
        """The head of a request for this endpoint. `fields` are header lines, each with its CRLF; `length` -1: no body.

        Raises UpstreamFailed when the endpoint's key cannot be read.
        """
        if self.endpoint.api_key_file:
            fields += b"authorization: Bearer " + self._read_key(now) + b"\r\n"
        if length >= 0:
            fields += b"content-length: %d\r\n" % length
        return b"%b %b%b HTTP/1.1\r\n%b%b\r\n" % (method, self._base, target, self._host_field, fields)

    def _read_key(self, now: float) -> bytes:
        if now >= self._key_until:
            try:
                with open(self.endpoint.api_key_file, "rb") as file:
                    self._key = file.read(4096).strip()
            except OSError as error:
                raise UpstreamFailed(
                    "refused", f"cannot read api_key_file of endpoint {self.endpoint.id}: {error.strerror}"
                ) from None
            self._key_until = now + KEY_S
        return self._key


async def read_head(line: Line, *, reused: bool, to_head_request: bool = False) -> tuple[ResponseHead, bytes]:
    """The response's head, interim (1xx) ones passed over, and the bytes that came after it. Raises UpstreamFailed."""
    held = b""
    while True:
        try:
            data = await line.recv()
        except OSError as error:
            raise UpstreamFailed(
                "reset", f"connection lost: {error.strerror or error}", sent=True, answered=bool(held), reused=reused
            ) from None
        if not data:
            detail = "connection closed within the answer's header" if held else "connection closed without an answer"
            raise UpstreamFailed("closed" if held else "reset", detail, sent=True, answered=bool(held), reused=reused)
        held = held + data if held else data
        try:
            while (end := head.end_of_head(held)) >= 0:
                response = head.read_response(held[:end], to_head_request=to_head_request)
                held = held[end:]
                if response.status >= 200:
                    return response, held
                if response.status == 101:
                    raise head.BadHead("the upstream switched protocols unasked")
        except head.BadHead as error:
            raise UpstreamFailed(
                "garbage", f"not an HTTP answer: {error}", sent=True, answered=True, reused=reused
            ) from None
        if held and not b"HTTP/1.".startswith(held[:7]):
            raise UpstreamFailed("garbage", "not an HTTP answer", sent=True, answered=True, reused=reused)

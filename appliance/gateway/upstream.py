"""Connections to one endpoint.

Idle ones are kept, last in first out, and watched by the poller: one that the engine closes leaves the pool at that
moment, and so does one on which it says something unasked, since the next request must not take that for its answer.
The race that remains (closed while our request was on its way) shows as a reset or an end without a byte on a `reused`
connection; the service sends such a request once more on a fresh one.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import socket
import ssl
import time

import trio

from ..facts.endpoint import Endpoint
from ..facts.errors import Refusal
from ..nursery.sleeper import DeadlinePassed, Sleeper
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


MOST_INTERIM = 16
"""Interim (1xx) answers before the real one; engines send none or one."""
_OURS = frozenset((errno.EMFILE, errno.ENFILE, errno.ENOBUFS, errno.ENOMEM, errno.EADDRNOTAVAIL))
"""Why a connection cannot be made that no engine is to blame for: this process or machine has run out of something."""

_Address = tuple[int, tuple[object, ...]]


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
    """The connection pool of an endpoint. `close` ends the idle connections; busy ones belong to their exchanges.

    `idle` holds since when each has been so, oldest first. A dictionary, because an engine that restarts closes
    thousands of them at once, each of which is to be found.
    """

    def __init__(self, endpoint: Endpoint, poller: Poller, context: ssl.SSLContext | None = None) -> None:
        self.endpoint = endpoint
        self.closed = False
        self._poller = poller
        self._context = context
        self.idle: dict[Line, float] = {}
        self._numeric = _numeric(endpoint.host, endpoint.port)
        self._addresses: list[_Address] = []
        self._addresses_until = 0.0
        self._asking: set[Sleeper] | None = None
        """Who waits for the look-up that is under way; None while none is."""
        self._unknown: Exception | None = None
        self._key = b""
        self._key_until = 0.0
        self._key_field = b"authorization: Bearer %b\r\n" % endpoint.api_key.encode() if endpoint.api_key else b""
        self._key_usable = _is_key(endpoint.api_key.encode())
        host = f"[{endpoint.host}]" if ":" in endpoint.host else endpoint.host
        default = 443 if endpoint.tls else 80
        self._host_field = (
            b"host: " + (host if endpoint.port == default else f"{host}:{endpoint.port}").encode() + b"\r\n"
        )
        self._base = endpoint.base.encode()

    # -- connections -----------------------------------------------------------------------------------------------

    def take(self, sleeper: Sleeper, now: float) -> Line | None:
        """An idle connection for the task of `sleeper`, or None: then `dial`."""
        idle = self.idle
        while idle:
            line, since = idle.popitem()
            if line.hung_up or now - since > IDLE_S or (line.readable and _has_spoken(line)):
                line.close()
                continue
            line.on_news = None
            line.sleeper = sleeper
            return line
        return None

    def give_back(self, line: Line, now: float) -> None:
        """Keep a connection whose exchange ended cleanly: nothing was left unsent or unread."""
        if self.closed or line.hung_up:
            line.close()
            return
        line.sleeper = None
        line.on_news = functools.partial(self._idle_news, line)
        self.idle[line] = now

    async def dial(self, sleeper: Sleeper) -> Line:
        """A new connection. The caller has armed its deadline, which is shared out over the addresses of the host.

        Raises UpstreamFailed("refused"), Refusal when this machine lacks what a connection takes, or a cut.
        """
        addresses = self._numeric or await self._look_up(sleeper)
        due, name = sleeper.due, sleeper.due_name
        failure: Exception | None = None
        for index, address in enumerate(addresses):
            left = len(addresses) - index
            if len(addresses) > 1:
                # an address that swallows our packets must leave time for the next
                now = time.monotonic()
                sleeper.arm(due if left == 1 else now + (due - now) / left, name)
            try:
                return await self._connect(*address, sleeper)
            except DeadlinePassed as late:
                if left == 1 or late.name != name or time.monotonic() >= due:
                    raise
                failure = TimeoutError("no answer")
            except (OSError, ssl.SSLError) as error:
                if isinstance(error, OSError) and error.errno in _OURS:
                    raise _exhausted(error) from None
                failure = error
        self._addresses_until = 0.0  # it may have moved
        reason = getattr(failure, "strerror", None) or str(failure)
        raise UpstreamFailed("refused", f"cannot connect to {self.endpoint.url}: {reason}")

    async def _connect(self, family: int, address: tuple[object, ...], sleeper: Sleeper) -> Line:
        """Raises OSError, ssl.SSLError, or a cut."""
        sock = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            keep_alive_probes(sock)
            with contextlib.suppress(BlockingIOError):
                sock.connect(address)
            line = self._line(sock, sleeper)
        except BaseException:
            sock.close()
            raise
        try:
            await line.connected()
            if isinstance(line, tls.TlsLine):
                await line.handshake()
        except BaseException:
            line.abort()
            raise
        return line

    def drop_stale(self, now: float) -> None:
        """Close what has been idle for too long; called by the sweeper, so that engines are not left holding
        sockets.
        """
        stale = []
        for line, since in self.idle.items():
            if now - since <= IDLE_S:
                break
            stale.append(line)
        for line in stale:
            del self.idle[line]
            line.close()

    def close(self) -> None:
        self.closed = True
        while self.idle:
            self.idle.popitem()[0].close()

    def _line(self, sock: socket.socket, sleeper: Sleeper) -> Line:
        if self.endpoint.tls:
            assert self._context is not None, "a TLS endpoint needs a context"
            return tls.TlsLine(
                sock, self._poller, self._context, sleeper, server_side=False, server_hostname=self.endpoint.host
            )
        return Line(sock, self._poller, sleeper)

    def _idle_news(self, line: Line) -> None:
        """An idle connection spoke or ended. A late report of bytes already read finds nothing and means nothing."""
        if not _has_spoken(line):
            return
        self.idle.pop(line, None)
        line.close()

    async def _look_up(self, sleeper: Sleeper) -> list[_Address]:
        """Addresses of the host to try in order, asked for again after ADDRESS_S.

        The question runs in a thread that nothing can stop, so it has a task of its own (Trio's, since it belongs to
        whoever waits) and the caller sleeps where deadlines and departed clients reach it. One question at a time: a
        resolver that is down must not eat the threads of the process. Raises UpstreamFailed, or a cut.
        """
        if time.monotonic() < self._addresses_until:
            return self._addresses
        if self._asking is None:
            self._asking = set()
            trio.lowlevel.spawn_system_task(self._ask, name=f"look up {self.endpoint.host}")
        waiting = self._asking
        waiting.add(sleeper)
        try:
            while self._asking is waiting:
                await sleeper.sleep()
        finally:
            waiting.discard(sleeper)
        if self._unknown is not None:
            detail = f"cannot find the address of {self.endpoint.host}: {self._unknown}"
            raise UpstreamFailed("refused", detail)
        return self._addresses

    async def _ask(self) -> None:
        self._unknown = None
        try:
            found = await trio.socket.getaddrinfo(self.endpoint.host, self.endpoint.port, type=socket.SOCK_STREAM)
            self._addresses = [(family, address) for family, _, _, _, address in found]
            self._addresses_until = time.monotonic() + ADDRESS_S
        except (OSError, ValueError) as error:  # the second for names that no resolver can be asked
            self._unknown = error
        finally:
            waiting, self._asking = self._asking, None
            for sleeper in waiting or ():
                sleeper.wake()

    # -- the request -------------------------------------------------------------------------------------------------

    def request_head(self, method: bytes, target: bytes, fields: bytes, length: int, now: float) -> bytes:
        """The head of a request for this endpoint. `fields` are header lines, each with its CRLF; `length` -1: no body.

        Raises UpstreamFailed when the endpoint's key cannot be read, Refusal when that is for want of descriptors.
        """
        key = self._key_field
        if self.endpoint.api_key_file:
            key = b"authorization: Bearer %b\r\n" % self._read_key(now)
        elif key and not self._key_usable:
            detail = f"the key of endpoint {self.endpoint.id} has more than visible characters"
            raise UpstreamFailed("refused", detail)
        body = b"" if length < 0 else b"content-length: %d\r\n" % length
        return b"%b %b%b HTTP/1.1\r\n%b%b%b%b\r\n" % (
            method, self._base, target, self._host_field, fields, key, body,
        )  # fmt: skip

    def _read_key(self, now: float) -> bytes:
        if now >= self._key_until:
            where = f"api_key_file of endpoint {self.endpoint.id}"
            try:
                with open(self.endpoint.api_key_file, "rb") as file:
                    key = file.read(4096).strip()
            except OSError as error:
                if error.errno in _OURS:
                    raise _exhausted(error) from None
                raise UpstreamFailed("refused", f"cannot read {where}: {error.strerror}") from None
            if not key or not _is_key(key):
                raise UpstreamFailed("refused", f"{where} must hold one key: a line of visible characters")
            self._key = key
            self._key_until = now + KEY_S
        return self._key


def _is_key(key: bytes) -> bool:
    """Whether a key can stand in a header field: visible characters only."""
    return all(32 < byte < 127 for byte in key)


def _numeric(host: str, port: int) -> list[_Address]:
    """The address that `host` is, where it is one."""
    for family, rest in ((socket.AF_INET, ()), (socket.AF_INET6, (0, 0))):
        with contextlib.suppress(OSError):
            socket.inet_pton(family, host)
            return [(family, (host, port, *rest))]
    return []


def _has_spoken(line: Line) -> bool:
    """Whether an idle connection has brought anything, its end included."""
    try:
        return line.try_recv() is not None
    except OSError:
        return True


def _exhausted(error: OSError) -> Refusal:
    return Refusal(
        503,
        "router_exhausted",
        f"this router cannot open another connection ({error.strerror}): its operator must raise LimitNOFILE",
        retry_after_s=1,
    )


def lost(error: OSError, *, reused: bool, answered: bool = False) -> UpstreamFailed:
    """A connection broke off whose request was handed over."""
    detail = f"connection lost: {error.strerror or error}"
    return UpstreamFailed("reset", detail, sent=True, answered=answered, reused=reused)


def whole_head(data: bytes, *, to_head_request: bool = False) -> tuple[ResponseHead, bytes] | None:
    """The response's head and what came after it, where all of it came in one piece and without interim ones, as it
    nearly always does. None: `read_head` must see to it, and says what is wrong."""
    try:
        end = head.end_of_head(data)
        if end < 0:
            return None
        response = head.read_response(data[:end], to_head_request=to_head_request)
    except head.BadHead:
        return None
    return (response, data[end:]) if 200 <= response.status < 600 else None


async def read_head(
    line: Line, *, reused: bool, to_head_request: bool = False, early: bytes = b""
) -> tuple[ResponseHead, bytes]:
    """The response's head, interim (1xx) ones passed over, and the bytes that came after it; `early` is what came
    before. Raises UpstreamFailed, or a cut.
    """
    held = b""
    data = early
    answered = False
    interim = 0
    while True:
        if not data:
            try:
                data = await line.recv()
            except OSError as error:
                raise lost(error, reused=reused, answered=answered) from None
            if not data:
                kind, when = ("closed", "within the answer's header") if held else ("reset", "without an answer")
                raise UpstreamFailed(kind, f"connection closed {when}", sent=True, answered=answered, reused=reused)
        answered = True
        held = held + data if held else data
        try:
            while (end := head.end_of_head(held)) >= 0:
                response = head.read_response(held[:end], to_head_request=to_head_request)
                held = held[end:]
                if 200 <= response.status < 600:
                    return response, held
                interim += 1
                if response.status == 101 or response.status >= 600 or interim > MOST_INTERIM:
                    raise head.BadHead(f"status {response.status} was not to be expected here")
        except head.BadHead as error:
            raise UpstreamFailed(
                "garbage", f"not an HTTP answer: {error}", sent=True, answered=True, reused=reused
            ) from None
        if held and not b"HTTP/1.".startswith(held[:7]):
            raise UpstreamFailed("garbage", "not an HTTP answer", sent=True, answered=True, reused=reused)
        data = b""
        # one that trickles without end would otherwise never sleep, and a deadline only strikes a sleeper
        if line.sleeper is not None:
            line.sleeper.check()

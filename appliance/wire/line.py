"""Stream sockets of the request road, all watched by one edge-triggered epoll set.

Trio's `wait_readable` arms and disarms a socket for every wait. Here a socket is registered once for its life, with all
events, edge-triggered; the poller task waits (through Trio) on the epoll set itself and, per event, sets two flags on
the line and either tells the sleeper of the task that uses it or calls `on_news` right there. No task is woken for what
is usual: a short request is carried on inside the poller (`nursery/carried.py`), and so are streams while both sides
are calm, from the engine's socket to the client's (`gateway/stream.py`).

Small sends are corked while many sockets have news at a time: what the tasks and pumps of one round produce leaves
together at its end. On a two-core virtual machine a send to a sleeping peer costs 20 microseconds, nearly all of it for
waking the other core; sent back to back, the first one wakes it and the rest cost 7. A round of few events is not
corked: there the wait would be all cost.

Edge-triggered means that a flag may only be cleared by seeing the socket empty (a short read) or full (EAGAIN).
"""

from __future__ import annotations

import contextlib
import os
import select
import socket
import struct
from collections.abc import Callable
from typing import NoReturn

import trio

from ..nursery.sleeper import Sleeper, breathe

READ_BYTES = 65536
_arrived = memoryview(bytearray(READ_BYTES))
"""What a read brings is copied out of here. `recv` would allocate so much for every read and give most of it back, and
what lives longer settles in between: the heap of a router under mixed load grew by a tenth in 25,000 requests, for
ever. The copy costs 0.05 microseconds."""
CORK_FROM = 4
"""Events in one round from which on sends are corked."""
CORKED_BYTES = 16384
"""The largest piece that is corked; copying more costs more than it saves."""
_EVENTS = select.EPOLLIN | select.EPOLLOUT | select.EPOLLRDHUP | select.EPOLLET
_READABLE = select.EPOLLIN | select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR
_WRITABLE = select.EPOLLOUT | select.EPOLLHUP | select.EPOLLERR
_HUNG_UP = select.EPOLLRDHUP | select.EPOLLHUP | select.EPOLLERR


class Poller:
    """The epoll set of a process. `run` serves it until cancelled; lines may be added before, during and after."""

    def __init__(self) -> None:
        self._epoll = select.epoll()
        self._lines: dict[int, Line] = {}
        self._newcomers: dict[int, Line] = {}
        self._in_round = False
        self._postponed: list[Line] = []
        self.corked = False
        self.outbox: list[Line] = []

    def add(self, line: Line) -> None:
        # The number may be that of a socket closed in this round, whose last news are still to come in it.
        (self._newcomers if self._in_round else self._lines)[line.fd] = line
        self._epoll.register(line.fd, _EVENTS)

    def remove(self, line: Line) -> None:
        """Forget a line. Must come before its socket is closed: the number may be reused within the same round."""
        for lines in (self._newcomers, self._lines):
            if lines.get(line.fd) is line:
                del lines[line.fd]
                self._epoll.unregister(line.fd)

    def postpone(self, line: Line) -> None:
        """Call the line's `on_news` again in the next round: it stopped before its socket was empty, so that others get
        their turn, and an edge-triggered set will not report those bytes again."""
        self._postponed.append(line)

    def __len__(self) -> int:
        return len(self._lines) + len(self._newcomers)

    async def run(self) -> NoReturn:
        poll, lines, fd = self._epoll.poll, self._lines, self._epoll.fileno()
        while True:
            if self._postponed:
                await trio.lowlevel.checkpoint()
                postponed, self._postponed = self._postponed, []
                for line in postponed:
                    if line.on_news is not None and not line.closed:
                        line.on_news()
            else:
                await trio.lowlevel.wait_readable(fd)
            round_ = poll(0)
            self.corked = len(round_) >= CORK_FROM
            self._in_round = True
            for number, events in round_:
                watched = lines.get(number)
                if watched is not None:
                    watched.news(events)
            self._in_round = False
            if self._newcomers:
                lines.update(self._newcomers)
                self._newcomers.clear()
            if self.corked:
                await self._uncork()

    async def _uncork(self) -> None:
        """Let what this round has produced go. The pumps' part first; the tasks that were woken have all run after two
        rounds of the scheduler, since this task's own turn in the first may come before theirs."""
        try:
            self._flush()
            await trio.lowlevel.checkpoint()
            await trio.lowlevel.checkpoint()
        finally:
            self.corked = False
            self._flush()

    def _flush(self) -> None:
        outbox, self.outbox = self.outbox, []
        for line in outbox:
            line.push()

    def close(self) -> None:
        """Close the set; the lines' sockets belong to their own users."""
        self._epoll.close()


class Line:
    """One non-blocking stream socket (TCP or Unix). Whoever made it closes it.

    `sleeper` is told of news; `on_news`, where set, is called instead, inside the poller: it must neither block nor
    raise. `hung_up` tells that the peer has closed its side (a FIN, a reset, an error); what it sent before may still
    be read. `on_hang_up` is called once, before the news, when that is first seen.
    """

    __slots__ = (
        "_backlog",
        "_operations",
        "closed",
        "fd",
        "hung_up",
        "on_hang_up",
        "on_news",
        "poller",
        "readable",
        "sleeper",
        "sock",
        "writable",
    )

    def __init__(self, sock: socket.socket, poller: Poller, sleeper: Sleeper | None = None) -> None:
        sock.setblocking(False)
        self.sock = sock
        self.fd = sock.fileno()
        self.poller = poller
        self.sleeper = sleeper
        self.on_news: Callable[[], None] | None = None
        self.on_hang_up: Callable[[], None] | None = None
        self.readable = True
        self.writable = True
        self.hung_up = False
        self.closed = False
        self._backlog: bytes = b""
        self._operations = 0
        poller.add(self)

    def news(self, events: int) -> None:
        """Called by the poller."""
        if events & _READABLE:
            self.readable = True
        if events & _WRITABLE:
            self.writable = True
            if self._backlog:
                self.push()
        if events & _HUNG_UP and not self.hung_up:
            self.hung_up = True
            if self.on_hang_up is not None:
                self.on_hang_up()
        if self.on_news is not None:
            self.on_news()
        elif self.sleeper is not None:
            self.sleeper.carry_on()

    # -- without waiting ---------------------------------------------------------------------------------------------

    def try_recv(self) -> bytes | None:
        """What has arrived, at most 64 KiB; b"" at the end of the stream; None when there is nothing now. Raises
        OSError.
        """
        if not self.readable:
            return None
        try:
            data = _arrived[: self.sock.recv_into(_arrived)].tobytes()
        except BlockingIOError:
            self.readable = False
            return None
        if len(data) < READ_BYTES and not self.hung_up:
            self.readable = False
        return data

    def try_peek(self) -> bool:
        """Whether bytes wait to be read, also after the peer broke off."""
        try:
            self.readable = bool(self.sock.recv(1, socket.MSG_PEEK))
        except OSError:
            return False
        return self.readable

    def try_send(self, data: bytes | memoryview) -> int:
        """Hand over what is taken now; how many bytes that was. Raises OSError (BrokenPipeError, reset).

        A corked piece counts as taken. Should its sending fail later, the connection is lost, which reading it will
        tell.
        """
        if not self.writable:
            return 0
        poller = self.poller
        if poller.corked and len(data) <= CORKED_BYTES:
            if not self._backlog:
                self._backlog = bytes(data)
                poller.outbox.append(self)
                return len(data)
            if len(self._backlog) <= CORKED_BYTES:
                self._backlog += data
                return len(data)
        if self._backlog:
            self.push()
            if self._backlog:
                return 0
        try:
            return self.sock.send(data)
        except BlockingIOError:
            self.writable = False
            return 0

    def push(self) -> None:
        """Hand the backlog to the socket, as much as it takes; the rest goes when it has room."""
        backlog = self._backlog
        if not backlog or self.closed:
            return
        try:
            sent = self.sock.send(backlog)
        except BlockingIOError:
            sent = 0
        except OSError:
            self._backlog = b""  # lost with its connection
            return
        self._backlog = backlog[sent:] if sent < len(backlog) else b""
        if self._backlog:
            self.writable = False

    # -- with waiting: only for a line that has a sleeper -------------------------------------------------------------

    async def recv(self) -> bytes:
        """The next bytes; b"" at the end of the stream. Raises OSError, or the reason of a cut."""
        sleeper = self.sleeper
        assert sleeper is not None, "a line without a sleeper cannot wait"
        while (data := self.try_recv()) is None:
            await sleeper.sleep()
        self._operations += 1
        if self._operations & 15 == 0:
            await breathe(self._operations)
        return data

    async def send_all(self, data: bytes | memoryview) -> None:
        """Hand over all of `data`. Raises OSError, or the reason of a cut; then an unknown part of it has been sent."""
        sent = self.try_send(data)
        if sent < len(data):
            rest = memoryview(data)[sent:]
            while rest:
                self._operations += 1
                await breathe(self._operations)
                sent = self.try_send(rest)
                rest = rest[sent:]
                if rest and not self.writable:
                    await self._sleep()
        await self.flush()

    async def flush(self) -> None:
        """Wait until everything handed over lies with the kernel (or is lost with the connection). Raises the reason of
        a cut."""
        self.push()
        while self._backlog:
            await self._sleep()
            self.push()

    async def connected(self) -> None:
        """Wait for a `connect` begun on the socket. Raises OSError when it failed."""
        self.writable = False
        while not self.writable:
            await self._sleep()
        error = self.sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if error:
            raise OSError(error, os.strerror(error))

    async def _sleep(self) -> None:
        assert self.sleeper is not None, "a line without a sleeper cannot wait"
        await self.sleeper.sleep()

    # -- ends ---------------------------------------------------------------------------------------------------------

    @property
    def unsent(self) -> bool:
        """Whether something handed over lies here and not yet with the kernel: `flush` waits for it, `close` drops what
        the socket does not take at once."""
        return bool(self._backlog)

    async def part(self) -> None:
        """Tell the peer that nothing more comes, and throw away what it still sends until it closes its side too:
        closing at once would make a reset of it. Raises OSError, or the reason of a cut."""
        self._finish()
        while (data := Line.try_recv(self)) != b"":
            if data is None:
                await self._sleep()
            self._operations += 1
            await breathe(self._operations)

    def _finish(self) -> None:
        self.push()
        self.sock.shutdown(socket.SHUT_WR)

    def close(self) -> None:
        """Close the socket. What the kernel holds is still sent; unread input makes it a reset. Harmless when
        repeated.
        """
        if not self.closed:
            self.push()
            self.closed = True
            self.poller.remove(self)
            self.sock.close()

    def abort(self) -> None:
        """Close with a reset, so that the peer cannot take what it has got for the whole."""
        if not self.closed:
            self._backlog = b""
            with contextlib.suppress(OSError):
                self.sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
            Line.close(self)


_NO_LINGER = struct.pack("ii", 1, 0)


UNACKNOWLEDGED_S = 15.0


_TCP_INFO = struct.Struct("=8B24I4Q3I")
_UNACKED, _SINCE_LAST_ACK_MS, _UNSENT_BYTES = 12, 20, 38
"""Fields of Linux's tcp_info: segments on their way, milliseconds since an acknowledgement came, bytes not sent yet."""


def silent_s(sock: socket.socket) -> float:
    """For how long a peer has said nothing, not even acknowledged one of the `keep_alive_probes`. 0.0 for one that has
    closed its window because it takes no data: the kernel asks it more and more rarely, and a deadline is on it."""
    if sock.family == socket.AF_UNIX:
        return 0.0
    try:
        info = _TCP_INFO.unpack(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _TCP_INFO.size))
    except (OSError, struct.error):  # struct.error: a kernel before 4.6 tells less
        return 0.0
    stalled = info[_UNSENT_BYTES] and not info[_UNACKED]
    return 0.0 if stalled else float(info[_SINCE_LAST_ACK_MS]) / 1000


def keep_alive_probes(sock: socket.socket, stall_s: float = 0.0) -> None:
    """A peer without power is noticed by probes after 20 s of silence, and by unacknowledged data after 15 s.

    The kernel counts data that a living peer does not take as unacknowledged too, so where a peer is promised `stall_s`
    seconds to take some, the bound lies behind that promise: else its deadline would never be the one to strike. That
    bound holds for the probes too, so such a peer must be looked at (`silent_s`) to be known as gone before.
    """
    if sock.family == socket.AF_UNIX:
        return
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, 5)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, 3)
    bound_s = max(UNACKNOWLEDGED_S, stall_s + 2.0 if stall_s else 0.0)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, min(int(bound_s * 1000), 2**31 - 1))

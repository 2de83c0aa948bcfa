"""The site of the admin socket: knows the caller by the kernel's word, and relays to the management API.

The API is a Quart app on Hypercorn, because convenience is worth more than speed there. An ASGI app sees neither who
connected nor passed descriptors, so Hypercorn listens on a private socket (mode 0600, its name carries the pid), and
this site, behind the door's own connections, passes each request on with the caller's user in a header. Other header
fields pass by an allowlist, so nobody can claim to be somebody else.

Nothing of Quart or Hypercorn is imported before the first request: together they weigh half as much as the router.
The import runs in a thread, since it takes the better part of a second in which streams must go on.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import structlog
import trio

from ..facts.errors import Refusal
from ..gateway.answer import BodyReader, kept_fields
from ..gateway.reply import Reply
from ..gateway.upstream import UpstreamFailed, read_head
from ..nursery.sleeper import Sleeper
from ..wire.head import RequestHead
from ..wire.line import Line, Poller
from . import sockets
from .handover import HandOver, WholeReply
from .sockets import CannotListen, Peer, peer_of

CALLER = b"x-appliance-caller"
"""Carries the uid of the caller to the app; set here and taken from nobody."""
_NAME = "admin-{}.sock"
_PASSED = (b"accept", b"content-type")

log = structlog.get_logger("admin")

Serve = Callable[..., Any]
"""Serves the app on a listening socket until cancelled, calling `started()`: `admin.app.serve`."""


class AdminSite:
    """`prepare` imports the app and gives the function that serves it; `folder` is where the private socket lies. The
    app's tasks live in `nursery`, which must outlast every request. `handover` answers a takeover itself, since an app
    cannot pass descriptors; it imports nothing more, so a takeover is quick."""

    def __init__(
        self,
        prepare: Callable[[], Serve],
        folder: str,
        poller: Poller,
        nursery: trio.Nursery,
        handover: HandOver | None = None,
    ) -> None:
        self.carried = False
        self.draining = False  # of this listener: it answers until the process ends, or another one takes over
        self._handover = handover
        self._prepare = prepare
        self._path = f"{folder}/{_NAME.format(os.getpid())}"
        self._poller = poller
        self._nursery = nursery
        self._starting = trio.Lock()
        self._serving = False
        self._answering = 0
        self._quiet = trio.Event()

    # -- Site --------------------------------------------------------------------------------------------------------

    def admit(self, head: RequestHead, reply: Reply, peer: str) -> Peer:
        assert reply.line is not None, "a connection's reply has its socket"
        return peer_of(reply.line.sock)

    async def answer(self, plan: object, head: RequestHead, body: bytes, reply: WholeReply) -> None:
        assert isinstance(plan, Peer)
        if self._handover is not None and head.path.startswith(b"/takeover"):
            await self._handover.answer(head, plan, reply)
            return
        self._answering += 1
        try:
            await self._start()
            await self._relay(plan, head, body, reply)
        finally:
            self._answering -= 1
            if not self._answering:
                self._quiet.set()

    def record(self, head: RequestHead | None, reply: Reply, peer: str, started: float) -> None:
        """Not written down: what is done is logged by the app, what is looked at is not."""

    async def quiet(self) -> None:
        """Wait until nothing is being answered."""
        if self._answering:
            self._quiet = trio.Event()
            await self._quiet.wait()

    # -- the app -----------------------------------------------------------------------------------------------------

    async def _start(self) -> None:
        """Have the app run. Raises Refusal."""
        if self._serving:
            return
        async with self._starting:
            if self._serving:
                return
            try:
                serve = await trio.to_thread.run_sync(self._prepare)
                await self._nursery.start(self._serve, serve, name="management API")
            except CannotListen as error:
                raise Refusal(503, "admin_failed", str(error), retry_after_s=1) from None

    async def _serve(self, serve: Serve, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """The app, until the nursery ends; a crash ends only the app, and the next request starts another."""
        sockets.remove_dead(os.path.dirname(self._path), _NAME)
        private = sockets.listen(self._path, 0o600)
        try:
            async with trio.open_nursery() as nursery:
                await nursery.start(serve, private.sock, name="hypercorn")
                self._serving = True
                task_status.started()
        except Exception:
            if not self._serving:
                raise
            log.exception("the management API failed, it starts again with the next request")
        finally:
            self._serving = False
            private.close()

    def _dial(self, sleeper: Sleeper) -> Line:
        try:
            return Line(sockets.connect(self._path), self._poller, sleeper)
        except OSError as error:
            reason = error.strerror or str(error)
            raise Refusal(503, "admin_failed", f"the management API is not there: {reason}", retry_after_s=1) from None

    async def _relay(self, peer: Peer, head: RequestHead, body: bytes, reply: Reply) -> None:
        line = self._dial(reply.sleeper)
        try:
            await self._exchange(line, peer, head, body, reply)
        except UpstreamFailed as failed:
            if not reply.started:
                raise Refusal(502, "admin_failed", f"the management API broke off: {failed.detail}") from None
            reply.give_up()
        finally:
            line.abort()

    async def _exchange(self, line: Line, peer: Peer, head: RequestHead, body: bytes, reply: Reply) -> None:
        await line.send_all(_request(head, peer, body))
        answer, rest = await read_head(line, reused=False, to_head_request=head.method == b"HEAD")
        reader = BodyReader(line, answer, rest)
        reply.start(answer.status, kept_fields(answer.fields), answer.length)
        while (piece := await reader.next()) is not None:
            await reply.send(piece)
        await reply.end()


def _request(head: RequestHead, peer: Peer, body: bytes) -> bytes:
    fields = [(CALLER, b"%d" % peer.uid), *((name, head.by_name[name]) for name in _PASSED if name in head.by_name)]
    lines = b"".join(b"%b: %b\r\n" % field for field in fields)
    return b"%b %b HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n%bcontent-length: %d\r\n\r\n%b" % (
        head.method,
        head.target,
        lines,
        len(body),
        body,
    )

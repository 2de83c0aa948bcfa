"""The listening sockets of a running router, given to the one that takes over (`serve --takeover`).

Two requests on one connection of the admin socket:

    POST /takeover         an interim answer (102) that carries the descriptors, then 200 with what they are. Nothing
                           has changed: both processes hold the sockets, this one goes on accepting.
    POST /takeover/done    the other process is ready to serve. This one stops listening, everywhere, before it says so.

Whatever goes wrong before the second request (the other process finds a fault, dies, or gives up waiting), closing the
connection ends the offer and this process is as it was. A process that was stuck meanwhile and finds the second request
finds the connection closed as well, and then does not answer it (`door/connection.py`).
"""

from __future__ import annotations

import os
import socket
from collections.abc import Awaitable, Callable
from typing import Any, Protocol

import attrs
import msgspec

from ..facts.errors import Refusal
from ..gateway.reply import Reply
from ..wire.head import RequestHead
from ..wire.line import Line
from .metrics import Answer
from .sockets import Peer

OFFER = b"/takeover"
DONE = b"/takeover/done"
MOST_DESCRIPTORS = 253
"""What Linux takes in one message (SCM_MAX_FD)."""
INTERIM = b"HTTP/1.1 102 Processing\r\n\r\n"


class WholeReply(Reply, Answer, Protocol):
    """An answer that can also be complete at once."""


@attrs.frozen
class Offer:
    """`descriptors` in the order that `about` tells; they stay open here. `about` may hold keys of engines: it goes to
    the other process and nowhere else."""

    about: dict[str, Any] = attrs.field(repr=False)
    descriptors: tuple[int, ...]


class HandOver:
    """`offer` names the sockets, or raises a Refusal where this process must not be replaced in this way. `give_way`
    makes this process stop listening, and returns within seconds; it is called once, and answers with what is told to
    the other one."""

    def __init__(self, offer: Callable[[], Offer], give_way: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._offer = offer
        self._give_way = give_way
        self._taker: Line | None = None

    async def answer(self, head: RequestHead, peer: Peer, reply: WholeReply) -> None:
        """One of the two requests. Raises Refusal."""
        line = reply.line
        assert line is not None, "a connection's reply has its socket"
        if head.method != b"POST" or head.path not in (OFFER, DONE):
            raise Refusal(404, "not_found", "expected POST /takeover or POST /takeover/done", should_retry=False)
        if peer.uid not in (0, os.geteuid()):
            raise Refusal(
                403, "takeover_refused", f"only root and the user with uid {os.geteuid()} can take over this router"
            )
        taker = self._taker if self._taker is not None and not self._taker.closed else None
        if head.path == DONE:
            if taker is not line:
                raise Refusal(409, "takeover_refused", "ask with POST /takeover on the same connection first")
            await reply.whole(200, msgspec.json.encode(await self._give_way()))
            return
        if taker is not None and taker is not line:
            raise Refusal(409, "takeover_refused", "another process is taking over from this router at this moment")
        offered = self._offer()
        if len(offered.descriptors) > MOST_DESCRIPTORS:
            raise Refusal(409, "takeover_refused", "this router listens on too many addresses to hand them over")
        self._taker = line
        try:
            # Nothing else of this connection is on its way, so the message goes whole.
            socket.send_fds(line.sock, [INTERIM], offered.descriptors)
        except OSError as error:
            raise Refusal(500, "takeover_failed", f"the sockets cannot be passed: {error.strerror}") from None
        await reply.whole(200, msgspec.json.encode(offered.about))

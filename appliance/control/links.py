"""The door for nodes: one port where agents call and machines join.

    serve
    '- accept loops, and per connection one task
       |- TLS handshake and the head of the request, within HANDSHAKE_S together
       |- GET /link      a WebSocket, which is `Plane.attend`'s until it ends
       '- all else       one answer, then the end

A certificate of the caller is optional for TLS, since a machine that joins has none yet; one that is shown must be
signed by the cluster's root. So a foreign or expired one fails in the handshake: the peer is told by an alert, and here
a line names peer and reason. Whoever has not proven to be a node has little room: few connections at a time in all
and from each address, each for a short time. A node has a certificate, and its connection counts apart.
"""

from __future__ import annotations

import contextlib
import socket
import ssl
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any, NoReturn, cast

import msgspec
import structlog
import trio

from appliance.control.claims import Claim
from appliance.control.joining import BODY_BYTES, Answer, Joining
from appliance.control.plane import Plane
from appliance.control.strangers import Strangers
from appliance.control.told import Told
from appliance.wire.answered import heard_out, send_answer
from appliance.wire.asked import read_head
from appliance.wire.calls import LINK_PATH, answer, shake_hands
from appliance.wire.handshake import holder
from appliance.wire.head import BadHead, RequestHead, end_of_head
from appliance.wire.line import keep_alive_probes
from appliance.wire.link import MAX_MESSAGE_BYTES, LinkRefused
from appliance.wire.websocket import SocketLink

HANDSHAKE_S = 10.0
BODY_S = 10.0
WRITE_S = 10.0
PARTING_S = 1.0

MOST_LINKS = 4096
MOST_STRANGERS = 256
MOST_STRANGERS_EACH = 64
"""Connections of nodes; of those that have not proven to be one; and of these from one address. A hundred nodes behind
one address that call at the same moment come in at the second try."""

SLOW_S = 2.0
"""How old a stranger's connection must be to make way for another: a handshake takes a tenth of a second."""

STRANGER_BYTES = 1 << 20
"""Most of a message from an agent without a certificate: it is read to name the claim in the refusal."""

log = structlog.get_logger("control")


class LinkDoor:
    """`context` gives the TLS context of the moment; a certificate may be renewed while it serves."""

    def __init__(self, plane: Plane, joining: Joining, context: Callable[[], ssl.SSLContext]) -> None:
        self.links = 0
        self.strangers = Strangers(MOST_STRANGERS, MOST_STRANGERS_EACH, SLOW_S)
        self._plane = plane
        self._joining = joining
        self._context = context
        self._told = Told()

    async def serve(
        self, sockets: Iterable[socket.socket], task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> NoReturn:
        """Serve on listening sockets until cancelled. They are closed by it."""
        listeners = [trio.SocketListener(trio.socket.from_stdlib_socket(sock)) for sock in sockets]
        task_status.started()  # they listen already
        await trio.serve_listeners(self._connection, listeners)

    async def _connection(self, tcp: trio.SocketStream) -> None:
        """One connection from its beginning to its end. Nothing that happens on it reaches the others."""
        try:
            address, port = tcp.socket.getpeername()[:2]
        except OSError:
            await trio.aclose_forcefully(tcp)
            return
        peer = f"[{address}]:{port}" if ":" in address else f"{address}:{port}"
        try:
            link, claim = None, None
            with self.strangers.room(address) as room:
                if room:
                    link, claim = await self._greet(tcp, address, peer)
                else:
                    self._tell(address, "it has too many connections open that are no node's", "connection refused")
            if link is not None and claim is not None:
                await self._attend(link, claim)
        except (trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError):
            return  # it has left, or does not read
        except Exception as error:
            log.error("fault of a connection", peer=peer, exc_info=error)
        finally:
            await trio.aclose_forcefully(tcp)

    async def _attend(self, link: SocketLink, claim: Claim) -> None:
        if self.links >= MOST_LINKS:
            self._tell(link.peer, f"{MOST_LINKS} nodes are connected already", "connection refused")
            await link.aclose("too many nodes are connected")
            return
        self.links += 1
        try:
            await self._plane.attend(link, claim)
        finally:
            self.links -= 1

    async def _greet(
        self, tcp: trio.SocketStream, address: str, peer: str
    ) -> tuple[SocketLink, Claim] | tuple[None, None]:
        """The handshake and the request. A link with a certificate is given back; all else is answered here."""
        keep_alive_probes(cast(socket.socket, tcp.socket))
        try:
            with trio.fail_after(HANDSHAKE_S):
                stream = await shake_hands(tcp, self._context(), peer)
        except LinkRefused as refused:
            if refused.by == "tls":
                self._tell(address, str(refused).removeprefix(f"{peer}: "), "TLS handshake failed")
            return None, None
        except trio.TooSlowError:
            self._tell(address, f"it has not shaken hands within {HANDSHAKE_S:g} s", "TLS handshake failed")
            return None, None
        if self._told.succeeded(address):
            log.info("TLS handshake succeeded again", peer=peer)
        try:
            with trio.fail_after(HANDSHAKE_S):
                head, received = await read_head(stream)
        except BadHead as bad:
            await _send(stream, bad.status, _error(str(bad)))
            return None, None
        if head is None:
            return None, None
        if head.path != LINK_PATH.encode():
            await self._answer(stream, head, received, address)
            return None, None
        return await self._upgrade(stream, received, peer)

    async def _upgrade(
        self, stream: trio.SSLStream[trio.SocketStream], received: bytes, peer: str
    ) -> tuple[SocketLink, Claim] | tuple[None, None]:
        shown = holder(cast("Mapping[str, Any] | None", stream.getpeercert()))
        try:
            with trio.fail_after(HANDSHAKE_S):
                link = await answer(stream, received, peer, MAX_MESSAGE_BYTES if shown else STRANGER_BYTES)
        except LinkRefused as refused:
            text = f"agents call a WebSocket here: {str(refused).removeprefix(f'{peer}: ')}"
            await _send(stream, 400, _error(text))
            return None, None
        if shown is not None:
            return link, Claim(shown.name, shown.serial, peer)
        await self._plane.attend(link, Claim("", "", peer))
        return None, None

    async def _answer(
        self, stream: trio.SSLStream[trio.SocketStream], head: RequestHead, received: bytes, address: str
    ) -> None:
        """What is not a link is for whoever joins."""
        length = head.length or 0
        if head.chunked or length > BODY_BYTES:
            await _send(stream, 413, _error(f"a request has a content-length of at most {BODY_BYTES} bytes here"))
            return
        body = bytearray(received[end_of_head(received) :])
        with trio.fail_after(BODY_S):
            while len(body) < length:
                chunk = await stream.receive_some(65536)
                if not chunk:
                    return
                body += chunk
        method, path = head.method.decode("latin-1"), head.target.decode("latin-1")
        await _send(
            stream, 0, await self._joining.answer(method, path, bytes(body[:length]), address), method != "HEAD"
        )

    def _tell(self, peer: str, reason: str, what: str) -> None:
        if self._told.worth(peer, reason, trio.current_time()):
            log.warning(what, peer=peer, reason=reason)


async def _send(
    stream: trio.SSLStream[trio.SocketStream], status: int, answered: Answer, with_body: bool = True
) -> None:
    """One answer and the end. The stream is the caller's to close."""
    await send_answer(
        stream,
        status or answered.status,
        answered.content_type,
        answered.body,
        answered.headers,
        with_body=with_body,
        within_s=WRITE_S,
        part=partial(_part, stream),
    )


async def _part(stream: trio.SSLStream[trio.SocketStream]) -> None:
    with trio.move_on_after(PARTING_S), contextlib.suppress(trio.BrokenResourceError):
        await stream.unwrap()
    await heard_out(stream.transport_stream, PARTING_S)


def _error(message: str) -> Answer:
    return Answer(
        400, "application/json", msgspec.json.encode({"error": {"code": "invalid_request", "message": message}})
    )

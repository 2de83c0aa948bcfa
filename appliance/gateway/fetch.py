"""Small documents, from endpoints and others: lists of models, metrics."""

from __future__ import annotations

import time
from collections.abc import Callable

from ..facts.errors import Refusal
from ..nursery.sleeper import Sleeper
from ..wire.line import Line
from .answer import BodyReader
from .upstream import Upstream, UpstreamFailed, read_head

_FIELDS = b"accept: */*\r\nuser-agent: appliance\r\n"


async def fetch(
    upstream: Upstream,
    sleeper: Sleeper,
    target: bytes,
    *,
    within_s: float,
    bound: int,
    method: bytes = b"GET",
    fields: bytes = _FIELDS,
    body: bytes = b"",
    clock: Callable[[], float] = time.monotonic,
) -> tuple[int, bytes]:
    """One small exchange with an endpoint: status and body. `fields` are header lines, each with its CRLF; `bound` is
    the largest answer taken, in bytes. Raises UpstreamFailed, or a cut named "scrape".

    Also where this router cannot open a connection, which a client is told by a Refusal: those who ask here do so for
    ever, and one that let it pass would end the router at the moment it has run out of descriptors.
    """
    now = clock()
    length = len(body) if body or method == b"POST" else -1
    sleeper.arm(now + within_s, "scrape")
    try:
        request = upstream.request_head(method, target, fields, length, now) + body
        line = upstream.take(sleeper, now)
        if line is not None:
            try:
                return await _exchange(line, True, upstream, request, bound, clock)
            except UpstreamFailed as failed:
                if failed.answered:
                    raise
                # closed by the engine while it was idle: says nothing about the engine
        return await _exchange(await upstream.dial(sleeper), False, upstream, request, bound, clock)
    except Refusal as refusal:
        raise UpstreamFailed("refused", refusal.message) from None
    finally:
        sleeper.disarm()


async def _exchange(
    line: Line, reused: bool, upstream: Upstream, request: bytes, bound: int, clock: Callable[[], float]
) -> tuple[int, bytes]:
    keep = False
    try:
        try:
            await line.send_all(request)
        except OSError as error:
            raise UpstreamFailed("reset", f"connection lost: {error.strerror or error}", reused=reused) from None
        head, rest = await read_head(line, reused=reused)
        reader = BodyReader(line, head, rest)
        body = bytearray()
        while (piece := await reader.next()) is not None:
            body += piece
            if len(body) > bound:
                raise UpstreamFailed(
                    "garbage", f"more than {bound} bytes where a small document was expected", sent=True, answered=True
                )
        keep = head.keep_alive and not reader.surplus
        return head.status, bytes(body)
    finally:
        if keep:
            upstream.give_back(line, clock())
        else:
            line.abort()

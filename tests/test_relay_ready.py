"""A socket that is always ready never lets its task sleep; a deadline or a client that left must reach it all the same.

The lines here are made of nothing: real sockets pause now and then, which would hide a loop that never does.
"""

from __future__ import annotations

from typing import Any

import pytest
import trio

from appliance.facts.call import DONE, Route
from appliance.gateway.answer import BodyReader
from appliance.gateway.reply import Left
from appliance.gateway.stream import Stream
from appliance.gateway.upstream import read_head
from appliance.gateway.usage import Tally
from appliance.nursery.sleeper import DeadlinePassed, Sleeper
from appliance.wire.head import ResponseHead, read_response


class Ready:
    """An engine's line that always has more of the same. Somebody cuts its task after a few reads."""

    on_news: Any = None

    def __init__(self, piece: bytes, cut: DeadlinePassed | Left) -> None:
        self.sleeper = Sleeper()
        self.reads = 0
        self._piece = piece
        self._cut = cut

    async def recv(self) -> bytes:
        self.reads += 1
        assert self.reads < 100, "it goes on for ever"
        if self.reads == 5:
            self.sleeper.cut(self._cut)
        await trio.lowlevel.checkpoint()
        return self._piece


class Page:
    """A reply that is no socket."""

    line = None
    started = False
    chunked = True
    sent_bytes = 0

    def __init__(self, sleeper: Sleeper) -> None:
        self.sleeper = sleeper
        self.got = b""

    async def send(self, data: bytes, *, framed: bool = False) -> None:
        self.started = True
        self.got += data
        await trio.lowlevel.checkpoint()


CUTS = [DeadlinePassed("total_s"), Left()]


def head_of(raw: bytes) -> ResponseHead:
    return read_response(raw + b"\r\n\r\n")


@pytest.mark.parametrize("cut", CUTS, ids=["deadline", "left"])
@pytest.mark.parametrize("chunked", [True, False])
async def test_a_body(cut: DeadlinePassed | Left, chunked: bool) -> None:
    line: Any = Ready(b"1\r\nx\r\n" if chunked else b"x", cut)
    head = head_of(b"HTTP/1.1 200 OK" + (b"\r\ntransfer-encoding: chunked" if chunked else b""))
    reader = BodyReader(line, head, b"")
    with pytest.raises(type(cut)):
        while await reader.next() is not None:
            continue


@pytest.mark.parametrize("cut", CUTS, ids=["deadline", "left"])
@pytest.mark.parametrize("piece", [b"x", b"HTTP/1.1 102 P\r\n\r\n"], ids=["a header", "interim answers"])
async def test_a_head(cut: DeadlinePassed | Left, piece: bytes) -> None:
    line: Any = Ready(piece, cut)
    with pytest.raises(type(cut)):
        await read_head(line, reused=False, early=b"HTTP/1.1 200 OK\r\nx: " if piece == b"x" else b"")


@pytest.mark.parametrize("cut", CUTS, ids=["deadline", "left"])
@pytest.mark.parametrize("piece", [b"4\r\n: \n\n\r\n", b"1\r\nx\r\n"], ids=["comments", "an event"])
async def test_the_first_event(cut: DeadlinePassed | Left, piece: bytes) -> None:
    line: Any = Ready(piece, cut)
    reply: Any = Page(line.sleeper)
    with pytest.raises(type(cut)):
        await stream_on(line, reply).first_event(b"")


@pytest.mark.parametrize("cut", CUTS, ids=["deadline", "left"])
async def test_a_stream_to_a_page(cut: DeadlinePassed | Left) -> None:
    line: Any = Ready(b"9\r\ndata: x\n\n\r\n", cut)
    reply: Any = Page(line.sleeper)
    stream = stream_on(line, reply)
    held = await stream.first_event(b"")
    with pytest.raises(type(cut)):
        await stream.carry(held)
    assert reply.got.count(b"data: x") == line.reads


def stream_on(line: Any, reply: Any) -> Stream:
    head = head_of(b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked")
    route = Route("chat", (DONE,))
    return Stream(
        head, line, reply, route, Tally(), idle_s=1e9, first_due=1e18, total_due=1e18, ping_s=1e9, stall_s=1e9
    )

"""Answers made by a task aside, on the door's own connections: what it writes arrives, and who leaves ends it."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from appliance.door.accept import Listeners, bind
from appliance.door.aside import Aside, aside
from appliance.door.buffers import Buffers
from appliance.door.connection import Limits
from appliance.door.reply import HttpReply
from appliance.facts.errors import Refusal
from appliance.nursery.sleeper import sweep
from appliance.wire.head import RequestHead
from appliance.wire.line import Poller
from tests.toolservers.scripted import Server, scene

Work = Callable[[RequestHead, bytes, Aside], Awaitable[None]]
EVENTS = [(b"content-type", b"text/event-stream")]


class Site:
    draining = False
    carried = False

    def __init__(self, work: Work) -> None:
        self._work = work

    def admit(self, head: RequestHead, reply: HttpReply, peer: str) -> object:
        return None

    async def answer(self, plan: object, head: RequestHead, body: bytes, reply: HttpReply) -> None:
        await aside(reply, lambda out: self._work(head, body, out))

    def record(self, head: RequestHead | None, reply: HttpReply, peer: str, started: float) -> None:
        return


@asynccontextmanager
async def door(work: Work, write_stall_s: float = 30) -> AsyncIterator[str]:
    poller, sleepers = Poller(), set[Any]()
    listeners = Listeners(Site(work), poller, sleepers, Limits(15, 75, write_stall_s, 1 << 20), Buffers(1 << 24))
    sock = bind("127.0.0.1", 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(poller.run)
        nursery.start_soon(sweep, sleepers)
        await nursery.start(listeners.serve, [sock], trio.Event(), lambda: 0.0)
        yield f"http://127.0.0.1:{sock.getsockname()[1]}"
        nursery.cancel_scope.cancel()


async def test_whole_and_streamed_answers_on_one_connection() -> None:
    async def work(head: RequestHead, body: bytes, out: Aside) -> None:
        await trio.lowlevel.checkpoint()
        if head.path == b"/whole":
            out.start(200, [], 5)
            await out.send(b"hello")
        elif head.path == b"/nothing":
            out.start(202, [], 0)
        else:
            out.start(200, EVENTS, None)
            for number in range(50):
                await trio.lowlevel.checkpoint()
                await out.send(b"data: %d\n\n" % number)
        await out.end()

    async with door(work) as url, httpx.AsyncClient(trust_env=False) as client:
        for _ in range(3):
            assert (await client.get(url + "/whole")).content == b"hello"
            streamed = await client.post(url + "/stream", content=b"{}")
            assert streamed.text == "".join(f"data: {number}\n\n" for number in range(50))
            nothing = await client.get(url + "/nothing")
            assert (nothing.status_code, nothing.content) == (202, b"")


async def test_pieces_leave_as_they_are_made() -> None:
    more = trio.Event()

    async def work(head: RequestHead, body: bytes, out: Aside) -> None:
        out.start(200, EVENTS, None)
        await out.send(b"data: first\n\n")
        await more.wait()
        await out.send(b"data: second\n\n")
        await out.end()

    async with (
        door(work) as url,
        httpx.AsyncClient(trust_env=False) as client,
        client.stream("GET", url) as answer,
    ):
        pieces = answer.aiter_raw()
        assert await anext(pieces) == b"data: first\n\n"
        more.set()
        assert await anext(pieces) == b"data: second\n\n"
        assert await anext(pieces, None) is None


@pytest.mark.parametrize("started", [True, False])
async def test_a_client_that_leaves_cancels_the_work(started: bool) -> None:
    ended, running = trio.Event(), trio.Event()

    async def work(head: RequestHead, body: bytes, out: Aside) -> None:
        try:
            if started:
                out.start(200, EVENTS, None)
                await out.send(b"data: first\n\n")
            running.set()
            await trio.sleep_forever()
        finally:
            ended.set()

    async with door(work) as url:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(asked, url)
            await running.wait()
            nursery.cancel_scope.cancel()
        with trio.fail_after(10):
            await ended.wait()


async def asked(url: str) -> None:
    async with httpx.AsyncClient(trust_env=False, timeout=None) as client:
        await client.get(url)


async def test_refusals_and_failures_become_http() -> None:
    async def work(head: RequestHead, body: bytes, out: Aside) -> None:
        await trio.lowlevel.checkpoint()
        if head.path == b"/refused":
            raise Refusal(405, "method_not_allowed", "no", headers=(("Allow", "POST"),))
        raise RuntimeError("broken")

    async with door(work) as url, httpx.AsyncClient(trust_env=False) as client:
        refused = await client.get(url + "/refused")
        assert (refused.status_code, refused.headers["allow"]) == (405, "POST")
        assert refused.json()["error"]["code"] == "method_not_allowed"
        assert (await client.get(url + "/broken")).json()["error"]["code"] == "internal_error"
        assert (await client.get(url + "/refused")).status_code == 405


async def test_a_client_that_takes_nothing_ends_the_work() -> None:
    ended = trio.Event()
    written = 0

    async def work(head: RequestHead, body: bytes, out: Aside) -> None:
        nonlocal written
        out.start(200, EVENTS, None)
        try:
            for _ in range(1000):
                await out.send(b"x" * (1 << 20))
                written += 1
        finally:
            ended.set()

    async with door(work, write_stall_s=0.3) as url:
        stream = await trio.open_tcp_stream("127.0.0.1", int(url.rpartition(":")[2]))
        async with stream:
            await stream.send_all(b"GET / HTTP/1.1\r\nhost: a\r\n\r\n")
            with trio.fail_after(20):
                await ended.wait()
    assert written < 100


async def test_the_merged_tools_behind_the_doors_own_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern", events=True)

    async def steps(params: Any, notify: Any) -> Any:
        notice = {"progressToken": params["_meta"]["progressToken"], "progress": 1}
        notify({"jsonrpc": "2.0", "method": "notifications/progress", "params": notice})
        return {"content": []}

    server.tool = steps
    async with scene(monkeypatch, {"g": server}) as here:

        async def work(head: RequestHead, body: bytes, out: Aside) -> None:
            fields = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in head.fields]
            await here.endpoint.answer(head.method.decode(), fields, body, out)

        async with door(work) as url, httpx.AsyncClient(trust_env=False) as client:
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
            params = {"name": "g__add", "_meta": {"progressToken": "p"}}
            for _ in range(2):
                answer = await client.post(url + "/mcp", json={**message, "params": params})
                assert answer.headers["content-type"] == "text/event-stream"
                assert answer.text.count("event: message") == 2
            assert (await client.get(url + "/mcp")).status_code == 405

"""Routers that are groups of each other: what both have is found at both, and nothing goes round in a circle."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import pytest
import trio

from appliance.wire import via
from tests.fake_daemon import Daemon, fake_daemon
from tests.fake_engine import CHAT, says, whole
from tests.groups_outside import BOTH, Outside, Restartable, outside, restartable, url_of
from tests.mcp_door_scene import at
from tests.toolservers.scripted import Server

STRANGER = "1.1 appliance-0123456789abcdef"


@attrs.frozen
class Site:
    """A router with an engine and a tool server of its own."""

    name: str
    daemon: Daemon
    engine: Restartable
    tools: Server
    door: Outside

    def has(self, *others: Site) -> None:
        """Announce other routers here, as groups of their names."""
        for other in others:
            self.daemon.group(other.name, openai=f"{other.door.base}/v1", mcp=f"{other.door.base}/mcp")


@asynccontextmanager
async def site(folder: Path, name: str, **environ: str) -> AsyncIterator[Site]:
    home, tools = folder / name, Server(tools=[f"tool-{name}"])
    home.mkdir()
    async with restartable() as engine, fake_daemon() as daemon, at(tools) as where:
        engine.models = (f"model-{name}", "shared")
        engine.script = says(whole(200, CHAT | {"made_by": name}))
        daemon.group(f"own-{name}", openai=url_of(engine), mcp=where)
        async with outside(home, daemon.address, **environ) as door:
            yield Site(name, daemon, engine, tools, door)


@pytest.mark.parametrize("naming", ["prefix", "flat"])
async def test_two_routers_that_announce_each_other(naming: str, tmp_path: Path) -> None:
    naming_of = {"APPLIANCE_GROUPS__MCP_NAMING": f'"{naming}"'}
    async with site(tmp_path, "a", **naming_of) as a, site(tmp_path, "b", **naming_of) as b:
        a.has(b)
        b.has(a)
        for one in (a, b):
            await one.daemon.tell()
        everything = ["model-a", "model-b", "shared"]
        for one, other in ((a, b), (b, a)):
            await one.door.serves(*everything)
            await one.door.until("the shared one is at both", lambda s: s["models"]["shared"]["endpoints"] == 2)
            answer = await one.door.chat(f"model-{other.name}")
            assert (answer.status_code, answer.json()["made_by"]) == (200, other.name)
        # shared between the own engine and the other router, which must not send it back
        for _ in range(30):
            answer = await a.door.chat("shared")
            assert answer.status_code == 200, answer.text
        assert a.engine.asked[1:] and b.engine.asked[1:]
        assert len(a.engine.asked) + len(b.engine.asked) == 2 + 30

        names = [tool["name"] for tool in await a.door.tools()]
        if naming == "prefix":
            assert names == ["serve_status", "b__serve_status", "b__own-b__tool-b", "own-a__tool-a"]
        else:
            assert names == ["serve_status", "own-b__tool-b", "tool-a"]
        for _ in range(3):  # nothing grows
            assert [tool["name"] for tool in await a.door.tools()] == names
        called = "b__own-b__tool-b" if naming == "prefix" else "own-b__tool-b"
        assert await a.door.call(called, n=1) == (False, '["tool-b", {"n": 1}]')
        assert len(b.tools.ran) == 1

        # what nobody serves any more is not kept alive by each having it from the other
        a.engine.stop()
        for one in (a, b):
            await one.door.serves("model-b", "shared")
            await one.door.until("it is b's alone", lambda s: s["models"].get("model-a") is None)


async def test_three_in_a_circle(tmp_path: Path) -> None:
    """What a router has from another one it does not pass on to a third; each other's own is there all the same."""
    async with site(tmp_path, "a") as a, site(tmp_path, "b") as b, site(tmp_path, "c") as c:
        for one, next_one in ((a, b), (b, c), (c, a)):
            one.has(next_one)
            await one.daemon.tell()
        for one, next_one in ((a, b), (b, c), (c, a)):
            await one.door.serves("shared", f"model-{one.name}", f"model-{next_one.name}")
            for _ in range(10):
                assert (await one.door.chat("shared")).status_code == 200
            names = [tool["name"] for tool in await one.door.tools()]
            inner = f"{next_one.name}__own-{next_one.name}__tool-{next_one.name}"
            assert sorted(names) == sorted(
                ["serve_status", f"{next_one.name}__serve_status", inner, f"own-{one.name}__tool-{one.name}"]
            )
        assert sum(len(one.engine.asked) for one in (a, b, c)) == 30


async def test_a_request_that_has_come_round_is_refused(tmp_path: Path) -> None:
    async with site(tmp_path, "a") as a, site(tmp_path, "b") as b:
        a.has(b)
        await a.daemon.tell()
        await a.door.serves("model-a", "model-b", "shared")
        await a.door.tools()
        http, base = a.door.http, a.door.base
        ask = {"model": "model-a", "messages": []}
        list_tools = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}

        listed = await http.get(f"{base}/v1/models", headers={"via": STRANGER})
        (own,) = via.marks([listed.headers["via"]])
        assert own != via.OWN
        assert [row["id"] for row in listed.json()["data"]] == ["model-a", "shared"]  # not what b alone has
        assert "via" not in (await http.get(f"{base}/v1/models")).headers

        # by a stranger: its own engine, and never the other router
        before = len(b.engine.asked)
        for _ in range(10):
            for model in ("model-a", "shared"):
                answer = await http.post(
                    f"{base}/v1/chat/completions", json=ask | {"model": model}, headers={"via": STRANGER}
                )
                assert answer.status_code == 200
        assert len(b.engine.asked) == before
        assert a.engine.asked[-1].by_name["via"] == f"{STRANGER}, 1.1 {own}"
        answer = await http.post(
            f"{base}/v1/chat/completions", json=ask | {"model": "model-b"}, headers={"via": STRANGER}
        )
        assert (answer.status_code, answer.json()["error"]["code"]) == (508, "loop_detected")
        assert answer.headers["x-should-retry"] == "false"
        told = await http.post(f"{base}/mcp", json=list_tools, headers={"via": STRANGER, "accept": BOTH})
        assert [tool["name"] for tool in told.json()["result"]["tools"]] == ["serve_status", "own-a__tool-a"]
        assert via.marks([told.headers["via"]]) == (own,)
        call = list_tools | {"method": "tools/call", "params": {"name": "b__own-b__tool-b"}}
        told = await http.post(f"{base}/mcp", json=call, headers={"via": STRANGER, "accept": BOTH})
        assert told.json()["result"]["isError"] is True
        assert b.tools.ran == []

        # by itself, whatever stands before and after it, in one field or in two
        for value in (f"1.1 {own}", f"1.0 proxy.example (x), 1.1 {own}, HTTP/1.1 {STRANGER[4:]}"):
            for headers in ([("via", value)], [("via", value), ("via", "1.1 proxy.example")]):
                for path in ("/v1/chat/completions", "/tokenize", "/v1/messages"):
                    answer = await http.post(base + path, json=ask, headers=headers)
                    assert answer.status_code == 508, answer.text
                assert (await http.get(f"{base}/v1/models", headers=headers)).status_code == 508
                answer = await http.post(f"{base}/mcp", json=list_tools, headers=[*headers, ("accept", BOTH)])
                assert (answer.status_code, answer.json()["error"]["code"]) == (508, -32600)
        crowd = ", ".join(f"1.1 appliance-{n:016x}" for n in range(9))
        answer = await http.post(f"{base}/v1/chat/completions", json=ask, headers={"via": crowd})
        assert answer.status_code == 508


async def test_marks_of_others_mean_nothing_and_go_nowhere(tmp_path: Path) -> None:
    async with site(tmp_path, "a") as a:
        await a.door.serves("model-a", "shared")
        for value in (
            "1.1 proxy.example",
            "1.1 appliance-1, appliance-0123456789abcdef",
            "1.1 appliance-" + "g" * 16,
            ",",
        ):
            answer = await a.door.http.post(
                f"{a.door.base}/v1/chat/completions", json={"model": "shared"}, headers={"via": value}
            )
            assert answer.status_code == 200
            assert len(via.marks([a.engine.asked[-1].by_name["via"]])) == 1
            listed = await a.door.http.get(f"{a.door.base}/v1/models", headers={"via": value})
            assert "via" not in listed.headers


async def test_engines_of_the_file_get_no_mark_unless_a_router_asks(tmp_path: Path) -> None:
    async with restartable() as engine, outside(tmp_path, config=engine.toml) as door:
        assert (await door.chat("llama")).status_code == 200
        assert "via" not in engine.asked[-1].by_name
        ask = {"model": "llama", "messages": []}
        await door.http.post(f"{door.base}/v1/chat/completions", json=ask, headers={"via": STRANGER})
        assert engine.asked[-1].by_name["via"].startswith(f"{STRANGER}, 1.1 appliance-")


async def test_a_router_that_is_its_own_group_under_a_name(tmp_path: Path) -> None:
    """Found out by its sockets where the address shows it, by its mark where something stands in between."""
    async with site(tmp_path, "a") as a, trio.open_nursery() as nursery:
        listeners = await nursery.start(partial(trio.serve_tcp, _carry(a.door.process.door), 0, host="127.0.0.1"))
        port = listeners[0].socket.getsockname()[1]
        a.daemon.group("me", openai=f"http://127.0.0.1:{port}/v1", mcp=f"http://127.0.0.1:{port}/mcp")
        await a.daemon.tell()
        why = await a.door.gated("me", "endpoint probe failed")
        assert why == f"endpoint probe failed: http://127.0.0.1:{port}/v1: HTTP 508 Loop Detected"
        assert [tool["name"] for tool in await a.door.tools()] == ["serve_status", "own-a__tool-a"]
        assert "this router itself listens there" in (await a.door.group("me"))["mcp_error"]
        nursery.cancel_scope.cancel()


def _carry(port: int) -> Callable[[trio.SocketStream], Awaitable[None]]:
    async def carry(stream: trio.SocketStream) -> None:
        async def one_way(source: trio.SocketStream, sink: trio.SocketStream) -> None:
            try:
                async for piece in source:
                    await sink.send_all(piece)
                await sink.send_eof()
            except (trio.BrokenResourceError, trio.ClosedResourceError):
                pass

        other = await trio.open_tcp_stream("127.0.0.1", port)
        async with stream, other, trio.open_nursery() as nursery:
            nursery.start_soon(one_way, stream, other)
            nursery.start_soon(one_way, other, stream)

    return carry

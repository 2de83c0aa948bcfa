"""Tool servers that mean harm, or are broken in many ways at once: what they cost is bounded, what they say can be
shown, and no call is ever sent twice."""

from __future__ import annotations

import collections
import json
import random
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from appliance.facts.mcp import McpSettings
from appliance.mcp.conversation import MOST_REPLIES
from appliance.mcp.merge import MOST_TOLD
from appliance.rules.mcp import messages, naming
from tests.fake_daemon import fake_daemon
from tests.mcp_door_scene import inside
from tests.toolservers.scripted import Body, Server, event, failed, response, said, scene


async def test_a_server_that_asks_without_end_makes_us_ask_little(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every question costs a request of ours: it could have had thousands of them made by one stream."""
    server = Server(events=True)
    most = 0
    waiting: list[int] = []
    go_on = trio.Event()

    async def stream(identity: Any) -> AsyncIterator[bytes]:
        for number in range(2000):
            yield event({"jsonrpc": "2.0", "id": f"p{number}", "method": "ping"})
            await trio.lowlevel.checkpoint()
        await trio.testing.wait_all_tasks_blocked()
        nonlocal most
        most = most or len(waiting)
        go_on.set()
        yield event({"jsonrpc": "2.0", "id": identity, "result": {"content": [{"type": "text", "text": "ok"}]}})

    handle = server.handle

    async def asks(request: httpx.Request) -> httpx.Response:
        body = json.loads(request.content) if request.content else {}
        if "method" not in body and body:  # one of our replies
            waiting.append(1)
            await go_on.wait()
            return response(202)
        if body.get("method") == "tools/call":
            streamed = {"content-type": "text/event-stream"}
            return httpx.Response(200, headers=streamed, stream=Body(stream(body["id"])))
        return await handle(request)

    monkeypatch.setattr(server, "handle", asks)
    async with scene(monkeypatch, {"g": server}) as here:
        assert await here.call("g__add") == "ok"
        await trio.testing.wait_all_tasks_blocked()
        assert await here.call("g__add") == "ok"  # and those are not forgotten: it answers again
    assert most == MOST_REPLIES


async def test_a_list_is_bounded_over_all_its_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tools=[f"t{i}" for i in range(10)])
    server.per_page = 1
    for tool in server.tools:
        tool["description"] = "x" * 1000
    async with scene(monkeypatch, {"g": server}, McpSettings(max_body_bytes=5000)) as here:
        assert await here.names() == ["serve_status"]
        (row,) = here.merge.rows()
        assert row["error"] == "a list of tools of more than 5000 bytes"
    assert len(server.asked("tools/list")) < 2 * 6


def test_names_that_cannot_be_shown_are_no_tools() -> None:
    names = ["ok", "größe", "a\nb", "\x1b[2J", "x" * (naming.MOST_NAME + 1), "\u202eb", ""]
    raws = [naming.raw({"name": naming.raw(name)}) for name in names]
    assert [tool.name for tool in naming.tools_of(raws)] == ["ok", "größe"]


async def test_what_a_server_says_of_itself_can_be_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.before = lambda *_: response(500, b"\x1b[2J<html>\nbad\x07", content_type="text/html")
    async with scene(monkeypatch, {"g": server}) as here:
        await here.names()
        (row,) = here.merge.rows()
        assert "<html>" in str(row["error"])
        assert str(row["error"]).isprintable()


async def test_names_that_are_all_taken_fill_no_log(monkeypatch: pytest.MonkeyPatch) -> None:
    """`a` has tools that are called like those of `a__b`, others with every list."""
    first, second = Server(tools=[f"b__t{i}" for i in range(500)]), Server(tools=[f"t{i}" for i in range(500)])
    with capture_logs() as log:
        async with scene(monkeypatch, {"a": first, "a__b": second}) as here:
            await here.names()
    assert sum(line["event"] == "mcp_tool_dropped" for line in log) == MOST_TOLD
    assert [line["more"] for line in log if line["event"] == "mcp_tools_dropped"] == [500 - MOST_TOLD]


def _broken(kind: int, body: Any) -> httpx.Response | None:
    """One of many ways not to answer."""
    identity = body.get("id")
    match kind:
        case 0:
            raise httpx.ReadError("reset")
        case 1:
            raise httpx.RemoteProtocolError("closed without an answer")
        case 2:
            return failed(404, identity, -32600)  # as of a lost session
        case 3:
            return failed(400, identity, -32022)
        case 4:
            return response(307, headers={"location": "/elsewhere"})
        case 5:
            return response(401, b"key?", content_type="text/plain")
        case 6:
            return response(200, b"<html>", content_type="text/html")
        case 7:
            return response(200, b'{"jsonrpc":"2.0","id":"other","result":{}}')
        case 8:
            return response(200, b'id: 5\nretry: 0\ndata: {"jsonrpc":', content_type="text/event-stream")
        case 9:
            return response(503)
        case 10:
            return said(identity, 7)
        case 11:
            return response(202)
        case 12:
            return response(200, json.dumps({"jsonrpc": "2.0", "id": identity, "error": "no"}).encode())
    return None


@pytest.mark.parametrize("era", ["handshake", "modern"])
@pytest.mark.parametrize("seed", [1, 2])
async def test_of_two_hundred_calls_none_is_sent_twice(monkeypatch: pytest.MonkeyPatch, era: str, seed: int) -> None:
    rng = random.Random(seed)
    server = Server(era)

    def before(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        if method != "POST" or rng.random() < 0.3:
            return None
        if rng.random() < 0.1:
            server.restart()
        wanted = isinstance(body, dict) and (body.get("method") == "tools/call" or rng.random() < 0.2)
        return _broken(rng.randrange(15), body) if wanted else None

    server.before = before
    answered = 0
    async with scene(monkeypatch, {"g": server}, McpSettings(tools_ttl_s=0)) as here:
        for number in range(200):
            params = {"name": "g__add", "arguments": {"n": number}}
            asked = {"jsonrpc": "2.0", "id": number, "method": "tools/call", "params": params}
            got = (await here.post(asked, modern=number % 2 == 0)).message
            assert got["id"] == number
            assert isinstance(got.get("result", {}), dict)
            assert isinstance(got.get("error", {}), dict)
            assert ("result" in got) != ("error" in got)
            answered += json.dumps(["add", {"n": number}]) in str(got)
            if number % 10 == 0:
                await here.names()
    sent = collections.Counter(body["params"]["arguments"]["n"] for body in server.asked("tools/call"))
    assert sent
    assert max(sent.values()) == 1
    assert 20 < answered <= len(sent)
    assert len(server.ran) == len({json.dumps(run["arguments"]) for run in server.ran})


async def test_a_tool_server_that_is_the_router_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_daemon() as daemon, inside(monkeypatch, tmp_path, daemon) as router:
        daemon.group("me", mcp=router.url)
        await daemon.tell()
        await router.knows("me")
        with trio.fail_after(8):  # its list waited for itself until its time was over
            assert await router.names() == ["serve_status"]
        assert "this router itself listens there" in (await router.status())["groups"]["me"]["mcp_error"]
        assert "this router itself listens there" in await router.text("me__me__serve_status")
        daemon.groups.clear()
        await daemon.tell()
        await router.running.until("the group is gone", lambda: not router.running.app.groups.groups.tool_servers())
        assert "me" not in (await router.status())["groups"]  # and our connections to ourselves are closed


MANY = 200_000
"""Fields of one object: as a dictionary they take a second in which the router serves nobody. 16 MiB hold a million."""


def fields(count: int = MANY) -> str:
    return ",".join(f'"k{i}":0' for i in range(count))


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (f'{{"jsonrpc":"2.0","id":1,"method":"ping",{fields()}}}', None),
        (f'{{"jsonrpc":"2.0","id":1,"method":"ping","params":{{{fields()}}}}}', -32600),
        (f'{{"jsonrpc":"2.0","id":1,"method":"tools/list","params":{{"_meta":{{{fields()}}}}}}}', None),
        (f'{{"jsonrpc":"2.0","id":[{"{}," * MANY}1],"method":"ping"}}', -32600),
        (f'{{"jsonrpc":"2.0","id":1,"method":[{"{}," * MANY}1]}}', -32600),
        (f'{{"jsonrpc":[{"{}," * MANY}1],"id":1,"method":"ping"}}', -32600),
        (f'{{"jsonrpc":"2.0","id":1,"method":"ping","params":[{"{}," * MANY}1]}}', -32600),
        (f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":[{"{}," * MANY}1]}}}}', -32602),
        (
            f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{{"name":"x","arguments":[{"{}," * MANY}1]}}}}',
            -32602,
        ),
        (f'{{"jsonrpc":"2.0","id":1,"method":"initialize","params":{{"protocolVersion":[{"{}," * MANY}1]}}}}', None),
    ],
)
async def test_requests_of_a_million_fields_are_not_taken_apart(
    monkeypatch: pytest.MonkeyPatch, body: str, code: int | None
) -> None:
    made = counted_fields(monkeypatch)
    async with scene(monkeypatch, {"g": Server()}) as here:
        got = await here.raw("POST", {"content-type": "application/json"}, body.encode())
        assert (got.status, got.message.get("error", {}).get("code")) == (400 if code == -32600 else 200, code)
    assert max(made, default=0) <= messages.MOST_FIELDS


@pytest.mark.parametrize("naming", ["prefix", "flat"])
async def test_arguments_and_results_of_a_million_fields_pass_as_they_are(
    monkeypatch: pytest.MonkeyPatch, naming: str
) -> None:
    server = Server("modern")
    server.tools[0]["inputSchema"] = {"properties": {"k1": {"x-mcp-header": "k"}}}

    async def tool(params: Any, notify: Any) -> Any:
        return {"content": [], "structuredContent": params["arguments"], "isError": False}

    server.tool = tool
    made = counted_fields(monkeypatch)
    async with scene(monkeypatch, {"g": server}, McpSettings(naming=naming)) as here:
        params = f'{{"name":"g__add","arguments":{{{fields()}}}}}'
        message = f'{{"jsonrpc":"2.0","id":1,"method":"tools/call","params":{params}}}'
        got = await here.raw("POST", {"content-type": "application/json"}, message.encode())
        assert len(got.message["result"]["structuredContent"]) == MANY
    assert len(server.ran[0]["arguments"]) == MANY
    assert max(made) <= messages.MOST_FIELDS


@pytest.mark.parametrize("what", ["a result", "an error", "a list", "a schema", "many tools"])
async def test_servers_that_answer_with_a_million_fields(monkeypatch: pytest.MonkeyPatch, what: str) -> None:
    server = Server("modern")

    def answers(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        listed = what in ("a list", "a schema", "many tools")
        if body["method"] != ("tools/list" if listed else "tools/call"):
            return None
        said_ = {
            "a result": f'"result":{{{fields()}}}',
            "an error": f'"error":{{{fields()}}}',
            "a list": f'"result":{{"tools":[],{fields()}}}',
            "a schema": f'"result":{{"tools":[{{"name":"t","inputSchema":{{"properties":{{{fields()}}}}}}}]}}',
            "many tools": f'"result":{{"tools":[{"{}," * 2 * MANY}{{"name":"t"}}]}}',
        }[what]
        return response(200, f'{{"jsonrpc":"2.0","id":{body["id"]},{said_}}}'.encode())

    server.before = answers
    made = counted_fields(monkeypatch)
    async with scene(monkeypatch, {"g": server}) as here:
        if what in ("a result", "an error"):
            wrong, text = await here.call("g__add")
            assert wrong == "failed"
            assert "neither a result nor an error" in text or "without a message" in text
        else:
            assert await here.names() == ["serve_status"]
    assert max(made) <= messages.MOST_FIELDS


def counted_fields(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many fields each dictionary has that is made of an object from now on."""
    made: list[int] = []
    decoder = messages._fields

    class Counting:
        def decode(self, data: Any) -> Any:
            found = decoder.decode(data)
            made.append(len(found))
            return found

    monkeypatch.setattr(messages, "_fields", Counting())
    return made


@pytest.mark.parametrize("text", [':,"' * 50_000, "\\" * 99_999 + '":{', "{[" * 50_000, "größe:" * 30_000])
async def test_a_long_text_among_few_arguments_is_no_reason_to_refuse(
    monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    """Also where one of the arguments is ours to take out."""
    servers = {"a": Server(), "b": Server()}
    async with scene(monkeypatch, servers, McpSettings(naming="flat")) as here:
        await here.names()
        await here.call("add", {"document": text, "more": {"x": text}, "__group": "b"})
        wrong, told = await here.call("add", {"document": text, "__group": "c"})
        assert (wrong, told) == ("failed", "add is offered by a, b; __group must be one of these")
    assert servers["a"].ran == []
    assert servers["b"].ran[0]["arguments"] == {"document": text, "more": {"x": text}}

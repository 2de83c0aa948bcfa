"""The merge and tool servers of both eras: which one is spoken, sessions, and what changes on the way between them."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from appliance.facts.mcp import McpSettings
from appliance.rules.mcp import protocol
from tests.toolservers.scripted import Server, failed, response, scene

ERAS = ("modern", "handshake")


@pytest.mark.parametrize("client_modern", [True, False])
@pytest.mark.parametrize("events", [True, False])
@pytest.mark.parametrize("era", ERAS)
async def test_every_client_reaches_every_server(
    monkeypatch: pytest.MonkeyPatch, era: str, events: bool, client_modern: bool
) -> None:
    server = Server(era, ["add", "größe"], events)
    async with scene(monkeypatch, {"g": server}) as here:
        assert await here.names(modern=client_modern) == ["serve_status", "g__add", "g__größe"]
        assert await here.call("g__größe", {"x": 1}, modern=client_modern) == '["gr\\u00f6\\u00dfe", {"x": 1}]'
        assert await here.call("g__add", modern=client_modern) == '["add", null]'
    assert [call["name"] for call in server.ran] == ["größe", "add"]
    if era == "handshake":
        assert server.made == 1
        assert not server.sessions  # ended at the end
    for method, headers, _ in server.seen:
        assert headers["host"] == "g"
        assert "origin" not in headers
        assert method != "POST" or headers["accept"] == "application/json, text/event-stream"


async def test_the_era_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    modern, old = Server("modern"), Server()
    async with scene(monkeypatch, {"m": modern, "o": old}, McpSettings(tools_ttl_s=0)) as here:
        for _ in range(3):
            await here.names()
            await here.call("m__add")
            await here.call("o__add")
        assert {row["group"]: row["era"] for row in here.merge.rows()} == {"m": "2026-07-28", "o": "2025-11-25"}
    assert len(modern.asked("server/discover")) == len(old.asked("server/discover")) == 1
    assert len(old.asked("initialize")) == len(old.asked("notifications/initialized")) == 1
    assert not modern.asked("initialize")


async def test_a_server_that_never_answers_the_modern_question_gets_the_handshake(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    server = Server()
    hangs = server.handle

    async def handle(request: httpx.Request) -> httpx.Response:
        if b"server/discover" in request.content:
            await trio.sleep_forever()
        return await hangs(request)

    monkeypatch.setattr(server, "handle", handle)
    async with scene(monkeypatch, {"g": server}) as here:
        assert await here.names() == ["serve_status", "g__add"]
    assert trio.current_time() < McpSettings().list_timeout_s + autojump_clock.rate + 10


async def test_what_clients_show_at_the_door_stays_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern")
    async with scene(monkeypatch, {"g": server}) as here:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "g__add"}}
        await here.post(message, modern=True, authorization="Bearer door", x_api_key="door", cookie="a=b", x_other="1")
    for _, headers, _ in server.seen:
        assert not {"authorization", "x-api-key", "cookie", "x-other"} & set(headers)


# -- sessions ----------------------------------------------------------------------------------------------------------


async def test_a_restart_is_noticed_by_a_list_and_costs_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    async with scene(monkeypatch, {"g": server}, McpSettings(tools_ttl_s=0)) as here:
        await here.names()
        server.restart()
        assert await here.names() == ["serve_status", "g__add"]
        assert await here.call("g__add") == '["add", null]'
    assert server.made == 2
    assert len(server.asked("server/discover")) == 1


async def test_a_call_that_meets_a_restart_is_told_and_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    async with scene(monkeypatch, {"g": server}) as here:
        await here.names()
        server.restart()
        told = await here.call("g__add")
        assert told == (
            "failed",
            "Group g did not run add: the tool server does not know our session; it was restarted. Call it again.",
        )
        assert len(server.asked("tools/call")) == 1
        assert server.ran == []
        assert await here.call("g__add") == '["add", null]'
    assert len(server.ran) == 1


async def test_a_session_id_on_a_refusal_is_no_session(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()

    def refuses(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        first = body is not None and body.get("method") == "initialize" and not server.asked("tools/list")
        return failed(400, None, -32600, {"mcp-session-id": "fresh"}) if first and server.made == 0 else None

    server.before = refuses
    async with scene(monkeypatch, {"g": server}) as here:
        assert await here.names() == ["serve_status"]
    assert all(headers.get("mcp-session-id") is None for _, headers, _ in server.seen)


async def test_a_server_without_sessions_gets_no_session_header(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    server.keeps_sessions = False
    async with scene(monkeypatch, {"g": server}) as here:
        assert await here.call("g__add") == '["add", null]'
    assert all("mcp-session-id" not in headers for _, headers, _ in server.seen)
    assert [method for method, _, _ in server.seen if method == "DELETE"] == []


async def test_a_server_replaced_by_one_of_the_other_era_is_learnt_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {"g": Server("modern")}
    async with scene(monkeypatch, servers, McpSettings(tools_ttl_s=0)) as here:
        assert await here.call("g__add") == '["add", null]'
        servers["g"] = old = Server(tools=["other"])
        assert await here.names() == ["serve_status", "g__other"]
        assert await here.call("g__other") == '["other", null]'
        servers["g"] = Server("modern", ["third"])
        assert await here.names() == ["serve_status", "g__third"]
    assert len(old.ran) == 1


async def test_greeting_follows_a_redirect_of_its_own_origin_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    here_too, away = Server(), Server()

    def within(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        return response(307, headers={"location": "/mcp/"}) if here_too.path == "/mcp" else None

    here_too.before = within
    away.before = lambda *_: response(307, headers={"location": "http://elsewhere/mcp"})
    with capture_logs() as logs:
        async with scene(monkeypatch, {"away": away, "here": here_too, "elsewhere": Server()}) as here:
            assert await here.names() == ["serve_status", "elsewhere__add", "here__add"]
    assert [line["reason"] for line in logs if line.get("group") == "away"] == ["the tool server redirects (HTTP 307)"]


async def test_a_server_that_knows_no_handshake_gets_bare_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    bare = Server()
    bare.keeps_sessions = False

    def knows_two_methods(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        known = body.get("method") in ("tools/list", "tools/call")
        return None if known else failed(200, body.get("id"), -32601)

    bare.before = knows_two_methods
    async with scene(monkeypatch, {"g": bare}, McpSettings(tools_ttl_s=0)) as here:
        for _ in range(2):
            assert await here.names() == ["serve_status", "g__add"]
            assert await here.call("g__add") == '["add", null]'
        assert here.merge.rows()[0]["era"] == "bare"
    assert len(bare.asked("server/discover")) == len(bare.asked("initialize")) == 1
    assert not bare.asked("notifications/initialized")
    assert all("mcp-protocol-version" not in headers for _, headers, body in bare.seen if "tools" in body["method"])


async def test_calls_alone_learn_that_a_server_was_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {"g": Server("modern")}
    async with scene(monkeypatch, servers) as here:
        await here.names()
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "g__add"}}
        for replacement in (Server(), Server("modern"), Server()):
            servers["g"] = replacement
            answer = (await here.post(message)).message
            assert "error" in answer or "Call it again" in answer["result"]["content"][0]["text"]
            assert replacement.ran == []
            assert await here.call("g__add") == '["add", null]'
        # something else altogether for a moment, which has no messages at all
        servers["g"] = other = Server("modern")
        other.before = lambda *_: response(405, b"", content_type="text/plain")
        assert (await here.call("g__add"))[0] == "failed"
        servers["g"] = Server("modern")
        assert await here.call("g__add") == '["add", null]'


# -- between the eras --------------------------------------------------------------------------------------------------


async def test_arguments_are_repeated_in_headers_for_clients_that_cannot_know(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern")
    server.tools[0]["inputSchema"] = {
        "type": "object",
        "properties": {"where": {"type": "string", "x-mcp-header": "W"}},
    }
    async with scene(monkeypatch, {"g": server}) as here:
        await here.call("g__add", {"where": "hé"})  # never listed before
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "g__add", "arguments": {}}}
        await here.post(message, modern=True, Mcp_Param_W="as the client said")
    sent = [headers.get("mcp-param-w") for _, headers, body in server.seen if body["method"] == "tools/call"]
    assert sent == [protocol.header_value("hé"), "as the client said"]


async def test_what_a_tool_asks_back_stays_within_the_modern_era(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern")

    async def asks(params: Any, notify: Any) -> Any:
        if "inputResponses" in params:
            return {"content": [{"type": "text", "text": params["requestState"]}]}
        return {"resultType": "input_required", "inputRequests": {"a": {}}, "requestState": "s"}

    server.tool = asks
    async with scene(monkeypatch, {"g": server}) as here:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "g__add"}}
        got = await here.post(json.loads(json.dumps(message)), modern=True)
        assert got.message["result"]["resultType"] == "input_required"
        assert await here.call("g__add", modern=True, inputResponses={"a": {}}, requestState="s") == "s"
        kind, text = await here.call("g__add")
        assert kind == "failed"
        assert "input_required" in text
        capabilities = [call["_meta"][protocol.META_CAPABILITIES] for call in server.ran]
        assert capabilities == [{}, {}, {}]


async def test_results_carry_the_marks_of_the_clients_era(monkeypatch: pytest.MonkeyPatch) -> None:
    marked = {"content": [], "resultType": "complete", "_meta": {protocol.META_SERVER: {"name": "x"}, "own": 1}}
    for era in ERAS:
        server = Server(era)

        async def tool(params: Any, notify: Any) -> Any:
            return marked

        server.tool = tool
        async with scene(monkeypatch, {"g": server}) as here:
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "g__add"}}
            modern = (await here.post(json.loads(json.dumps(message)), modern=True)).message["result"]
            assert modern["resultType"] == "complete"
            assert modern["_meta"][protocol.META_SERVER]["name"] == "appliance"
            assert modern["_meta"]["own"] == 1
            old = (await here.post(message)).message["result"]
            assert old == {"content": [], "_meta": {"own": 1}}
    meta = server.ran[0].get("_meta", {})
    assert not any(key.startswith(protocol.META_PREFIX) for key in meta)

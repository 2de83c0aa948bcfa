"""The merge of tool servers in memory: eras, sessions, lists, calls, and servers that misbehave."""

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
from tests.toolservers.scripted import Got, Server, event, failed, response, said, scene

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


# -- sessions --------------------------------------------------------------------------------------


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


# -- lists --------------------------------------------------------------------------------------


async def test_all_pages_are_walked_and_circles_are_left(monkeypatch: pytest.MonkeyPatch) -> None:
    paged, circle = Server("modern", [f"t{n}" for n in range(7)]), Server("modern", ["a"])
    paged.per_page = 2

    def always(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        if body["method"] != "tools/list":
            return None
        return said(body["id"], {"tools": circle.tools, "nextCursor": "again"})

    circle.before = always
    async with scene(monkeypatch, {"c": circle, "p": paged}) as here:
        assert await here.names() == ["serve_status", "c__a", *(f"p__t{n}" for n in range(7))]
    assert len(circle.asked("tools/list")) == 2
    assert len(paged.asked("tools/list")) == 4


async def test_pages_without_an_end_are_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    endless = Server("modern")

    def next_page(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        if body["method"] != "tools/list":
            return None
        number = int(body["params"].get("cursor", 0))
        return said(body["id"], {"tools": [{"name": f"t{number}"}], "nextCursor": str(number + 1)})

    endless.before = next_page
    async with scene(monkeypatch, {"g": endless}) as here:
        assert len(await here.names()) == 101


async def test_a_list_is_asked_for_once_within_its_time(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    server = Server("modern")
    async with scene(monkeypatch, {"g": server}) as here:
        await here.names()
        await trio.sleep(59)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(here.names)
        assert len(server.asked("tools/list")) == 1
        await trio.sleep(2)
        async with trio.open_nursery() as nursery:
            for _ in range(5):
                nursery.start_soon(here.names)
        assert len(server.asked("tools/list")) == 2


async def test_a_hung_group_costs_the_others_its_bound_once_and_nothing_later(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    hung, well = Server("modern"), Server("modern")
    hung.hung = True
    with capture_logs() as logs:
        async with scene(monkeypatch, {"a": hung, "b": well}) as here:
            assert await here.call("b__add") == '["add", null]'
            assert trio.current_time() == 0  # calls of others do not wait at all
            assert await here.names() == ["serve_status", "b__add"]
            assert trio.current_time() == 10
            for _ in range(5):
                assert await here.names() == ["serve_status", "b__add"]
            assert trio.current_time() <= 10 + 5 * 0.5
            for _ in range(3):  # failing again is not told again
                await trio.sleep(11)
                await here.names()
            hung.hung = False
            await trio.sleep(20)
            assert await here.names() == ["serve_status", "a__add", "b__add"]
    told = [line["event"] for line in logs if line.get("group") == "a"]
    assert told == ["mcp_tools_fetch_failed", "mcp_tools_fetched_again"]


async def test_groups_that_are_down_or_talk_nonsense_contribute_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    nonsense, locked = Server(), Server()
    nonsense.before = lambda *_: response(200, b"<html>hello</html>", content_type="text/html")
    locked.before = lambda *_: response(401)
    servers = {"down": Server(), "locked": locked, "nonsense": nonsense, "well": Server()}
    async with scene(monkeypatch, servers) as here:
        gone = servers.pop("down")
        del gone
        sources = here.merge._sources
        monkeypatch.setattr(here.merge, "_sources", lambda: [*sources(), type(sources()[0])("down", "http://down/mcp")])
        assert await here.names() == ["serve_status", "well__add"]
        errors = {row["group"]: row["error"] for row in here.merge.rows()}
        assert errors["well"] is None
        assert errors["down"] == "no connection: refused"
        assert "401" in str(errors["locked"])
        assert "nonsense" in errors and "<html>" in str(errors["nonsense"])
        assert await here.call("down__add") == (
            "failed",
            "Group down did not answer: no connection: refused. Nothing was sent.",
        )


async def test_groups_come_and_go(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Server(), Server("modern", ["sub"])
    servers, hidden = {"a": first}, set[str]()
    async with scene(monkeypatch, servers, hidden=hidden) as here:
        assert await here.names() == ["serve_status", "a__add"]
        servers["b"] = second
        assert await here.names() == ["serve_status", "a__add", "b__sub"]
        hidden.add("a")
        assert await here.names() == ["serve_status", "b__sub"]
        await trio.testing.wait_all_tasks_blocked()
        assert (first.made, first.sessions) == (1, set())  # ended when the group went
        told = await here.call("a__add")
        assert told == ("failed", "There is no tool a__add. Tools: serve_status, b__sub")
        hidden.clear()
        assert await here.call("a__add") == '["add", null]'
        assert await here.names() == ["serve_status", "a__add", "b__sub"]


# -- calls --------------------------------------------------------------------------------------


async def test_a_call_whose_connection_breaks_is_not_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    for era in ERAS:
        server = Server(era)

        async def breaks(params: Any, notify: Any) -> Any:
            raise httpx.ReadError("reset")

        server.tool = breaks
        async with scene(monkeypatch, {"g": server}) as here:
            kind, text = await here.call("g__add")
            assert kind == "failed"
            assert text == "Group g gave no answer: connection lost: reset. add may have run all the same."
            assert len(server.asked("tools/call")) == 1


async def test_a_call_has_its_own_time_and_says_when_it_is_over(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    server = Server()

    async def hangs(params: Any, notify: Any) -> Any:
        await trio.sleep_forever()

    server.tool = hangs
    async with scene(monkeypatch, {"g": server}) as here:
        assert await here.call("g__add") == (
            "failed",
            "Group g gave no answer within 180 s. add may have run all the same.",
        )
        assert trio.current_time() == 180
        await trio.testing.wait_all_tasks_blocked()
    (told,) = server.asked("notifications/cancelled")
    assert told["params"]["requestId"] == server.asked("tools/call")[0]["id"]
    assert len(server.asked("tools/call")) == 1


@pytest.mark.parametrize("modern", [True, False])
async def test_progress_reaches_the_client_under_its_own_token(monkeypatch: pytest.MonkeyPatch, modern: bool) -> None:
    server = Server("modern", events=True)

    async def steps(params: Any, notify: Any) -> Any:
        token = params["_meta"]["progressToken"]
        for done in (1, 2):
            notice = {"progressToken": token, "progress": done, "total": 2}
            notify({"jsonrpc": "2.0", "method": "notifications/progress", "params": notice})
        other = {"progressToken": "somebody else's", "progress": 1}
        notify({"jsonrpc": "2.0", "method": "notifications/progress", "params": other})
        notify({"jsonrpc": "2.0", "method": "notifications/message", "params": {"level": "info", "data": "x"}})
        return {"content": []}

    server.tool = steps
    async with scene(monkeypatch, {"g": server}) as here:
        params = {"name": "g__add", "_meta": {"progressToken": "mine"}}
        got = await here.post({"jsonrpc": "2.0", "id": "x", "method": "tools/call", "params": params}, modern=modern)
        *notices, last = got.events
        assert [notice["params"] for notice in notices] == [
            {"progressToken": "mine", "progress": done, "total": 2} for done in (1, 2)
        ]
        assert last["id"] == "x"
        assert got.ended
        # who does not want events gets the result alone, in JSON
        plain = await here.post(
            {"jsonrpc": "2.0", "id": "x", "method": "tools/call", "params": params},
            modern=modern,
            accept="application/json",
        )
        assert json.loads(plain.body)["id"] == "x"
    tokens = [call["_meta"]["progressToken"] for call in server.ran]
    assert len(set(tokens)) == 2
    assert "mine" not in tokens


async def test_many_calls_side_by_side_keep_their_answers_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {"a": Server("modern", events=True), "b": Server(events=True)}
    answers: dict[int, Any] = {}

    async with scene(monkeypatch, servers) as here:
        await here.names()

        async def one(number: int) -> None:
            answers[number] = await here.call(f"{'ab'[number % 2]}__add", {"n": number}, modern=number % 3 == 0)

        async with trio.open_nursery() as nursery:
            for number in range(60):
                nursery.start_soon(one, number)
        assert not here.endpoint._running
    assert answers == {number: f'["add", {{"n": {number}}}]' for number in range(60)}
    assert servers["b"].made == 1


async def test_a_client_that_leaves_cancels_its_call(monkeypatch: pytest.MonkeyPatch) -> None:
    for era in ERAS:
        server = Server(era)
        ended: list[str] = []
        running = trio.Event()

        async def hangs(params: Any, notify: Any, running: trio.Event = running, ended: list[str] = ended) -> Any:
            running.set()
            try:
                await trio.sleep_forever()
            finally:
                ended.append("cancelled")

        server.tool = hangs
        async with scene(monkeypatch, {"g": server}) as here:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(here.call, "g__add")
                await running.wait()
                nursery.cancel_scope.cancel()
            await trio.testing.wait_all_tasks_blocked()
            assert ended == ["cancelled"]
            assert len(server.asked("notifications/cancelled")) == (0 if era == "modern" else 1)


async def test_a_reply_that_cannot_be_written_ends_the_call_with_its_own_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = Server("modern", events=True)

    class Gone(Exception):
        pass

    def gone(_: bytes) -> None:
        raise Gone

    async def steps(params: Any, notify: Any) -> Any:
        notice = {"progressToken": params["_meta"]["progressToken"], "progress": 1}
        notify({"jsonrpc": "2.0", "method": "notifications/progress", "params": notice})
        return {"content": []}

    server.tool = steps
    async with scene(monkeypatch, {"g": server}) as here:
        params = {"name": "g__add", "_meta": {"progressToken": 1}}
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
        headers = {"accept": "application/json, text/event-stream"}
        with pytest.raises(Gone):  # bare, not in a group
            await here.raw("POST", headers, json.dumps(message).encode(), Got(gone))


async def test_a_handshake_client_cancels_by_its_session_and_id(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern")
    running = trio.Event()

    async def hangs(params: Any, notify: Any) -> Any:
        running.set()
        await trio.sleep_forever()

    server.tool = hangs
    async with scene(monkeypatch, {"g": server}) as here:
        got: list[Got] = []

        async def called(accept: str = "application/json, text/event-stream") -> None:
            message = {"jsonrpc": "2.0", "id": 5, "method": "tools/call", "params": {"name": "g__add"}}
            got.append(await here.post(message, mcp_session_id="mine", accept=accept))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(called)
            await running.wait()
            cancel = {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 5}}
            for session in ({"mcp_session_id": "theirs"}, {}):
                assert (await here.post(cancel, **session)).status == 202
            await trio.testing.wait_all_tasks_blocked()
            assert not got
            assert (await here.post(cancel, mcp_session_id="mine")).status == 202
        assert (got[0].events, got[0].ended) == ([], True)  # nobody waits for an answer
        running = trio.Event()
        async with trio.open_nursery() as nursery:
            nursery.start_soon(called, "application/json")
            await running.wait()
            await here.post(cancel, mcp_session_id="mine")
        assert got[1].message["error"]["code"] == -32800


async def test_without_a_session_nobody_cancels_a_call(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern")
    running, go_on = trio.Event(), trio.Event()

    async def waits(params: Any, notify: Any) -> Any:
        running.set()
        await go_on.wait()
        return {"content": [{"type": "text", "text": "done"}]}

    server.tool = waits
    async with scene(monkeypatch, {"g": server}) as here, trio.open_nursery() as nursery:

        async def called() -> None:
            assert await here.call("g__add") == "done"

        nursery.start_soon(called)
        await running.wait()
        # ids are alike among clients: this one may be anybody
        await here.post({"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": 7}})
        await trio.testing.wait_all_tasks_blocked()
        go_on.set()


async def test_silence_is_broken_by_pings(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    server = Server("modern")

    async def slow(params: Any, notify: Any) -> Any:
        await trio.sleep(40)
        return {"content": []}

    server.tool = slow
    async with scene(monkeypatch, {"g": server}) as here:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "g__add"}}
        got = await here.post(message)
        assert got.body.count(b": ping\n\n") == 2
        assert got.message["id"] == 1
        plain = await here.post(message, accept="application/json")
        assert json.loads(plain.body)["id"] == 1


async def test_errors_of_a_server_pass_with_the_status_of_the_era(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern")
    server.before = lambda method, headers, body: (
        failed(400, body["id"], -32602) if body["method"] == "tools/call" else None
    )
    async with scene(monkeypatch, {"g": server}) as here:
        message = {"jsonrpc": "2.0", "id": 9, "method": "tools/call", "params": {"name": "g__add"}}
        for modern, status in ((True, 400), (False, 200)):
            got = await here.post(json.loads(json.dumps(message)), modern=modern)
            assert (got.status, got.message["error"]["code"], got.message["id"]) == (status, -32602, 9)


async def test_a_server_may_ask_whether_we_are_there(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(events=True)

    async def asks(params: Any, notify: Any) -> Any:
        notify({"jsonrpc": "2.0", "id": "p", "method": "ping"})
        notify({"jsonrpc": "2.0", "id": "e", "method": "elicitation/create", "params": {}})
        return {"content": [{"type": "text", "text": "ok"}]}

    server.tool = asks
    async with scene(monkeypatch, {"g": server}) as here:
        assert await here.call("g__add") == "ok"
        await trio.testing.wait_all_tasks_blocked()
    replies = {body["id"]: body for _, _, body in server.seen if body and body.get("id") in ("p", "e")}
    assert replies["p"]["result"] == {}
    assert replies["e"]["error"]["code"] == -32601


async def test_a_stream_that_its_server_closed_is_taken_up_again(
    monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    server = Server()

    def closes(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        if method == "GET":
            assert headers["last-event-id"] == "e1"
            answer = event({"jsonrpc": "2.0", "id": server.asked("tools/call")[0]["id"], "result": {"content": []}})
            return response(200, answer, content_type="text/event-stream")
        if body is None or body.get("method") != "tools/call":
            return None
        return response(200, b"id: e1\nretry: 500\ndata:\n\n", content_type="text/event-stream")

    server.before = closes
    async with scene(monkeypatch, {"g": server}) as here:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "g__add"}}
        assert (await here.post(message)).message == {"jsonrpc": "2.0", "id": 1, "result": {"content": []}}
        assert trio.current_time() == 0.5
    assert len(server.asked("tools/call")) == 1


async def test_a_token_that_is_none_is_not_passed_on(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern")
    async with scene(monkeypatch, {"g": server}) as here:
        await here.call("g__add", _meta={"progressToken": {}, "traceparent": "kept"})
    assert "progressToken" not in server.ran[0]["_meta"]
    assert server.ran[0]["_meta"]["traceparent"] == "kept"


async def test_indented_answers_stay_one_event(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern")

    def indented(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        if body["method"] != "tools/call":
            return None
        result = {"content": [{"type": "text", "text": "two\nlines"}]}
        return response(200, json.dumps({"jsonrpc": "2.0", "id": body["id"], "result": result}, indent=2).encode())

    server.before = indented
    async with scene(monkeypatch, {"g": server}) as here:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "g__add"}}
        got = await here.post(message, accept="text/event-stream")
        (answer,) = got.events
        assert answer["result"]["content"][0]["text"] == "two\nlines"
        assert got.body.count(b"\n") == 3


async def test_headers_that_cannot_be_sent_are_not(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern")
    async with scene(monkeypatch, {"g": server}) as here:
        message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "g__add"}}
        got = await here.post(message, modern=True, mcp_param_a="h\xe9", mcp_param_b="b")
        assert "isError" not in got.message["result"]
    (sent,) = [headers for _, headers, body in server.seen if body["method"] == "tools/call"]
    assert ("mcp-param-a" in sent, sent["mcp-param-b"]) == (False, "b")


async def test_large_results_pass_up_to_the_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    for events in (True, False):
        server = Server("modern", events=events)
        size = 3 << 20

        async def large(params: Any, notify: Any) -> Any:
            return {"content": [{"type": "text", "text": "x" * params["arguments"]["size"]}]}

        server.tool = large
        async with scene(monkeypatch, {"g": server}, McpSettings(max_body_bytes=4 << 20)) as here:
            assert len(await here.call("g__add", {"size": size})) == size
            kind, text = await here.call("g__add", {"size": 5 << 20})
            assert kind == "failed"
            assert "more than 4194304 bytes" in text


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


async def test_an_answer_to_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern", events=True)

    async def mixed(params: Any, notify: Any) -> Any:
        notify({"jsonrpc": "2.0", "id": 999, "result": {"content": [{"type": "text", "text": "of another"}]}})
        notify({"jsonrpc": "2.0", "id": None, "error": {"code": 1, "message": "of nobody"}})
        return {"content": [{"type": "text", "text": "own"}]}

    server.tool = mixed
    async with scene(monkeypatch, {"g": server}) as here:
        assert await here.call("g__add") == "own"


# -- between the eras --------------------------------------------------------------------------------------


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


# -- our own tools, and names --------------------------------------------------------------------------------------


@pytest.mark.parametrize("modern", [True, False])
async def test_serve_status_is_the_status_document(monkeypatch: pytest.MonkeyPatch, modern: bool) -> None:
    async with scene(monkeypatch, {}) as here:
        assert json.loads(await here.call("serve_status", modern=modern)) == {"models": {"m": 1}}


async def test_flat_names_and_groups_that_share_them(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = {"a": Server(tools=["add", "serve_status"]), "b": Server("modern", ["add", "sub"])}
    with capture_logs() as logs:
        async with scene(monkeypatch, servers, McpSettings(naming="flat")) as here:
            # a name without its list: asked for first
            assert await here.call("sub", {"x": 1}) == '["sub", {"x": 1}]'
            assert await here.names() == ["serve_status", "add", "sub"]
            assert await here.call("add", {"__group": "b", "x": 1}) == '["add", {"x": 1}]'
            assert await here.call("b__add", {"x": 2}) == '["add", {"x": 2}]'
            assert await here.call("add", {"x": 1}) == (
                "failed",
                "add is offered by several groups: set __group to one of a, b",
            )
            assert await here.call("add", {"__group": "c"}) == (
                "failed",
                "add is offered by a, b; __group must be one of these",
            )
            assert json.loads(await here.call("serve_status")) == {"models": {"m": 1}}
    assert [call["arguments"] for call in servers["b"].ran] == [{"x": 1}, {"x": 1}, {"x": 2}]
    assert servers["a"].ran == []
    dropped = [line for line in logs if line["event"] == "mcp_tool_dropped"]
    assert [(line["group"], line["tool"]) for line in dropped] == [("a", "serve_status")]

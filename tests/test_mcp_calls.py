"""Calls through the merge in memory: sent once, cancelled, streamed, refused, and answers that are none."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from appliance.facts.mcp import McpSettings
from tests.toolservers.scripted import Got, Server, event, failed, response, scene

ERAS = ("modern", "handshake")


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


async def test_an_answer_to_something_else_is_not_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server("modern", events=True)

    async def mixed(params: Any, notify: Any) -> Any:
        notify({"jsonrpc": "2.0", "id": 999, "result": {"content": [{"type": "text", "text": "of another"}]}})
        notify({"jsonrpc": "2.0", "id": None, "error": {"code": 1, "message": "of nobody"}})
        return {"content": [{"type": "text", "text": "own"}]}

    server.tool = mixed
    async with scene(monkeypatch, {"g": server}) as here:
        assert await here.call("g__add") == "own"

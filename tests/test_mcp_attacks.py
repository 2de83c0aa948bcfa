"""Tool servers and clients that break off, lie about lengths and names, leave by the hundred: from outside, at real
sockets, with a router as a process."""

from __future__ import annotations

import gzip
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from tests.fake_daemon import fake_daemon
from tests.groups_outside import BOTH, Outside, outside
from tests.mcp_door_scene import at
from tests.toolservers.listener import Reply, Request, listening, relayed
from tests.toolservers.scripted import Server, event, failed, response

JSON = (b"content-type", b"application/json")
EVENTS = (b"content-type", b"text/event-stream")


def result(identity: Any, text: str = "of another") -> bytes:
    content = {"content": [{"type": "text", "text": text}]}
    return json.dumps({"jsonrpc": "2.0", "id": identity, "result": content}).encode()


async def knows(door: Outside, *groups: str) -> None:
    await door.until("the groups are known", lambda shown: set(groups) <= set(shown["groups"]))


ANSWERS: dict[str, tuple[list[tuple[bytes, bytes]], list[bytes], str]] = {
    "closes within an event": ([EVENTS], [b'data: {"jsonrpc": "2.0", "id'], "ended without a result"),
    "closes before any event": ([EVENTS], [b": wait\n\n"], "ended without a result"),
    "sends nothing at all": ([JSON], [], "ended without a result"),
    "compresses unasked": ([JSON, (b"content-encoding", b"gzip")], [gzip.compress(result(1))], "compressed"),
    "answers to another id": ([JSON], [result(10**30)], "ended without a result"),
    "answers to the same id as text": ([JSON], [b""], "ended without a result"),
    "sends half a document": ([JSON], [result(1)[:40]], "without a message"),
    "sends a page": ([(b"content-type", b"text/html")], [b"<html>\x1b[2J"], "without a message"),
    "answers neither way": ([JSON], [b'{"jsonrpc": "2.0", "id": 1}'], "without a message"),
}


@pytest.mark.parametrize("how", ANSWERS)
async def test_an_answer_that_is_none(how: str, tmp_path: Path) -> None:
    """The caller is told, nothing is sent twice, no address is told, and the next call is an ordinary one."""
    server, asked = Server(), []
    fields, pieces, told = ANSWERS[how]

    async def handle(request: Request, reply: Reply) -> None:
        body = json.loads(request.body or b"{}")
        if body.get("method") == "tools/call" and body["params"].get("arguments", {}).get("odd"):
            asked.append(body["id"])
            reply.start(200, fields, None)
            for piece in [result(str(body["id"]))] if how == "answers to the same id as text" else pieces:
                await reply.send(piece)
            await reply.end()
            return
        await relayed(server, request, reply)

    async with fake_daemon() as daemon, listening(handle) as url:
        daemon.group("g", mcp=url + "/mcp")
        async with outside(tmp_path, daemon.address) as door:
            await knows(door, "g")
            assert await door.call("g__add") == (False, '["add", {}]')
            for _ in range(2):
                wrong, text = await door.call("g__add", odd=True)
                assert wrong
                assert told in text, text
                assert "add may have run all the same" in text
                assert "127.0.0.1" not in text
                assert text.isprintable()
            assert len(asked) == 2
            assert await door.call("g__add") == (False, '["add", {}]')
            assert server.made == 1


async def test_a_session_id_that_changes_with_each_answer(tmp_path: Path) -> None:
    """Only the handshake hands one out; what other answers say of one is not believed."""
    server = Server()
    handle = server.handle

    async def changes(request: httpx.Request) -> httpx.Response:
        answer = await handle(request)
        if b"initialize" not in request.content:
            answer.headers["mcp-session-id"] = f"stolen-{len(server.seen)}"
        return answer

    server.handle = changes  # type: ignore[method-assign]
    async with fake_daemon() as daemon, at(server) as tools:
        daemon.group("g", mcp=tools)
        async with outside(tmp_path, daemon.address) as door:
            await knows(door, "g")
            for _ in range(5):
                assert await door.call("g__add") == (False, '["add", {}]')
    assert server.made == 1
    assert {headers.get("mcp-session-id") for _, headers, _ in server.seen} <= {None, "s1"}


async def test_redirects_lead_to_no_other_server_and_in_no_circle(tmp_path: Path) -> None:
    victim = Server()

    async def handle(request: Request, reply: Reply) -> None:
        reply.start(307, [(b"location", target), (b"content-length", b"0")], 0)
        await reply.end()

    async with fake_daemon() as daemon, at(victim) as tools, listening(handle) as url:
        daemon.group("g", mcp=url + "/mcp")
        async with outside(tmp_path, daemon.address) as door:
            await knows(door, "g")
            for where in (tools, url + "/mcp", "/mcp", "//" + tools.removeprefix("http://"), "gopher://x", "http://["):
                target = where.encode()
                wrong, text = await door.call("g__add")
                assert wrong
                assert "redirects" in text, text
                assert "127.0.0.1" not in text
            assert [tool["name"] for tool in await door.tools()] == ["serve_status"]
    assert victim.seen == []


async def test_calls_that_a_server_cannot_read_leave_no_sessions_behind(tmp_path: Path) -> None:
    """A status of 400 makes us doubt what we know of a server. Clients can cause one whenever they like."""
    server = Server()
    waits, goes_on = trio.Event(), trio.Event()

    async def tool(params: Any, notify: Any) -> Any:
        waits.set()
        await goes_on.wait()
        return {"content": [{"type": "text", "text": "done"}]}

    def strict(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        wrong = isinstance(body, dict) and body.get("method") == "tools/call" and "x" in body["params"]["arguments"]
        return failed(400, body["id"], -32602) if wrong else None

    server.before, server.tool = strict, tool
    async with fake_daemon() as daemon, at(server) as tools:
        daemon.group("g", mcp=tools)
        async with outside(tmp_path, daemon.address) as door:
            await knows(door, "g")
            answers = []

            async def ask() -> None:
                answers.append(await door.call("g__add"))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await waits.wait()
                message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call"}
                message["params"] = {"name": "g__add", "arguments": {"x": 1}}  # type: ignore[assignment]
                for _ in range(20):
                    answer = await door.http.post(f"{door.base}/mcp", json=message, headers={"accept": BOTH})
                    assert answer.json()["error"]["code"] == -32602
                # that of the call that runs, and none of the twenty
                with trio.fail_after(10):
                    while len(server.sessions) > 2:  # noqa: ASYNC110 - another process ends them
                        await trio.sleep(0.02)
                assert "s1" in server.sessions
                goes_on.set()
            assert answers == [(False, "done")]
            with trio.fail_after(10):
                while "s1" in server.sessions:  # noqa: ASYNC110
                    await trio.sleep(0.02)
    assert len(server.asked("tools/call")) == 21


async def test_a_call_outlives_a_moment_in_which_nobody_tells_of_its_group(tmp_path: Path) -> None:
    """A daemon that is started anew knows nobody until the agents call again; the tool server never noticed."""
    server = Server()
    waits, goes_on = trio.Event(), trio.Event()

    async def tool(params: Any, notify: Any) -> Any:
        if not params["arguments"]:
            return {"content": [{"type": "text", "text": "at once"}]}
        waits.set()
        await goes_on.wait()
        return {"content": [{"type": "text", "text": "done"}]}

    server.tool = tool
    async with fake_daemon() as daemon, at(server) as tools:
        daemon.group("g", mcp=tools)
        async with outside(tmp_path, daemon.address) as door:
            await knows(door, "g")
            answers = []

            async def ask() -> None:
                answers.append(await door.call("g__add", slowly=True))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await waits.wait()
                group = daemon.groups.pop()
                await daemon.tell()
                await door.until("it is gone", lambda shown: not shown["groups"])
                assert [tool["name"] for tool in await door.tools()] == ["serve_status"]
                daemon.groups.append(group)
                await daemon.tell()
                await knows(door, "g")
                assert await door.call("g__add") == (False, "at once")
                assert not answers
                goes_on.set()
            assert answers == [(False, "done")]
            with trio.fail_after(10):
                while "s1" in server.sessions:  # noqa: ASYNC110 - another process ends it
                    await trio.sleep(0.02)
            assert len(server.sessions) == 1


@pytest.mark.parametrize("version", ["2025-11-25\r\nx-injected: 1", "v" * 5000, "größe", " "])
async def test_a_version_that_is_none(version: str, tmp_path: Path) -> None:
    server = Server()

    def odd(method: str, headers: httpx.Headers, body: Any) -> httpx.Response | None:
        if not isinstance(body, dict) or body.get("method") != "initialize":
            return None
        welcome = {"protocolVersion": version, "capabilities": {}, "serverInfo": {"name": "s", "version": ""}}
        answer = {"jsonrpc": "2.0", "id": body["id"], "result": welcome}
        return response(200, json.dumps(answer).encode())

    server.before = odd
    async with fake_daemon() as daemon, at(server) as tools:
        daemon.group("g", mcp=tools)
        async with outside(tmp_path, daemon.address) as door:
            await knows(door, "g")
            assert [tool["name"] for tool in await door.tools()] == ["serve_status"]
            row = await door.group("g")
            assert row["mcp_error"] == "initialize was answered with a version that is none"
            assert row["mcp_era"] == "unknown"
    assert all("x-injected" not in headers for _, headers, _ in server.seen)


async def test_a_hundred_calls_whose_clients_leave(tmp_path: Path) -> None:
    server = Server(events=True)
    running, most = 0, 0

    async def tool(params: Any, notify: Any) -> Any:
        nonlocal running, most
        running += 1
        most = max(most, running)
        try:
            if params["arguments"]["n"] % 2:
                await trio.sleep_forever()
            await trio.sleep(0.05)
            return {"content": [{"type": "text", "text": str(params["arguments"]["n"])}]}
        finally:
            running -= 1

    server.tool = tool
    async with fake_daemon() as daemon, at(server) as tools:
        daemon.group("g", mcp=tools)
        async with outside(tmp_path, daemon.address) as door:
            await knows(door, "g")
            await door.tools()
            descriptors = f"/proc/{door.process.pid}/fd"
            before = len(os.listdir(descriptors))
            answers: list[str] = []

            async def ask(number: int) -> None:
                with trio.move_on_after(1.5 if number % 2 else 20):
                    answers.append((await door.call("g__add", n=number))[1])

            for _ in range(2):
                answers.clear()
                async with trio.open_nursery() as nursery:
                    for number in range(100):
                        nursery.start_soon(ask, number)
                assert sorted(answers, key=int) == [str(number) for number in range(0, 100, 2)]
                with trio.fail_after(10):
                    while running:  # noqa: ASYNC110 - another process brings it about
                        await trio.sleep(0.02)
            assert most > 50
            assert len(server.ran) == 200
            assert await door.call("g__add", n=4) == (False, "4")
            with trio.fail_after(20):
                while len(os.listdir(descriptors)) > before + 8:  # noqa: ASYNC110 - idle ones close after seconds
                    await trio.sleep(0.1)
            assert "Traceback" not in door.log


async def test_a_stream_without_end_reaches_its_client_and_nobody_else(tmp_path: Path) -> None:
    """Notices without a pause, to a client that reads them, and to one that does not."""
    server = Server(events=True)
    sent = 0

    async def handle(request: Request, reply: Reply) -> None:
        nonlocal sent
        body = json.loads(request.body or b"{}")
        if body.get("method") != "tools/call" or "endless" not in body["params"].get("arguments", {}):
            await relayed(server, request, reply)
            return
        reply.start(200, [EVENTS], None)
        token = body["params"]["_meta"]["progressToken"]
        notice = {"progressToken": token, "progress": 1, "message": "x" * 4000}
        with suppress(trio.BrokenResourceError):  # it left
            while True:
                sent += 1
                await reply.send(event({"jsonrpc": "2.0", "method": "notifications/progress", "params": notice}))

    async with fake_daemon() as daemon, listening(handle) as url:
        daemon.group("g", mcp=url + "/mcp")
        async with outside(tmp_path, daemon.address) as door:
            await knows(door, "g")
            await door.tools()
            params = {"name": "g__add", "arguments": {"endless": 1}, "_meta": {"progressToken": "mine"}}
            message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}

            async def read(much: bool, task_status: trio.TaskStatus[None]) -> None:
                async with door.http.stream("POST", f"{door.base}/mcp", json=message, headers={"accept": BOTH}) as got:
                    if not much:
                        task_status.started()
                        await trio.sleep_forever()
                    count = 0
                    async for piece in got.aiter_text():
                        count += piece.count('"mine"')
                        if count > 100:
                            task_status.started()
                            count = -1_000_000

            async with trio.open_nursery() as nursery:
                for much in (True, False):
                    with trio.fail_after(20):
                        await nursery.start(read, much)
                for number in range(20):
                    with trio.fail_after(5):
                        assert await door.call("g__add", n=number) == (False, json.dumps(["add", {"n": number}]))
                nursery.cancel_scope.cancel()
            # whoever reads nothing is not written for: the rest waits at its server
            with trio.fail_after(10):
                while True:
                    before = sent
                    await trio.sleep(0.3)
                    if sent == before:
                        break


async def test_no_more_is_promised_than_tools(tmp_path: Path) -> None:
    """Prompts and resources of the groups' servers are not merged, and nobody is told that they were."""
    server = Server()
    async with fake_daemon() as daemon, at(server) as tools:
        daemon.group("g", mcp=tools)
        async with outside(tmp_path, daemon.address) as door:
            await knows(door, "g")
            welcome = await door.rpc("initialize", {"protocolVersion": "2025-11-25", "capabilities": {}})
            assert welcome["capabilities"] == {"tools": {"listChanged": False}}
            meta = {"io.modelcontextprotocol/protocolVersion": "2026-07-28"}
            meta["io.modelcontextprotocol/clientCapabilities"] = {}  # type: ignore[assignment]
            others = (
                *("prompts/list", "prompts/get", "resources/list", "resources/read", "resources/templates/list"),
                *(
                    "resources/subscribe",
                    "completion/complete",
                    "logging/setLevel",
                    "subscriptions/listen",
                    "tasks/list",
                ),
            )
            for method in ("server/discover", *others):
                named = {"name": "p"} if method == "prompts/get" else {"uri": "u"} if method == "resources/read" else {}
                message = {"jsonrpc": "2.0", "id": 5, "method": method, "params": {**named, "_meta": meta}}
                modern = {"accept": BOTH, "mcp-protocol-version": "2026-07-28", "mcp-method": method}
                modern |= {"mcp-name": next(iter(named.values()))} if named else {}
                answer = await door.http.post(f"{door.base}/mcp", json=message, headers=modern)
                if method == "server/discover":
                    assert answer.json()["result"]["capabilities"] == {"tools": {"listChanged": False}}
                    continue
                assert (answer.status_code, answer.json()["error"]["code"], answer.json()["id"]) == (404, -32601, 5)
                answer = await door.http.post(f"{door.base}/mcp", json=message, headers={"accept": BOTH})
                assert (answer.status_code, answer.json()["error"]["code"], answer.json()["id"]) == (200, -32601, 5)
    assert server.seen == []

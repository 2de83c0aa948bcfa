"""Tools of announced groups at the door of a router that runs: official clients, servers and a daemon around it."""

from __future__ import annotations

import gzip
import json
import socket
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from mcp import Client

from tests.fake_daemon import fake_daemon
from tests.mcp_door_scene import LIST, at, call, door, inside, until
from tests.raw_client import request
from tests.toolservers.programs import START_S, Running, first_line, program, python_server
from tests.toolservers.scripted import Server

VERSIONS = {"auto": "2026-07-28", "legacy": "2025-11-25"}


@pytest.fixture(scope="module")
def official() -> Iterator[dict[str, Running]]:
    """One of each era."""
    with (
        program(python_server(sys.executable, "new")) as new,
        program(python_server(sys.executable, "old", "--handshake-only")) as old,
    ):
        yield {"new": Running(first_line(new), new), "old": Running(first_line(old), old)}


def text_of(result: Any) -> str:
    return "".join(block.text for block in result.content)


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_tools_of_two_groups_in_one_list(tmp_path: Path, official: dict[str, Running], mode: str) -> None:
    before = {name: await server.ran("whoami") for name, server in official.items()}
    async with fake_daemon() as daemon:
        daemon.group("new", mcp=official["new"].url + "/mcp")
        # its engine loads: no actor runs, and nobody answers where it will
        daemon.group("old", mcp=official["old"].url + "/mcp", openai=closed(), actors=["spawning"])
        async with door(tmp_path, daemon) as router, Client(router.url, mode=mode) as client:
            assert client.protocol_version == VERSIONS[mode]
            row = (await router.status())["groups"]["old"]
            assert (row["healthy"], row["why_not"], row["mcp_tools"]) == (False, "no running actors", None)
            names = [tool.name for tool in (await client.list_tools()).tools]
            tools = ["add", "whoami", "steps", "wait", "boom"]
            assert names == ["serve_status", *(f"{group}__{tool}" for group in ("new", "old") for tool in tools)]
            for group in ("new", "old"):
                # both have it: what it is called says whose it is
                assert text_of(await client.call_tool(f"{group}__whoami", {})) == group
            steps: list[Any] = []

            async def told(*step: Any) -> None:
                steps.append(step)

            await client.call_tool("old__steps", {"n": 2}, progress_callback=told)
            assert steps == [(1, 2, "step 1"), (2, 2, "step 2")]
            rows = (await router.status())["groups"]
            assert [rows[name]["mcp_tools"] for name in ("new", "old")] == [5, 5]
            assert [rows[name]["mcp_era"] for name in ("new", "old")] == ["2026-07-28", "2025-11-25"]
            status = text_of(await client.call_tool("serve_status", {}))
            assert without_time(json.loads(status)) == without_time(await router.status())
            assert json.loads(status)["groups"]["old"]["why_not"] == "no running actors"
    assert {name: await server.ran("whoami") - before[name] for name, server in official.items()} == {
        "new": 1,
        "old": 1,
    }


def without_time(document: dict[str, Any]) -> Any:
    daemons = {name: {**row, "age_s": 0} for name, row in document["daemons"].items()}
    return {**document, "uptime_s": 0, "daemons": daemons}


def closed() -> str:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}/v1"


async def test_names_without_the_group(tmp_path: Path, official: dict[str, Running]) -> None:
    async with fake_daemon() as daemon, at(Server(tools=("lone",))) as url:
        for name, server in official.items():
            daemon.group(name, mcp=server.url + "/mcp")
        daemon.group("third", mcp=url)
        async with door(tmp_path, daemon, 'mcp_naming = "flat"') as router, Client(router.url) as client:
            tools = {tool.name: tool.input_schema for tool in (await client.list_tools()).tools}
            assert sorted(tools) == ["add", "boom", "lone", "serve_status", "steps", "wait", "whoami"]
            assert tools["whoami"]["properties"]["__group"]["enum"] == ["new", "old"]
            assert "__group" in tools["whoami"]["required"]
            for group in ("new", "old"):
                assert text_of(await client.call_tool("whoami", {"__group": group})) == group
            assert json.loads(text_of(await client.call_tool("lone", {"x": 1}))) == ["lone", {"x": 1}]
            refused = await client.call_tool("whoami", {})
            assert refused.is_error
            assert "new, old" in text_of(refused)


async def test_two_tools_under_one_long_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = Server(tools=("b__add",)), Server(tools=("add", "own"))
    async with fake_daemon() as daemon, at(first) as one, at(second) as two:
        daemon.group("a", mcp=one)
        daemon.group("a__b", mcp=two)
        async with inside(monkeypatch, tmp_path, daemon) as router:
            assert await router.names() == ["serve_status", "a__b__add", "a__b__own"]
            await router.text("a__b__add")
            await router.text("a__b__own")
            assert ([ran["name"] for ran in first.ran], [ran["name"] for ran in second.ran]) == (["b__add"], ["own"])
            await until("it is told", lambda: router.running.told("mcp_tool_dropped"))


@pytest.mark.parametrize("mode", ["auto", "legacy"])
async def test_a_client_that_leaves_ends_its_call(tmp_path: Path, official: dict[str, Running], mode: str) -> None:
    async def rows(what: str) -> dict[str, int]:
        seen = {name: await server.seen() for name, server in official.items()}
        return {name: sum(row.get(what) == "wait" for row in rows) for name, rows in seen.items()}

    ran, cancelled = await rows("ran"), await rows("cancelled")
    one_more = ({name: count + 1 for name, count in ran.items()}, {name: n + 1 for name, n in cancelled.items()})
    async with fake_daemon() as daemon:
        for name, server in official.items():
            daemon.group(name, mcp=server.url + "/mcp")
        async with door(tmp_path, daemon) as router, Client(router.url, mode=mode) as client:
            async with trio.open_nursery() as nursery:
                for name in official:
                    nursery.start_soon(client.call_tool, f"{name}__wait", {})
                with trio.fail_after(START_S):
                    while await rows("ran") != one_more[0]:  # noqa: ASYNC110
                        await trio.sleep(0.05)
                assert await rows("cancelled") == cancelled
                nursery.cancel_scope.cancel()
            with trio.fail_after(START_S):
                while await rows("cancelled") != one_more[1]:  # noqa: ASYNC110
                    await trio.sleep(0.05)
            assert text_of(await client.call_tool("old__add", {"a": 1, "b": 2})) == "3"
    assert (await rows("ran"), await rows("cancelled")) == one_more


async def ctl(*words: str, admin: Path) -> str:
    command = [sys.executable, "-m", "appliance", "ctl", *words, "--admin", str(admin)]
    done = await trio.run_process(command, capture_stdout=True)
    return done.stdout.decode()


async def test_a_server_that_was_restarted(tmp_path: Path) -> None:
    command = python_server(sys.executable, "up", "--handshake-only")
    async with fake_daemon() as daemon:
        with program(command) as process:
            first = Running(first_line(process), process)
            daemon.group("up", mcp=first.url + "/mcp")
            async with door(tmp_path, daemon, "tools_ttl_s = 0.01") as router, Client(router.url) as client:
                assert text_of(await client.call_tool("up__add", {"a": 1, "b": 2})) == "3"
                process.kill()
                process.wait()
                down = await client.call_tool("up__add", {"a": 1, "b": 2})
                assert down.is_error
                assert [tool.name for tool in (await client.list_tools()).tools] == ["serve_status"]
                assert (await router.status())["groups"]["up"]["mcp_error"].startswith("no connection")
                (trouble,) = json.loads(await ctl("status", "--json", admin=router.process.admin))["troubles"]
                assert trouble.startswith("group up: no tools, no connection")
                with program((*command, "--port", first.url.rpartition(":")[2])) as process:
                    second = Running(first_line(process), process)
                    names = [tool.name for tool in (await client.list_tools()).tools]
                    assert "up__add" in names
                    assert (await router.status())["groups"]["up"]["mcp_error"] is None
                    assert text_of(await client.call_tool("up__add", {"a": 1, "b": 2})) == "3"
                    assert await second.ran("add") == 1


async def test_one_that_hangs_delays_nobody_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good, hung = Server(), Server()
    hung.hung = True
    async with fake_daemon() as daemon, at(good) as one, at(hung) as two:
        daemon.group("good", mcp=one)
        daemon.group("hung", mcp=two)
        async with (
            inside(monkeypatch, tmp_path, daemon, "[groups]\nmcp_timeout_s = 60") as router,
            trio.open_nursery() as nursery,
        ):
            nursery.start_soon(router.text, "hung__add")
            nursery.start_soon(router.names)
            await until("both were asked", lambda: hung.seen and good.asked("tools/list"))
            with trio.fail_after(5):  # hung servers are given up after 10 s at the earliest
                for number in range(20):
                    assert json.loads(await router.text("good__add", {"n": number})) == ["add", {"n": number}]
                await router.text("serve_status")
            assert len(good.ran) == 20
            nursery.cancel_scope.cancel()


async def test_a_group_that_comes_and_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_daemon() as daemon, at(Server()) as one, at(Server()) as two:
        daemon.group("one", mcp=one)
        async with inside(monkeypatch, tmp_path, daemon) as router:
            assert await router.names() == ["serve_status", "one__add"]
            daemon.group("two", mcp=two)
            daemon.groups.pop(0)
            await daemon.tell()
            await router.knows("two")
            assert await router.names() == ["serve_status", "two__add"]
            assert "There is no tool one__add" in await router.text("one__add")


async def test_a_router_that_looks_for_no_groups_has_its_own_tool(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with (
        fake_daemon() as daemon,
        inside(monkeypatch, tmp_path, daemon, "[groups]\nenabled = false") as router,
    ):
        assert await router.names() == ["serve_status"]
        assert json.loads(await router.text("serve_status")) == await router.status()


async def test_nothing_is_left_to_load_while_streams_wait() -> None:
    """The first client of a tool server is made in the loop, which must not import meanwhile."""
    program = (
        "import sys; from appliance.cli import toolservers; assert 'httpx' not in sys.modules; toolservers._load();"
        "from appliance.mcp.exchange import open_client; known = set(sys.modules); open_client('http://x');"
        "print(*(set(sys.modules) - known))"
    )
    done = await trio.run_process([sys.executable, "-c", program], capture_stdout=True)
    assert done.stdout.split() == []


async def test_credentials_of_clients_stay_at_the_door(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    shown = {
        "authorization": "Bearer of-the-client",
        "x_api_key": "of-the-client",
        "cookie": "of-the-client",
        "proxy_authorization": "of-the-client",
        "x_anything": "of-the-client",
        "mcp_session_id": "of-the-client",
        "user_agent": "of-the-client",
        "x_request_id": "of-the-client",
    }
    async with fake_daemon() as daemon, at(server) as url:
        daemon.group("up", mcp=url)
        async with inside(monkeypatch, tmp_path, daemon) as router:
            assert (await router.ask(LIST, **shown))["tools"]
            await router.text("up__add", **shown)
    assert len(server.ran) == 1
    for _, headers, _ in server.seen:
        assert "of-the-client" not in str(headers.raw)
        assert headers["host"] == url.split("/")[2]
        assert "origin" not in headers


async def test_what_http_it_takes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = '[server]\ncors_origins = ["https://page.example"]\n'
    async with fake_daemon() as daemon, inside(monkeypatch, tmp_path, daemon, config) as router:
        for method in ("GET", "HEAD", "PUT", "PATCH"):
            answer = await router.send(method, accept="text/event-stream")
            assert (answer.status_code, answer.headers["allow"]) == (405, "POST, DELETE"), method
            assert answer.headers["x-appliance-reason"] == "method_not_allowed"
        assert (await router.send("DELETE")).status_code == 405
        began = await router.send("POST", {"jsonrpc": "2.0", "id": 0, "method": "initialize", "params": {}})
        session = began.headers["mcp-session-id"]
        assert began.json()["result"]["serverInfo"]["name"] == "appliance"
        assert (await router.send("DELETE", mcp_session_id=session)).status_code == 200
        slash = await router.send("POST", LIST, path="/mcp/")
        assert (slash.status_code, len(slash.json()["result"]["tools"])) == (200, 1)
        told = await router.send("POST", {"jsonrpc": "2.0", "method": "notifications/initialized"})
        assert (told.status_code, told.content) == (202, b"")
        options = await router.send("OPTIONS", origin="https://page.example")
        assert (options.status_code, options.headers["allow"]) == (204, "POST, DELETE, OPTIONS")
        for origin, status in (
            ("https://page.example", 403),
            ("http://evil.example", 403),
            ("null", 403),
            (router.base, 200),
        ):
            answer = await router.send("POST", LIST, origin=origin)
            assert answer.status_code == status, origin
            if status == 403:
                assert answer.json()["error"]["code"] == "origin_not_permitted"
                answer = await router.send("DELETE", origin=origin, mcp_session_id="s")
                assert answer.status_code == 403
        for taken in (options, slash, answer):
            assert not [name for name in taken.headers if name.startswith("access-control")]
        assert (await router.send("POST", LIST, path="/mcp/x")).status_code == 404
        upgrade = await router.send("GET", upgrade="websocket", connection="upgrade")
        assert upgrade.status_code == 501


async def test_bodies_above_16_mib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server()
    async with fake_daemon() as daemon, at(server) as url:
        daemon.group("up", mcp=url)
        async with inside(monkeypatch, tmp_path, daemon) as router:
            fits = json.dumps(call("up__add", {"x": "y" * (8 << 20)})).encode()
            assert (await router.send("POST", fits)).status_code == 200
            large = b" " * ((16 << 20) + 1)
            answer = await router.send("POST", large)
            assert (answer.status_code, answer.json()["error"]["code"]) == (413, "body_too_large")

            # one that says how large it will be is not even read
            client = await router.running.connect()
            await client.send(request("POST", "/mcp", f"content-length: {len(large)}"))
            assert (await client.answer("POST")).status == 413

            async def pieces() -> Any:
                for start in range(0, len(large), 1 << 20):
                    yield large[start : start + (1 << 20)]

            chunked = await router.http.post(router.url, content=pieces())
            assert (chunked.status_code, chunked.json()["error"]["code"]) == (413, "body_too_large")
            small = gzip.compress(large)
            packed = await router.send("POST", small, content_encoding="gzip")
            assert (packed.status_code, packed.json()["error"]["code"]) == (413, "body_too_large")
            assert len(server.ran) == 1


async def test_what_is_told_of_a_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A line in the access log, and nothing among the figures of models."""
    async with fake_daemon() as daemon, at(Server()) as url:
        daemon.group("up", mcp=url)
        async with inside(monkeypatch, tmp_path, daemon, "[server]\naccess_log = true\n") as router:
            await router.text("up__add", {"x": "of-the-client"}, x_request_id="call-1")
            await until("it is told", lambda: [r for r in router.running.told("request") if r["path"] == "/mcp"])
            (told,) = [line for line in router.running.told("request") if line["path"] == "/mcp"]
            assert (told["method"], told["status"], told["request_id"]) == ("POST", 200, "call-1")
            assert "of-the-client" not in json.dumps(router.running.log)
            assert not router.running.app.gateway.meters.models
            assert router.running.app.requests == 0


async def test_a_call_is_sent_once(tmp_path: Path) -> None:
    """Whatever becomes of the server, the client and its connection."""
    server = Server()
    waits, ended = trio.Event(), trio.Event()

    async def tool(params: Any, notify: Any) -> Any:
        if params["arguments"].get("breaks"):
            raise trio.BrokenResourceError
        waits.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    server.tool = tool
    async with fake_daemon() as daemon, at(server) as url:
        daemon.group("up", mcp=url)
        async with door(tmp_path, daemon) as router:
            told = await router.text("up__add", {"breaks": True})
            assert "may have run all the same" in told
            assert len(server.ran) == 1
            async with Client(router.url) as client:
                broken = await client.call_tool("up__add", {"breaks": True})
            assert broken.is_error
            assert len(server.ran) == 2
            # a client whose connection broke, and that goes on over another one
            async with trio.open_nursery() as nursery:
                nursery.start_soon(router.text, "up__add")
                await waits.wait()
                nursery.cancel_scope.cancel()
            with trio.fail_after(5):
                await ended.wait()
            assert await router.names() == ["serve_status", "up__add"]
            assert len(server.ran) == 3
            await router.process.stop()
    assert len(server.ran) == 3


@pytest.mark.parametrize("take_over", [False, True])
async def test_a_stop_lets_calls_end(tmp_path: Path, take_over: bool) -> None:
    server = Server()
    waits, goes_on = trio.Event(), trio.Event()

    async def tool(params: Any, notify: Any) -> Any:
        waits.set()
        await goes_on.wait()
        return {"content": [{"type": "text", "text": "done"}]}

    server.tool = tool
    async with fake_daemon() as daemon, at(server) as url:
        daemon.group("up", mcp=url)
        async with door(tmp_path, daemon) as router, trio.open_nursery() as nursery:
            answers: list[str] = []
            session = {"mcp_session_id": "one-of-before"}

            async def ask() -> None:
                answers.append(await router.text("up__add", **session))

            nursery.start_soon(ask)
            await waits.wait()
            first = router.process
            if take_over:
                await router.replaced()
                line = await router.process.logged("took over")
                assert "requests_finishing_there=1" in line
                # the session is believed, and nobody has to begin again
                assert await router.names() == ["serve_status", "up__add"]
            else:
                first.popen.terminate()
                assert "requests=1" in await first.logged("event=stopping")
            assert first.popen.poll() is None
            goes_on.set()
            assert await first.ended() == 0
            assert answers == ["done"]
            assert len(server.ran) == 1
            assert len(server.sessions) == (1 if take_over else 0)  # those of a router that ended are ended


async def test_a_stop_cuts_calls_that_outlast_it(tmp_path: Path) -> None:
    server = Server()
    waits, ended = trio.Event(), trio.Event()

    async def tool(params: Any, notify: Any) -> Any:
        waits.set()
        try:
            await trio.sleep_forever()
        finally:
            ended.set()

    server.tool = tool
    async with fake_daemon() as daemon, at(server) as url:
        daemon.group("up", mcp=url)
        async with door(tmp_path, daemon, drain_s=0.2) as router, trio.open_nursery() as nursery:
            broken: list[bool] = []

            async def ask() -> None:
                try:
                    await router.text("up__add")
                except Exception:
                    broken.append(True)

            nursery.start_soon(ask)
            await waits.wait()
            assert await router.process.stop() == 0
            with trio.fail_after(5):
                await ended.wait()
            assert len(server.ran) == 1
    assert broken == [True]

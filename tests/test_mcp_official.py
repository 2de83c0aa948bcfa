"""The official MCP packages on both ends of the merge, each as programs of their own.

Python's 2.x is among what the tests need. The other two want environments that `make test-mcp` makes and names here:
TEST_MCP_VENV (Python's 1.x) and TEST_MCP_SDK (the package for Node); without them their rows are skipped.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import pytest
import trio

from appliance.facts.mcp import McpSettings, Source
from appliance.mcp.merge import Merge, open_merge
from tests.toolservers.listener import served
from tests.toolservers.programs import HERE, START_S, Running, first_line, program, python_server

KEY = "Bearer of-this-server"
STATUS = {"groups": {"a": {"healthy": False, "why_not": "not probed yet"}}, "models": {}}
NAME = {"name": "appliance", "version": "1"}


def python_2() -> str:
    if importlib.util.find_spec("mcp") is None:
        pytest.skip("the package mcp is not installed (extra `test`)")
    return sys.executable


def python_1() -> str:
    folder = os.environ.get("TEST_MCP_VENV", "")
    if not folder:
        pytest.skip("no Python with mcp 1.x: `make test-mcp` makes one")
    return str(Path(folder) / "bin" / "python")


def node() -> str:
    found = shutil.which("node")
    if found is None or not os.environ.get("TEST_MCP_SDK"):
        pytest.skip("no Node with @modelcontextprotocol/sdk: `make test-mcp` installs it where npm is there")
    return found


SERVERS: Mapping[str, Callable[[], tuple[str, ...]]] = {
    "py2": lambda: python_server(python_2(), "py2"),
    "py2-paged": lambda: python_server(python_2(), "py2-paged", "--paged"),
    "py2-old": lambda: python_server(python_2(), "py2-old", "--handshake-only", "--key", KEY),
    "py2-old-json": lambda: python_server(
        python_2(), "py2-old-json", "--handshake-only", "--json", "--stateless", "--mounted"
    ),
    "py1": lambda: python_server(python_1(), "py1"),
    "py1-json": lambda: python_server(python_1(), "py1-json", "--json", "--key", KEY),
    "py1-stateless": lambda: python_server(python_1(), "py1-stateless", "--stateless"),
    "node": lambda: (node(), str(HERE / "node_server.mjs"), "node", "stateful"),
    "node-stateless": lambda: (node(), str(HERE / "node_server.mjs"), "node-stateless", "stateless"),
}
MODERN = {"py2", "py2-paged"}


def python_client(python: str, url: str, mode: str, calls: str, leave_after: float) -> list[str]:
    return [python, str(HERE / "python_client.py"), url, mode, calls, "--leave-after", str(leave_after)]


CLIENTS: Mapping[str, Callable[[str, str, float], list[str]]] = {
    "py2-modern": lambda url, calls, leave: python_client(python_2(), url, "auto", calls, leave),
    "py2-handshake": lambda url, calls, leave: python_client(python_2(), url, "legacy", calls, leave),
    "py1": lambda url, calls, leave: python_client(python_1(), url, "", calls, leave),
    "node": lambda url, calls, leave: [node(), str(HERE / "node_client.mjs"), url, calls],
}
VERSIONS = {"py2-modern": "2026-07-28", "py2-handshake": "2025-11-25", "py1": "2025-11-25", "node": "2025-11-25"}


async def client(kind: str, url: str, calls: Sequence[Any], leave_after: float = 0) -> Any:
    environment = {
        **os.environ,
        "MCP_SDK": os.environ.get("TEST_MCP_SDK", ""),
        "LEAVE_AFTER_MS": str(leave_after * 1000),
    }
    command = CLIENTS[kind](url, json.dumps(calls), leave_after)
    with trio.fail_after(START_S):
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False, env=environment)
    assert done.returncode == 0, done.stderr.decode()
    return json.loads(done.stdout)


@pytest.fixture(autouse=True)
def needed(request: pytest.FixtureRequest) -> None:
    """Skips a row whose package is not there, before anything is started for it."""
    callspec = getattr(request.node, "callspec", None)
    kind = callspec.params.get("kind") if callspec is not None else None
    if kind in CLIENTS:
        CLIENTS[kind]("", "", 0)
    elif kind is not None:
        SERVERS[kind]()


@pytest.fixture(scope="module")
def servers() -> Iterator[dict[str, Running]]:
    """Every server that can be had here; all load at the same time."""
    commands = {}
    for name, command in SERVERS.items():
        try:
            commands[name] = command()
        except pytest.skip.Exception:
            continue
    if not commands:
        pytest.skip("no official package is installed")
    with ExitStack() as stack:
        processes = {name: stack.enter_context(program(command)) for name, command in commands.items()}
        yield {name: Running(first_line(process), process) for name, process in processes.items()}


def merge_of(sources: Sequence[Source], settings: McpSettings | None = None) -> Any:
    return open_merge(lambda: sources, lambda: STATUS, settings or McpSettings(list_timeout_s=20), NAME)


def sources_of(servers: Mapping[str, Running]) -> list[Source]:
    return [Source(name, server.url + "/mcp", (("authorization", KEY),)) for name, server in servers.items()]


@pytest.mark.parametrize("kind", CLIENTS)
async def test_each_client_lists_and_calls_through_to_each_server(kind: str, servers: dict[str, Running]) -> None:
    simple = [name for name in servers if "paged" not in name]
    before = {name: await servers[name].ran("add") for name in simple}
    calls = [
        ["serve_status", {}],
        *([f"{name}__add", {"a": number, "b": 2}] for number, name in enumerate(simple)),
        *([f"{name}__steps", {"n": 3}] for name in simple),
        ["nobody__add", {}],
    ]
    if "py2" in servers:
        calls += [["py2__boom", {}], ["py2__unknown", {}], ["py2-paged__t6", {"where": "größer"}]]
    async with merge_of(sources_of(servers)) as merge, served(merge) as url:
        found = await client(kind, url, calls)
        eras = {row["group"]: row["era"] for row in merge.rows()}
    assert found["version"] == VERSIONS[kind]
    assert eras == {name: "2026-07-28" if name in MODERN else "2025-11-25" for name in servers}

    tools = {tool["name"]: tool for tool in found["tools"]}
    assert len(tools) == len(found["tools"])
    for name in simple:
        for tool in ("add", "steps", "wait"):
            assert tools[f"{name}__{tool}"]["description"].endswith(f"(group {name})")
    if "py2-paged" in servers:
        assert {f"py2-paged__t{n}" for n in range(7)} <= set(tools)
        assert tools["py2-paged__t6"]["schema"]["properties"]["where"]["x-mcp-header"] == "Where"

    answers = iter(found["calls"])
    status = next(answers)
    assert (status["failed"], json.loads(status["text"])) == (False, STATUS)
    for number, _ in enumerate(simple):
        added = next(answers)
        assert (added["failed"], added["text"]) == (False, str(number + 2))
    for name in simple:
        stepped = next(answers)
        assert (stepped["failed"], stepped["text"]) == (False, "done")
        # one that answers in JSON has no way to tell of steps
        assert stepped["progress"] == ([] if "json" in name else [[n, 3, f"step {n}"] for n in (1, 2, 3)])
    refused = next(answers)
    assert refused["failed"]
    assert "There is no tool nobody__add. Tools: serve_status, " in refused["text"]
    if "py2" in servers:
        assert next(answers)["failed"]
        unknown = next(answers)
        assert (unknown["failed"], unknown["text"]) == (True, "Unknown tool: unknown")
        assert json.loads(next(answers)["text"]) == ["t6", {"where": "größer"}]

    for name in simple:
        assert await servers[name].ran("add") - before[name] == 1


@pytest.mark.parametrize("kind", CLIENTS)
async def test_a_client_that_gives_up_ends_its_call_at_the_server(kind: str, servers: dict[str, Running]) -> None:
    # A stateless server cannot be told: the word comes in a request of its own.
    kept = {name: servers[name] for name in ("py2", "py2-old", "py1", "node") if name in servers}

    async def cancelled() -> dict[str, int]:
        rows = {name: await server.seen() for name, server in kept.items()}
        return {name: sum(row.get("cancelled") == "wait" for row in seen) for name, seen in rows.items()}

    before = await cancelled()
    async with merge_of(sources_of(kept)) as merge, served(merge) as url:
        found = await client(kind, url, [[f"{name}__wait", {}] for name in kept], leave_after=0.3)
        assert found["calls"] == [{"left": True}] * len(kept)
        with trio.fail_after(START_S):
            while await cancelled() != {name: count + 1 for name, count in before.items()}:  # noqa: ASYNC110
                await trio.sleep(0.1)


@pytest.mark.parametrize("kind", ["py2", "py2-old", "py1", "node"])
async def test_a_server_that_was_restarted(kind: str) -> None:
    command = SERVERS[kind]()
    with program(command) as process:
        first = Running(first_line(process), process)
        port = first.url.rpartition(":")[2]
        source = Source(kind, first.url + "/mcp", (("authorization", KEY),))
        async with merge_of([source], McpSettings(tools_ttl_s=0, list_timeout_s=20)) as merge:
            assert f"{kind}__add" in await names(merge)
            assert await result(merge, f"{kind}__add") == "3"
            first.process.kill()
            first.process.wait()
            at_port = ("--port", port) if command[1].endswith(".py") else (port,)
            with program((*command, *at_port)) as process:
                second = Running(first_line(process), process)
                told = await result(merge, f"{kind}__add")
                ran = await second.ran("add")
                # whatever it said, it is true, and nothing ran twice
                assert ran == (1 if told == "3" else 0)
                assert told == "3" or "Call it again" in told or "session" in told.lower()
                assert f"{kind}__add" in await names(merge)
                assert await result(merge, f"{kind}__add") == "3"
                assert await second.ran("add") == ran + 1


async def test_a_server_that_hangs_delays_no_calls_of_others(servers: dict[str, Running]) -> None:
    simple = [name for name in servers if "paged" not in name]
    with socket.socket() as hung:
        hung.bind(("127.0.0.1", 0))
        hung.listen()  # connections are made by the kernel, and nobody ever reads from them
        sources = sources_of(servers)
        sources.append(Source("hung", f"http://127.0.0.1:{hung.getsockname()[1]}/mcp"))
        async with merge_of(sources, McpSettings(list_timeout_s=600)) as merge, trio.open_nursery() as nursery:
            nursery.start_soon(merge.listing)
            for name in simple:
                assert await result(merge, f"{name}__add") == "3"
            assert {row["group"]: row["tools"] for row in merge.rows()}["hung"] is None
            nursery.cancel_scope.cancel()


async def names(merge: Merge) -> list[str]:
    async with httpx.AsyncClient(trust_env=False) as http, served(merge) as url:
        answer = await http.post(url, json={"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, timeout=START_S)
    return [tool["name"] for tool in answer.json()["result"]["tools"]]


async def result(merge: Merge, name: str) -> str:
    params = {"name": name, "arguments": {"a": 1, "b": 2}}
    message = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": params}
    async with httpx.AsyncClient(trust_env=False) as http, served(merge) as url:
        answer = (await http.post(url, json=message, timeout=START_S)).json()
    return answer["result"]["content"][0]["text"] if "result" in answer else answer["error"]["message"]

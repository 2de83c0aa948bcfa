"""A router whose only knowledge is one daemon, and tool servers for that daemon to announce.

async with fake_daemon() as daemon, at(Server()) as url:
    daemon.group("glm", mcp=url)
    async with door(tmp_path, daemon) as router:
        await router.ask(call("glm__add"))
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest
import trio

from tests.fake_daemon import Daemon
from tests.routers import Running
from tests.routers import router as in_this_loop
from tests.serve_process import Processes, Router, processes
from tests.toolservers.listener import Reply, Request, listening, relayed
from tests.toolservers.scripted import Server

BOTH = "application/json, text/event-stream"
WITHIN_S = 20.0


@asynccontextmanager
async def at(server: Server) -> AsyncIterator[str]:
    """A server that a test wrote, at a real address: its URL with /mcp. Who leaves cancels what it asked for; a tool
    that raises BrokenResourceError ends the connection without a word."""

    async def handle(request: Request, reply: Reply) -> None:
        with suppress(trio.BrokenResourceError):
            await relayed(server, request, reply)

    async with listening(handle) as url:
        yield url + "/mcp"


@attrs.define(eq=False)
class McpDoor:
    base: str
    http: httpx.AsyncClient

    @property
    def url(self) -> str:
        return f"{self.base}/mcp"

    async def send(self, method: str, body: Any = None, path: str = "/mcp", **fields: str) -> httpx.Response:
        """One request; `fields` in Python's spelling. A body that is no bytes is sent as JSON."""
        data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
        headers = {"accept": BOTH, "content-type": "application/json"} if data is not None else {}
        headers |= {name.replace("_", "-"): text for name, text in fields.items()}
        return await self.http.request(method, self.base + path, content=data, headers=headers)

    async def ask(self, message: Any, **fields: str) -> Any:
        """The result of one message of the handshake era."""
        answer = await self.send("POST", message, **fields)
        assert answer.status_code == 200, answer.text
        if answer.headers["content-type"] == "text/event-stream":
            return json.loads(answer.text.rpartition("data: ")[2])["result"]
        return answer.json()["result"]

    async def text(self, name: str, arguments: Any = None, **fields: str) -> str:
        return str((await self.ask(call(name, arguments), **fields))["content"][0]["text"])

    async def names(self) -> list[str]:
        return [tool["name"] for tool in (await self.ask(LIST))["tools"]]

    async def status(self) -> Any:
        return (await self.send("GET", path="/status.json")).json()

    async def knows(self, *groups: str) -> None:
        """Wait until the daemon has told it of these groups."""
        with trio.fail_after(WITHIN_S):
            while set(groups) - set((await self.status()).get("groups", ())):  # noqa: ASYNC110
                await trio.sleep(0.02)


@attrs.define(eq=False)
class RouterProcess(McpDoor):
    """`process` is the one that serves now."""

    process: Router
    routers: Processes
    environ: dict[str, str]

    async def replaced(self) -> None:
        """Another process takes over."""
        self.process = await self.routers.start("--takeover", env=self.environ)


@attrs.define(eq=False)
class RouterInside(McpDoor):
    running: Running


LIST = {"jsonrpc": "2.0", "id": 1, "method": "tools/list"}


def call(name: str, arguments: Any = None, identity: Any = 7) -> Any:
    params = {"name": name, "arguments": arguments or {}}
    return {"jsonrpc": "2.0", "id": identity, "method": "tools/call", "params": params}


@asynccontextmanager
async def door(folder: Path, daemon: Daemon, groups: str = "", **server: object) -> AsyncIterator[RouterProcess]:
    """`groups` is more of that section, `server` of the other."""
    async with processes(folder) as routers, client() as http:
        routers.configure(f"[groups]\n{groups}\n", **server)
        environ = {"MENTAT_DAEMONS": daemon.address}  # all tests' routers are told otherwise (`conftest.py`)
        process = await routers.start(env=environ)
        router = RouterProcess(f"http://127.0.0.1:{process.door}", http, process, routers, environ)
        await router.knows(*(group.name for group in daemon.groups))
        yield router


@asynccontextmanager
async def inside(
    monkeypatch: pytest.MonkeyPatch, folder: Path, daemon: Daemon, config: str = ""
) -> AsyncIterator[RouterInside]:
    monkeypatch.setenv("MENTAT_DAEMONS", daemon.address)
    async with in_this_loop(folder, config=config) as running, client() as http:
        router = RouterInside(running.url, http, running)
        await router.knows(*(group.name for group in daemon.groups))
        yield router


def client() -> httpx.AsyncClient:
    """A connection a request: idle ones would hold up the end of a router for seconds."""
    return httpx.AsyncClient(trust_env=False, timeout=WITHIN_S, limits=httpx.Limits(max_keepalive_connections=0))


async def until(what: str, wanted: Any) -> None:
    with trio.move_on_after(WITHIN_S):
        while not wanted():  # noqa: ASYNC110 - another process brings it about
            await trio.sleep(0.01)
        return
    raise AssertionError(f"never true: {what}")

"""A router as a process that knows nothing but what daemons tell it, and what its clients and its operator get to see.

    async with fake_daemon() as daemon, outside(tmp_path, daemon.address) as door:
        await door.serves("m")
        await door.chat("m")

Intervals are short, as upstream's own tests set them; everything else is what a router has without a configuration.
"""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import trio

from tests.fake_engine import CHAT, FakeEngine, says, whole
from tests.serve_process import Processes, processes

WITHIN_S = 20.0
"""Ends a test that would fail anyway."""
QUICK = {"POLL_INTERVAL_S": "1", "PROBE_INTERVAL_S": "0.1", "PROBE_TIMEOUT_S": "1", "ALLOWED_SOURCES": "127."}
BOTH = "application/json, text/event-stream"


@attrs.define(eq=False)
class Outside:
    """`process` is the router, `environ` what it was started with."""

    process: Any
    routers: Processes
    environ: dict[str, str]
    http: httpx.AsyncClient

    @property
    def base(self) -> str:
        return f"http://127.0.0.1:{self.process.door}"

    @property
    def log(self) -> str:
        return "\n".join(self.process.log)

    # -- what it shows -------------------------------------------------------------------------------------------------

    async def status(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.http.get(f"{self.base}/status.json")).json()
        return found

    async def group(self, name: str) -> dict[str, Any]:
        """What it says of a group; {} while it does not show it."""
        found: dict[str, Any] = (await self.status())["groups"].get(name, {})
        return found

    async def models(self) -> list[str]:
        return sorted(row["id"] for row in (await self.http.get(f"{self.base}/v1/models")).json()["data"])

    async def until(self, what: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait until `holds` is true of the status document; the document. `what` is what a test fails with."""
        shown: dict[str, Any] = {}
        with trio.move_on_after(WITHIN_S):
            while not holds(shown := await self.status()):  # noqa: ASYNC110 - another process brings it about
                await trio.sleep(0.02)
            return shown
        raise AssertionError(f"never true: {what}; at last {json.dumps(shown)}")

    async def serves(self, *models: str) -> None:
        """Wait until it lists these models and no others."""
        with trio.move_on_after(WITHIN_S):
            while await self.models() != sorted(models):  # noqa: ASYNC110
                await trio.sleep(0.02)
            return
        raise AssertionError(f"{models} were never served: {json.dumps(await self.status())}")

    async def gated(self, group: str, why: str) -> str:
        """Wait until the group is shut for a reason that begins so; the whole reason."""
        shown = await self.until(
            f"{group} is gated: {why}",
            lambda document: (document["groups"].get(group, {}).get("why_not") or "").startswith(why),
        )
        return str(shown["groups"][group]["why_not"])

    # -- what it is asked ----------------------------------------------------------------------------------------------

    async def post(self, path: str, body: Any) -> httpx.Response:
        return await self.http.post(self.base + path, json=body)

    async def chat(self, model: str, **more: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", {"model": model, "messages": [], **more})

    @asynccontextmanager
    async def stream(self, model: str) -> AsyncIterator[httpx.Response]:
        """A stream whose head has come."""
        ask = {"model": model, "messages": [], "stream": True}
        async with self.http.stream("POST", f"{self.base}/v1/chat/completions", json=ask) as answer:
            yield answer

    async def rpc(self, method: str, params: Any = None) -> Any:
        """The result of one request at /mcp."""
        message = {"jsonrpc": "2.0", "id": 7, "method": method, "params": params or {}}
        answer = await self.http.post(f"{self.base}/mcp", json=message, headers={"accept": BOTH})
        assert answer.status_code == 200, answer.text
        return answer.json()["result"]

    async def tools(self) -> list[dict[str, Any]]:
        found: list[dict[str, Any]] = (await self.rpc("tools/list"))["tools"]
        return found

    async def call(self, name: str, **arguments: Any) -> tuple[bool, str]:
        """Whether the tool failed, and its text."""
        result = await self.rpc("tools/call", {"name": name, "arguments": arguments})
        return bool(result.get("isError")), result["content"][0]["text"]

    # -- what its operator is told -------------------------------------------------------------------------------------

    async def ctl_says(self, *words: str) -> str:
        command = [sys.executable, "-m", "appliance", "ctl", *words, "--admin", str(self.process.admin)]
        done = await trio.run_process(command, capture_stdout=True, capture_stderr=True, check=False)
        return (done.stdout + done.stderr).decode()

    async def ctl(self, *words: str) -> Any:
        return json.loads(await self.ctl_says(*words, "--json"))


@asynccontextmanager
async def outside(folder: Path, *daemons: str, config: str = "", **environ: str) -> AsyncIterator[Outside]:
    """`daemons` are its seeds; `environ` more of its environment."""
    env = QUICK | {"MENTAT_DAEMONS": ",".join(daemons)} | environ
    async with processes(folder) as routers, one_connection_each() as http:
        routers.configure(config)
        yield Outside(await routers.start(env=env), routers, env, http)


def one_connection_each() -> httpx.AsyncClient:
    """Idle connections would hold up the end of a router for seconds."""
    return httpx.AsyncClient(trust_env=False, timeout=WITHIN_S, limits=httpx.Limits(max_keepalive_connections=0))


def url_of(engine: FakeEngine) -> str:
    return f"http://127.0.0.1:{engine.port}/v1"


@attrs.define(eq=False)
class Restartable(FakeEngine):
    """An engine that stops and starts again at its address. Stopped, it is gone as a killed one: who connects is
    refused, and open connections break."""

    nursery: trio.Nursery = attrs.field(kw_only=True)
    _serving: trio.CancelScope = attrs.field(factory=trio.CancelScope, init=False)

    async def start(self) -> None:
        listeners = await trio.open_tcp_listeners(self.port, host="127.0.0.1")
        self.port = listeners[0].socket.getsockname()[1]
        self._serving = trio.CancelScope()
        await self.nursery.start(self._run, listeners, self._serving)

    def stop(self) -> None:
        self._serving.cancel()

    async def _run(
        self, listeners: list[trio.SocketListener], scope: trio.CancelScope, task_status: trio.TaskStatus[None]
    ) -> None:
        with scope:
            await trio.serve_listeners(self._serve, listeners, task_status=task_status)  # type: ignore[arg-type]


@asynccontextmanager
async def restartable() -> AsyncIterator[Restartable]:
    async with trio.open_nursery() as nursery:
        engine = Restartable(0, says(whole(200, CHAT)), nursery=nursery)
        await engine.start()
        yield engine
        nursery.cancel_scope.cancel()

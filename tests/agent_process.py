"""`appliance agent` as a process that is stopped, killed and started again; what it leaves running is ended with the
test, by the marker of its state directory."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import sys
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from appliance.agent import procfs
from tests.processes import APPLIANCE, Process, environment, port_in, spawn

LLAMA_SERVER = Path(sys.executable).with_name("appliance-llama-server")


@attrs.frozen(eq=False)
class Agent(Process):
    """One agent, with its log in a file of its own."""

    @property
    def port(self) -> int:
        return port_in(self.log, 'event="agent runs"')

    async def status(self) -> dict[str, Any]:
        return await trio.to_thread.run_sync(get_json, f"http://127.0.0.1:{self.port}/status")

    async def shards(self) -> dict[str, Any]:
        found: dict[str, Any] = (await self.status())["appliance"]["shards"]
        return found

    async def shard(self, shard_id: str, holds: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
        """Wait until the shard is there and `holds` is true of it."""
        with trio.fail_after(60):
            while True:
                found = (await self.shards()).get(shard_id)
                if found is not None and holds(found):
                    return dict(found)
                await trio.sleep(0.05)

    async def ready(self, shard_id: str, *, other_than: int = 0) -> dict[str, Any]:
        return await self.shard(shard_id, lambda each: each["state"] == "ready" and each["pid"] != other_than)


class Agents:
    """The agents of one test, on one state directory and one configuration."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "appliance-state"
        self.config = folder / "appliance.toml"
        self._all: list[Agent] = []

    def configure(self, models: str, **agent: object) -> None:
        """Write the file: loopback, ports of this test alone, no GPUs, and what the test says."""
        first = 20000 + os.getpid() % 240 * 50  # below what the kernel gives out by itself
        given = {
            "node": "box",
            "address": "127.0.0.1",
            "listen": "127.0.0.1:0",
            "port_range": [first, first + 49],
            "gpus": {"backend": "none"},
            "executables": {"llamacpp": str(LLAMA_SERVER)},
            "llamacpp": {"threads": 1},
        } | agent
        from appliance.cli.config import toml_value

        lines = [f"{key} = {toml_value(value)}" for key, value in given.items()]
        self.config.write_text("\n".join(["[agent]", *lines, models]))

    def environment(self, env: Mapping[str, str] | None = None) -> dict[str, str]:
        return environment(self.folder) | dict(env or {})

    def begin(self, *flags: str, env: Mapping[str, str] | None = None) -> Agent:
        log_file = self.folder / f"agent-{len(self._all)}.log"
        process = Agent(spawn((*APPLIANCE, "agent", *flags), log_file, self.environment(env)), log_file)
        self._all.append(process)
        return process

    async def start(self, *flags: str, **how: Any) -> Agent:
        process = self.begin(*flags, **how)
        await process.logged('event="agent runs"')
        return process

    async def refused(self, **how: Any) -> list[str]:
        process = self.begin(**how)
        assert await process.ended() == 1, process.log
        return process.log

    def engines(self) -> dict[int, str]:
        """Pid -> marker of every process that belongs to this state directory."""
        with contextlib.suppress(FileNotFoundError):
            word = (self.state / "shards" / "word").read_text().strip()
            return procfs.marked(lambda marker: bool(word) and marker.startswith(f"{word}."))
        return {}

    def kill(self) -> None:
        for process in self._all:
            process.kill()
        for pid in self.engines():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@asynccontextmanager
async def agents(folder: Path) -> AsyncIterator[Agents]:
    made = Agents(folder)
    try:
        yield made
    finally:
        made.kill()


def model(name: str, engine: str = "sim", source: str = "", replicas: int = 1, more: str = "gpus_per_node = 0") -> str:
    """The tables of one model with one profile."""
    return (
        f"[[models]]\nname = '{name}'\nscaling = {{ min_replicas = {replicas} }}\n"
        f"[[models.profiles]]\nname = 'p'\nengine = '{engine}'\nsource = '{source}'\n{more}\n"
    )


def need_llama() -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed (extra `demo`)")


def get_json(url: str) -> Any:
    with urllib.request.urlopen(url, timeout=20) as answer:
        return json.load(answer)


def chat(url: str, name: str, tokens: int = 4) -> str:
    """What a model answers; `url` without /v1."""
    body = {"model": name, "messages": [{"role": "user", "content": "hi"}], "max_tokens": tokens, "temperature": 0}
    request = urllib.request.Request(
        f"{url}/v1/chat/completions", json.dumps(body).encode(), {"content-type": "application/json"}
    )
    with urllib.request.urlopen(request, timeout=60) as answer:
        text: str = json.load(answer)["choices"][0]["message"]["content"]
    return text

"""vLLM and SGLang themselves, serving on the CPU, launched by `appliance agent`. `make test-engines` runs this, in an
environment of 3.8 GB that TEST_ENGINES_VENV names; `make test` skips it."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from appliance.agent import procfs
from tests.agent_process import Agent, agents, chat, get_json, model
from tests.engines.tiny_gguf import words

VENV = os.path.abspath(given) if (given := os.environ.get("TEST_ENGINES_VENV")) else ""

pytestmark = pytest.mark.skipif(not VENV, reason="TEST_ENGINES_VENV names no environment; `make test-engines` does")

SECONDS = 400.0
"""For one load: importing torch from a cold disk on a busy machine. 20 to 80 s is usual."""

ID = "tiny.1/0"


@attrs.frozen
class Real:
    """How one engine is made to run on a CPU: `more` goes into its profile."""

    name: str
    more: str


# float32, as the weights are, so that the text is the known one on every CPU.
VLLM = Real("vllm", "dtype = 'float32'\nargs = ['--enforce-eager', '--kv-cache-memory-bytes=268435456']")
SGLANG = Real("sglang", "dtype = 'float32'\nargs = ['--max-total-tokens=8192']")


@pytest.fixture(scope="module")
def tiny_hf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from tests.engines.cpu_engines_model import make

    return make(tmp_path_factory.mktemp("hf") / "tiny")


@pytest.mark.parametrize("real", [VLLM, SGLANG], ids=lambda real: real.name)
async def test_it_is_launched_adopted_killed_and_stopped(real: Real, tmp_path: Path, tiny_hf: Path) -> None:
    told = Told(real.name)
    async with agents(tmp_path) as scene:
        executables = {real.name: f"{VENV}/bin/{real.name}"}
        tables = model("tiny", real.name, str(tiny_hf), more=f"gpus_per_node = 0\n{real.more}")
        scene.configure(tables, executables=executables)
        agent = await scene.start()
        states: list[str] = []
        first = await shard(agent, is_ready, states)
        assert states.index("loading") < states.index("ready"), states
        told(f"ready, pid {first['pid']}, after {' '.join(states)}")
        assert await asked(first) == words(4)
        told(f"answer {words(4)!r}")
        family = set(scene.engines())
        assert first["pid"] in family
        assert len(family) > 1

        # Killed, the agent leaves it serving; so it does when it is told to end.
        for last_words, status in ((signal.SIGKILL, -signal.SIGKILL), (signal.SIGTERM, 0)):
            began = time.monotonic()
            assert await agent.stop(last_words) == status
            took = time.monotonic() - began
            assert await asked(first) == words(4)
            agent = await scene.start()
            again = await shard(agent, is_ready)
            assert again["adopted"]
            assert (again["pid"], again["url"], again["log"]) == (first["pid"], first["url"], first["log"])
            assert await asked(again) == words(4)
            assert set(scene.engines()) >= family
            told(f"agent ended by {last_words.name} in {took:.1f} s; pid {again['pid']} adopted and answers")

        # Its own process alone is killed: nothing of the rest may stay, and the agent starts another one.
        os.kill(first["pid"], signal.SIGKILL)
        line = await agent.logged('event="shard failed"')
        assert "the engine ended while ready" in line
        assert not any(map(alive, family)), [procfs.command_line(pid) for pid in family if alive(pid)]
        told(f"killed, and none of its {len(family)} processes is left")
        second = await shard(agent, lambda row: is_ready(row) and row["pid"] != first["pid"])
        assert not second["adopted"]
        assert await asked(second) == words(4)
        told(f"started again as pid {second['pid']}, and answers")

        family = set(scene.engines())
        scene.configure("", executables=executables)
        began = time.monotonic()
        agent.send(signal.SIGHUP)
        line = await agent.logged(f'event="shard is stopped" shard={ID}')
        told(f"stopped in {time.monotonic() - began:.1f} s, {line[line.index('exit=') :]}")
        assert not any(map(alive, family))
        assert scene.engines() == {}
        assert await agent.stop() == 0


class Told:
    """What has been seen, for whoever runs this with `-s`: one line each, with the seconds since the start."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._began = time.monotonic()

    def __call__(self, text: str) -> None:
        print(f"{self._name}: {time.monotonic() - self._began:6.1f} s  {text}", flush=True)


def is_ready(row: dict[str, Any]) -> bool:
    return bool(row["state"] == "ready")


def alive(pid: int) -> bool:
    seen = procfs.see(pid)
    return seen is not None and not seen.ended


async def asked(row: dict[str, Any]) -> str:
    return await trio.to_thread.run_sync(chat, row["url"], "tiny")


async def shard(
    agent: Agent, holds: Callable[[dict[str, Any]], bool], states: list[str] | None = None
) -> dict[str, Any]:
    """The shard once `holds` is true of it; all states on the way go to `states`. Fails when the shard has."""
    states = [] if states is None else states
    with trio.fail_after(SECONDS):
        while True:
            status = await trio.to_thread.run_sync(get_json, f"http://127.0.0.1:{agent.port}/status")
            row: dict[str, Any] = status["appliance"]["shards"].get(ID, {"state": "none"})
            if states[-1:] != [row["state"]]:
                states.append(row["state"])
            if row["state"] != "none" and holds(row):
                return row
            if states.count("failed") > 1:
                raise AssertionError((states, row, agent.log))
            await trio.sleep(0.1)

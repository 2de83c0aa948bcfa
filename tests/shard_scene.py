"""Agents for tests of supervision: in the test's own Trio run, on the stub engine, with nothing left behind."""

from __future__ import annotations

import json
import os
import random
import re
import signal
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import Any

import attrs
import trio

from appliance.agent import procfs, sockets
from appliance.agent.shards import Shards
from appliance.facts.catalog import Profile
from appliance.facts.hardware import Cpus, Inventory
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.rules.engines.patience import Patience

QUICK = Patience(probe_every_s=0.03)
OWN_ARGV = (sys.executable, "-m", "appliance")
LOG_BYTES = 1 << 20
SECONDS = 30.0
"""The longest wait for anything: the machine may be busy. What is waited for takes a tenth of a second or two."""


def free_range(count: int) -> tuple[int, int]:
    """The first and last of `count` ports that nobody has now: by chance, or two runs of the tests at one time would
    take each other's. Below those that the kernel gives out by itself."""
    while True:
        first = random.randrange(20000, 32000 - count)
        if not sockets.taken(range(first, first + count)):
            return first, first + count - 1


@attrs.frozen
class Scene:
    """A state directory, and programs to run as engines. `settings` are what `Shards` is made with."""

    folder: Path
    settings: dict[str, Any]

    @property
    def state(self) -> Path:
        return self.folder / "state"

    def shards(self, **changes: Any) -> Shards:
        return Shards(**{**self.settings, **changes})

    def record(self, shard_id: str) -> dict[str, Any]:
        """The record of a shard as it lies on the disk."""
        for path in self.state.glob("shards/*/record.json"):
            record: dict[str, Any] = json.loads(path.read_text())
            if f"{record['shard']['replica']}/{record['shard']['rank']}" == shard_id:
                return record
        raise KeyError(shard_id)

    def processes(self) -> dict[int, str]:
        """Everything alive that this scene's agents started: pid -> marker."""
        try:
            word = (self.state / "shards/word").read_text()
        except FileNotFoundError:
            return {}
        return procfs.marked(lambda marker: marker.startswith(f"{word}."))


@contextmanager
def scene(folder: Path, port_range: tuple[int, int], **changes: Any) -> Iterator[Scene]:
    """A scene in `folder`; whatever its agents have left running is killed at the end, known by its marker alone."""
    stub = folder / "stub-engine"
    # Isolated and without site-packages: it starts in a tenth of the time.
    stub.write_text(f"#!{sys.executable} -IS\n" + (Path(__file__).parent / "stub_engine.py").read_text())
    stub.chmod(0o755)
    made = Scene(
        folder,
        {
            "state_dir": str(folder / "state"),
            "run_dir": str(folder / "run"),
            "agent_id": "a",
            "executables": {"llamacpp": str(stub), "vllm": str(stub), "ray": str(stub)},
            "own_argv": OWN_ARGV,
            "log_bytes": LOG_BYTES,
            "memory_wait_s": 1.0,
            "inventory": lambda: Inventory(node="a", cpus=Cpus(count=2)),
            "port_range": port_range,
            "environment": {"PATH": os.environ["PATH"], "HOME": str(folder)},
            "patience": QUICK,
            **changes,
        },
    )
    try:
        yield made
    finally:
        for pid, marker in made.processes().items():
            procfs.kill_if(pid, lambda pid=pid, marker=marker: procfs.marker_of(pid) == marker)  # type: ignore[misc]


@asynccontextmanager
async def agent(scene: Scene, **changes: Any) -> AsyncIterator[Shards]:
    """An agent that has adopted and runs; on leaving it is gone, and what it started is not."""
    shards = scene.shards(**changes)
    await shards.adopt()
    async with trio.open_nursery() as nursery:
        await nursery.start(shards.run)
        try:
            yield shards
        finally:
            nursery.cancel_scope.cancel()
    shards.close()


def stub(replica: str, *args: str, model: str = "m", source: str = "/dev/null", **changes: Any) -> Shard:
    """A shard that the stub engine is, with these flags of its own."""
    profile = Profile("p", "llamacpp", source=source, gpus_per_node=0, args=args)
    return Shard(replica, model, profile, **changes)


async def reported(shards: Shards, shard_id: str, *states: str, seconds: float = SECONDS) -> Report:
    """The report once it has one of these states; fails at once when it has ended in another."""
    return await when(shards, lambda: _in(shards, shard_id, states), seconds)


def _in(shards: Shards, shard_id: str, states: tuple[str, ...]) -> Report | None:
    report = shards.reports()[shard_id]
    if report.state in states:
        return report
    assert not report.ended, (report.state, report.reason, report.exit, report.tail)
    return None


async def when(shards: Shards, holds: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """What `holds` gives once it is true, looked at with every change of a report."""
    with trio.fail_after(seconds):
        while not (found := holds()):
            await shards.changed()
    return found


async def until(holds: Callable[[], Any], seconds: float = SECONDS) -> Any:
    """The same for what no report tells."""
    with trio.fail_after(seconds):
        while not (found := holds()):  # noqa: ASYNC110 - other processes set no events
            await trio.sleep(0.01)
    return found


def said(log: str) -> str:
    """All that is in a log file now."""
    return Path(log).read_text()


def pids_in(log: str) -> list[int]:
    """The processes that the stub engine has told of, in the order in which they started."""
    return [int(pid) for pid in re.findall(r"^pid (\d+)$", said(log), re.MULTILINE)]


def alive(pid: int) -> bool:
    seen = procfs.see(pid)
    return seen is not None and not seen.ended


def kill(pid: int, number: int = signal.SIGKILL) -> None:
    """Kill a process that a test knows to be its own."""
    os.kill(pid, number)

"""Programs of ours as process 1, as in a container: what others leave behind is cleared away, signals arrive, and no
status of an engine is lost."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from appliance.agent import procfs
from tests.agent_process import Agent, Agents, agents, model
from tests.namespaces import need_unshare
from tests.processes import APPLIANCE, Process, environment, spawn, until
from tests.serve_process import processes

ROOT = Path(__file__).parent.parent


@pytest.fixture(autouse=True)
def able() -> None:
    need_unshare("--pid", "--fork", "--kill-child", "--mount-proc")


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Agents]:
    async with agents(tmp_path) as made:
        yield made


def as_first(*command: str) -> tuple[str, ...]:
    return ("unshare", "--pid", "--fork", "--kill-child", "--mount-proc", *command)


def below(pid: int) -> list[procfs.Seen]:
    """Every process that descends from `pid`, zombies included."""
    seen = [each for each in map(procfs.see, procfs.everybody()) if each is not None]
    found, parents = [], {pid}
    while more := [each for each in seen if each.parent in parents]:
        found += more
        parents = {each.pid for each in more}
    return found


def begin(scene: Agents, *flags: str) -> Agent:
    log_file = scene.folder / "first.log"
    return Agent(spawn(as_first(*APPLIANCE, *flags), log_file, scene.environment()), log_file)


def first(process: Process) -> int:
    (pid,) = (each.pid for each in below(process.pid) if each.parent == process.pid)
    return pid


def program(process: Process) -> int:
    """The child that process 1 has become: what else is its child was left to it, and is marked."""
    pids = (each.pid for each in below(process.pid) if each.parent == first(process))
    return next(pid for pid in pids if not procfs.marker_of(pid))


async def test_what_engines_leave_behind_is_cleared_away(scene: Agents) -> None:
    """An engine with children in its group and one of its own session; killed, all of them become process 1's."""
    stub = scene.folder / "stub"
    stub.write_text(f"#!{sys.executable} -IS\n" + (ROOT / "tests" / "stub_engine.py").read_text())
    stub.chmod(0o755)
    more = "gpus_per_node = 0\nargs = ['--children=3', '--orphan']"
    scene.configure(model("m", "llamacpp", "/dev/null", more=more), executables={"llamacpp": str(stub)})
    process = begin(scene, "agent")
    try:
        assert "pid=2" in (await process.logged('event="agent runs"')).split()
        await process.ready("m.1/0")
        agent = program(process)
        (engine,) = (each.pid for each in below(process.pid) if each.parent == agent)
        os.kill(engine, signal.SIGKILL)
        failed = await process.logged('event="shard failed"')
        # The engine's own status was not taken by anybody else.
        assert "SIGKILL" in failed
        await process.logged('event="shard is ready"', times=2)
        ours = (first(process), agent)
        zombies = lambda: [each for each in below(process.pid) if each.ended and each.parent in ours]  # noqa: E731
        await until(lambda: not zombies(), "no zombie is left")
        assert not any(map(procfs.see, [engine]))
        os.kill(first(process), signal.SIGTERM)
        assert await process.ended() == 0
        assert 'event="agent stopped, and its container with it" engines_ended=m.1/0' in process.log[-1]
    finally:
        process.kill()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
async def test_a_signal_that_comes_before_the_program_has_begun_is_not_lost(
    scene: Agents, number: signal.Signals
) -> None:
    scene.configure("")
    process = begin(scene, "agent")
    try:
        await until(lambda: len(below(process.pid)) >= 2, "it has split")
        os.kill(first(process), number)
        # By the signal or politely, as far as it has come.
        assert await process.ended() in (0, 1, 128 + number)
    finally:
        process.kill()


async def test_it_ends_with_the_status_of_the_program(scene: Agents) -> None:
    scene.configure("", listen="300.0.0.1:x")
    process = begin(scene, "agent")
    assert await process.ended() == 1
    scene.configure("")
    process = begin(scene, "agent")
    try:
        await process.logged('event="agent runs"')
        os.kill(program(process), signal.SIGKILL)
        assert await process.ended() == 128 + signal.SIGKILL
    finally:
        process.kill()


async def test_a_router_too_clears_up_reloads_and_stops(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("")
        log_file = tmp_path / "first.log"
        process = Process(spawn(as_first(*APPLIANCE, "serve"), log_file, environment(tmp_path)), log_file)
        try:
            await process.logged("event=serving")
            pid = first(process)
            # As `docker exec` does: a process of that namespace whose parent ends before it.
            enter = ["nsenter", "--target", str(pid), "--pid", "sh", "-c", "sleep 0.1 & sleep 0.1 & exit 0"]
            await trio.run_process(enter)
            await until(lambda: len(below(process.pid)) == 4, "there are orphans")
            await until(lambda: len(below(process.pid)) == 2, "they are gone")
            os.kill(pid, signal.SIGHUP)
            await process.logged('event="configuration reloaded"')
            os.kill(pid, signal.SIGTERM)
            assert await process.ended() == 0
        finally:
            process.kill()


def test_sockets_passed_to_process_1_are_its_childs() -> None:
    """What a supervisor outside says of the process by its number holds for the program."""
    code = (
        "import json, os; from appliance.cli.firstprocess import split; split();"
        "print(json.dumps([os.getpid(), os.environ['LISTEN_PID'], os.environ['WATCHDOG_PID'], os.getsid(0)]))"
    )
    done = subprocess.run(
        as_first(sys.executable, "-c", code),
        env={**os.environ, "LISTEN_PID": "1", "WATCHDOG_PID": "77"},
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert json.loads(done.stdout) == [2, "2", "77", 2]


def test_anybody_else_goes_on_as_one_process() -> None:
    code = "import os; from appliance.cli.firstprocess import split; print(os.getpid()); split(); print(os.getpid())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    before, after = done.stdout.split()
    assert before == after

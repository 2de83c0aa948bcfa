"""`appliance agent` as a process with a control plane that gets stuck, is killed, or was never there."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from appliance.agent import procfs
from appliance.agent.conversation import MOST_LOGS, WELCOME_S
from appliance.cli.agent_tree import AgentTree, within
from appliance.cli.config import load
from appliance.facts import link as say
from appliance.facts.catalog import Profile
from appliance.facts.replica import Shard
from appliance.wire.link import Link, LinkClosed
from tests.agent_process import Agent, agents, model
from tests.caller_scene import Line
from tests.fake_control import as_text, control
from tests.link_papers import Cluster
from tests.processes import until

STOP_S = WELCOME_S - 1
"""A stop that waited for a stuck link would take at least as long as the shortest patience with one, or for ever. It
takes a fifth of a second where nothing else runs."""
SIM = Profile("p", "sim", gpus_per_node=0)


def shard(replica: str, **changes: Any) -> Shard:
    return Shard(replica, "m", SIM, node="box", key="engine-key", **changes)


def alive(pid: int) -> bool:
    seen = procfs.see(pid)
    return seen is not None and not seen.ended


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "appliance-plane")


async def stop_in_time(agent: Agent) -> None:
    agent.send(signal.SIGTERM)
    at = time.monotonic()
    assert await agent.ended() == 0
    assert time.monotonic() - at < STOP_S, agent.log


# -- a stuck link ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", ["no handshake", "no upgrade"])
async def test_it_stops_in_the_middle_of_a_handshake(tmp_path: Path, cluster: Cluster, mode: Any) -> None:
    async with control(cluster.papers) as plane, agents(tmp_path) as scene:
        plane.mode = mode
        scene.configure("", control_url=plane.url)
        cluster.join(scene.state, "box")
        agent = await scene.start()
        await until(lambda: bool(plane.connections), "it has called")
        await stop_in_time(agent)


async def test_it_stops_while_nobody_accepts(tmp_path: Path, cluster: Cluster) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=0) as deaf, contextlib.ExitStack() as filling:
        port = deaf.getsockname()[1]
        for _ in range(2):  # its queue is full: further ones wait for an answer to their SYN
            client = filling.enter_context(socket.socket())
            client.setblocking(False)
            client.connect_ex(deaf.getsockname())
        async with agents(tmp_path) as scene:
            scene.configure("", control_url=f"wss://127.0.0.1:{port}")
            cluster.join(scene.state, "box")
            calling = unanswered(port)
            agent = await scene.start()
            await until(lambda: unanswered(port) > calling, "it is calling")
            await stop_in_time(agent)


def unanswered(port: int) -> int:
    """How many connections to this port wait for an answer to their SYN, as the kernel lists them."""
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sum(row[2].endswith(f":{port:04X}") and row[3] == "02" for row in rows)


CHATTERBOX = """#!{python}
import sys, time
for _ in range(40_000):
    sys.stdout.buffer.write(b"x" * 99 + b"\\n")
sys.stdout.flush()
time.sleep(600)
"""


async def test_it_stops_while_the_control_plane_reads_nothing(tmp_path: Path, cluster: Cluster) -> None:
    program, weights = tmp_path / "chatterbox", tmp_path / "w.gguf"
    program.write_text(CHATTERBOX.format(python=sys.executable))
    program.chmod(0o755)
    weights.write_bytes(b"GGUF")
    loud = Shard("loud.1", "loud", Profile("p", "llamacpp", source=str(weights), gpus_per_node=0), node="box")
    async with control(cluster.papers) as plane, agents(tmp_path) as scene:
        scene.configure("", control_url=plane.url, executables={"llamacpp": str(program)})
        cluster.join(scene.state, "box")
        agent = await scene.start()
        line, _ = await plane.welcomed(silence_s=60.0, beat_s=0.1)
        await line.say(say.Start(loud))
        shown = await agent.shard("loud.1/0", lambda each: each["pid"])
        await until(lambda: os.stat(shown["log"]).st_size > 1_000_000, "it has written much")
        # More than sockets hold is asked for, and none of it is read; the agent goes on all the same.
        for number in range(400):
            await line.say(say.AskLog(f"r{number}", "loud.1/0", 600))
            if number % MOST_LOGS == MOST_LOGS - 1:
                await trio.sleep(0.005)
        await trio.sleep(1)
        with trio.fail_after(30):
            assert (await agent.status())["appliance"]["control"]["connected"] is True
        await stop_in_time(agent)
        assert alive(shown["pid"])


# -- a control plane that is killed ------------------------------------------------------------------------------------


@attrs.define(eq=False)
class PlaneProcess:
    popen: subprocess.Popen[bytes]

    async def told(self, kind: str) -> dict[str, Any]:
        """What it says next about this."""
        assert self.popen.stdout is not None
        with trio.fail_after(30):
            while True:
                text = await trio.to_thread.run_sync(self.popen.stdout.readline, abandon_on_cancel=True)
                assert text, "the control plane has ended"
                row: dict[str, Any] = json.loads(text)
                if row["kind"] == kind:
                    return row

    def say(self, message: say.Message) -> None:
        assert self.popen.stdin is not None
        self.popen.stdin.write(as_text(message).encode() + b"\n")
        self.popen.stdin.flush()


@contextlib.contextmanager
def plane_process(state: str, port: int = 0) -> Iterator[PlaneProcess]:
    command = [sys.executable, "-m", "tests.fake_control", state, str(port)]
    popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, cwd=Path(__file__).parent.parent)
    try:
        yield PlaneProcess(popen)
    finally:
        popen.kill()
        popen.wait()


async def test_a_killed_control_plane_costs_no_engine(tmp_path: Path, cluster: Cluster) -> None:
    state = str(Path(cluster.papers.folder).parent)
    async with agents(tmp_path) as scene:
        with plane_process(state) as plane:
            port = (await plane.told("port"))["port"]
            scene.configure("", control_url=f"wss://127.0.0.1:{port}")
            cluster.join(scene.state, "box")
            agent = await scene.start()
            assert (await plane.told("register"))["shards"] == {}
            plane.say(say.Start(shard("m.abcde")))
            before = await agent.ready("m.abcde/0")
            plane.popen.kill()
            await agent.logged('event="control plane lost, engines go on"')
            await agent.logged('event="control plane cannot be reached, engines go on"')
            assert (await agent.status())["appliance"]["control"]["connected"] is False
            assert (await agent.shards())["m.abcde/0"]["pid"] == before["pid"]
        with plane_process(state, port) as plane:
            shards = (await plane.told("register"))["shards"]
            assert shards == {"m.abcde/0": {"state": "ready", "pid": before["pid"]}}
            # The agent is killed too: the next one tells of the engine that it adopts.
            await agent.stop(signal.SIGKILL)
            agent = await scene.start()
            assert (await plane.told("register"))["shards"] == shards
            # Stopped in the middle of everything it is as good as gone, and the agent stops all the same.
            os.kill(plane.popen.pid, signal.SIGSTOP)
            await stop_in_time(agent)
            assert alive(before["pid"])
            os.kill(plane.popen.pid, signal.SIGCONT)
            agent = await scene.start()
            await plane.told("register")
            plane.say(say.Stop("m.abcde/0"))
            assert "reason=" in await agent.logged('event="told to stop" shard=m.abcde/0')
            await agent.shard("m.abcde/0", lambda each: each["state"] == "stopped")
            plane.say(say.Forget("m.abcde/0"))
            await until(lambda: not scene.engines(), "its engine is gone")
            await until(lambda: not list(scene.state.glob("shards/*/record.json")), "and its record")


# -- what an operator set ----------------------------------------------------------------------------------------------


async def test_the_control_plane_decides_and_the_models_of_the_file_do_not(tmp_path: Path, cluster: Cluster) -> None:
    async with control(cluster.papers) as plane, agents(tmp_path) as scene:
        scene.configure(model("m"))
        alone = await scene.start()
        left = await alone.ready("m.1/0")
        await alone.stop()
        scene.configure(model("m") + model("other"), control_url=plane.url)
        cluster.join(scene.state, "box")
        agent = await scene.start()
        told = await agent.logged("models of this file are ignored")
        assert "models=m,other" in told
        assert "follows the control plane" in told
        line, register = await plane.welcomed()
        assert [(each.shard.id, each.state, each.pid) for each in register.reports] == [("m.1/0", "ready", left["pid"])]
        await line.say(say.Stop("m.1/0", reason="nobody knows it"))
        while [each.state for each in (await line.hear(say.News)).reports] != ["stopped"]:
            continue
        assert not [each for each in agent.log if "ask for no key" in each]
        assert len([each for each in agent.log if "are ignored" in each]) == 1
        await stop_in_time(agent)


async def test_without_papers_it_runs_and_says_what_to_do(tmp_path: Path) -> None:
    async with agents(tmp_path) as scene:
        scene.configure("", control_url="wss://127.0.0.1:9")
        agent = await scene.start()
        told = await agent.logged("control plane refuses this agent")
        assert "code=no_certificate" in told
        assert "node.pem" in told
        assert "claim=box" in told
        assert "appliance ctl node add NODE" in told
        await stop_in_time(agent)


# -- within a serve ----------------------------------------------------------------------------------------------------


class Within:
    """The control plane's end of links in memory: the latest call is `line`."""

    def __init__(self) -> None:
        self.fault: Exception | None = None
        self.send, self.lines = trio.open_memory_channel[Line](8)

    async def attend(self, link: Link) -> None:
        if self.fault is not None:
            raise self.fault
        line = Line(link)
        await line.welcome(clock=time.time())
        await self.send.send(line)
        await trio.sleep_forever()


async def test_an_agent_within_another_process_leaves_its_engines_to_the_next(tmp_path: Path) -> None:
    async with agents(tmp_path) as scene:
        scene.configure(model("m"))
        pids = []
        for number in range(2):
            plane = Within()
            settings = load(None, scene.environment()).settings
            tree = AgentTree(settings, within(plane.attend), wait_s=5.0)
            async with trio.open_nursery() as ground:
                await ground.start(tree.run)
                line = await plane.lines.receive()
                if not number:
                    await line.say(say.Start(shard("m.abcde")))
                    # A link that ends is another one later, and nothing else.
                    await line.link.aclose()
                    line = await plane.lines.receive()
                with trio.fail_after(30):
                    while tree.shards.reports()["m.abcde/0"].state != "ready":
                        await tree.shards.changed()
                pids.append(tree.shards.reports()["m.abcde/0"].pid)
                at = time.monotonic()
                ground.cancel_scope.cancel()
            assert time.monotonic() - at < STOP_S
            with pytest.raises(LinkClosed):
                await line.link.receive()
        assert pids[0] == pids[1]
        assert alive(pids[0])


async def test_a_fault_of_the_control_plane_within_the_process_is_survived(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with agents(tmp_path) as scene:
        scene.configure("")
        plane = Within()
        plane.fault = RuntimeError("a bug")
        tree = AgentTree(load(None, scene.environment()).settings, within(plane.attend))
        async with trio.open_nursery() as ground:
            await ground.start(tree.run)
            with trio.fail_after(30):
                while tree.caller is not None and "not called" in tree.caller.line.reason:
                    await tree.caller.changed.wait()
            plane.fault = None
            with trio.fail_after(30):
                await plane.lines.receive()
            ground.cancel_scope.cancel()
        assert "fault of the control plane's end of the link" in capsys.readouterr().out


async def test_the_next_router_waits_for_the_directory_and_a_stranger_does_not(tmp_path: Path) -> None:
    from appliance.cli.startfailed import StartFailed

    async with agents(tmp_path) as scene:
        scene.configure("")
        settings = load(None, scene.environment()).settings
        plane = Within()
        async with trio.open_nursery() as ground:
            first = trio.CancelScope()

            async def until_cancelled(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
                with first:
                    await AgentTree(settings, within(plane.attend)).run(task_status)

            await ground.start(until_cancelled)
            with pytest.raises(StartFailed, match=f"in use by another agent .pid {os.getpid()}"):
                await ground.start(AgentTree(settings, within(plane.attend)).run)
            ground.start_soon(_later, first)
            with trio.fail_after(30):
                await ground.start(AgentTree(settings, within(plane.attend), wait_s=10.0).run)
            ground.cancel_scope.cancel()


async def _later(scope: trio.CancelScope) -> None:
    await trio.sleep(0.3)
    scope.cancel()


def test_a_router_without_profiles_carries_nothing_of_it() -> None:
    program = (
        "import sys, appliance.cli.serve; "
        "print([n for n in sys.modules if n.startswith(('appliance.agent', 'appliance.control', 'wsproto'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"


def test_an_agent_in_local_mode_carries_no_certificates() -> None:
    program = (
        "import sys; from appliance.cli.agent_tree import AgentTree; from appliance.facts.settings import Settings; "
        "AgentTree(Settings()); "
        "print([n for n in sys.modules if n.startswith(('cryptography', 'appliance.agent.link'))])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "[]"

"""`appliance agent` with real engines: started, killed, adopted, reloaded, reached through a router."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
from trio_websocket import open_websocket_url

from appliance.agent import procfs
from appliance.cli.agent_tree import AgentTree
from appliance.cli.config import load
from appliance.cli.startfailed import StartFailed
from appliance.demo.child import DidNotStart
from appliance.demo.engine import model_file
from appliance.facts.report import Report
from tests.agent_process import Agents, agents, chat, model, need_llama
from tests.engines.tiny_gguf import TinyModels, words
from tests.processes import until
from tests.serve_process import endpoint, processes


async def in_thread(call: Any, *args: Any) -> Any:
    return await trio.to_thread.run_sync(call, *args)


def proc(pid: int, name: str) -> str:
    """A file the kernel keeps about a process."""
    return Path(f"/proc/{pid}/{name}").read_text()


def alive(pid: int) -> bool:
    seen = procfs.see(pid)
    return seen is not None and not seen.ended


async def test_a_killed_engine_comes_back_and_its_neighbour_never_left(tmp_path: Path, tiny_models: TinyModels) -> None:
    need_llama()
    async with agents(tmp_path) as scene:
        scene.configure(model("m") + model("org/tiny", "llamacpp", str(tiny_models.model)))
        agent = await scene.start()
        sim, llama = await agent.ready("m.1/0"), await agent.ready("org/tiny.1/0")
        assert await in_thread(chat, llama["url"], "org/tiny") == words(4)
        assert await in_thread(chat, sim["url"], "m")
        kinds: list[str] = []
        async with open_websocket_url(f"ws://127.0.0.1:{agent.port}/events") as events, trio.open_nursery() as nursery:
            assert json.loads(await events.get_message())["type"] == "snapshot"

            async def hear() -> None:
                while True:
                    event = json.loads(await events.get_message())
                    if event["type"].startswith("actor_") and event["patch"][0]["at"] == ["groups", "m.1"]:
                        kinds.append(event["type"])

            nursery.start_soon(hear)
            os.kill(sim["pid"], signal.SIGKILL)
            again = await agent.ready("m.1/0", other_than=sim["pid"])
            await until(lambda: kinds[-1:] == ["actor_running"], "told by /events")
            nursery.cancel_scope.cancel()
        assert kinds[0] == "actor_dead"
        assert "actor_spawning" in kinds
        assert 'exit="signal SIGKILL"' in await agent.logged('event="shard failed"')
        assert "again_in_s=" in await agent.logged('event="not running" replica=m.1')
        assert await in_thread(chat, again["url"], "m")
        assert (await agent.shards())["org/tiny.1/0"]["pid"] == llama["pid"]


async def test_a_stop_leaves_engines_and_the_next_agent_adopts_them(tmp_path: Path, tiny_models: TinyModels) -> None:
    need_llama()
    async with agents(tmp_path) as scene:
        scene.configure(model("m") + model("tiny", "llamacpp", str(tiny_models.model)))
        first = await scene.start()
        before = {name: (await first.ready(name))["pid"] for name in ("m.1/0", "tiny.1/0")}
        assert await first.stop() == 0
        assert "engines_left_running=m.1/0,tiny.1/0" in first.log[-1]
        assert all(map(alive, before.values()))
        for last_words in (signal.SIGKILL, None):
            agent = await scene.start()
            found = {name: await agent.ready(name) for name in before}
            assert {name: each["pid"] for name, each in found.items()} == before
            assert all(each["adopted"] for each in found.values())
            assert await in_thread(chat, found["tiny.1/0"]["url"], "tiny") == words(4)
            if last_words is not None:
                await agent.stop(last_words)
        scene.configure(model("m"))
        agent.send(signal.SIGHUP)
        await agent.logged('event="shard is stopped" shard=tiny.1/0')
        assert not alive(before["tiny.1/0"])
        await until(lambda: set(scene.engines()) == {before["m.1/0"]}, "nothing else is left")


async def test_a_reload_takes_what_is_right_and_leaves_what_is_wrong(tmp_path: Path) -> None:
    async with agents(tmp_path) as scene:
        scene.configure(model("m"))
        agent = await scene.start()
        first = await agent.ready("m.1/0")
        scene.configure("[[models]]\nname = 'm'\nfallbacks = ['nobody']\n")
        agent.send(signal.SIGHUP)
        assert "models[0].fallbacks: expected the name of a model" in await agent.logged("configuration refused")
        scene.configure(model("m", replicas=2), log_bytes=1 << 20)
        agent.send(signal.SIGHUP)
        await agent.ready("m.2/0")
        assert "keys=agent.log_bytes" in await agent.logged("some changes need a restart")
        assert "changed=models.m.scaling.min_replicas" in await agent.logged("configuration reloaded")
        assert (await agent.shards())["m.1/0"]["pid"] == first["pid"]
        scene.configure(model("m", more="gpus_per_node = 0\nargs = ['--kv-blocks=99']"))
        agent.send(signal.SIGHUP)
        changed = await agent.ready("m.1/0", other_than=first["pid"])
        assert "profile p has been changed" in await agent.logged("event=stopping shard=m.1/0")
        command = proc(changed["pid"], "cmdline").split("\0")
        assert "--kv-blocks=99" in command


async def test_what_cannot_run_here_says_why_and_the_rest_runs(tmp_path: Path) -> None:
    node = tmp_path / "node.toml"
    node.write_text(
        'interfaces = [{ name = "lo", addresses = ["127.0.0.1"] }]\nmemory = { total_bytes = 549755813888 }\n'
        + '[[gpus]]\nname = "NVIDIA L40S"\nmemory_bytes = 48305799168\n' * 3
    )
    one = "gpus_per_node = 1\ngpu_class = 'l40s-45g'"
    missing = str(tmp_path / "missing.gguf")
    async with agents(tmp_path) as scene:
        scene.configure(
            model("a", more=one)
            + model("b", more="gpus_per_node = 2\ntensor_parallel = 2", replicas=2)
            + model("two", more="nodes = 2\ngpus_per_node = 1\ntensor_parallel = 2")
            + model("gone", "llamacpp", missing),
            inventory_file=str(node),
        )
        agent = await scene.start()
        found = {name: await agent.ready(name) for name in ("a.1/0", "b.1/0")}
        assert [len(found[name]["gpus"]) for name in found] == [1, 2]
        environ = proc(found["b.1/0"]["pid"], "environ").split("\0")
        assert "CUDA_VISIBLE_DEVICES=1,2" in environ
        # Now and then it is being tried once more.
        with trio.fail_after(60):
            while "gone.1" not in (whole := await agent.status())["appliance"]["waiting"]:  # noqa: ASYNC110 - remote
                await trio.sleep(0.05)
        waiting = {name: each["reason"] for name, each in whole["appliance"]["waiting"].items()}
        assert waiting["b.2"] == (
            "p: it needs 2 GPUs of one class, and 0 of 3 are free (GPU 0 has a.1; GPUs 1-2 have b.1)"
        )
        assert waiting["two.1"] == "p: it needs 2 nodes, and this agent runs replicas on one node only"
        assert f"source {missing} is not on this node" in waiting["gone.1"]
        assert whole["appliance"]["waiting"]["gone.1"]["again_at"]
        assert whole["groups"]["b.1"]["gpus_total"] == 2
        assert whole["appliance"]["shards"]["gone.1/0"]["state"] == "failed"


CHATTERBOX = """#!{python}
import sys, time
line = b"x" * 99 + b"\\n"
for _ in range(300_000):
    sys.stdout.buffer.write(line)
sys.stdout.flush()
time.sleep(600)
"""


async def test_status_is_answered_while_an_engine_writes_without_end(tmp_path: Path) -> None:
    program, weights = tmp_path / "chatterbox", tmp_path / "w.gguf"
    program.write_text(CHATTERBOX.format(python=sys.executable))
    program.chmod(0o755)
    weights.write_bytes(b"GGUF")
    async with agents(tmp_path) as scene:
        scene.configure(
            model("loud", "llamacpp", str(weights)), executables={"llamacpp": str(program)}, log_bytes=1 << 17
        )
        agent = await scene.start()
        loud = await agent.shard("loud.1/0", lambda each: each["pid"])
        log = Path(loud["log"])
        with trio.fail_after(60):
            while int(proc(loud["pid"], "io").split("wchar: ")[1].split()[0]) < 29_000_000:
                with trio.fail_after(5):
                    assert (await agent.shards())["loud.1/0"]["state"] == "loading"
                await trio.sleep(0.02)
        await until(lambda: sum(each.stat().st_size for each in log.parent.iterdir()) <= 1 << 18, "the log is bounded")


async def test_refusals_of_a_start(tmp_path: Path) -> None:
    async with agents(tmp_path) as scene:
        scene.configure(
            "[[models]]\nname = 'm'\n[[models.profiles]]\nname = 'p'\nengine = 'sm'\nnodes = 0\n", log_byte=1
        )
        assert await scene.refused() == [
            'appliance agent: models[0].profiles[0].engine: expected "vllm", "sglang", "llamacpp" or "sim", got "sm"',
            "appliance agent: models[0].profiles[0].nodes: expected a whole number, 1 or more, got 0",
            "appliance agent: agent.log_byte: unknown key; did you mean log_bytes?",
        ]
        scene.configure("")
        first = await scene.start()
        (told,) = await scene.refused()
        assert told.startswith("appliance agent: the state directory ")
        assert f"in use by another agent (pid {first.popen.pid})" in told
        scene.configure("", listen=f"127.0.0.1:{first.port}")
        (told,) = await scene.refused(env={"STATE_DIRECTORY": str(tmp_path / "appliance-other")})
        assert f"agent.listen: 127.0.0.1:{first.port} is in use by another process" in told
        (tmp_path / "bad.toml").write_text("gpu = 1")
        scene.configure("", inventory_file=str(tmp_path / "bad.toml"))
        (told,) = await scene.refused(env={"STATE_DIRECTORY": str(tmp_path / "appliance-other")})
        assert "agent.inventory_file: " in told
        assert "gpu: unknown key" in told


@pytest.mark.parametrize(
    ("number", "step"),
    [(errno.ENOSPC, "make room there, then start the agent again"), (errno.EACCES, "set STATE_DIRECTORY and")],
)
async def test_a_disk_that_cannot_be_used_is_told_with_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int, step: str
) -> None:
    scene = Agents(tmp_path)
    scene.configure("")
    tree = AgentTree(load(None, scene.environment()).settings)

    async def adopt() -> list[Report]:
        raise OSError(number, os.strerror(number), "/x")

    monkeypatch.setattr(tree.shards, "adopt", adopt)
    with pytest.raises(StartFailed, match=f"^/x cannot be used: {os.strerror(number)}; {step}"):
        await tree.adopt()


async def test_a_router_reaches_what_an_agent_runs(tmp_path: Path, tiny_models: TinyModels) -> None:
    need_llama()
    (tmp_path / "router").mkdir()
    async with agents(tmp_path) as scene, processes(tmp_path / "router") as routers:
        scene.configure(model("m") + model("tiny", "llamacpp", str(tiny_models.model)))
        agent = await scene.start()
        sim, llama = await agent.ready("m.1/0"), await agent.ready("tiny.1/0")
        engines = endpoint("a", sim["url"]) + endpoint("b", llama["url"], ["tiny"]).replace('"sim"', '"llamacpp"')
        routers.configure(engines)
        router = await routers.start()
        door = f"http://127.0.0.1:{router.door}"
        assert await in_thread(chat, door, "tiny") == words(4), router.log
        assert await in_thread(chat, door, "m")
        routers.configure(engines + model("other"))
        router.send(signal.SIGHUP)
        assert "models.other.profiles" in await router.logged("some changes need a restart")
        assert await in_thread(chat, door, "tiny") == words(4)


async def test_a_real_model(tmp_path: Path) -> None:
    try:
        path = await in_thread(model_file)
    except DidNotStart as missing:
        pytest.skip(str(missing))
    async with agents(tmp_path) as scene:
        scene.configure(model("gemma", "llamacpp", str(path), more="gpus_per_node = 0\ncontext_tokens = 512"))
        agent = await scene.start()
        gemma = await agent.ready("gemma.1/0")
        assert (await in_thread(chat, gemma["url"], "gemma", 8)).strip()


def test_the_inventory_as_configured(tmp_path: Path) -> None:
    scene = Agents(tmp_path)
    scene.configure("", labels={"rack": "a"})
    command = [sys.executable, "-m", "appliance", "agent", "inventory"]
    ran = subprocess.run(command, env=scene.environment(), capture_output=True, text=True, timeout=60)
    assert ran.returncode == 0, ran.stderr
    assert ran.stdout.splitlines()[0] == "node      box at 127.0.0.1 (rack=a)"
    ran = subprocess.run([*command, "--json"], env=scene.environment(), capture_output=True, text=True, timeout=60)
    assert json.loads(ran.stdout)["labels"] == {"rack": "a"}

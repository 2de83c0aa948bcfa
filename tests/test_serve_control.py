"""The control plane inside a router: when it is there, what a start without it refuses, and a change of processes."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable
from pathlib import Path

import httpx
import pytest
import trio

from appliance.cli.config import load
from appliance.cli.router import Router
from appliance.cli.startfailed import StartFailed
from appliance.control import pki
from appliance.control.plane import Plane
from appliance.store.papers import Papers, make_folder
from tests.cluster import Cluster, cluster, inventory
from tests.gate_scene import waiting
from tests.processes import APPLIANCE
from tests.raw_client import chat as raw_chat
from tests.routers import router

PROFILE = """
[[models]]
name = "llama"
[models.scaling]
min_replicas = {least}
idle_s = {idle_s}
[[models.profiles]]
name = "cpu"
engine = "sim"
gpus_per_node = 0
args = ["--decode-tokens-per-second=200"]
"""
AGENT = """
[agent]
node = "box"
address = "127.0.0.1"
listen = "127.0.0.1:0"
port_range = [{first}, {last}]
"""


def settings(least: int, idle_s: float = 0, first: int = 31200) -> str:
    return PROFILE.format(least=least, idle_s=idle_s) + AGENT.format(first=first, last=first + 49)


def make_root(folder: Path) -> None:
    """What `ctl init` makes, where `tests.routers` keeps its state."""
    papers = Papers.of(str(folder / "appliance-state"))
    make_folder(papers.folder)
    pki.create(papers, time.time())


async def chat(made: Cluster, **more: object) -> httpx.Response:
    async with httpx.AsyncClient(timeout=60) as client:
        return await client.post(
            f"http://{made.host}:{made.door_port}/v1/chat/completions",
            json={"model": "llama", "messages": [{"role": "user", "content": "hello"}], "max_tokens": 4, **more},
        )


# -- when it is there --------------------------------------------------------------------------------------------------


def test_a_router_without_profiles_imports_nothing_of_it(tmp_path: Path) -> None:
    program = """
import json, os, sys
from appliance.cli.config import load
from appliance.cli.router import Router
def read():
    return load(None, os.environ, arguments={"server.listen": ["127.0.0.1:0"]})
router = Router(read(), read)
folders = tuple(f"appliance.{name}" for name in ("control", "store", "agent", "rules.fleet", "rules.placement"))
print(json.dumps([name for name in sys.modules if name.startswith(folders) or name.split(".")[0] in
    ("cryptography", "sqlite3", "trio_websocket", "wsproto", "pynvml", "cattrs")]))
"""
    env = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin"}
    done = subprocess.run([sys.executable, "-c", program], env=env, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == []


async def test_profiles_that_nothing_could_run_end_the_start_with_one_line(tmp_path: Path) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(settings(1))
    environment = {"STATE_DIRECTORY": str(tmp_path / "state"), "RUNTIME_DIRECTORY": str(tmp_path / "run"), "PATH": ""}
    with trio.fail_after(30):
        done = await trio.run_process(
            [*APPLIANCE, "serve", "--config", str(file)],
            env=environment,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
    assert done.returncode == 1
    (line,) = done.stderr.decode().splitlines()
    assert line == (
        "appliance serve: there is no node to run llama on: run 'appliance ctl init' here and let machines join"
        " ('appliance ctl node add'), or use this machine with 'appliance serve --with-agent'"
    )


def test_an_agent_within_follows_nobody_else(tmp_path: Path) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(settings(1) + 'control_url = "wss://other:6384"\n')
    loaded = load(file, {"HOME": str(tmp_path)})
    with pytest.raises(StartFailed, match=r"^--with-agent: .*agent\.control_url"):
        Router(loaded, lambda: loaded, with_agent=True)


async def test_the_first_profile_that_a_reload_brings_waits_for_a_restart(tmp_path: Path) -> None:
    plain = '[[models]]\nname = "llama"\n'
    async with router(tmp_path, config=plain) as door:
        door.file.write_text(PROFILE.format(least=1, idle_s=0))
        assert door.app.reload() == ""
        (told,) = door.told("some changes need a restart")
        assert told["keys"] == "models.llama.profiles"
        assert door.app.waiting() == ("models.llama.profiles",)
        assert door.app.plane is None
        assert not any(model.profiles for model in door.app.settings.models)
        door.file.write_text(plain)
        assert door.app.reload() == ""
        assert door.app.waiting() == ()
        assert len(door.told("some changes need a restart")) == 1


async def test_a_request_wakes_the_control_plane_and_is_told_what_it_says(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    woken: list[float] = []
    monkeypatch.setattr(Plane, "wake", lambda plane: woken.append(time.monotonic()))
    make_root(tmp_path)
    config = '[control]\nlisten = "127.0.0.1:0"\nsettle_s = 100\n' + PROFILE.format(least=0, idle_s=600)
    async with router(tmp_path, config=config) as door:
        assert door.app.plane is not None and door.app.plane.joining is not None
        (told,) = door.told("serving")
        assert told["agents"].startswith("127.0.0.1:") and not told["agents"].endswith(":0")
        client = await door.connect()
        before = len(woken)
        await client.send(raw_chat())
        await waiting(door, 1)
        assert len(woken) > before
        door.app.gateway.gate.sweep(time.monotonic() + 121.0)
        message = (await client.answer("POST")).error["message"]
        assert message.startswith("llama is not ready after 12")
        assert door.app.plane.waking()["llama"] in message


async def test_a_model_that_no_node_can_run_is_refused_with_the_reason(tmp_path: Path) -> None:
    make_root(tmp_path)
    config = '[control]\nlisten = "127.0.0.1:0"\nsettle_s = 0\n' + PROFILE.format(least=0, idle_s=600)
    async with router(tmp_path, config=config) as door:
        assert door.app.plane is not None
        await door.until("it has settled", lambda: door.app.plane.fleet.settled)
        await door.ask(raw_chat())
        await door.until("it knows that it cannot", lambda: not door.app.gateway.table.waking)
        answer = await door.ask(raw_chat())
        assert (answer.status, answer.error["code"]) == (503, "model_not_ready")
        assert answer.error["message"] == f"the model 'llama' is not ready: {door.app.plane.why_not('llama')}"


async def test_a_reload_reaches_the_control_plane(tmp_path: Path) -> None:
    make_root(tmp_path)
    config = '[control]\nlisten = "127.0.0.1:0"\n' + PROFILE.format(least=0, idle_s=600)
    async with router(tmp_path, config=config) as door:
        plane = door.app.plane
        assert plane is not None
        more = PROFILE.format(least=3, idle_s=0).replace("llama", "second")
        door.file.write_text("[control]\nwake_wait_s = 7\ndrain_grace_s = 5\n" + config.partition("\n\n")[2] + more)
        assert door.app.reload() == ""
        assert plane.fleet.models["second"].scaling.min_replicas == 3
        assert plane.fleet.settings.drain_grace_s == 5
        assert door.app.gateway.gate.rules.wake_wait_s == 7
        await door.until("the new one may be waited for", lambda: "second" in door.app.gateway.table.waking)
        (told,) = door.told("some changes need a restart")
        assert told["keys"] == "control.listen"


@pytest.mark.parametrize("spoilt", ["database", "root", "port"])
async def test_a_control_plane_that_cannot_begin_ends_the_start(tmp_path: Path, spoilt: str) -> None:
    make_root(tmp_path)
    config = '[control]\nlisten = "127.0.0.1:0"\n' + PROFILE.format(least=1, idle_s=0)
    with socket.create_server(("127.0.0.1", 0)) as taken:
        match spoilt:
            case "database":
                (tmp_path / "appliance-state" / "appliance.db").mkdir()
            case "root":
                (tmp_path / "appliance-state" / "pki" / "root.key").write_text("nonsense")
            case _:
                config = config.replace("127.0.0.1:0", f"127.0.0.1:{taken.getsockname()[1]}")
        with pytest.raises(ExceptionGroup) as failed, trio.fail_after(30):
            async with router(tmp_path, config=config):
                raise AssertionError("it serves")
    assert failed.group_contains(StartFailed, depth=1)


# -- one machine -------------------------------------------------------------------------------------------------------


async def test_a_model_is_woken_on_this_machine_and_its_engine_outlives_the_router(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(settings(0, idle_s=600), settle_s=1)
        first = await made.serve("--with-agent")
        answer = await chat(made)
        assert answer.status_code == 200, answer.text
        (before,) = await made.ready("llama")
        engines = made.control.engines()
        assert len(engines) == 1
        assert await first.stop() == 0
        assert made.control.engines() == engines
        await made.serve("--with-agent")
        answer = await chat(made)
        assert answer.status_code == 200, answer.text
        (after,) = await made.ready("llama")
        assert (after["id"], made.control.engines()) == (before["id"], engines)
        assert not [line for line in first.log if "Traceback" in line]


async def test_a_takeover_ends_one_control_plane_before_the_next_begins(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(settings(1, first=31300), settle_s=1)
        first = await made.serve("--with-agent")
        (before,) = await made.ready("llama")
        engines = made.control.engines()
        answers: list[int] = []
        streamed: list[str] = []
        over = trio.Event()

        async def long() -> None:
            streamed.append((await chat(made, max_tokens=1200, ignore_eos=True, stream=True)).text)

        async def ask() -> None:
            while not over.is_set():
                answers.append((await chat(made, max_tokens=40)).status_code)

        async with trio.open_nursery() as nursery:
            for _ in range(3):
                nursery.start_soon(ask)
            nursery.start_soon(long)
            while len(answers) < 6:  # noqa: ASYNC110 - another process brings it about
                await trio.sleep(0.02)
            second = await made.serve("--with-agent", "--takeover")
            assert first.alive and not streamed, "it finishes the stream while the next one serves"
            await first.logged("stopped")
            asked = len(answers)
            while len(answers) < asked + 12:  # noqa: ASYNC110
                await trio.sleep(0.02)
            over.set()
        assert set(answers) == {200}
        assert streamed[0].endswith("data: [DONE]\n\n") and "error" not in streamed[0]
        (after,) = await made.ready("llama")
        assert (after["id"], made.control.engines()) == (before["id"], engines)
        assert first.popen.wait() == 0
        assert second.alive
        written = "\n".join((*first.log, *second.log))
        assert "Traceback" not in written
        assert "took over" in written


async def test_agents_call_the_router_that_took_over(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(PROFILE.format(least=2, idle_s=0), settle_s=1)
        await made.begin()
        first = made.control.process
        assert first is not None
        await made.add("a", inventory("a", 0))
        before = await made.ready("llama", 2)
        engines = made.nodes["a"].engines()
        assert len(engines) == 2
        second = await made.serve("--takeover")
        assert (await chat(made)).status_code == 200
        await second.logged('event="agent connected"')
        await first.logged("stopped")
        assert first.popen.wait() == 0
        await made.come(
            lambda: made.ask("/status"), lambda found: found["endpoints"]["up"] == 2, "both replicas serve", 10
        )
        after = await made.ready("llama", 2)
        assert {each["id"] for each in after} == {each["id"] for each in before}
        await second.logged("event=settled")
        assert made.nodes["a"].engines() == engines
        assert (await chat(made)).status_code == 200
        keys = {key for pid in engines for key in keys_of(pid)}
        assert keys
        node = made.nodes["a"].process
        assert node is not None
        told = "\n".join((*first.log, *second.log, *node.log, json.dumps(await everything(made))))
        assert [key for key in keys if key in told] == []
        assert "Traceback" not in told


async def test_replicas_serve_on_before_their_agents_have_called(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(PROFILE.format(least=1, idle_s=0), settle_s=1, lost_after_s=4)
        await made.begin()
        first = made.control.process
        assert first is not None
        agent = (await made.add("a", inventory("a", 0))).process
        assert agent is not None
        await made.ready("llama")
        assert await agent.stop() == 0
        engines = made.nodes["a"].engines()
        second = await made.serve("--takeover")
        assert (await chat(made)).status_code == 200
        assert (await made.ask("/status"))["endpoints"] == {"known": 1, "up": 1}
        assert not [line for line in second.log if "agent connected" in line]
        await made.come(lambda: made.ask("/endpoints"), lambda found: not found, "they are believed for a while", 20)
        await made.start("a")
        await made.ready("llama")
        assert made.nodes["a"].engines() == engines
        assert (await chat(made)).status_code == 200


async def test_who_waits_for_a_model_at_a_takeover_asks_the_next_one(tmp_path: Path) -> None:
    slow = settings(0, idle_s=600, first=31400).replace('"--decode', '"--load-s=8", "--decode')
    async with cluster(tmp_path) as made:
        made.configure(slow, settle_s=1)
        first = await made.serve("--with-agent")
        told: list[httpx.Response] = []

        async def ask() -> None:
            told.append(await chat(made))

        async with trio.open_nursery() as nursery:
            nursery.start_soon(ask)
            await made.come(lambda: made.replicas("llama"), bool, "it is being started")
            engines = await made.come(engines_of(made), bool, "its engine runs")
            await made.serve("--with-agent", "--takeover")
        (answer,) = told
        assert answer.status_code == 503
        assert answer.json()["error"]["message"] == (
            "the model 'llama' is not ready: another process takes over this router, ask again"
        )
        assert int(answer.headers["retry-after"]) >= 1
        assert (await chat(made)).status_code == 200
        assert made.control.engines() == engines
        assert "Traceback" not in "\n".join(first.log)


def engines_of(made: Cluster) -> Callable[[], Awaitable[dict[int, str]]]:
    async def look() -> dict[int, str]:
        return made.control.engines()

    return look


def keys_of(pid: int) -> list[str]:
    """What an engine was given as its key."""
    found = Path(f"/proc/{pid}/environ").read_bytes().decode().split("\0")
    return [value for name, _, value in (each.partition("=") for each in found) if name.endswith("API_KEY") and value]


async def everything(made: Cluster) -> list[object]:
    paths = ("/status", "/endpoints", "/models", "/models/llama", "/nodes", "/replicas", "/config", "/requests")
    return [await made.ask(path) for path in paths]

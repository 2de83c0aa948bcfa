"""Agents that end, politely or not, and those that come after them: never two engines for one shard, never one that
nobody knows, never somebody else's process killed."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx
import pytest

from appliance.agent import procfs
from appliance.agent.ownership import StateInUse
from appliance.agent.records import Process, Record, Store, describes
from appliance.facts.catalog import Profile
from appliance.facts.replica import Shard
from tests.engines.tiny_gguf import TinyModels, words
from tests.shard_scene import SECONDS, Scene, alive, free_range, pids_in, scene

PORTS = free_range(200)
ROOT = Path(__file__).parent.parent


@attrs.define
class Agents:
    """Agents on one state directory, one after the other."""

    place: Scene
    popen: subprocess.Popen[str]
    running: int = 0

    def begin(
        self,
        *,
        run: dict[str, list[str]] | None = None,
        seed: int | None = None,
        stop: bool = False,
        executable: str = "",
        source: str = "/dev/null",
    ) -> None:
        """Fork one; see `tests/supervised_agent.py` for what it does."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        (self.place.folder / "reports.json").unlink(missing_ok=True)
        order = {"run": run or {}, "seed": seed, "stop": stop, "executable": executable, "source": source}
        self.popen.stdin.write(json.dumps(order) + "\n")
        self.popen.stdin.flush()
        self.running = int(self.popen.stdout.readline())

    def end(self, number: signal.Signals = signal.SIGKILL) -> int:
        """End the one that runs; its exit status, negative for a signal."""
        assert self.popen.stdout is not None
        pid, self.running = self.running, 0
        os.kill(pid, number)
        return int(self.popen.stdout.readline())

    def reports(self) -> dict[str, dict[str, Any]]:
        try:
            return dict(json.loads((self.place.folder / "reports.json").read_text())["shards"])
        except FileNotFoundError:
            return {}

    def wait(self, holds: Callable[[dict[str, dict[str, Any]]], object]) -> dict[str, dict[str, Any]]:
        """The reports once they are as wanted."""
        until = time.monotonic() + SECONDS
        while time.monotonic() < until:
            reports = self.reports()
            if reports and holds(reports):
                return reports
            time.sleep(0.01)
        raise AssertionError(self.reports())

    def engines(self) -> dict[str, list[int]]:
        """Shard id -> engines that run for it: processes with our marker that lead a session."""
        found: dict[str, list[int]] = {}
        for pid, marker in self.place.processes().items():
            seen = procfs.see(pid)
            if seen is not None and seen.session == pid:
                found.setdefault(marker.split(".", 2)[2], []).append(pid)
        return found


@pytest.fixture
def agents(tmp_path: Path) -> Iterator[Agents]:
    with making_agents(tmp_path, PORTS) as made:
        yield made


@contextmanager
def making_agents(folder: Path, ports: tuple[int, int]) -> Iterator[Agents]:
    command = [sys.executable, "-m", "tests.supervised_agent", str(folder), *map(str, ports)]
    with scene(folder, ports) as place:
        popen = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
        agents = Agents(place, popen)
        try:
            yield agents
        finally:
            # Also when the test has failed with an agent still there: it would start engines for ever.
            if agents.running:
                agents.end()
            popen.kill()
            popen.communicate()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_agent_adopts_what_runs_and_stops_it_by_its_group(agents: Agents, number: signal.Signals) -> None:
    agents.begin(
        run={"r1": ["--children", "2", "--bare"], "r2": ["--load-s", "60"], "r3": ["--title", "engine: serving"]}
    )
    states = {"r1/0": "ready", "r2/0": "loading", "r3/0": "ready"}
    before = agents.wait(lambda found: {name: row["state"] for name, row in found.items()} == states)
    log = next((agents.place.state / "logs").glob("r1-0-*.log"))
    assert agents.end(number) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert httpx.get(f"http://127.0.0.1:{before['r1/0']['port']}/health").status_code == 200

    agents.begin()
    after = agents.wait(lambda found: len(found) == 3)
    assert {name: row["state"] for name, row in after.items()} == states
    assert all(row["adopted"] for row in after.values())
    assert [row["pid"] for row in after.values()] == [row["pid"] for row in before.values()]
    pids = pids_in(str(log))
    assert len(pids) == 4
    assert all(map(alive, pids))
    agents.end()

    agents.begin(stop=True)
    stopped = agents.wait(lambda found: all(row["state"] == "stopped" for row in found.values()))
    assert {row["exit"] for row in stopped.values()} == {"unknown (adopted)"}
    assert not any(map(alive, pids))
    assert log.read_text().endswith("SIGTERM\n")
    assert agents.place.processes() == {}
    agents.end()


def test_a_real_engine_outlives_the_agent_and_is_stopped_by_the_next(agents: Agents, tiny_models: TinyModels) -> None:
    if importlib.util.find_spec("xllamacpp") is None:
        pytest.skip("xllamacpp is not installed (extra `demo`)")
    server = agents.place.folder / "llama-server"
    server.write_text(
        f"#!{sys.executable}\nimport sys\nsys.path.insert(0, {str(ROOT)!r})\n"
        "from appliance.llama_server.main import main\nsys.exit(main())\n"
    )
    server.chmod(0o755)
    run = {"r1": ["--parallel", "1"]}
    agents.begin(run=run, executable=str(server), source=str(tiny_models.model))
    seen: list[str] = []

    def settled(found: dict[str, dict[str, Any]]) -> bool:
        seen.append(found["r1/0"]["state"])
        return seen[-1] == "ready"

    before = agents.wait(settled)["r1/0"]
    assert "loading" in seen
    agents.end()
    agents.begin()
    after = agents.wait(lambda found: found["r1/0"]["state"] == "ready")["r1/0"]
    assert after == before | {"adopted": True}
    url = f"http://127.0.0.1:{after['port']}/v1/completions"
    body = {"model": "m", "prompt": "hi", "max_tokens": 5, "temperature": 0}
    assert httpx.post(url, json=body).json()["choices"][0]["text"] == words(5)
    agents.end(signal.SIGTERM)
    assert httpx.post(url, json=body).json()["choices"][0]["text"] == words(5)
    agents.begin(stop=True)
    assert agents.wait(lambda found: found["r1/0"]["state"] == "stopped")
    assert agents.place.processes() == {}


def test_death_while_the_agent_is_away_is_told_by_the_next(agents: Agents) -> None:
    agents.begin(run={"r1": ["--children", "1", "--say", "CUDA error: device-side assert"], "r2": []})
    before = agents.wait(lambda found: [row["state"] for row in found.values()] == ["ready", "ready"])
    agents.end()
    os.kill(before["r1/0"]["pid"], signal.SIGKILL)
    agents.begin()
    after = agents.wait(lambda found: found["r1/0"]["state"] == "failed")
    assert after["r1/0"]["reason"] == "the engine ended while the agent was away"
    assert after["r1/0"]["exit"] == "unknown (adopted)"
    assert "CUDA error: device-side assert" in after["r1/0"]["tail"]
    assert (after["r2/0"]["state"], after["r2/0"]["pid"]) == ("ready", before["r2/0"]["pid"])
    assert set(agents.place.processes()) == {before["r2/0"]["pid"]}
    # Nobody may have heard of it, so the one after it tells it again.
    agents.end()
    agents.begin()
    assert agents.wait(lambda found: len(found) == 2)["r1/0"] == after["r1/0"] | {"adopted": False}
    agents.end()


def test_twenty_kills_at_random_moments(agents: Agents) -> None:
    rng = random.Random(5)
    flags = {
        "r0": [],
        "r1": ["--children", "1"],
        "r2": ["--load-s", "0.1"],
        "r3": ["--load-s", "60"],
        "r4": ["--exit-after", "0.2"],
    }
    foreign: list[subprocess.Popen[bytes]] = []
    most: Counter[str] = Counter()
    forged = 0
    try:
        for round in range(20):
            agents.begin(run=flags, seed=rng.randrange(1 << 30))
            until = time.monotonic() + rng.random() * 0.7
            while time.monotonic() < until:
                for shard_id, pids in agents.engines().items():
                    most[shard_id] = max(most[shard_id], len(pids))
                time.sleep(0.02)
            agents.end()
            for shard_id, pids in agents.engines().items():
                most[shard_id] = max(most[shard_id], len(pids))
            if round % 4 == 3:
                forged += forge(agents, foreign, with_start_time=round % 8 == 3)
        # The last one starts nothing of its own. It must know all that is there, and be able to end it.
        agents.begin()
        agents.wait(
            lambda found: all(row["state"] not in ("starting", "stopping", "draining") for row in found.values())
        )
        known = {row["pid"] for row in agents.reports().values()}
        for pids in agents.engines().values():
            assert set(pids) <= known
        agents.end()
        agents.begin(stop=True)
        agents.wait(lambda found: all(row["state"] in ("stopped", "failed") for row in found.values()))
        agents.end()
        assert agents.place.processes() == {}
        assert [each.poll() for each in foreign] == [None] * len(foreign)
    finally:
        for each in foreign:
            os.killpg(each.pid, signal.SIGKILL)
            each.wait()
    assert forged > 0
    assert set(most) == {f"{name}/0" for name in flags}
    assert set(most.values()) == {1}


def forge(agents: Agents, foreign: list[subprocess.Popen[bytes]], *, with_start_time: bool) -> int:
    """Somebody else's process with the very command line of an engine; a record names its pid, as if the engine's had
    been given out again, with its start time or without. Its environment has no marker, or that of another agent."""
    for path in sorted(agents.place.state.glob("shards/*/record.json")):
        record = json.loads(path.read_text())
        if record["processes"] and record["processes"][0]["pid"] and record["state"] in ("loading", "ready"):
            process = record["processes"][0]
            env = {"APPLIANCE_SHARD": "0123456789abcdef.0." + record["shard"]["replica"]} if with_start_time else {}
            argv = [*process["argv"], "--port", "0", "--exit-after", "-1"]
            foreign.append(subprocess.Popen(argv, env=env, stdout=subprocess.DEVNULL, start_new_session=True))
            process["pid"] = foreign[-1].pid
            process["lines"].append(list(procfs.command_line(foreign[-1].pid)))
            if with_start_time:
                seen = procfs.see(foreign[-1].pid)
                assert seen is not None
                process["started"] = seen.started
            path.write_text(json.dumps(record))
            return 1
    return 0


def test_two_agents_on_one_host_leave_each_others_engines_alone(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    with making_agents(tmp_path / "a", PORTS) as one, making_agents(tmp_path / "b", PORTS) as other:
        one.begin(run={"r1": []})
        before = one.wait(lambda found: found["r1/0"]["state"] == "ready")
        one.end()
        # The same shard and the same ports: nothing but the state directory is another one.
        other.begin(run={"r1": []})
        theirs = other.wait(lambda found: found["r1/0"]["state"] == "ready")
        assert theirs["r1/0"]["port"] != before["r1/0"]["port"]
        other.end()
        other.begin(stop=True)
        other.wait(lambda found: found["r1/0"]["state"] == "stopped")
        other.end()
        assert other.place.processes() == {}
        assert set(one.place.processes()) == {before["r1/0"]["pid"]}
        one.begin(stop=True)
        one.wait(lambda found: found["r1/0"]["state"] == "stopped")
        one.end()


def test_an_engine_that_nobody_can_describe_is_killed(agents: Agents) -> None:
    agents.begin(run={"r1": ["--children", "1"], "r2": [], "r3": []})
    before = agents.wait(lambda found: len(found) == 3 and all(row["state"] == "ready" for row in found.values()))
    agents.end()
    (record,) = agents.place.state.glob("shards/r1-0-*/record.json")
    record.write_text("{")
    (record,) = agents.place.state.glob("shards/r2-0-*/record.json")
    record.write_text(record.read_text().replace('"version":1', '"version":99'))
    agents.begin()
    after = agents.wait(lambda found: "r3/0" in found)
    assert set(after) == {"r3/0"}
    assert set(agents.place.processes()) == {before["r3/0"]["pid"]}
    agents.end()


def test_a_number_given_out_again_is_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without its start time a process that calls itself something would pass for one that does so too."""
    (tmp_path / "stub").write_text((Path(__file__).parent / "stub_engine.py").read_text())
    argv = (sys.executable, str(tmp_path / "stub"), "--title", "engine: idle")
    with subprocess.Popen(argv, stdout=subprocess.PIPE, env={}) as popen:
        try:
            assert popen.stdout is not None
            while popen.stdout.readline() != b"serving\n":
                assert popen.poll() is None
            seen = procfs.see(popen.pid)
            assert seen is not None
            assert procfs.command_line(popen.pid)[0] == "engine: idle"
            process = Process("x", argv, (), popen.pid, seen.started, (argv,))
            record = Record(Shard("r", "m", Profile("p", "sim")), "word.nonce.r/0", procfs.boot_id())
            assert describes(process, record, record.boot)
            assert not describes(attrs.evolve(process, started=seen.started - 1), record, record.boot)
            assert not describes(process, record, "another boot")
            monkeypatch.setattr(procfs, "marker_of", lambda pid: None)
            assert describes(process, record, record.boot)
            monkeypatch.setattr(procfs, "marker_of", lambda pid: "word.other.r/0")
            assert not describes(process, record, record.boot)
            monkeypatch.undo()
            assert not describes(attrs.evolve(process, argv=argv[:1]), record, record.boot)
        finally:
            popen.kill()


def test_a_child_that_is_no_engine_yet_is_waited_for(tmp_path: Path) -> None:
    """An agent killed between fork and exec: the child has the lock, and no marker yet."""
    store = Store(str(tmp_path))
    store.open()
    (tmp_path / "shards" / "lock").write_text("0")
    child = os.fork()
    if child == 0:
        time.sleep(0.3)
        os._exit(0)
    store.close()
    with (tmp_path / "shards" / "lock").open() as lock, pytest.raises(BlockingIOError):
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    again = Store(str(tmp_path))
    again.open()
    again.close()
    os.waitpid(child, 0)


def test_a_state_directory_has_one_owner(tmp_path: Path) -> None:
    store = Store(str(tmp_path))
    store.open()
    with pytest.raises(StateInUse, match=rf"in use by another agent \(pid {os.getpid()}\)"):
        Store(str(tmp_path)).open()
    word = store.word
    store.close()
    again = Store(str(tmp_path))
    again.open()
    assert again.word == word
    again.close()

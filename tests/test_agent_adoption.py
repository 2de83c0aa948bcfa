"""Agents that end, politely or not, and those that come after them: never two engines for one shard, never one that
nobody knows, never somebody else's process killed."""

from __future__ import annotations

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
from appliance.agent.records import StateInUse, Store
from tests.shard_scene import SECONDS, Scene, alive, pids_in, scene

PORTS = (23400, 23599)
ROOT = Path(__file__).parent.parent


@attrs.define
class Agents:
    """Agents on one state directory, one after the other."""

    place: Scene
    popen: subprocess.Popen[str]

    def begin(self, *, run: dict[str, list[str]] | None = None, seed: int | None = None, stop: bool = False) -> int:
        """Fork one; its pid."""
        assert self.popen.stdin is not None
        assert self.popen.stdout is not None
        (self.place.folder / "reports.json").unlink(missing_ok=True)
        self.popen.stdin.write(json.dumps({"run": run or {}, "seed": seed, "stop": stop}) + "\n")
        self.popen.stdin.flush()
        return int(self.popen.stdout.readline())

    def end(self, pid: int, number: signal.Signals = signal.SIGKILL) -> int:
        """End it; its exit status, negative for a signal."""
        assert self.popen.stdout is not None
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
        with popen:
            yield Agents(place, popen)
            assert popen.stdin is not None
            popen.stdin.close()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM])
def test_the_next_agent_adopts_what_runs_and_stops_it_by_its_group(agents: Agents, number: signal.Signals) -> None:
    agent = agents.begin(
        run={"r1": ["--children", "2"], "r2": ["--load-s", "60"], "r3": ["--title", "engine: serving"]}
    )
    states = {"r1/0": "ready", "r2/0": "loading", "r3/0": "ready"}
    before = agents.wait(lambda found: {name: row["state"] for name, row in found.items()} == states)
    log = next((agents.place.state / "logs").glob("r1-0-*.log"))
    assert agents.end(agent, number) == (0 if number == signal.SIGTERM else -signal.SIGKILL)
    assert httpx.get(f"http://127.0.0.1:{before['r1/0']['port']}/health").status_code == 200

    agents.begin()
    after = agents.wait(lambda found: len(found) == 3)
    assert {name: row["state"] for name, row in after.items()} == states
    assert all(row["adopted"] for row in after.values())
    assert [row["pid"] for row in after.values()] == [row["pid"] for row in before.values()]
    pids = pids_in(str(log))
    assert len(pids) == 3
    assert all(map(alive, pids))
    agents.end(json.loads((agents.place.folder / "reports.json").read_text())["agent"])

    agents.begin(stop=True)
    stopped = agents.wait(lambda found: all(row["state"] == "stopped" for row in found.values()))
    assert {row["exit"] for row in stopped.values()} == {"unknown (adopted)"}
    assert not any(map(alive, pids))
    assert log.read_text().endswith("SIGTERM\n")
    assert agents.place.processes() == {}
    agents.end(json.loads((agents.place.folder / "reports.json").read_text())["agent"])


def test_death_while_the_agent_is_away_is_told_by_the_next(agents: Agents) -> None:
    agent = agents.begin(run={"r1": ["--children", "1", "--say", "CUDA error: device-side assert"], "r2": []})
    before = agents.wait(lambda found: [row["state"] for row in found.values()] == ["ready", "ready"])
    agents.end(agent)
    os.kill(before["r1/0"]["pid"], signal.SIGKILL)
    agent = agents.begin()
    after = agents.wait(lambda found: found["r1/0"]["state"] == "failed")
    assert after["r1/0"]["reason"] == "the engine ended while the agent was away"
    assert after["r1/0"]["exit"] == "unknown (adopted)"
    assert "CUDA error: device-side assert" in after["r1/0"]["tail"]
    assert (after["r2/0"]["state"], after["r2/0"]["pid"]) == ("ready", before["r2/0"]["pid"])
    assert set(agents.place.processes()) == {before["r2/0"]["pid"]}
    # Nobody may have heard of it, so the one after it tells it again.
    agents.end(agent)
    agent = agents.begin()
    assert agents.wait(lambda found: len(found) == 2)["r1/0"] == after["r1/0"] | {"adopted": False}
    agents.end(agent)


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
            agent = agents.begin(run=flags, seed=rng.randrange(1 << 30))
            until = time.monotonic() + rng.random() * 0.7
            while time.monotonic() < until:
                for shard_id, pids in agents.engines().items():
                    most[shard_id] = max(most[shard_id], len(pids))
                time.sleep(0.02)
            agents.end(agent)
            for shard_id, pids in agents.engines().items():
                most[shard_id] = max(most[shard_id], len(pids))
            if round % 4 == 3:
                forged += forge(agents, foreign, with_start_time=round % 8 == 3)
        # The last one starts nothing of its own. It must know all that is there, and be able to end it.
        agent = agents.begin()
        agents.wait(
            lambda found: all(row["state"] not in ("starting", "stopping", "draining") for row in found.values())
        )
        known = {row["pid"] for row in agents.reports().values()}
        for pids in agents.engines().values():
            assert set(pids) <= known
        agents.end(agent)
        agent = agents.begin(stop=True)
        agents.wait(lambda found: all(row["state"] in ("stopped", "failed") for row in found.values()))
        agents.end(agent)
        assert agents.place.processes() == {}
        assert [each.poll() for each in foreign] == [None] * len(foreign)
    finally:
        for each in foreign:
            each.kill()
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
        first = one.begin(run={"r1": []})
        before = one.wait(lambda found: found["r1/0"]["state"] == "ready")
        one.end(first)
        # The same shard and the same ports: nothing but the state directory is another one.
        second = other.begin(run={"r1": []})
        theirs = other.wait(lambda found: found["r1/0"]["state"] == "ready")
        assert theirs["r1/0"]["port"] != before["r1/0"]["port"]
        other.end(second)
        second = other.begin(stop=True)
        other.wait(lambda found: found["r1/0"]["state"] == "stopped")
        other.end(second)
        assert other.place.processes() == {}
        assert set(one.place.processes()) == {before["r1/0"]["pid"]}
        first = one.begin(stop=True)
        one.wait(lambda found: found["r1/0"]["state"] == "stopped")
        one.end(first)


def test_an_engine_that_nobody_can_describe_is_killed(agents: Agents) -> None:
    agent = agents.begin(run={"r1": ["--children", "1"], "r2": [], "r3": []})
    before = agents.wait(lambda found: len(found) == 3 and all(row["state"] == "ready" for row in found.values()))
    agents.end(agent)
    (record,) = agents.place.state.glob("shards/r1-0-*/record.json")
    record.write_text("{")
    (record,) = agents.place.state.glob("shards/r2-0-*/record.json")
    record.write_text(record.read_text().replace('"version":1', '"version":99'))
    agent = agents.begin()
    after = agents.wait(lambda found: "r3/0" in found)
    assert set(after) == {"r3/0"}
    assert set(agents.place.processes()) == {before["r3/0"]["pid"]}
    agents.end(agent)


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

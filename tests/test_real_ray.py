"""Ray itself as the sidecar of vLLM, on two nodes of one machine, each with an agent of its own. What would use Ray is
a stub, since vLLM's CPU build is another environment. `make test-ray` runs this, with Ray in an environment that
TEST_RAY_VENV names; `make test` skips it."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

from appliance.agent.discovery.interfaces import interfaces, own_address
from appliance.agent.shards import Shards
from appliance.facts.catalog import Profile
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from tests.shard_scene import Scene, agent, alive, free_range, kill, reported, scene

VENV = os.path.abspath(given) if (given := os.environ.get("TEST_RAY_VENV")) else ""
OWN_ADDRESS = own_address(interfaces(Path("/")))

pytestmark = [
    pytest.mark.skipif(not VENV, reason="TEST_RAY_VENV names no environment; `make test-ray` does"),
    pytest.mark.skipif(OWN_ADDRESS in ("", "127.0.0.1"), reason="Ray takes no loopback"),
]

SECONDS = 120.0
"""For a node of Ray to come up, or to be gone from the list of a head that drains it: 4 to 10 s is usual."""

PORTS = free_range(600)
MEETING = PORTS[1]


@attrs.frozen
class Nodes:
    """Two nodes on one machine: state directories and ports of their own, one address."""

    head: Scene
    worker: Scene


@pytest.fixture
def nodes(tmp_path: Path) -> Iterator[Nodes]:
    # Ray's sockets lie 66 characters below this, and the kernel takes 107 in all.
    with tempfile.TemporaryDirectory(prefix="r", dir="/tmp") as short:
        half = (PORTS[0] + PORTS[1]) // 2
        folders = [tmp_path / "head", tmp_path / "worker"]
        for folder in folders:
            folder.mkdir()
        with (
            scene(folders[0], (half + 1, PORTS[1]), run_dir=f"{short}/h") as head,
            scene(folders[1], (PORTS[0], half), run_dir=f"{short}/w") as worker,
        ):
            for each in (head, worker):
                each.settings["executables"]["ray"] = f"{VENV}/bin/ray"
            yield Nodes(head, worker)


def rank(number: int) -> Shard:
    profile = Profile("p", "vllm", "/dev/null", nodes=2, gpus_per_node=0, tensor_parallel=2, launch_mode="ray")
    return Shard("r1", "m", profile, number, address=OWN_ADDRESS, leader=OWN_ADDRESS, rendezvous_port=MEETING)


async def test_a_second_node_joins_the_head_and_leaves_it(nodes: Nodes) -> None:
    async with agent(nodes.worker) as workers:
        workers.start(rank(1))
        async with agent(nodes.head) as heads:
            heads.start(rank(0))
            head = await ready(heads, "r1/0")
            worker = await ready(workers, "r1/1")
            assert [each["name"] for each in nodes.head.record("r1/0")["processes"]] == ["ray", "vllm"]
            assert [each["name"] for each in nodes.worker.record("r1/1")["processes"]] == ["ray"]
            assert (head.port > 0, worker.port) == (True, 0)
            took = await nodes_of_ray(2)
            told(f"ready, and after {took:.1f} s `ray status` lists 2 nodes")
            ray = nodes.head.record("r1/0")["processes"][0]["pid"]
        # The head's agent has gone, its Ray and its engine have not.
        async with agent(nodes.head) as heads:
            again = await ready(heads, "r1/0")
            assert (again.adopted, again.pid) == (True, head.pid)
            assert nodes.head.record("r1/0")["processes"][0]["pid"] == ray
            await nodes_of_ray(2)
            told(f"adopted: ray as pid {ray}, the engine as pid {again.pid}, still 2 nodes")
            began = time.monotonic()
            workers.stop("r1/1")
            stopped = await reported(workers, "r1/1", "stopped", seconds=SECONDS)
            told(f"the second node stopped in {time.monotonic() - began:.1f} s, {stopped.exit}")
            assert nodes.worker.processes() == {}
            took = await nodes_of_ray(1)
            told(f"after another {took:.1f} s `ray status` lists 1 node")
            family = set(nodes.head.processes())
            began = time.monotonic()
            heads.stop("r1/0")
            stopped = await reported(heads, "r1/0", "stopped", seconds=SECONDS)
            told(f"the head stopped in {time.monotonic() - began:.1f} s, the engine with {stopped.exit}")
            assert not any(map(alive, family))
            assert nodes.head.processes() == {}
            assert os.listdir(nodes.head.settings["run_dir"]) == []


async def test_ray_that_is_killed_takes_the_shard_along(nodes: Nodes) -> None:
    async with agent(nodes.head) as heads:
        heads.start(rank(0))
        await ready(heads, "r1/0")
        await nodes_of_ray(1)
        family = set(nodes.head.processes())
        kill(nodes.head.record("r1/0")["processes"][0]["pid"])
        with trio.fail_after(SECONDS):
            while not (report := heads.reports()["r1/0"]).ended:
                await heads.changed()
        assert (report.state, report.reason) == ("failed", "ray ended while ready")
        assert not any(map(alive, family))
        assert nodes.head.processes() == {}
        told(f"killed: {report.reason!r}, and none of {len(family)} processes is left")


async def ready(shards: Shards, shard_id: str) -> Report:
    return await reported(shards, shard_id, "ready", seconds=SECONDS)


async def nodes_of_ray(count: int) -> float:
    """Wait until Ray's own command lists so many nodes; how long that took, in seconds."""
    began, found = time.monotonic(), ""
    while time.monotonic() - began < SECONDS:
        found = await trio.to_thread.run_sync(status)
        active = found.partition("Active:")[2].partition("Pending:")[0]
        if len(re.findall(r"^ 1 node_", active, re.MULTILINE)) == count:
            return time.monotonic() - began
        await trio.sleep(0.2)
    raise AssertionError(found)


def status() -> str:
    """What `ray status` says. Without a cluster it would ask for 40 s, hence the limit."""
    command = [f"{VENV}/bin/ray", "status", "--address", f"{OWN_ADDRESS}:{MEETING}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False).stdout


def told(text: str) -> None:
    """For whoever runs this with `-s`."""
    print(f"ray: {text}", flush=True)

"""One agent and its shards: brought up, judged, stopped, each by itself. The engine is a stub that behaves badly."""

from __future__ import annotations

import json
import os
import signal
import socket
import stat
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import attrs
import httpx
import pytest
import trio

from appliance.agent import logs, procfs
from appliance.agent.discovery.gpus import GpuProbe
from appliance.agent.discovery.interfaces import interfaces, own_address
from appliance.facts.catalog import Profile
from appliance.facts.hardware import GIB, Cpus, Gpu, Inventory
from appliance.facts.replica import Shard
from appliance.rules.engines import llamacpp, metrics
from appliance.rules.engines.patience import Patience
from tests.shard_scene import (
    SECONDS,
    Scene,
    agent,
    alive,
    free_range,
    kill,
    pids_in,
    reported,
    said,
    scene,
    stub,
    until,
    when,
)

PORTS = free_range(1500)
OWN_ADDRESS = own_address(interfaces(Path("/")))


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path, PORTS) as made:
        yield made


async def test_loading_is_seen_as_loading_and_ready_only_when_it_serves(place: Scene) -> None:
    async with agent(place) as shards:
        shards.start(stub("r1", "--load-s", "0.3", "--while-loading", "503"))
        loading = await reported(shards, "r1/0", "loading")
        assert (loading.pid, loading.port) != (0, 0)
        await when(shards, lambda: shards.reports()["r1/0"].reason == "/health answers 503")
        ready = await reported(shards, "r1/0", "ready")
        assert ready.reason == ""
        assert ready.url == f"http://127.0.0.1:{ready.port}"
        assert os.getsid(ready.pid) == os.getpgid(ready.pid) == ready.pid
        shards.start(stub("r1"))
        assert shards.reports()["r1/0"].pid == ready.pid
        shards.stop("r1/0")
        stopped = await reported(shards, "r1/0", "stopped")
    assert (stopped.exit, stopped.pid, stopped.tail) == ("exit status 0", 0, ())
    assert place.processes() == {}


async def test_an_engine_that_serves_another_name_is_not_ready(place: Scene) -> None:
    async with agent(place, patience=Patience(0.0, 1e9, 1.0, 0.03)) as shards:
        shards.start(stub("r1", "--serve-as", "other"))
        await when(shards, lambda: shards.reports()["r1/0"].reason == "it serves other, not m")
        failed = await reported(shards, "r1/0", "failed")
    assert "silent for" in failed.reason
    assert failed.reason.endswith("it serves other, not m")


async def test_an_engine_that_still_talks_may_load_for_longer(place: Scene) -> None:
    async with agent(place, patience=Patience(0.0, 1e9, 60.0, 0.03)) as shards:
        shards.start(stub("r1", "--load-s", "0.4", "--print-for-ever"))
        assert (await reported(shards, "r1/0", "ready")).state == "ready"


@pytest.mark.parametrize(
    ("args", "exit"),
    [(("--exit-status", "3"), "exit status 3"), (("--exit-signal", str(int(signal.SIGSEGV))), "signal SIGSEGV")],
)
async def test_death_while_loading_is_told_with_status_and_last_lines(
    place: Scene, args: tuple[str, ...], exit: str
) -> None:
    async with agent(place) as shards:
        shards.start(stub("r1", "--load-s", "60", "--say", "CUDA out of memory", "--exit-after", "0.1", *args))
        failed = await reported(shards, "r1/0", "failed")
    assert failed.reason == "the engine ended while loading"
    assert failed.exit == exit
    assert failed.tail[-1] == "CUDA out of memory"
    assert place.record("r1/0")["state"] == "failed"


async def test_death_while_ready_takes_children_and_survivors_along_and_nobody_else(place: Scene) -> None:
    async with agent(place) as shards:
        shards.start(stub("r1", "--title", "engine: serving", "--children", "2", "--orphan", "--bare", "--hop"))
        shards.start(stub("r2", "--children", "1"))
        first, second = await reported(shards, "r1/0", "ready"), await reported(shards, "r2/0", "ready")
        pids = await until(lambda: found if len(found := pids_in(first.log)) == 5 else None)
        assert all(map(alive, pids))
        kill(first.pid)
        failed = await reported(shards, "r1/0", "failed")
        assert (failed.reason, failed.exit) == ("the engine ended while ready", "signal SIGKILL")
        assert not any(map(alive, pids))
        assert set(place.processes()) == {second.pid, *pids_in(second.log)}
        # One that has ended may be started once more.
        shards.start(stub("r1"))
        assert (await reported(shards, "r1/0", "ready")).pid != first.pid


@pytest.mark.parametrize(("ignored", "exit", "heard"), [(1, "exit status 0", 2), (-1, "signal SIGKILL", 2)])
async def test_sigterm_twice_where_the_plan_says_so_and_then_sigkill(
    place: Scene, monkeypatch: pytest.MonkeyPatch, ignored: int, exit: str, heard: int
) -> None:
    """llama.cpp's own server does not end at the first one while a request runs."""
    monkeypatch.setattr(llamacpp, "STOP", [attrs.evolve(step, grace_s=0.3) for step in llamacpp.STOP])
    async with agent(place) as shards:
        shards.start(stub("r1", "--ignore-term", str(ignored)))
        await reported(shards, "r1/0", "ready")
        shards.stop("r1/0")
        stopped = await reported(shards, "r1/0", "stopped")
    assert stopped.exit == exit
    assert said(stopped.log).count("SIGTERM") == heard


async def test_a_drain_lets_the_last_request_end(place: Scene) -> None:
    profile = Profile("p", "sim", gpus_per_node=0, args=("--decode-tokens-per-second", "10"))
    async with agent(place) as shards:
        shards.start(Shard("r1", "m", profile))
        ready = await reported(shards, "r1/0", "ready")
        answers: list[httpx.Response] = []

        async def ask() -> None:
            body = {"model": "m", "prompt": "one two three four five six", "max_tokens": 12}
            async with httpx.AsyncClient() as client:
                answers.append(await client.post(f"{ready.url}/v1/completions", json=body, timeout=SECONDS))

        async with trio.open_nursery() as nursery, httpx.AsyncClient() as client:
            nursery.start_soon(ask)
            with trio.fail_after(SECONDS):
                while metrics.read("sim", (await client.get(f"{ready.url}/metrics")).content).running != 1:  # noqa: ASYNC110
                    await trio.sleep(0.01)
            shards.stop("r1/0", drain_s=SECONDS)
            await reported(shards, "r1/0", "draining")
            stopped = await reported(shards, "r1/0", "stopped")
        assert answers[0].status_code == 200
        assert "six" in answers[0].json()["choices"][0]["text"]
        assert stopped.exit == "exit status 0"


async def test_stopping_one_at_every_stage(place: Scene) -> None:
    async with agent(place) as shards:
        shards.stop("nobody/0")
        shards.start(stub("r1"))
        shards.stop("r1/0")
        assert (await reported(shards, "r1/0", "stopped")).pid == 0
        shards.start(stub("r2", "--load-s", "60"))
        await reported(shards, "r2/0", "loading")
        shards.stop("r2/0", drain_s=60)
        await reported(shards, "r2/0", "stopped")
        shards.start(stub("r3"))
        await reported(shards, "r3/0", "ready")
        shards.stop("r3/0", drain_s=60)
        await reported(shards, "r3/0", "draining")
        assert (await reported(shards, "r3/0", "stopped")).exit == "exit status 0"
        shards.forget("r3/0")
        assert set(shards.reports()) == {"r1/0", "r2/0"}
        with pytest.raises(KeyError):
            place.record("r3/0")
    assert place.processes() == {}


def over_ray(replica: str, *args: str) -> Shard:
    """A leader with a sidecar: the stub as vLLM on the stub as Ray."""
    profile = Profile("p", "vllm", source="/dev/null", gpus_per_node=0, launch_mode="ray", args=args)
    return Shard(replica, "m", profile, address=OWN_ADDRESS)


@pytest.mark.skipif(OWN_ADDRESS in ("", "127.0.0.1"), reason="Ray takes no loopback")
async def test_sidecars_come_first_and_go_last(place: Scene) -> None:
    with tempfile.TemporaryDirectory(prefix="r") as short:
        async with agent(place, run_dir=short) as shards:
            shards.start(over_ray("r1"))
            await reported(shards, "r1/0", "ready")
            ray, engine = (process["pid"] for process in place.record("r1/0")["processes"])
            assert [process["name"] for process in place.record("r1/0")["processes"]] == ["ray", "vllm"]
            assert len(os.listdir(short)) == 1
            shards.stop("r1/0")
            stopped = await reported(shards, "r1/0", "stopped")
            lines = [line for line in said(stopped.log).splitlines() if "SIGTERM" in line]
            assert lines == ["SIGTERM", "SIGTERM to ray"]
            assert os.listdir(short) == []
            assert not alive(ray)
            assert not alive(engine)
            # Whichever of them dies, the shard is over and the other one goes too.
            for victim, reason in ((0, "ray ended while ready"), (1, "the engine ended while ready")):
                shards.start(over_ray("r1"))
                await reported(shards, "r1/0", "ready")
                kill(place.record("r1/0")["processes"][victim]["pid"])
                assert (await reported(shards, "r1/0", "failed")).reason == reason
                assert place.processes() == {}


async def test_a_worker_waits_for_the_rendezvous_and_serves_nothing(place: Scene) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        meeting = PORTS[1]
        profile = Profile("p", "sim", nodes=2, gpus_per_node=0, tensor_parallel=2)
        common: dict[str, Any] = {"model": "m", "profile": profile, "leader": "127.0.0.1", "rendezvous_port": meeting}
        async with agent(place) as shards:
            shards.start(Shard("r1", rank=1, **common))
            waiting = f"waiting for the leader's rendezvous at 127.0.0.1:{meeting}"
            await when(shards, lambda: shards.reports()["r1/1"].reason == waiting)
            assert shards.reports()["r1/1"].state == "starting"
            shards.start(Shard("r1", rank=0, key="k3y-of-r1", **common))
            leader, worker = await reported(shards, "r1/0", "ready"), await reported(shards, "r1/1", "ready")
            assert (worker.port, worker.url) == (0, "")
            assert leader.url
            # The worker notices that its leader is gone, and fails by itself.
            kill(leader.pid)
            assert (await reported(shards, "r1/0", "failed")).exit == "signal SIGKILL"
            failed = await reported(shards, "r1/1", "failed")
            assert "the leader is gone" in failed.tail[-1]
            # Somebody else at the rendezvous: it was chosen by others, so no other port will do.
            port = taken.getsockname()[1]
            shards.start(Shard("r2", **{**common, "rendezvous_port": port}))
            outside = await reported(shards, "r2/0", "failed")
            assert "outside port_range" in outside.reason and outside.refused_port == 0
            with socket.create_server(("127.0.0.1", meeting - 1)):
                shards.start(Shard("r3", **{**common, "rendezvous_port": meeting - 1}))
                refused = await reported(shards, "r3/0", "failed")
                assert "in use by another process" in refused.reason and refused.refused_port == meeting - 1


async def test_twenty_at_once_share_no_port(place: Scene) -> None:
    profile = Profile("p", "vllm", source="/dev/null", gpus_per_node=0, args=("--load-s", "60"))
    async with agent(place) as shards:
        with socket.create_server(("127.0.0.1", PORTS[0] + 20)):
            for number in range(20):
                shards.start(Shard(f"r{number}", "m", profile))
            for number in range(20):
                await reported(shards, f"r{number}/0", "loading")
            held = [port for report in shards.reports().values() for port in report.ports]
        assert len(held) == len(set(held)) == 20 * 17
        assert PORTS[0] + 20 not in held
        for shard_id in shards.reports():
            shards.stop(shard_id)
        await when(shards, lambda: all(report.ended for report in shards.reports().values()))
    assert place.processes() == {}


async def test_a_stranger_on_its_port_is_no_engine_of_ours(place: Scene) -> None:
    """The stranger answers for the very name, and came after the plan was made."""
    async with agent(place) as shards:
        shards.start(stub("r1", "--load-s", "1"))
        loading = await reported(shards, "r1/0", "loading")
        args = [place.settings["executables"]["llamacpp"], "--alias", "m", "--port", str(loading.port)]
        stranger = await trio.lowlevel.open_process(args, stdout=-3)
        try:
            failed = await reported(shards, "r1/0", "failed")
            assert f"another process listens on its port {loading.port}" in failed.reason
            assert stranger.poll() is None
            shards.start(stub("r1"))
            assert (await reported(shards, "r1/0", "ready")).port != loading.port
        finally:
            stranger.kill()
            await stranger.wait()


async def test_refusals_are_reports(place: Scene) -> None:
    async with agent(place, executables={"llamacpp": "/nowhere/llama-server"}) as shards:
        shards.start(stub("r1"))
        assert "/nowhere/llama-server is not installed here" in (await reported(shards, "r1/0", "failed")).reason
    broken = place.folder / "broken"
    broken.write_text("#!/nowhere/python\n")
    broken.chmod(0o755)
    async with agent(place, executables={"llamacpp": str(broken)}) as shards:
        assert shards.reports()["r1/0"].state == "failed"
        shards.start(stub("r1"))
        assert "cannot be started" in (await reported(shards, "r1/0", "failed")).reason


async def test_keys_are_in_private_files_and_nowhere_else(place: Scene) -> None:
    secret = "s3cret-of-this-replica"
    async with agent(place) as shards:
        shards.start(stub("r1", "--say-key", "--say-env", key=secret))
        ready = await reported(shards, "r1/0", "ready")
        assert secret not in " ".join(procfs.command_line(ready.pid))
        (key_file,) = place.state.glob("shards/*/engine.key")
        private = [key_file, *place.state.glob("shards/*/record.json"), *place.state.glob("logs/*.log")]
        assert len(private) == 3
        for path in private:
            assert stat.S_IMODE(path.stat().st_mode) == 0o600
            assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
        await until(lambda: secret in said(ready.log))
        shown = "\n".join(await shards.log_lines("r1/0", 100))
        assert "settings: api_key='***'" in shown
        kill(ready.pid)
        failed = await reported(shards, "r1/0", "failed")
        assert secret not in "\n".join(failed.tail)
        assert secret not in repr(failed)
        assert not key_file.exists()


async def test_a_child_sees_none_of_our_libraries(place: Scene) -> None:
    bundle = "/opt/appliance/_internal"
    own = {
        "PATH": f"{bundle}/bin:/usr/bin:/bin",
        "LD_LIBRARY_PATH": bundle,
        "LD_LIBRARY_PATH_ORIG": "/usr/local/cuda/lib64",
        "LD_PRELOAD": f"{bundle}/x.so",
        "PYTHONHOME": bundle,
        "PYTHONPATH": bundle,
        "_PYI_APPLICATION_HOME_DIR": bundle,
        "_MEIPASS2": bundle,
        "VIRTUAL_ENV": sys.prefix,
        "APPLIANCE_ADMIN": "/run/x",
        "HF_TOKEN": "hf_token-of-the-agent",
    }
    async with agent(place, environment=own, bundle=bundle) as shards:
        shards.start(stub("r1", "--say-env"))
        ready = await reported(shards, "r1/0", "ready")
        told = next(line for line in said(ready.log).splitlines() if line.startswith("{"))
        environment = json.loads(told)
        assert bundle not in told
        assert environment["LD_LIBRARY_PATH"] == "/usr/local/cuda/lib64"
        assert not [
            name for name in environment if name.startswith(("PYTHON", "_PYI", "_MEI", "LD_PRELOAD", "VIRTUAL"))
        ]
        assert environment["APPLIANCE_SHARD"] == place.record("r1/0")["marker"]
        assert "hf_token-of-the-agent" not in "\n".join(await shards.log_lines("r1/0", 100))
        assert os.readlink(f"/proc/{ready.pid}/cwd").startswith(str(place.state))
        open_files = [os.readlink(f"/proc/{ready.pid}/fd/{number}") for number in os.listdir(f"/proc/{ready.pid}/fd")]
        assert sorted(name for name in open_files if name.startswith("/")) == ["/dev/null", ready.log, ready.log]


async def test_the_log_stays_within_its_bound_while_an_engine_shouts(place: Scene) -> None:
    bound = 8 << 20
    largest = 0

    async def look() -> None:
        nonlocal largest
        while True:
            await trio.sleep(0.002)
            sizes = [path.stat().st_size for path in place.state.glob("logs/*") if path.exists()]
            largest = max(largest, sum(sizes))

    async with agent(place, log_bytes=bound) as shards, trio.open_nursery() as nursery:
        nursery.start_soon(look)
        shards.start(stub("r1", "--print-bytes", str(20 << 20), "--say", "before"))
        ready = await reported(shards, "r1/0", "ready")
        assert (await shards.log_lines("r1/0", 1)) == ["serving"]
        assert len(await shards.log_lines("r1/0", 200)) == 200
        # What it writes next is at the beginning of the file, not at the place where it had been.
        assert os.stat(ready.log).st_blocks * 512 <= bound
        nursery.cancel_scope.cancel()
    assert 0 < largest <= bound


class Nvml:
    """NVML with one card; `used` are the bytes in use at each look, and the last of them for ever."""

    NVMLError = RuntimeError

    def __init__(self, used: list[int]) -> None:
        self.used = used

    def nvmlInit(self) -> None:
        """It is always there."""

    nvmlShutdown = nvmlInit

    def nvmlDeviceGetCount(self) -> int:
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetUUID(self, handle: int) -> str:
        return "GPU-1"

    def nvmlDeviceGetName(self, handle: int) -> str:
        return "NVIDIA L40S"

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: object = None) -> SimpleNamespace:
        used = self.used.pop(0) if len(self.used) > 1 else self.used[0]
        return SimpleNamespace(total=45 * GIB, used=used)

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> list[SimpleNamespace]:
        return [SimpleNamespace(pid=4711, usedGpuMemory=self.used[0])]


async def test_the_memory_of_gpus_is_waited_for(place: Scene) -> None:
    """A driver that gives the memory back some time after the process is gone, and one that does not."""
    card = Gpu("GPU-1", 0, "NVIDIA L40S", "l40s-45g", 45 * GIB, used_bytes=0, compute_cap=(8, 9))
    driver = Nvml([40 * GIB, 40 * GIB, 0])
    probe = GpuProbe("nvml", load=lambda: driver)

    async def read() -> tuple[Gpu, ...]:
        return (await probe.read()).reading.gpus

    profile = Profile("p", "llamacpp", source="/dev/null", gpus_per_node=1)
    inventory = Inventory(node="a", cpus=Cpus(count=2), gpus=(card,))
    async with agent(place, inventory=lambda: inventory, read_gpus=read, memory_wait_s=30.0) as shards:
        shards.start(Shard("r1", "m", profile, gpus=("GPU-1",)))
        await reported(shards, "r1/0", "ready")
        assert "GPU-1" in shards.ours().gpus
        assert shards.ours().is_pid(shards.reports()["r1/0"].pid)
        assert not shards.ours().is_pid(1)
        shards.stop("r1/0")
        assert (await reported(shards, "r1/0", "stopped")).reason == ""
    assert driver.used == [0]
    driver.used = [40 * GIB]
    async with agent(place, inventory=lambda: inventory, read_gpus=read, memory_wait_s=0.1) as shards:
        shards.start(Shard("r2", "m", profile, gpus=("GPU-1",)))
        await reported(shards, "r2/0", "ready")
        shards.stop("r2/0")
        held = await reported(shards, "r2/0", "stopped")
    assert held.reason == "GPU 0: 40960 MiB still in use, held by pid 4711"


async def test_a_fault_of_one_tree_touches_no_other(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async with agent(place) as shards:
        shards.start(stub("r1"))
        first = await reported(shards, "r1/0", "ready")

        async def broken(*_: object) -> None:
            raise RuntimeError("no idea")

        monkeypatch.setattr(logs, "keep_bounded", broken)
        shards.start(stub("r2"))
        failed = await reported(shards, "r2/0", "failed")
        assert failed.reason == "the agent could not go on with it: RuntimeError: no idea"
        assert set(place.processes()) == {first.pid}
        assert shards.reports()["r1/0"] == first


async def test_a_scope_of_systemd_goes_in_front(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a `systemd-run` that does what the real one does: turn into the command it is given."""
    runner = place.folder / "bin" / "systemd-run"
    runner.parent.mkdir()
    runner.write_text('#!/bin/sh\necho "$@" >> "$0.log"\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    runner.chmod(0o755)
    monkeypatch.setenv("PATH", f"{runner.parent}:{os.environ['PATH']}")
    async with agent(place, booted=str(place.folder)) as shards:
        shards.start(stub("r1"))
        ready = await reported(shards, "r1/0", "ready")
        *probes, scoped = (runner.parent / "systemd-run.log").read_text().splitlines()
        assert probes == ["--scope --quiet --collect -- true"] * 2
        assert scoped.startswith("--scope --quiet --collect -- ")
        assert procfs.command_line(ready.pid)[0] == sys.executable
    async with agent(place, booted=str(place.folder)) as shards:
        assert shards.reports()["r1/0"].pid == ready.pid
        shards.stop("r1/0")
        await reported(shards, "r1/0", "stopped")

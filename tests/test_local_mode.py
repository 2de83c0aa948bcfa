"""Local mode as a task: it acts on what changes, waits out a backoff, and tells each thing once."""

from __future__ import annotations

import math
from pathlib import Path
from random import Random

import attrs
import pytest
import trio
import trio.testing
from structlog.testing import capture_logs

from appliance.agent.discovery.gpus import Found
from appliance.agent.discovery.inventory import Place
from appliance.agent.discovery.reading import Ours, Reading
from appliance.agent.discovery.writing import BadInventory
from appliance.agent.local import DRAIN_S, Local
from appliance.agent.machine import LOOK_S, Machine
from appliance.facts.catalog import Model
from appliance.facts.hardware import Gpu
from tests.agent_scene import SIM, FakeShards, gpu, hindered, machine, model


class Scene:
    def __init__(self) -> None:
        self.shards = FakeShards()
        self.machine = machine()
        self.local = Local(self.shards, self.machine, Random(1), trio.current_time)

    @classmethod
    async def of(cls, nursery: trio.Nursery, *models: Model) -> Scene:
        self = cls()
        self.local.configure(models)
        for changed in (self.shards.changed.wait, self.machine.changed.wait):
            await nursery.start(self.local.wake.relay, changed)
        nursery.start_soon(self.local.keep)
        return self

    async def settled(self) -> list[str]:
        await trio.testing.wait_all_tasks_blocked()
        return self.shards.taken()


async def test_a_failed_replica_comes_back_after_its_wait(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        scene = await Scene.of(nursery, model())
        assert await scene.settled() == ["start m.1/0"]
        began = trio.current_time()
        scene.shards.become("m.1/0", "failed", began, reason="it exited")
        assert await scene.settled() == []
        (waiting,) = scene.local.waiting
        assert (waiting.replica, waiting.reason) == ("m.1", "it exited")
        await trio.sleep(waiting.again_at - trio.current_time() - 0.01)
        assert await scene.settled() == []
        await trio.sleep(0.2)
        assert await scene.settled() == ["start m.1/0"]
        assert scene.local.waiting == ()
        nursery.cancel_scope.cancel()


async def test_a_reload_stops_what_is_gone_and_starts_what_is_new(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        scene = await Scene.of(nursery, model("a"), model("b", replicas=2))
        assert await scene.settled() == ["start a.1/0", "start b.1/0", "start b.2/0"]
        scene.local.configure((model("b"), model("c")))
        assert await scene.settled() == [f"stop a.1/0 {DRAIN_S:g}", f"stop b.2/0 {DRAIN_S:g}", "start c.1/0"]
        scene.shards.become("a.1/0", "stopped")
        assert await scene.settled() == ["forget a.1/0"]
        nursery.cancel_scope.cancel()


async def test_a_gpu_that_comes_free_is_used(autojump_clock: trio.testing.MockClock) -> None:
    async with trio.open_nursery() as nursery:
        scene = await Scene.of(nursery, model("m", attrs.evolve(SIM, gpus_per_node=1)))
        assert await scene.settled() == []
        assert scene.local.waiting[0].reason == "cpu: it needs 1 GPU, and this node has none"
        scene.machine.inventory = attrs.evolve(scene.machine.inventory, gpus=(gpu(0),))
        scene.machine.changed.tell()
        assert await scene.settled() == ["start m.1/0"]
        nursery.cancel_scope.cancel()


async def test_each_state_and_each_reason_is_told_once(autojump_clock: trio.testing.MockClock) -> None:
    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            scene = await Scene.of(nursery, model())
            await scene.settled()
            scene.shards.become("m.1/0", "ready", 1.0, pid=7, url="http://10.0.0.1:20000")
            await scene.settled()
            for _ in range(3):
                scene.local.wake.tell()
                await scene.settled()
            scene.shards.become("m.1/0", "failed", 2.0, reason="it exited", exit="signal SIGKILL", tail=("a", "boom"))
            await scene.settled()
            scene.local.wake.tell()
            await scene.settled()
            nursery.cancel_scope.cancel()
    told = [line for line in lines if line["event"] != "starting"]
    assert [line["event"] for line in told] == ["shard is starting", "shard is ready", "shard failed", "not running"]
    assert told[1] | {} == {
        "event": "shard is ready",
        "log_level": "info",
        "shard": "m.1/0",
        "pid": 7,
        "url": "http://10.0.0.1:20000",
    }
    assert (told[2]["log_level"], told[2]["exit"], told[2]["last_line"]) == ("error", "signal SIGKILL", "boom")
    assert told[3]["reason"] == "it exited"


# -- the machine -------------------------------------------------------------------------------------------------------


class FakeProbe:
    def __init__(self, *gpus: Gpu) -> None:
        self.gpus = gpus
        self.notes: tuple[str, ...] = ()
        self.partial = False

    async def read(self) -> Found:
        return Found("nvml", Reading(self.gpus, notes=self.notes, partial=self.partial))


def looking(tmp_path: Path, probe: FakeProbe) -> Machine:
    return Machine(Place(node="box", models=str(tmp_path)), probe, Ours)  # type: ignore[arg-type]


async def test_only_what_decides_about_placing_is_news(tmp_path: Path) -> None:
    probe = FakeProbe(gpu(0, used_bytes=0), gpu(1, used_bytes=0))
    seen = looking(tmp_path, probe)
    heard: list[int] = []

    async def hear() -> None:
        while True:
            await seen.changed.wait()
            heard.append(len(seen.inventory.gpus))

    with capture_logs() as lines:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(hear)
            await trio.testing.wait_all_tasks_blocked()
            for gpus in (
                probe.gpus,
                (gpu(0, used_bytes=5, utilization=0.5), gpu(1)),
                (gpu(0), hindered(1, "ecc", "2 uncorrected memory errors")),
                (gpu(0), hindered(1, "ecc", "3 uncorrected memory errors")),
                (gpu(0), gpu(1)),
                (gpu(0),),
            ):
                probe.gpus = gpus
                await seen.look()
                await trio.testing.wait_all_tasks_blocked()
            nursery.cancel_scope.cancel()
    assert heard == [2, 2, 2, 1]
    assert [line["event"] for line in lines] == ["GPU is not free", "GPU is free again", "GPU is gone"]
    assert lines[0]["reason"] == "ecc: 2 uncorrected memory errors"


async def test_a_note_is_told_when_it_appears_and_when_it_clears(tmp_path: Path) -> None:
    probe = FakeProbe()
    seen = looking(tmp_path, probe)
    with capture_logs() as lines:
        for notes in ((), ("the driver is odd",), ("the driver is odd",), ()):
            probe.notes = notes
            await seen.look()
    assert [(line["event"], line["note"]) for line in lines] == [
        ("inventory", "the driver is odd"),
        ("inventory: no longer so", "the driver is odd"),
    ]


async def test_a_file_that_broke_is_told_once_and_changes_nothing(
    tmp_path: Path, autojump_clock: trio.testing.MockClock
) -> None:
    file = tmp_path / "node.toml"
    file.write_text('node = "a"\n[[gpus]]\nname = "NVIDIA L40S"\nmemory_bytes = 48305799168\n')
    # Without a limit: no time passes for this clock while a thread reads the file, and so all of it may.
    seen = Machine(Place(inventory_file=str(file)), FakeProbe(), Ours, limit_s=math.inf)  # type: ignore[arg-type]
    await seen.look()
    file.write_text("nonsense = 1")
    with pytest.raises(BadInventory):
        await seen.look()
    autojump_clock.autojump_threshold = 0.05  # for the threads that read the file
    with capture_logs() as lines, trio.move_on_after(LOOK_S * 3.5):
        await seen.watch()
    assert [line["event"] for line in lines] == ["inventory file cannot be used, the last one holds"]
    assert len(seen.inventory.gpus) == 1

"""Asking NVML and `nvidia-smi` when they work, fail, hang, or are not there. The tool is a script, NVML an object."""

from __future__ import annotations

import os
import stat
import threading
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from appliance.agent.discovery import nvml
from appliance.agent.discovery.asking import MAX_ANSWER_BYTES, ask
from appliance.agent.discovery.gpus import GpuProbe
from appliance.facts.hardware import GIB, MIB, Gpu, Holder

FIRST = "GPU-11111111-2222-3333-4444-555555555501"
SECOND = "GPU-11111111-2222-3333-4444-555555555502"
ROWS = "".join(
    f"{index}, {uuid}, NVIDIA L40S, 46068, 3, 0, 8.9, 0, [N/A], 00000000:4{index}:00.0\n"
    for index, uuid in enumerate((FIRST, SECOND))
)
MATRIX = "\tGPU0\tGPU1\nGPU0\t X \tNV4\nGPU1\tNV4\t X \n"
SHORT_S, LONG_S = 1.0, 60.0
"""A limit that is meant to be reached, and one that is not."""


def script(tmp_path: Path, body: str) -> str:
    path = tmp_path / "nvidia-smi"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return str(path)


def healthy(tmp_path: Path) -> str:
    return script(
        tmp_path,
        f"""case "$1" in
--query-gpu=*) printf '{ROWS}' ;;
--query-compute-apps=*) printf '{SECOND}, 77, 900\\n' ;;
topo) printf '{MATRIX}' ;;
esac""",
    )


def missing() -> Any:
    raise nvml.NoNvml("NVML: library not found")


def gone(pid: int) -> bool:
    """Whether a process has ended, be it that nobody has waited for it yet."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] in "ZX"
    except OSError:
        return True


async def until(holds: Callable[[], bool]) -> None:
    """Wait for something that another process does and that nothing tells us of."""
    with trio.fail_after(30):
        while not holds():  # noqa: ASYNC110
            await trio.sleep(0.01)


async def test_the_tool_is_asked_when_nvml_is_not_there_and_the_reason_is_noted(tmp_path: Path) -> None:
    found = await GpuProbe(limit_s=LONG_S, tool=healthy(tmp_path), load=missing).read()
    assert found.backend == "nvidia-smi"
    assert not found.reading.partial
    assert [gpu.holders for gpu in found.reading.gpus] == [(), (Holder(77, 900 * MIB),)]
    assert [gpu.nvlink_domain for gpu in found.reading.gpus] == [0, 0]
    (note,) = found.reading.notes
    assert "library not found" in note and "asked instead" in note


async def test_what_the_tool_cannot_tell_stays_unknown(tmp_path: Path) -> None:
    tool = script(tmp_path, f"case $1 in --query-gpu=*) printf '{ROWS}';; *) echo sorry; exit 1;; esac")
    found = await GpuProbe(limit_s=LONG_S, tool=tool, load=missing).read()
    assert [(gpu.holders, gpu.nvlink_domain) for gpu in found.reading.gpus] == [(None, None)] * 2
    assert len([note for note in found.reading.notes if "does not tell" in note]) == 2


async def test_rows_of_a_failing_tool_count_but_the_reading_is_partial(tmp_path: Path) -> None:
    tool = script(tmp_path, f"printf '{ROWS}'; echo 'infoROM is corrupted' >&2; exit 14")
    found = await GpuProbe(limit_s=LONG_S, tool=tool, load=missing).read()
    assert len(found.reading.gpus) == 2
    assert found.reading.partial
    assert any("exit status 14" in note and "infoROM" in note for note in found.reading.notes)


async def test_neither_library_nor_tool_is_a_machine_without_gpus(tmp_path: Path) -> None:
    found = await GpuProbe(limit_s=LONG_S, tool=str(tmp_path / "none"), load=missing).read()
    assert (found.backend, found.reading.gpus, found.reading.partial) == ("none", (), False)
    assert "is not there" in found.reading.notes[0]


async def test_a_driver_that_is_there_and_broken_is_partial(tmp_path: Path) -> None:
    found = await GpuProbe(limit_s=LONG_S, tool=str(tmp_path / "none"), load=lambda: Nvml(init=999)).read()
    assert (found.backend, found.reading.partial) == ("none", True)


async def test_a_chosen_backend_has_no_other(tmp_path: Path) -> None:
    found = await GpuProbe(backend="nvml", tool=healthy(tmp_path), load=missing).read()
    assert (found.reading.gpus, found.reading.partial) == ((), True)
    found = await GpuProbe(backend="none", tool=healthy(tmp_path), load=missing).read()
    assert found.reading.gpus == () and found.reading.notes == ()
    found = await GpuProbe(backend="nvidia-smi", limit_s=LONG_S, tool=healthy(tmp_path), load=Nvml).read()
    assert (found.backend, found.reading.notes) == ("nvidia-smi", ())


async def test_a_wedged_tool_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    tool = script(
        tmp_path, f"trap '' TERM HUP INT; sleep 1000 & echo $! >{pids}; echo $$ >>{pids}; printf '{ROWS}'; wait"
    )
    found = await GpuProbe(limit_s=SHORT_S, tool=tool, load=missing).read()
    assert found.reading.partial
    assert len(found.reading.gpus) == 2
    assert len([note for note in found.reading.notes if f"no answer within {SHORT_S:g} s" in note]) == 1
    # It is not asked two more questions, each up to the limit.
    assert not [note for note in found.reading.notes if "does not tell" in note]
    for pid in pids.read_text().split():
        await until(lambda pid=int(pid): gone(pid))  # type: ignore[misc]


async def test_a_tool_that_leaves_a_child_on_its_pipes_is_bounded_too(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    answer = await ask([script(tmp_path, f"sleep 1000 & echo $! >{pids}; echo done")], limit_s=SHORT_S)
    assert answer.stdout == "done\n"
    assert answer.status is None and "no answer" in answer.trouble
    await until(lambda: gone(int(pids.read_text())))


async def test_cancelling_the_question_kills_the_tool(tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    tool = script(tmp_path, f"echo $$ >{pids}.new; mv {pids}.new {pids}; exec sleep 1000")
    async with trio.open_nursery() as nursery:
        nursery.start_soon(lambda: ask([tool], limit_s=LONG_S))
        await until(pids.exists)
        nursery.cancel_scope.cancel()
    await until(lambda: gone(int(pids.read_text())))


async def test_an_endless_answer_is_cut(tmp_path: Path) -> None:
    answer = await ask([script(tmp_path, f"head -c {MAX_ANSWER_BYTES + 5000} /dev/zero")], limit_s=LONG_S)
    assert len(answer.stdout) == MAX_ANSWER_BYTES
    assert answer.trouble == "the answer is too long"


async def test_a_program_that_cannot_be_run_is_no_exception(tmp_path: Path) -> None:
    assert (await ask([str(tmp_path / "none")], limit_s=LONG_S)).absent
    plain = tmp_path / "plain"
    plain.write_text("no program")
    answer = await ask([str(plain)], limit_s=LONG_S)
    assert not answer.absent and "cannot be run" in answer.trouble


class NvmlFailure(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"error {value}")
        self.value = value


class Nvml:
    """NVML as far as it is called. `fails` maps (function, GPU index or None) to an error number; `links` are pairs."""

    NVMLError = NvmlFailure
    nvmlMemory_v2 = 0x02000028

    def __init__(
        self,
        count: int = 2,
        init: int = 0,
        fails: dict[tuple[str, int | None], int] | None = None,
        links: frozenset[tuple[int, int]] = frozenset({(0, 1)}),
        block: threading.Event | None = None,
    ) -> None:
        self.count, self.fails, self.links, self.block = count, dict(fails or {}), links, block
        self.calls: list[str] = []
        if init:
            self.fails["nvmlInit", None] = init

    def call(self, name: str, index: int | None, answer: Any) -> Any:
        self.calls.append(name)
        if (name, index) in self.fails:
            raise NvmlFailure(self.fails[name, index])
        return answer

    def nvmlInit(self) -> None:
        if self.block is not None:
            self.block.wait(60)
        self.call("nvmlInit", None, None)

    def nvmlShutdown(self) -> None:
        self.call("nvmlShutdown", None, None)

    def nvmlDeviceGetCount(self) -> Any:
        return self.call("nvmlDeviceGetCount", None, self.count)

    def nvmlDeviceGetHandleByIndex(self, index: int) -> Any:
        return self.call("nvmlDeviceGetHandleByIndex", index, index)

    def nvmlDeviceGetUUID(self, handle: int) -> Any:
        return self.call("nvmlDeviceGetUUID", handle, (FIRST, SECOND, "GPU-3", "GPU-4")[handle].encode())

    def nvmlDeviceGetName(self, handle: int) -> Any:
        return self.call("nvmlDeviceGetName", handle, "NVIDIA H100 80GB HBM3")

    def nvmlDeviceGetMemoryInfo(self, handle: int, version: int | None = None) -> Any:
        answer = SimpleNamespace(total=80 * GIB, used=GIB if version else 2 * GIB)
        return self.call("nvmlDeviceGetMemoryInfo_v2" if version else "nvmlDeviceGetMemoryInfo", handle, answer)

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> Any:
        return self.call("nvmlDeviceGetUtilizationRates", handle, SimpleNamespace(gpu=50))

    def nvmlDeviceGetMigMode(self, handle: int) -> Any:
        return self.call("nvmlDeviceGetMigMode", handle, [0, 1])

    def nvmlDeviceGetCudaComputeCapability(self, handle: int) -> Any:
        return self.call("nvmlDeviceGetCudaComputeCapability", handle, (9, 0))

    def nvmlDeviceGetPciInfo(self, handle: int) -> Any:
        return self.call("nvmlDeviceGetPciInfo", handle, SimpleNamespace(busId=f"0000000{handle}:BA:00.0".encode()))

    def nvmlDeviceGetComputeRunningProcesses(self, handle: int) -> Any:
        answer = [SimpleNamespace(pid=5, usedGpuMemory=100), SimpleNamespace(pid=6, usedGpuMemory=None)]
        return self.call("nvmlDeviceGetComputeRunningProcesses", handle, answer)

    def nvmlDeviceGetGraphicsRunningProcesses(self, handle: int) -> Any:
        return self.call("nvmlDeviceGetGraphicsRunningProcesses", handle, [SimpleNamespace(pid=5, usedGpuMemory=70)])

    def nvmlDeviceGetRemappedRows(self, handle: int) -> Any:
        return self.call("nvmlDeviceGetRemappedRows", handle, self.fails.get(("rows", handle), (0, 0, 0, 0)))

    def nvmlDeviceGetTotalEccErrors(self, handle: int, kind: int, counter: int) -> Any:
        assert (kind, counter) == (1, 0)
        return self.call("nvmlDeviceGetTotalEccErrors", handle, 0)

    def nvmlDeviceGetFieldValues(self, handle: int, fields: list[int]) -> Any:
        action = self.fails.get(("action", handle), 0)
        answer = [SimpleNamespace(nvmlReturn=0, value=SimpleNamespace(uiVal=action))]
        return self.call("nvmlDeviceGetFieldValues", handle, answer)

    def nvmlDeviceGetVirtualizationMode(self, handle: int) -> Any:
        return self.call("nvmlDeviceGetVirtualizationMode", handle, 0)

    def nvmlDeviceGetP2PStatus(self, one: int, other: int, capability: int) -> Any:
        assert capability == 2
        return self.call("nvmlDeviceGetP2PStatus", None, 0 if (one, other) in self.links else 5)


DESCRIBED = (
    "nvmlDeviceGetMemoryInfo",
    "nvmlDeviceGetUtilizationRates",
    "nvmlDeviceGetMigMode",
    "nvmlDeviceGetCudaComputeCapability",
    "nvmlDeviceGetPciInfo",
    "nvmlDeviceGetComputeRunningProcesses",
    "nvmlDeviceGetRemappedRows",
    "nvmlDeviceGetTotalEccErrors",
    "nvmlDeviceGetFieldValues",
    "nvmlDeviceGetVirtualizationMode",
)


def test_nvml_is_understood() -> None:
    reading = nvml.read(Nvml(count=4, links=frozenset({(0, 1), (2, 3)})))
    assert reading.gpus[0] == Gpu(
        uuid=FIRST,
        index=0,
        name="NVIDIA H100 80GB HBM3",
        memory_bytes=80 * GIB,
        used_bytes=GIB,
        utilization=0.5,
        compute_cap=(9, 0),
        bus_id="0000:ba:00.0",
        nvlink_domain=0,
        ecc_uncorrected=0,
        mig=False,
        holders=(Holder(5, 100), Holder(6, None)),
    )
    assert [gpu.nvlink_domain for gpu in reading.gpus] == [0, 0, 2, 2]
    assert not reading.partial and reading.notes == ()


def test_links_join_over_several_cards() -> None:
    reading = nvml.read(Nvml(count=4, links=frozenset({(2, 3), (0, 3)})))
    assert [gpu.nvlink_domain for gpu in reading.gpus] == [0, 1, 0, 0]


@pytest.mark.parametrize("function", DESCRIBED)
@pytest.mark.parametrize("error", [3, 4, 999])
def test_one_call_that_fails_makes_one_figure_unknown(function: str, error: int) -> None:
    fake = Nvml(fails={(function, 0): error})
    if function == "nvmlDeviceGetMemoryInfo":
        fake.fails["nvmlDeviceGetMemoryInfo_v2", 0] = error
    reading = nvml.read(fake)
    assert len(reading.gpus) == 2 and not reading.partial
    assert reading.gpus[0].hindrances == ()
    whole = nvml.read(Nvml()).gpus
    assert reading.gpus[1] == whole[1]
    changed = {
        field: getattr(reading.gpus[0], field)
        for field in ("memory_bytes", "used_bytes", "utilization", "compute_cap", "ecc_uncorrected", "mig", "holders")
        if getattr(reading.gpus[0], field) != getattr(whole[0], field)
    }
    assert set(changed.values()) <= {None}


def test_an_old_driver_without_the_second_memory_call() -> None:
    assert nvml.read(Nvml(fails={("nvmlDeviceGetMemoryInfo_v2", 0): 13})).gpus[0].used_bytes == 2 * GIB


def test_a_library_without_a_function() -> None:
    fake = Nvml()
    fake.nvmlDeviceGetRemappedRows = None  # type: ignore[method-assign, assignment]
    assert nvml.read(fake).gpus[0].hindrances == ()


@pytest.mark.parametrize(
    ("fails", "code"),
    [
        ({("nvmlDeviceGetUtilizationRates", 0): 15}, "lost"),
        ({("nvmlDeviceGetMemoryInfo_v2", 0): 16}, "reset"),
        ({("action", 0): 1}, "reset"),
        ({("action", 0): 4}, "reset"),
        ({("action", 0): 2}, "reboot"),
        ({("rows", 0): (0, 1, 1, 0)}, "reset"),
        ({("rows", 0): (0, 9, 0, 1)}, "remap"),
        ({("action", 0): 3}, ""),
    ],
)
def test_what_the_driver_says_of_a_cards_health(fails: dict[tuple[str, int | None], Any], code: str) -> None:
    first, second = nvml.read(Nvml(fails=fails)).gpus
    assert [each.code for each in first.hindrances] == ([code] if code else [])
    assert second.placeable


def test_a_card_without_identity_is_counted_and_not_made_up() -> None:
    for function in ("nvmlDeviceGetHandleByIndex", "nvmlDeviceGetUUID"):
        reading = nvml.read(Nvml(fails={(function, 0): 15}))
        assert [gpu.uuid for gpu in reading.gpus] == [SECOND]
        assert reading.partial and "GPU 0 cannot be identified" in reading.notes[0]


def test_unknown_links_are_noted_and_are_no_domain() -> None:
    reading = nvml.read(Nvml(fails={("nvmlDeviceGetP2PStatus", None): 3}))
    assert [gpu.nvlink_domain for gpu in reading.gpus] == [None, None]
    assert "NVLink" in reading.notes[0]


def test_nvml_is_shut_down_whatever_happens() -> None:
    fake = Nvml(fails={("nvmlDeviceGetCount", None): 999})
    with pytest.raises(nvml.NoNvml, match="counts no devices"):
        nvml.read(fake)
    assert fake.calls[-1] == "nvmlShutdown"
    nvml.read(Nvml(fails={("nvmlShutdown", None): 1}))


async def test_nvml_that_hangs_is_left_behind_once_and_used_again_when_it_is_back(tmp_path: Path) -> None:
    block = threading.Event()
    hanging, started = Nvml(block=block), 0

    def load() -> Nvml:
        nonlocal started
        started += 1
        return hanging

    probe = GpuProbe(limit_s=SHORT_S, tool=healthy(tmp_path), load=load)
    found = await probe.read()
    assert "did not answer within" in found.reading.notes[0]
    probe.limit_s = LONG_S
    found = await probe.read()
    assert found.backend == "nvidia-smi" and len(found.reading.gpus) == 2
    assert "has not come back" in found.reading.notes[0]
    assert started == 1
    block.set()
    await until(lambda: hanging.calls[-1:] == ["nvmlShutdown"])
    await until(lambda: not probe._stuck)
    assert (await probe.read()).backend == "nvml"


@pytest.mark.skipif(os.path.exists("/dev/nvidiactl"), reason="this machine has a driver")
async def test_the_real_library_says_why_it_cannot() -> None:
    found = await GpuProbe(backend="nvml", limit_s=LONG_S).read()
    assert found.reading.notes[0].startswith("no GPUs: ")

"""One agent among things that go wrong around it: clocks that are set, disks that do not answer, engines that answer
nonsense or do as they like with their log, processes that cannot be ended."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio

from appliance.agent import planning, process, ready, shard, wording
from appliance.agent.logs import LINE_CHARS, tail
from appliance.facts.catalog import Profile
from appliance.facts.launch import HttpReady
from appliance.facts.replica import Shard
from appliance.rules.engines import llamacpp
from appliance.rules.engines.patience import Patience
from tests.shard_scene import Scene, agent, alive, free_range, reported, scene, stub, until, when

PORTS = free_range(300)


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path, PORTS) as made:
        yield made


@attrs.define
class Clock:
    """The machine's clock, which somebody sets."""

    ahead_s: float = 0.0

    def now(self) -> float:
        return time.time() + self.ahead_s


# -- clocks ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("step_s", [1e7, -1e7])
async def test_a_clock_that_is_set_ends_no_engine_that_loads(place: Scene, step_s: float) -> None:
    clock = Clock()
    patience = Patience(5.0, 1e9, 5.0, 0.03)
    async with agent(place, now=clock.now, patience=patience) as shards:
        shards.start(stub("r1", "--load-s", "0.4"))
        shards.start(stub("r2", "--load-s", "60"))
        await reported(shards, "r1/0", "loading")
        loading = await reported(shards, "r2/0", "loading")
        clock.ahead_s = step_s
        assert (await reported(shards, "r1/0", "ready")).reason == ""
    # Nor is it judged by the next agent as if the years between had passed.
    async with agent(place, now=clock.now, patience=patience) as shards:
        await when(shards, lambda: shards.reports()["r2/0"].reason.startswith("nothing listens"))
        await trio.sleep(0.1)
        assert shards.reports()["r2/0"].pid == loading.pid


async def test_a_drain_ends_in_its_time_whatever_the_clock_says(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    async def busy(engine: str, wanted: HttpReady) -> bool:
        return False

    monkeypatch.setattr(shard, "idle", busy)
    clock = Clock()
    async with agent(place, now=clock.now) as shards:
        for name in ("r1", "r2"):
            shards.start(stub(name))
            await reported(shards, f"{name}/0", "ready")
        shards.stop("r1/0", drain_s=0.3)
        await reported(shards, "r1/0", "draining")
        clock.ahead_s = -1e7
        with trio.fail_after(10):
            await reported(shards, "r1/0", "stopped")
        shards.stop("r2/0", drain_s=0.3)
        await reported(shards, "r2/0", "draining")
    clock.ahead_s -= 1e7
    async with agent(place, now=clock.now) as shards:
        with trio.fail_after(10):
            await reported(shards, "r2/0", "stopped")


# -- disks -------------------------------------------------------------------------------------------------------------


async def test_a_disk_that_does_not_answer_holds_up_one_shard_and_no_agent(
    place: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(planning, "DISK_S", 0.3)
    back = threading.Event()
    asked = 0

    def which(name: str) -> str | None:
        nonlocal asked
        if name == "stuck":
            asked += 1
            back.wait(60)
        return name

    programs = {"vllm": "stuck", "llamacpp": place.settings["executables"]["llamacpp"]}
    vllm = Profile("p", "vllm", source="/dev/null", gpus_per_node=0)
    try:
        async with agent(place, which=which, executables=programs) as shards:
            shards.start(Shard("r1", "m", vllm))
            await until(lambda: asked)
            with trio.fail_after(10):
                shards.start(stub("r2"))
                await reported(shards, "r2/0", "ready")
                failed = await reported(shards, "r1/0", "failed")
                assert "the disk with the programs and weights of r1/0: no answer within 0.3 s" in failed.reason
                shards.start(Shard("r1", "m", vllm))
                failed = await reported(shards, "r1/0", "failed")
                # Its thread is not joined by a second one.
                assert "an earlier question has not been answered yet" in failed.reason
            assert asked == 1
    finally:
        back.set()


# -- what engines say --------------------------------------------------------------------------------------------------


async def test_a_name_that_cannot_be_written_is_told_all_the_same(place: Scene) -> None:
    """JSON may hold half a character. It must not take `/status` along, nor the record."""
    async with agent(place, patience=Patience(0.0, 1e9, 2.0, 0.03)) as shards:
        shards.start(stub("r1", "--serve-as", os.fsdecode(b"\xff\x1b[2Jmodel")))
        told = await when(shards, lambda: _reason(shards.reports()["r1/0"].reason))
        assert told.encode().decode() == "it serves \ufffdmodel, not m"
        failed = await reported(shards, "r1/0", "failed")
    assert failed.reason.endswith("it serves \ufffdmodel, not m")
    assert place.record("r1/0")["reason"] == failed.reason


def _reason(reason: str) -> str:
    return reason if reason.startswith("it serves") else ""


@pytest.mark.parametrize("body", [b"[" * 200_000, b'{"data":' + b"[" * 200_000, b'{"data":[{"id":' + b'{"a":' * 9_999])
def test_models_too_deep_to_be_read_are_no_list(body: bytes) -> None:
    assert ready.served(body) is None


def test_a_reason_has_a_bound() -> None:
    told = wording.sentence("it serves " + "x" * 1_000_000 + "\nmore")
    assert len(told) == wording.SENTENCE_CHARS
    assert told.endswith("…")


@pytest.mark.parametrize(
    ("written", "lines"),
    [
        (b"\x1b[31mred\x1b[0m\n", ["red"]),
        (b"\x1b]0;a title\x07named\n", ["named"]),
        (b"\x1b]8;;http://x\x1b\\link\x1b]8;;\x1b\\\n", ["link"]),
        (b"\x1bPq#0\x1b\\sixel\n", ["sixel"]),
        (b"\0" * 70_000 + b"after a hole\n", ["after a hole"]),
        (b"bell\x07 back\x08\x7f \xc2\x9b2J\n", ["bell back 2J"]),
        ("turned \u202egnp.exe\u2028\n".encode(), ["turned gnp.exe"]),
        (b"a\tb\n", ["a\tb"]),
        (b"y" * 70_000, ["y" * LINE_CHARS]),
    ],
)
def test_nothing_an_engine_writes_reaches_a_terminal_as_more_than_text(
    tmp_path: Path, written: bytes, lines: list[str]
) -> None:
    log = tmp_path / "log"
    log.write_bytes(written)
    assert tail(str(log), 20) == lines


# -- what engines do with their log ------------------------------------------------------------------------------------

WRITER = """#!{python} -IS
import os, sys, time
if "--reopen" in sys.argv:
    os.dup2(os.open("/dev/stdout", os.O_WRONLY), 1)
if "--delete" in sys.argv:
    os.unlink(os.readlink("/proc/self/fd/1"))
while True:
    os.write(1, b"x" * 1023 + b"\\n")
    time.sleep(0.001)
"""


@pytest.mark.parametrize("how", ["--delete", "--reopen"])
async def test_a_log_is_bounded_whatever_its_writer_does_with_it(
    place: Scene, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    program = place.folder / "writer"
    program.write_text(WRITER.format(python=sys.executable))
    program.chmod(0o755)
    bound = 1 << 18
    cuts: list[int] = []
    real_cut = shard.logs._Held.cut

    def cut(held: shard.logs._Held, log: str, keep: int) -> None:
        cuts.append(written())
        real_cut(held, log, keep)

    monkeypatch.setattr(shard.logs._Held, "cut", cut)
    pid = 0

    def written() -> int:
        text = Path(f"/proc/{pid}/io").read_text() if pid else ""
        return int(text.split("wchar: ")[1].split()[0]) if text else 0

    for _ in range(2):
        async with agent(place, executables={"llamacpp": str(program)}, log_bytes=bound) as shards:
            if not pid:
                shards.start(stub("r1", how))
            pid = (await when(shards, lambda: shards.reports()["r1/0"])).pid or (
                await reported(shards, "r1/0", "loading")
            ).pid
            began, seen = written(), len(cuts)
            await until(lambda began=began: written() > began + 2 * bound)
            assert os.stat(f"/proc/{pid}/fd/1").st_blocks * 512 <= bound
            # Once for each quarter, and not at each look.
            assert 2 <= len(cuts) - seen <= 20
    assert alive(pid)


# -- what cannot be ended ----------------------------------------------------------------------------------------------


async def test_what_cannot_be_ended_has_not_ended(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault in the middle of a teardown, again and again: nobody may start it a second time until it is gone."""
    monkeypatch.setattr(shard, "AGAIN_S", 0.1)
    real, faults = shard.end_marked, 3

    async def broken(marker: str) -> tuple[int, ...]:
        nonlocal faults
        faults -= 1
        if faults >= 0:
            raise OSError(24, "Too many open files")
        return await real(marker)

    async with agent(place) as shards:
        for name in ("r1", "r2"):
            shards.start(stub(name))
            await reported(shards, f"{name}/0", "ready")
        monkeypatch.setattr(shard, "end_marked", broken)
        shards.stop("r1/0")
        told = await when(
            shards,
            lambda: shards.reports()["r1/0"] if "cannot be ended yet" in shards.reports()["r1/0"].reason else None,
        )
        assert told.state == "stopping"
        shards.start(stub("r1"))
        failed = await reported(shards, "r1/0", "failed")
        assert failed.reason.startswith("the agent could not go on with it: OSError: [Errno 24]")
        assert shards.reports()["r2/0"].state == "ready"
        assert set(place.processes()) == {shards.reports()["r2/0"].pid}


async def test_an_engine_that_became_another_users_is_told_of(place: Scene, monkeypatch: pytest.MonkeyPatch) -> None:
    """A wrapper that changes the user: the kernel does not let us signal it."""
    monkeypatch.setattr(llamacpp, "STOP", [attrs.evolve(step, grace_s=0.1) for step in llamacpp.STOP])
    monkeypatch.setattr(process, "GONE_S", 0.3)
    async with agent(place) as shards:
        shards.start(stub("r1"))
        ready_one = await reported(shards, "r1/0", "ready")

        def refused(*_: object) -> None:
            raise PermissionError(1, "Operation not permitted")

        with monkeypatch.context() as patch:
            patch.setattr(os, "killpg", refused)
            patch.setattr(signal, "pidfd_send_signal", refused)
            shards.stop("r1/0")
            failed = await reported(shards, "r1/0", "failed")
        assert failed.reason == f"not gone after SIGKILL: pid {ready_one.pid}"


@pytest.mark.parametrize("how", ["fails", "gone"])
async def test_a_systemd_that_gives_no_scopes_any_more_keeps_no_engine_from_starting(
    place: Scene, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    runner = place.folder / "bin" / "systemd-run"
    runner.parent.mkdir()
    runner.write_text('#!/bin/sh\nwhile [ "$1" != -- ]; do shift; done\nshift\nexec "$@"\n')
    runner.chmod(0o755)
    monkeypatch.setenv("PATH", f"{runner.parent}:{os.environ['PATH']}")
    async with agent(place, booted=str(place.folder)) as shards:
        if how == "gone":
            runner.unlink()
        else:
            runner.write_text("#!/bin/sh\nexit 1\n")
        shards.start(stub("r1"))
        await reported(shards, "r1/0", "ready")

"""ctl about nodes, replicas and placement, against a router whose control plane has a world of the test's making."""

from __future__ import annotations

import io
import json
import os
import pwd
import re
import signal
import subprocess
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, redirect_stderr, redirect_stdout
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any
from unittest.mock import patch

import attrs
import pytest
import trio

from appliance.admin.fleet import replica_states
from appliance.admin.metrics import Scrapes
from appliance.admin.running import Running
from appliance.cli.ctl.screen import console
from appliance.cli.main import run
from appliance.cli.operations import Operations
from appliance.facts.catalog import Model, Profile, Scaling
from tests.plane_scene import QUICK, ScenePlane, machine, scene
from tests.processes import APPLIANCE, environment
from tests.routers import Running as InProcess
from tests.routers import router

ME = pwd.getpwuid(os.getuid()).pw_name
MODELS = (
    Model(
        "llama",
        aliases=("chat",),
        scaling=Scaling(min_replicas=2),
        profiles=(
            Profile("h100", "sim", gpu_class="h100-80g", priority=5),
            Profile("l40s", "sim", gpu_class="l40s-45g"),
        ),
    ),
    Model(
        "wide",
        profiles=(Profile("two", "sim", nodes=2, gpus_per_node=4, tensor_parallel=8, gpu_class="h100-80g"),),
    ),
    Model("huge", profiles=(Profile("sixteen", "sim", gpus_per_node=16, tensor_parallel=16),)),
    Model("idle", scaling=Scaling(min_replicas=0, max_replicas=1), profiles=(Profile("cpu", "sim", gpus_per_node=0),)),
)
NODES = {
    "blue-1": machine(8, fabric="blue", bad={7: "3 uncorrected memory errors"}),
    "blue-2": machine(8, fabric="blue"),
    "island": machine(2, kind="l40s-45g"),
}


@attrs.define(eq=False)
class Going:
    """A ctl that has been started and not waited for."""

    process: trio.Process
    _held: bytes = b""

    async def line(self) -> str:
        """The next line of what it prints."""
        assert self.process.stdout is not None
        with trio.fail_after(20):
            while b"\n" not in self._held:
                piece = await self.process.stdout.receive_some()
                assert piece, ("it ended", self._held)
                self._held += piece
        line, _, self._held = self._held.partition(b"\n")
        return line.decode()

    async def ended(self) -> tuple[int, str]:
        """Its exit status and what it complained about."""
        assert self.process.stderr is not None
        with trio.fail_after(20):
            complaint = b"".join([piece async for piece in self.process.stderr])
            return await self.process.wait(), complaint.decode()


@attrs.frozen
class Seen:
    """A router with a plane, and ctl beside it."""

    router: InProcess
    plane: ScenePlane
    folder: Path

    async def ctl(self, *arguments: str, **env: str) -> CompletedProcess[str]:
        """What ctl does, in a thread of this process: most of its time would be spent on importing it."""
        return await trio.to_thread.run_sync(self._run, arguments, env)

    def _run(self, arguments: tuple[str, ...], env: dict[str, str]) -> CompletedProcess[str]:
        out, err = io.StringIO(), io.StringIO()
        console.cache_clear()
        beside = {**environment(self.folder), **env}
        with patch.dict(os.environ, beside, clear=True), redirect_stdout(out), redirect_stderr(err):
            status = run(["ctl", *arguments])
        console.cache_clear()
        return CompletedProcess(arguments, status, out.getvalue(), err.getvalue())

    async def says(self, *arguments: str, status: int = 0) -> str:
        """What ctl prints; the exit status must be `status`."""
        done = await self.ctl(*arguments)
        assert done.returncode == status, (arguments, done)
        return done.stderr if status else done.stdout

    async def begin(self, *arguments: str) -> Going:
        """A ctl that goes on."""
        process = await trio.lowlevel.open_process(
            [*APPLIANCE, "ctl", *arguments],
            env=environment(self.folder),
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        return Going(process)

    async def read(self, *arguments: str) -> Any:
        return json.loads(await self.says(*arguments, "--json"))


@pytest.fixture
def planes(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[ScenePlane]]:
    """What is put in here is the control plane of every router that starts."""
    held: list[ScenePlane] = []
    real = Operations._running

    def running(self: Operations) -> Running:
        return attrs.evolve(real(self), plane=lambda: held[0] if held else None)

    monkeypatch.setattr(Operations, "_running", running)
    yield held


@asynccontextmanager
async def seen(folder: Path, planes: list[ScenePlane], settings: Any = QUICK) -> AsyncIterator[Seen]:
    """Two replicas of llama that serve, one of wide that loads, huge that fits nowhere, idle at zero."""
    async with scene(folder, MODELS, NODES, settings) as plane:
        planes.append(plane)
        plane.act()
        plane.says("llama", "ready")
        plane.says("wide", "loading")
        plane.act()
        names = "".join(f'[[models]]\nname = "{model.name}"\n' for model in MODELS)
        async with router(folder, config=names) as running:
            yield Seen(running, plane, folder)


READS = (
    ("nodes",), ("replicas",), ("models",), ("status",), ("doctor",), ("audit",),
    ("explain", "placement", "llama"), ("explain", "placement", "huge"), ("explain", "placement", "idle"),
)  # fmt: skip


async def test_every_read_has_words_and_json_and_keeps_to_the_width(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        for arguments in READS:
            words = await at.ctl(*arguments)
            assert words.returncode in (0, 1) and words.stdout.strip() and not words.stderr, (arguments, words)
            assert "\x1b" not in words.stdout, "no colour into a pipe"
            assert not any(line.endswith(" ") for line in words.stdout.splitlines()), (arguments, words.stdout)
            assert isinstance(json.loads((await at.ctl(*arguments, "--json")).stdout), dict)
            narrow = (await at.ctl(*arguments, COLUMNS="80")).stdout
            assert max(map(len, narrow.splitlines())) <= 80, (arguments, narrow)


# -- nodes -------------------------------------------------------------------------------------------------------------


async def test_nodes_say_what_is_free_and_why_a_gpu_is_not(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        rows = (await at.says("nodes")).splitlines()
        assert rows[0].split()[:3] == ["NODE", "STATE", "REPLICAS"]
        assert rows[1].startswith("blue-1  ready") and "1 of 8 h100-80g" in rows[1] and "blue ib 400 Gb/s" in rows[1]
        assert rows[3].startswith("island") and "2 of 2 l40s-45g" in rows[3]
        assert rows[5:] == ["blue-1: not free: GPU 7: ecc: 3 uncorrected memory errors"]
        document = await at.read("nodes")
        first = document["nodes"][0]
        assert document["settling_s"] is None
        assert len(first["inventory"]["gpus"]) == 8 and first["inventory"]["gpus"][7]["hindrances"]
        taken = {each["index"]: each["replica"] for each in first["not_free"]}
        assert sorted(each.split(".")[0] for each in taken.values() if each) == ["llama"] * 2 + ["wide"] * 4
        assert first["memory_bytes"] == 64 << 30 and first["version"] == "1.2.3" and first["address"] == "10.0.0.1"


async def test_a_node_in_trouble_says_which(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        plane = at.plane
        plane.world.expect("new", time.monotonic())
        plane.join("late", attrs.evolve(machine(), partial=True, notes=("nvidia-smi: timed out",)), clock_off_s=-90.0)
        plane.world.parted("blue-2", time.monotonic())
        plane.world.silent("blue-2", time.monotonic())
        plane.world.lost("island", time.monotonic())
        states = {node["name"]: node["state"] for node in (await at.read("nodes"))["nodes"]}
        assert states == {
            "blue-1": "ready", "blue-2": "unreachable", "island": "lost", "late": "ready", "new": "expected",
        }  # fmt: skip
        words = await at.says("nodes")
        assert re.search(r"blue-2: unreachable: not connected for \d+ s; what ran there is started elsewhere in", words)
        assert "island: lost: nothing was heard of it for " in words
        assert "2 of 2 l40s-45g" not in words, "nothing is to be had there"
        assert "new: expected: it has a certificate and has not called since this router started" in words
        assert "late: its clock is 90 s behind this machine's: set both by NTP" in words
        assert "late: its hardware could not be read as a whole: nvidia-smi: timed out" in words
        assert "node island: lost: " in await at.says("status")
        doctor = json.loads((await at.ctl("doctor", "--json")).stdout)
        found = {(each["check"], each["verdict"]) for each in doctor["findings"]}
        assert ("node", "failed") in found and ("node", "warning") in found and ("nodes", "ok") not in found
        (row,) = [line for line in (await at.says("replicas")).splitlines() if line.startswith("wide.") and ":" in line]
        assert row.endswith(": blue-2 is unreachable")


async def test_cordon_and_uncordon(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        told = await at.says("cordon", "blue-1")
        assert told.startswith("blue-1 cordoned\nnothing new is placed there; 3 replicas there go on: llama.")
        assert (await at.says("cordon", "blue-1")).startswith("blue-1 was cordoned already\n")
        assert at.plane.world.nodes["blue-1"].cordoned and "blue-1" in await at.plane.store.cordons()
        node = (await at.read("nodes"))["nodes"][0]
        assert (node["cordoned"], node["cordoned_by"], node["draining"]) == (True, ME, False)
        assert "blue-1  ready, cordoned" in await at.says("nodes")
        assert "3 ready; cordoned: blue-1" in await at.says("status")
        assert f"blue-1 is cordoned, by {ME}" in (await at.ctl("doctor")).stdout
        assert "blue-1  it is cordoned" in await at.says("explain", "placement", "llama")
        assert await at.says("uncordon", "blue-1") == "blue-1 uncordoned\nreplicas may be placed there again\n"
        assert (await at.says("uncordon", "blue-1")).startswith("blue-1 was not cordoned\n")
        rows = [line.split()[2:] for line in (await at.says("audit")).splitlines()[1:]]
        assert rows == [[ME, "cordon", "blue-1", "-"], [ME, "uncordon", "blue-1", "-"]]
        assert [each["action"] for each in (await at.read("audit", "--lines", "1"))["audit"]] == ["uncordon"]


async def test_names_that_nobody_knows(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        for arguments, told in (
            (("cordon", "blue1"), "no node 'blue1' is known: did you mean blue-1?"),
            (("drain", "xyz"), "no node 'xyz' is known; there are: blue-1, blue-2, island"),
            (("explain", "placement", "lama"), "no model 'lama' is known: did you mean llama?"),
            (("models", "stop", "nothing"), "no model 'nothing' is known; there are: huge, idle, llama, wide"),
            (("logs", "nothing.aaaaa"), "no replica 'nothing.aaaaa' is known; there are: llama."),
        ):
            line = await at.says(*arguments, status=1)
            assert line.count("\n") == 1 and told in line, (arguments, line)
        await at.says("models", "scale", "llama", "many", status=2)
        await at.says("logs", "x", "--lines", "-1", status=2)


# -- drain -------------------------------------------------------------------------------------------------------------


async def test_a_drain_waits_for_the_replacements(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at, trio.open_nursery() as nursery:
        nursery.start_soon(at.plane.go_on)
        told = (await at.says("drain", "blue-1")).splitlines()
        # The answer is made while the fleet goes on, so the one that has no other place may have left before it.
        assert told[0] == "blue-1 drains" and re.match("[23] replicas must go: llama[.]", told[1])
        assert told[2] == "each goes on until its replacement serves elsewhere, and is stopped without one in 10 min"
        assert "blue-1 is drained" in told
        # two nodes of the fabric are needed for this one, and there is only one left
        assert told[-1].startswith("wide: 1 missing: ")
        assert at.plane.world.nodes["blue-1"].draining_since is not None
        running = [placed for placed in at.plane.world.replicas.values() if placed.stage == "running"]
        where = {placed.nodes for placed in running if placed.model == "llama"}
        assert where == {("blue-2",)}
        again = (await at.says("drain", "blue-1")).splitlines()
        assert again[0] == "blue-1 drains already" and "blue-1 is drained: nothing ran there" in again
        assert "blue-1  ready, drained" in await at.says("nodes")
        assert [each["action"] for each in (await at.read("audit"))["audit"]] == ["cordon", "drain"]
        nursery.cancel_scope.cancel()


async def test_a_drain_need_not_be_waited_for_and_can_be_taken_back(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        at.plane.says("wide", "ready")
        at.plane.act()
        at.plane.serving = False
        told = await at.says("drain", "blue-2", "--no-wait")
        assert "is stopped without one in 10 min" in told and "is drained" not in told
        async with trio.open_nursery() as nursery:
            nursery.start_soon(at.plane.go_on)
            waiting = await at.begin("drain", "blue-2")
            assert (await waiting.line()).startswith("blue-2 drains already")
            while "waiting for wide." not in (line := await waiting.line()):
                pass
            assert line.startswith("0 of 1 replica gone, 10 min of grace left; waiting for wide."), line
            await at.plane.uncordon("blue-2", "somebody")
            assert await waiting.ended() == (1, "appliance: blue-2 drains no more: somebody has uncordoned it "
                                                "(ctl audit says who)\n")  # fmt: skip
            nursery.cancel_scope.cancel()


async def test_a_drain_of_the_only_possible_node_ends_with_the_grace(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes, attrs.evolve(QUICK, drain_grace_s=1.0)) as at, trio.open_nursery() as nursery:
        at.plane.says("wide", "ready")
        nursery.start_soon(at.plane.go_on)
        told = (await at.says("drain", "blue-2")).splitlines()
        assert any(line.startswith("0 of 1 replica gone, ") and "; waiting for wide." in line for line in told)
        assert told[-2] == "blue-2 is drained, not everything with a replacement, since the grace was over"
        assert told[-1].startswith("wide: 1 missing: ")
        nursery.cancel_scope.cancel()


# -- models ------------------------------------------------------------------------------------------------------------


async def test_models_say_how_many_are_wanted_and_why_not(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        found = {model["name"]: model["replicas"] for model in (await at.read("models"))["models"]}
        wide, idle = found["wide"], found["idle"]
        assert (found["llama"]["wanted"], found["llama"]["ready"], found["llama"]["why"]) == (2, 2, "")
        assert (wide["wanted"], wide["ready"], wide["starting"]) == (1, 0, 1)
        assert wide["why"].startswith("it is loading on blue-2 and blue-1") and wide["states"] == {
            "ready": 0,
            "loading": 1,
        }
        assert idle["at_zero"] and not idle["why"]
        assert found["huge"]["why"].startswith("no node has room for it: blue-1: it needs 16 GPUs")
        rows = {line.split()[0]: line.split() for line in (await at.says("models")).splitlines() if line}
        assert rows["idle"][1:3] == ["at", "zero"] and rows["llama"][6:9] == ["2", "of", "2"]


async def test_models_are_scaled_stopped_and_started(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        told = await at.says("models", "scale", "chat", "3")
        assert told.startswith("llama: 3 replicas wanted now: an operator said so\nthis holds until 'ctl models scale")
        assert sum(placed.model == "llama" for placed in at.plane.world.replicas.values()) == 3
        assert await at.says("models", "scale", "llama", "auto") == "llama: 2 replicas wanted now: min_replicas is 2\n"
        assert (await at.says("models", "stop", "llama")).startswith("llama: 0 replicas wanted now: ")
        entry = next(each for each in (await at.read("models"))["models"] if each["name"] == "llama")
        assert entry["replicas"]["at_zero"] and entry["replicas"]["why"] == "an operator has stopped it"
        assert await at.says("models", "start", "llama") == "llama: 2 replicas wanted now: min_replicas is 2\n"
        assert (await at.says("models", "start", "idle")).startswith(
            "idle: 1 replica wanted now: an operator said so\n"
        )
        rows = [(each["by"], each["action"], each["target"]) for each in (await at.read("audit"))["audit"]]
        assert rows == [(ME, "scale", "llama")] * 4 + [(ME, "scale", "idle")]


# -- replicas and placement --------------------------------------------------------------------------------------------


async def test_replicas_tell_which_part_failed_and_what_is_missing(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        plane = at.plane
        document = await at.read("replicas")
        wide = next(each for each in document["replicas"] if each["model"] == "wide")
        assert (wide["state"], wide["nodes"], wide["fabric"]) == ("loading", ["blue-2", "blue-1"], "blue")
        assert [(each["rank"], each["node"], each["gpus"]) for each in wide["shards"]] == [
            (0, "blue-2", [0, 1, 2, 3]), (1, "blue-1", [2, 3, 4, 5]),
        ]  # fmt: skip
        assert [(each["model"], each["count"]) for each in document["missing"]] == [("huge", 1)]
        tail = ("loading shards", "RuntimeError: NCCL error")
        assert f"{wide['id']}: loading\n   rank 0 on blue-2: loading\n" in await at.says("replicas")
        plane.says("wide", "failed", rank=1, reason="it ended by itself", exit="exit status 1", tail=tail)
        words = await at.says("replicas")
        assert "   rank 1 on blue-1: failed: it ended by itself, exit status 1\n" in words
        assert "      | RuntimeError: NCCL error\n" in words
        for _ in range(5):
            plane.act()
        assert wide["id"] not in plane.world.replicas
        later = time.monotonic() + 100
        plane.fleet.history.backoffs["wide"] = attrs.evolve(plane.fleet.history.backoffs["wide"], until=later)
        missing = next(each for each in (await at.read("replicas"))["missing"] if each["model"] == "wide")
        assert 0 < missing["again_s"] <= 100 and missing["failures"][0]["node"] == "blue-1"
        words = await at.says("replicas")
        assert "wide: 1 missing: it failed once: it ended by itself on blue-1" in words
        assert re.search(
            rf"   {wide['id']} failed \d+ s ago: rank 1 on blue-1: it ended by itself, exit status 1\n", words
        )
        assert "      | RuntimeError: NCCL error\n" in words
        assert await at.says("logs", wide["id"], "--rank", "1", "--lines", "1") == "RuntimeError: NCCL error\n"
        assert f"failed   {wide['id']}, " in await at.says("explain", "placement", "wide")


async def test_placement_of_a_model_that_cannot_run_names_every_node(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        document = await at.read("explain", "placement", "huge")
        (profile,) = document["profiles"]
        assert profile["place"] is None and profile["needs"] == "one node, 16 GPUs of one class"
        assert {each["candidate"] for each in profile["rejections"]} == set(NODES)
        assert all("it needs 16 GPUs" in each["reason"] for each in profile["rejections"])
        words = await at.says("explain", "placement", "huge")
        assert words.startswith("huge  missing\n0 of 1 wanted replicas serve.\n")
        assert "missing  1: no node has room for it\n" in words and "   it fits nowhere now\n" in words


async def test_placement_says_where_it_runs_and_where_one_more_would(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        words = await at.says("explain", "placement", "chat")
        assert words.startswith("llama  ready\n2 of 2 wanted replicas serve.\n\nasked for  chat, an alias\n")
        assert (
            "1. h100, priority 5: one node, 1 GPU of class h100-80g\n   one more would go to blue-1 (GPU 6)\n" in words
        )
        assert "   blue-2  it would do, and blue-1 has fewer free GPUs to spare\n" in words
        assert "   island  it needs 1 GPU of class h100-80g, and the GPUs here are l40s-45g\n" in words
        first = (await at.read("explain", "placement", "llama"))["profiles"][0]
        assert first["place"] == {
            "nodes": [{"node": "blue-1", "gpus": ["blue-1-6"]}],
            "gpu_class": "h100-80g",
            "fabric": "",
        }
        wide = (await at.read("explain", "placement", "wide"))["profiles"][0]
        assert wide["needs"] == "2 nodes of one fabric, 4 GPUs of class h100-80g each"
        assert {each["candidate"] for each in wide["rejections"]} == {"fabric blue", *NODES}


# -- logs --------------------------------------------------------------------------------------------------------------


async def test_logs_are_printed_and_followed(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        replica = next(name for name in at.plane.world.replicas if name.startswith("llama"))
        at.plane.logs = {f"{replica}/0": [["one", "two"], ["three — ünï"]]}
        assert await at.says("logs", replica) == "one\ntwo\nthree — ünï\n"
        lines = (await at.says("logs", replica, "--json")).splitlines()
        assert [json.loads(line)["line"] for line in lines] == ["one", "two", "three — ünï"]
        assert await at.says("logs", replica, "--rank", "4", status=1) == (
            f"appliance: {replica}/4 is no part of a replica that is known here\n"
        )
        following = await at.begin("logs", replica, "-f")
        assert [await following.line() for _ in range(3)] == ["one", "two", "three — ünï"]
        await at.router.until("it is followed", lambda: at.plane.followed)
        following.process.send_signal(signal.SIGINT)
        assert await following.ended() == (0, "")
        await at.router.until("the follow has ended", lambda: not at.plane.followed)


async def test_a_follow_of_a_silent_log_begins_at_once_and_ends_with_the_client(
    tmp_path: Path, planes: list[ScenePlane]
) -> None:
    async with seen(tmp_path, planes) as at:
        replica = next(iter(at.plane.world.replicas))
        at.plane.logs = {f"{replica}/0": []}
        stream = await trio.open_unix_socket(str(tmp_path / "appliance-run" / "admin.sock"))
        await stream.send_all(f"GET /logs/{replica}?follow=1 HTTP/1.1\r\nhost: x\r\n\r\n".encode())
        answer = b""
        while b'"rank"' not in answer:
            answer += await stream.receive_some()
        await at.router.until("it is followed", lambda: at.plane.followed)
        await stream.aclose()
        await at.router.until("the follow has ended", lambda: not at.plane.followed)


# -- the rest ----------------------------------------------------------------------------------------------------------


async def test_a_router_without_a_control_plane_says_so(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with router(tmp_path, config='[[models]]\nname = "llama"\n') as running:
        at = Seen(running, None, tmp_path)  # type: ignore[arg-type]
        for arguments in (
            ("nodes",), ("replicas",), ("audit",), ("explain", "placement", "llama"), ("cordon", "a"),
            ("uncordon", "a"), ("drain", "a"), ("logs", "a"), ("models", "stop", "llama"), ("models", "start", "llama"),
            ("models", "scale", "llama", "1"),
        ):  # fmt: skip
            line = await at.says(*arguments, status=1)
            assert line.startswith("appliance: this router runs no control plane: no model has a profile"), arguments
            assert line.count("\n") == 1
        assert (await at.read("status"))["fleet"] is None
        assert (await at.read("models"))["models"][0]["replicas"] is None


async def test_refusals_of_the_api(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes):
        for target, method, status, code in (
            ("/nodes/nobody", "GET", 404, "node_not_found"),
            ("/nodes/blue-1/cordon", "GET", 404, "node_not_found"),
            ("/nodes/blue-1", "DELETE", 405, "method_not_allowed"),
            ("/audit?lines=0", "GET", 400, "bad_lines"),
            ("/models/llama/scale", "POST", 400, "bad_replicas"),
            ("/models/llama/scale?replicas=-1", "POST", 400, "bad_replicas"),
            ("/models/none/scale?replicas=1", "POST", 404, "model_not_placed"),
            ("/logs/none.aaaaa", "GET", 404, "replica_not_found"),
            ("/logs/none.aaaaa?lines=x", "GET", 400, "bad_query"),
            ("/placement/none", "GET", 404, "model_not_placed"),
        ):
            stream = await trio.open_unix_socket(str(tmp_path / "appliance-run" / "admin.sock"))
            request = f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-length: 0\r\n\r\n"
            await stream.send_all(request.encode())
            answer = b"".join([piece async for piece in stream])
            head, _, body = answer.partition(b"\r\n\r\n")
            assert (int(head.split()[1]), json.loads(body)["error"]["code"]) == (status, code), target


async def test_counts_for_prometheus_and_for_the_door(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        plane = at.plane
        plane.world.expect("new", time.monotonic())
        text, _ = Scrapes(at.router.app.gateway, lambda: plane)("text/plain")  # type: ignore[arg-type, return-value]
        lines = text.decode().splitlines()
        assert 'appliance_nodes{state="ready"} 3.0' in lines and 'appliance_nodes{state="expected"} 1.0' in lines
        assert 'appliance_nodes{state="lost"} 0.0' in lines
        assert 'appliance_replicas{model="llama",state="ready"} 2.0' in lines
        assert 'appliance_replicas{model="wide",state="loading"} 1.0' in lines
        assert 'appliance_replicas{model="huge",state="ready"} 0.0' in lines
        at.router.app.door.replicas = lambda: replica_states(plane)  # type: ignore[arg-type]
        answer = await at.router.ask(b"GET /status.json HTTP/1.1\r\nhost: x\r\n\r\n")
        models = json.loads(answer.body)["models"]
        assert models["wide"]["replicas"] == {"ready": 0, "loading": 1} and models["llama"]["replicas"] == {"ready": 2}


async def test_a_model_that_sleeps_says_that_a_request_would_wait(tmp_path: Path, planes: list[ScenePlane]) -> None:
    async with seen(tmp_path, planes) as at:
        gateway, fleet = at.router.app.gateway, at.plane.fleet
        gateway.publish((), fleet.waking(time.monotonic()))
        assert (await at.says("explain", "model", "idle")).startswith(
            "idle  at zero\nA request would wait for the model to be started: it is about to be started.\n"
        )
        gateway.why_not = lambda model: fleet.troubles(time.monotonic()).get(model, "")
        refused = "A request would be refused with 503 model_not_ready: the model 'huge' is not ready: no node has room"
        assert (await at.says("explain", "model", "huge")).startswith(f"huge  not ready\n{refused}")
        found = {model["name"]: model["waking"] for model in (await at.read("models"))["models"]}
        assert found["idle"] and found["wide"].startswith("it is loading on ") and not found["huge"]

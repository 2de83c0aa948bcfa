"""Whatever a file, a driver, a tool or the kernel says of a node: the agent goes on, and can tell of it."""

from __future__ import annotations

import copy
import json
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
import structlog
import trio
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.agent import machine as machines
from appliance.agent.discovery import asking, cpus, fabrics, inventory, nvml, smi
from appliance.agent.discovery.gpus import GpuProbe
from appliance.agent.discovery.inventory import Place, gather
from appliance.agent.discovery.reading import Ours
from appliance.agent.discovery.writing import BadInventory, parse_inventory, read_inventory, to_json, to_lines
from appliance.agent.machine import Machine, placing
from appliance.agent.status import Identity, Seen, document
from appliance.facts.catalog import Profile
from appliance.facts.hardware import (
    GIB,
    Cpus,
    Disk,
    Fabric,
    Gid,
    Holder,
    Interface,
    Inventory,
    Memory,
    Port,
    Rail,
    RdmaAdapter,
)
from appliance.rules.fleet.room import NoRoom, choose_gpus
from tests.agent_scene import gpu, hindered

WHOLE = Inventory(
    node="box",
    address="10.0.0.1",
    labels={"rack": "a"},
    cpus=Cpus(8, "model", "x86_64", 2),
    memory=Memory(512 * GIB, 100 * GIB),
    disk=Disk("/models", 5 * GIB, 4 * GIB),
    gpus=(
        gpu(0, used_bytes=1, utilization=0.5, compute_cap=(8, 9), holders=(Holder(5, 6),), nvlink_domain=0),
        hindered(1, "ecc", "2 errors"),
    ),
    gpu_backend="nvml",
    adapters=(
        RdmaAdapter("mlx5_0", "ca", 0, (Port(1, "active", "linkup", "infiniband", 400.0, (Gid(0, "fe80::1"),)),)),
    ),
    fabrics=(Fabric("blue", "ib", (Rail("mlx5_0", 1, True, 400.0),)),),
    interfaces=(Interface("eth0", ("10.0.0.1", "fd00::1")),),
    notes=("a note",),
)
NUMBERS = [None, True, -1, 0, 2**40, 2**63, 2**70, 10**400, 1e308, -0.5, float("nan"), float("inf")]
TEXTS = ["", "\0", "a\nb", "\x1b[2J", "\ud800", "10.0.0.1/24", "a,b", "٣", [], {}, [[]], {"a": None}, "x" * 100_000]
ODD = st.sampled_from([*NUMBERS, *TEXTS])


def leaves(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(document, dict):
        for key in document:
            yield from leaves(document[key], (*at, key))
    elif isinstance(document, list):
        for number, each in enumerate(document):
            yield from leaves(each, (*at, number))


DOCUMENT = json.loads(to_json(WHOLE))
PLACES = sorted(leaves(DOCUMENT), key=str)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(PLACES), ODD), min_size=1, max_size=2))
def test_a_file_is_refused_or_can_be_used_and_told_of(changes: list[tuple[tuple[Any, ...], Any]]) -> None:
    changed: Any = copy.deepcopy(DOCUMENT)
    for at, value in copy.deepcopy(changes):
        if not at:
            changed = value
            continue
        into = changed
        try:
            for key in at[:-1]:
                into = into[key]
            into[at[-1]] = value
        except (KeyError, IndexError, TypeError):
            continue
    try:
        found = parse_inventory(changed)
    except BadInventory as wrong:
        str(wrong).encode()
        return
    placed = inventory._placed(found, Place())
    assert parse_inventory(json.loads(to_json(found))) == found
    assert all("\n" not in line for line in to_lines(placed))
    msgspec.json.encode(document(Seen(Identity("box", placed.address, "b", 0.0), placed, {})))
    placing(placed)
    for profile in (Profile("p", "sim", gpus_per_node=1), Profile("p", "sim", gpus_per_node=2)):
        try:
            choose_gpus(profile, placed, {})
        except NoRoom:
            continue


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("n.toml", "x = " + "9" * 5000, "n.toml: "),
        ("n.toml", "x = " + "[" * 5000, "n.toml: it is nested too deeply"),
        ("n.json", "[" * 200_000, "n.json: it is nested too deeply"),
        ("n.json", '{"gpus":' + "[" * 200_000, "n.json: it is nested too deeply"),
        ("n.json", '{"gpus":' + "[" * 950 + "]" * 950 + "}", "n.json: "),
        (
            "n.toml",
            'interfaces = [{ name = "lo", addresses = ["10.0.0.1/24"] }]',
            "interfaces[0].addresses[0]: expected an",
        ),
        ("n.toml", 'address = "box.lan"', "address: expected an IP address, got box.lan"),
        ("n.toml", '[[gpus]]\nname = "a"\nmemory_bytes = -1', "gpus[0].memory_bytes: expected 0 or more, got -1"),
        (
            "n.toml",
            '[[gpus]]\nname = "a"\nmemory_bytes = 1\nutilization = nan',
            "gpus[0].utilization: expected a number",
        ),
        ("n.toml", '[[gpus]]\nname = "a\\u0000b"\nmemory_bytes = 1', "gpus[0].name: holds a control character"),
        ("n.toml", '[[gpus]]\nname = "a"\nuuid = "x,y"\nmemory_bytes = 1', "gpus[0].uuid: expected a word"),
        ("n.toml", '[[gpus]]\nname = "a"\nuuid = ""\nmemory_bytes = 1', "gpus[0].uuid: expected a word"),
    ],
)
def test_what_is_wrong_is_told_with_its_place(tmp_path: Path, name: str, text: str, told: str) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(BadInventory) as refused:
        read_inventory(path)
    assert told in str(refused.value)


@pytest.mark.parametrize(
    "text", ["GPU" + "9" * 5000 + "\nGPU1 X", "\tGPU0\nGPU0\t" + "NV9" * 5000, "GPU٣ GPU0\nGPU0 X X"]
)
def test_no_topology_is_made_of_garbage(text: str) -> None:
    smi.parse_nvlink(text)


class Strange:
    """A library that fails in ways of its own."""

    NVMLError = RuntimeError

    def nvmlInit(self) -> None:
        raise OSError("no such symbol")


async def test_a_library_that_fails_in_its_own_way_is_a_note(tmp_path: Path) -> None:
    probe = GpuProbe("auto", load=lambda: Strange(), tool=str(tmp_path / "none"))
    found = (await probe.read()).reading
    assert found.gpus == ()
    assert found.partial
    assert "no such symbol" in found.notes[0]
    probe = GpuProbe("nvml", load=lambda: SimpleNamespace())
    assert (await probe.read()).reading.partial
    with pytest.raises(nvml.NoNvml):
        raise nvml.NoNvml("still what it says when it says something")


def test_names_of_the_kernel_may_be_any_bytes(tmp_path: Path) -> None:
    device = os.fsencode(tmp_path) + b"/mlx\xff_0"
    os.makedirs(device + b"/ports/1/gids")
    os.makedirs(device + b"/ports/x\xfe/gids")
    Path(os.fsdecode(device + b"/ports/1/state")).write_bytes(b"4: ACT\xffIVE\n\0")
    Path(os.fsdecode(device + b"/ports/1/rate")).mkdir()
    (tmp_path / "loop").symlink_to(tmp_path)
    (tmp_path / "nowhere").symlink_to(tmp_path / "gone")
    adapters = fabrics.parse(fabrics.read_tree(tmp_path))
    msgspec.json.encode(adapters)
    assert [port.why_not for each in adapters for port in each.ports if each.name.startswith("mlx")] != []


@pytest.mark.parametrize(
    "script", ["exit 0", "echo; exit 0", "printf '\\0\\033[2J\\377'", "echo Keine Geräte gefunden", "echo {}"]
)
async def test_a_tool_that_says_nothing_to_the_point_hides_no_gpu(tmp_path: Path, script: str) -> None:
    """Nothing, garbage, another language: what was there before stays listed, as not seen."""
    tool = tmp_path / "smi"
    tool.write_text(f"#!/bin/sh\n{script}\n")
    tool.chmod(0o755)
    found = await gather(Place(root=tmp_path), GpuProbe("nvidia-smi", tool=str(tool)), previous=WHOLE.gpus[:1])
    assert found.partial
    assert [[each.code for each in gpu.hindrances] for gpu in found.gpus] == [["unseen"]]
    assert any(str(tool) in note or "nvidia-smi" in note for note in found.notes)
    json.dumps(found.notes).encode().decode("ascii")


async def test_a_tool_of_another_user_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refused(group: int, number: int) -> None:
        asked.append(group)
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(asking, "DYING_S", 0.1)
    with monkeypatch.context() as patch:
        patch.setattr(os, "killpg", refused)
        answer = await asking.ask(["sleep", "60"], limit_s=0.1)
    os.killpg(asked[0], signal.SIGKILL)
    assert answer.status is None
    assert f"does not die of SIGKILL either (pid {asked[0]})" in answer.trouble


# -- an agent that looks again and again -------------------------------------------------------------------------------


async def test_a_disk_that_hangs_costs_one_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Looked at every 15 s, it would otherwise take all threads of the agent within ten minutes."""
    back, asked = threading.Event(), 0

    def hang(path: Path) -> Disk:
        nonlocal asked
        asked += 1
        back.wait(60)
        return Disk(str(path))

    monkeypatch.setattr(cpus, "disk", hang)
    machine = Machine(Place(root=tmp_path), GpuProbe("none"), Ours, limit_s=0.05)
    free = trio.to_thread.current_default_thread_limiter().available_tokens
    try:
        for _ in range(3):
            await machine.look()
            assert machine.inventory.partial
            assert any("the disk of" in note for note in machine.inventory.notes)
        assert asked == 1
        assert trio.to_thread.current_default_thread_limiter().available_tokens == free
    finally:
        back.set()


async def test_a_file_on_a_disk_that_hangs_is_no_inventory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    back = threading.Event()

    def hang(path: Path, node: str) -> Inventory:
        back.wait(60)
        return WHOLE

    monkeypatch.setattr(inventory, "read_inventory", hang)
    try:
        with trio.fail_after(10), pytest.raises(BadInventory, match="no answer within"):
            await gather(Place(inventory_file="/mnt/n.toml"), GpuProbe("none"), limit_s=0.05)
    finally:
        back.set()


async def test_a_look_that_fails_is_told_once_and_the_last_one_holds(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, autojump_clock: trio.testing.MockClock
) -> None:
    looks = 0

    async def broken(*_: Any, **__: Any) -> Inventory:
        nonlocal looks
        looks += 1
        if looks == 1:
            return WHOLE
        raise OSError(24, "Too many open files")

    monkeypatch.setattr(machines, "gather", broken)
    machine = Machine(Place(), GpuProbe("none"), Ours)
    with structlog.testing.capture_logs() as told:
        await machine.look()
        with trio.move_on_after(100):
            await machine.watch()
    assert looks > 3
    assert machine.inventory == WHOLE
    assert len([line for line in told if line["log_level"] == "error"]) == 1

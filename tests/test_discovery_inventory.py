"""The whole node: gathered below a root that the test builds, or read from a file; printed for programs and people."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import attrs
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent.discovery import cpus, interfaces
from appliance.agent.discovery.gpus import GpuProbe
from appliance.agent.discovery.inventory import Place, gather
from appliance.agent.discovery.writing import BadInventory, parse_inventory, read_inventory, to_json, to_lines
from appliance.cli.agent import agent
from appliance.facts.hardware import (
    GIB,
    Cpus,
    Disk,
    Fabric,
    Gid,
    Gpu,
    Hindrance,
    Holder,
    Interface,
    Inventory,
    Memory,
    Port,
    Rail,
    RdmaAdapter,
)

UUID = "GPU-11111111-2222-3333-4444-555555555501"

FULL = Inventory(
    node="node-a",
    address="10.0.0.1",
    labels={"rack": "7"},
    cpus=Cpus(64, "Some CPU", "x86_64", 2),
    memory=Memory(512 * GIB, 500 * GIB),
    disk=Disk("/models", 4000 * GIB, 1800 * GIB),
    gpus=(
        Gpu(
            uuid=UUID,
            index=0,
            name="NVIDIA H100 80GB HBM3",
            gpu_class="h100-80g",
            memory_bytes=80 * GIB,
            used_bytes=0,
            utilization=0.5,
            compute_cap=(9, 0),
            bus_id="0000:18:00.0",
            numa_node=0,
            nvlink_domain=0,
            ecc_uncorrected=0,
            mig=False,
            holders=(Holder(5, None),),
        ),
        Gpu("GPU-b", 1, "NVIDIA H100 80GB HBM3", "h100", hindrances=(Hindrance("memory", "it is unknown"),)),
    ),
    gpu_backend="nvml",
    adapters=(
        RdmaAdapter("mlx5_0", "ca", 0, (Port(1, "active", "linkup", "infiniband", 400.0, (Gid(0, "fe80::1", "ib"),)),)),
        RdmaAdapter("mlx5_1", "ca", None, (Port(1, "down", why_not="state is down, not active"),)),
    ),
    fabrics=(Fabric("blue", "ib", (Rail("mlx5_0", 1, True, 400.0, 0),)),),
    interfaces=(Interface("eth0", ("10.0.0.1", "fd00::1")),),
    notes=("something was odd",),
    partial=True,
)


@pytest.mark.parametrize("inventory", [FULL, Inventory(gpu_backend="file")])
def test_what_is_printed_can_be_read_back(inventory: Inventory, tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"
    path.write_text(to_json(inventory))
    assert read_inventory(path) == inventory


def test_a_few_lines_are_enough_for_a_rehearsal(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text(
        f"""node = "sim-a"
        memory = {{ total_bytes = {512 * GIB} }}
        [[gpus]]
        name = "NVIDIA L40S"
        memory_bytes = {45 * GIB}
        [[gpus]]
        name = "NVIDIA L40S"
        memory_bytes = {45 * GIB}
        [[gpus]]
        name = "NVIDIA GB10"
        [[gpus]]
        name = "NVIDIA L40S"
        [[fabrics]]
        name = "blue"
        transport = "ib"
        rails = [{{ adapter = "mlx5_0" }}]
        """
    )
    inventory = read_inventory(path)
    assert [gpu.gpu_class for gpu in inventory.gpus] == ["l40s-45g", "l40s-45g", "gb10-512g", "l40s"]
    assert [gpu.placeable for gpu in inventory.gpus] == [True, True, True, False]
    assert [gpu.index for gpu in inventory.gpus] == [0, 1, 2, 3]
    assert len({gpu.uuid for gpu in inventory.gpus}) == 4
    assert inventory.gpu_backend == "file"
    assert inventory.fabric("blue") is not None


def test_several_nodes_rehearsed_with_one_file_have_gpus_of_their_own() -> None:
    document = {"node": "sim-a", "gpus": [{"name": "NVIDIA L40S", "memory_bytes": 45 * GIB}]}
    made = [parse_inventory(document, node).gpus[0].uuid for node in ("", "node-2", "node-3")]
    assert made == ["GPU-sim-a-0", "GPU-node-2-0", "GPU-node-3-0"]


@pytest.mark.parametrize(
    ("document", "told"),
    [
        ([], "expected an object"),
        ({"version": 2}, "version: expected 1"),
        ({"gpu": []}, "gpu: unknown key"),
        ({"gpus": [{"name": "x", "memory": 1}]}, "gpus[0].memory: unknown key"),
        ({"fabrics": [{"name": "b", "transport": "ib", "rails": [{"adaptor": "m"}]}]}, "fabrics[0].rails[0].adaptor"),
        ({"gpus": [{"name": "x", "memory_bytes": "80g"}]}, "gpus[0].memory_bytes"),
        ({"gpus": [{}]}, "name"),
        ({"gpus": {"name": "x"}}, "gpus"),
        ({"cpus": {"count": 1.5}}, "cpus.count"),
        ({"gpus": [{"name": "x", "uuid": "a"}, {"name": "x", "uuid": "a"}]}, "uuid must be unique"),
        ({"gpus": [{"name": "x"}, {"name": "x", "index": 0}]}, "index must be unique"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place(document: Any, told: str) -> None:
    with pytest.raises(BadInventory) as refused:
        parse_inventory(document)
    assert told in str(refused.value)


@pytest.mark.parametrize("text", ["", "{", "[1", "\xff"])
def test_a_file_that_is_no_document_is_refused_with_its_name(text: str, tmp_path: Path) -> None:
    for name in ("i.json", "i.toml"):
        path = tmp_path / name
        path.write_bytes(text.encode("latin-1"))
        if name == "i.toml" and text == "":
            continue
        with pytest.raises(BadInventory, match=name):
            read_inventory(path)
    with pytest.raises(BadInventory, match=r"gone\.json: cannot be read"):
        read_inventory(tmp_path / "gone.json")


def test_people_see_what_is_there_and_what_hinders() -> None:
    text = "\n".join(to_lines(FULL))
    for word in (
        "node-a at 10.0.0.1 (rack=7)",
        "64 x Some CPU, x86_64, 2 NUMA nodes",
        "512.0 GiB, 500.0 GiB available",
        "1800.0 GiB free of 4000.0 GiB at /models",
        "2 (nvml)",
        "memory: it is unknown",
        "blue: ib, 400 Gb/s over mlx5_0",
        "mlx5_1 port 1 left out: state is down, not active",
        "something was odd",
        "there may be more here",
    ):
        assert word in text
    assert all(len(line) == len(line.rstrip()) for line in to_lines(FULL))
    bare = "\n".join(to_lines(Inventory()))
    assert "gpus      none" in bare and "island" in bare and "unknown" in bare


@given(st.builds(attrs.evolve, st.just(FULL), partial=st.booleans(), notes=st.lists(st.text()).map(tuple)))
def test_any_inventory_can_be_printed(inventory: Inventory) -> None:
    assert parse_inventory(json.loads(to_json(inventory))) == inventory
    to_lines(inventory)


def machine(root: Path) -> Path:
    """A root with 8 processors and 64 GiB, of which a control group leaves 3 and 16; one GPU's place, one adapter."""
    files = {
        "proc/cpuinfo": "processor\t: 0\nmodel name\t: Some   CPU @ 3 GHz\n\nprocessor\t: 1\nmodel name\t: other\n",
        "proc/meminfo": f"MemTotal:       {64 << 20} kB\nMemFree:  1 kB\nMemAvailable:   {60 << 20} kB\n",
        "proc/self/cgroup": "0::/system.slice/agent.service\n",
        "sys/fs/cgroup/system.slice/cpu.max": "250000 100000\n",
        "sys/fs/cgroup/system.slice/agent.service/cpu.max": "max 100000\n",
        "sys/fs/cgroup/system.slice/agent.service/memory.max": f"{16 * GIB}\n",
        "sys/fs/cgroup/memory.max": "max\n",
        "sys/devices/system/node/node0/x": "",
        "sys/devices/system/node/node1/x": "",
        "sys/bus/pci/devices/0000:41:00.0/numa_node": "1\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_0/ports/1/link_layer": "InfiniBand\n",
    }
    for path, text in files.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    return root


def test_processors_and_memory_as_far_as_we_may_use_them(tmp_path: Path) -> None:
    root = machine(tmp_path)
    found = cpus.cpus(root, allowed=8)
    assert (found.count, found.model, found.numa_nodes) == (3, "Some CPU @ 3 GHz", 2)
    assert cpus.cpus(root, allowed=2).count == 2
    assert cpus.memory(root) == Memory(16 * GIB, 16 * GIB)
    (root / "sys/fs/cgroup/system.slice/agent.service/memory.max").write_text("max\n")
    assert cpus.memory(root) == Memory(64 * GIB, 60 * GIB)


def test_a_root_without_anything_says_nothing(tmp_path: Path) -> None:
    assert cpus.cpus(tmp_path, allowed=4).count == 4
    assert cpus.memory(tmp_path) == Memory(None, None)
    assert cpus.numa_node_of("0000:41:00.0", tmp_path) is None
    assert cpus.numa_node_of("", tmp_path) is None


def test_the_disk_of_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    disk = cpus.disk(tmp_path / "models" / "llama")
    assert disk.path == str(tmp_path / "models" / "llama")
    assert disk.total_bytes and disk.free_bytes is not None and disk.free_bytes <= disk.total_bytes


def test_interfaces_are_merged_and_the_best_address_is_taken() -> None:
    table = (
        "fd000000000000000000000000000007 02 40 00 80 eth0\nfe80000000000000000000000000000a 02 40 20 80 eth0\nodd\n"
    )
    found = interfaces.merge([("lo", "127.0.0.1"), ("eth0", "10.0.0.7"), *interfaces.parse_inet6(table)])
    assert found[1] == Interface("eth0", ("10.0.0.7", "fd00::7", "fe80::a"))
    assert interfaces.own_address(found) == "10.0.0.7"
    assert interfaces.own_address(interfaces.merge(interfaces.parse_inet6(table))) == "fd00::7"
    assert interfaces.own_address(interfaces.merge([("a", "169.254.1.1"), ("b", "fe80::1")])) == "127.0.0.1"
    assert interfaces.own_address(()) == "127.0.0.1"
    assert "127.0.0.1" in [address for each in interfaces.interfaces() for address in each.addresses]


def tool(tmp_path: Path) -> str:
    path = tmp_path / "nvidia-smi"
    row = f"0, {UUID}, NVIDIA L40S, 46068, 3, 0, 8.9, 0, [N/A], 00000000:41:00.0"
    path.write_text(f'#!/bin/sh\ncase "$1" in --query-gpu=*) echo "{row}";; esac\n')
    path.chmod(0o755)
    return str(path)


async def test_a_node_is_gathered(tmp_path: Path) -> None:
    place = Place(node="n", address="10.0.0.9", labels={"a": "b"}, fabric="blue", models=str(tmp_path))
    place = attrs.evolve(place, root=machine(tmp_path / "root"))
    inventory = await gather(place, GpuProbe(backend="nvidia-smi", limit_s=60, tool=tool(tmp_path)), limit_s=60)
    (gpu,) = inventory.gpus
    assert (gpu.gpu_class, gpu.numa_node, gpu.holders, gpu.placeable) == ("l40s-45g", 1, (), True)
    assert (inventory.node, inventory.address, inventory.labels) == ("n", "10.0.0.9", {"a": "b"})
    assert inventory.gpu_backend == "nvidia-smi" and not inventory.partial and inventory.notes == ()
    assert inventory.memory.total_bytes == 16 * GIB and inventory.cpus.numa_nodes == 2
    fabric = inventory.fabric("blue")
    assert fabric is not None and fabric.rails == (Rail("mlx5_0"),)
    assert inventory.disk is not None and inventory.disk.path == str(tmp_path)


async def test_a_file_stands_in_for_all_probes_and_configuration_wins(tmp_path: Path) -> None:
    path = tmp_path / "inventory.json"

    def never() -> Any:
        raise AssertionError("no hardware is asked")

    path.write_text(to_json(attrs.evolve(FULL, labels={"rack": "7", "room": "2"})))
    place = Place(address="10.9.9.9", labels={"rack": "8", "row": "1"}, inventory_file=str(path))
    inventory = await gather(place, GpuProbe(load=never))
    assert inventory == attrs.evolve(FULL, address="10.9.9.9", labels={"rack": "8", "room": "2", "row": "1"})
    path.write_text("{}")
    assert (await gather(place, GpuProbe(load=never))).gpus == ()
    path.write_text("[]")
    with pytest.raises(BadInventory):
        await gather(place, GpuProbe(load=never))


async def test_a_disk_that_hangs_is_left_behind(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    block = threading.Event()
    monkeypatch.setattr(cpus, "disk", lambda path: block.wait(60))
    place = Place(models="/models", root=machine(tmp_path))
    inventory = await gather(place, GpuProbe(backend="none"), limit_s=1)
    block.set()
    assert inventory.disk == Disk("/models")
    assert inventory.partial and "the disk of /models: no answer within 1 s" in inventory.notes
    assert inventory.memory.total_bytes == 16 * GIB


def test_the_command_prints_this_machine() -> None:
    plain = CliRunner().invoke(agent, ["inventory"])
    assert plain.exit_code == 0, plain.output
    assert plain.output.startswith("node ")
    structured = CliRunner().invoke(agent, ["inventory", "--json"])
    assert parse_inventory(json.loads(structured.output)).cpus.count >= 1

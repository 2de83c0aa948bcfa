"""A cluster whose database fails: what an operator can still do, and that no node is lost for it."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.cluster import cluster, inventory, sim_model
from tests.processes import until


@contextlib.contextmanager
def small_disk(folder: Path) -> Iterator[None]:
    """A file system of 2 MiB at `folder`."""
    folder.mkdir(parents=True)
    mounted = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(folder)], capture_output=True)
    if mounted.returncode:
        pytest.skip(f"nothing can be mounted here: {mounted.stderr.decode().strip()}")
    try:
        yield
    finally:
        subprocess.run(["umount", "--lazy", str(folder)], check=True)


def fill(file: Path) -> None:
    with file.open("wb", buffering=0) as full, contextlib.suppress(OSError):
        while full.write(b"x" * 4096) == 4096:
            continue


async def test_a_full_disk_stops_no_model_from_being_stopped_and_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        with small_disk(made.control.state):
            made.configure(sim_model(replicas=1))
            await made.begin()
            await made.add("a", inventory("a", 1))
            await made.ready("m")
            filler = made.control.state / "filler"
            fill(filler)

            wrong = (
                f"appliance: the database {made.control.state}/appliance.db cannot be written,"
                " because the disk is full; free some room and do it again\n"
            )
            for words in (("cordon", "a"), ("drain", "a", "--no-wait"), ("node", "add", "b"), ("node", "revoke", "a")):
                assert await made.control.run("ctl", *words, status=1) == wrong, words
            node = await made.node("a")
            assert node["state"] == "ready" and not node["cordoned"] and not node["draining"], "nothing was done"
            assert "was not cordoned" in await made.control.run("ctl", "uncordon", "a")

            told = await made.control.run("ctl", "models", "stop", "m")
            assert "m: 0 replicas wanted now: an operator said so" in told
            assert "in the router's log, and not in the audit: the database" in told and "disk is full" in told, told
            assert made.control.process is not None
            line = await made.control.process.logged("an operator's word is not in the audit")
            assert "by=" in line and "target=m" in line and 'detail="0 replicas"' in line, line
            await until(lambda: not made.nodes["a"].engines(), "the engine is gone")
            for words in (("nodes",), ("replicas",), ("status",), ("audit",), ("node", "list")):
                await made.control.run("ctl", *words)

            filler.unlink()
            assert "audit" not in await made.control.run("ctl", "models", "start", "m")
            await made.ready("m")
            assert "a cordoned" in await made.control.run("ctl", "cordon", "a")
            told = await made.control.run("ctl", "audit")
            assert "by demand" in told and "0 replicas" not in told, told
            await made.control.process.stop()

            fill(filler)
            told = await made.control.run("serve", status=1)
            assert told.endswith(f"appliance serve: {wrong.removeprefix('appliance: ')}"), told


async def test_a_damaged_database_costs_no_node_and_is_named(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model(replicas=1))
        await made.begin()
        await made.add("a", inventory("a", 1))
        (before,) = await made.ready("m")
        engines = made.engines()
        assert made.control.process is not None
        file = made.control.state / "appliance.db"
        with file.open("r+b") as opened:
            opened.write(b"\xff" * file.stat().st_size)
        # A change, after which nothing is read from memory any more. Whether it is noted is a matter of luck.
        await made.control.run("ctl", "models", "scale", "m", "1")
        made.nodes["a"].kill(engines=False)
        await made.start("a")
        await made.control.process.logged('event="the database cannot be used"')
        await made.node_is("a", "ready")
        (after,) = await made.ready("m")
        assert after["id"] == before["id"] and made.engines() == engines
        assert "a " in await made.control.run("ctl", "nodes")
        wrong = f"appliance: the database {file} is damaged or no database (file is not a database); put a backup"
        for words in (("audit",), ("node", "list"), ("node", "add", "b"), ("node", "revoke", "a")):
            assert (await made.control.run("ctl", *words, status=1)).startswith(wrong), words
        told = await made.control.run("ctl", "doctor", status=1)
        assert "database" in told and "is damaged or no database" in told, told
        await made.control.run("ctl", "models", "stop", "m")
        await until(lambda: not made.nodes["a"].engines(), "the engine is gone")

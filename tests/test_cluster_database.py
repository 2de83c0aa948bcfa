"""An operator in an emergency: the disk of the router's database is full, and what ctl can still do then."""

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

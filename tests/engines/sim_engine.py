"""Sims for tests: one inside the test's own Trio run, or one as a process."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import attrs
import trio

from appliance.sim.batch import Batch
from appliance.sim.engine import Engine
from appliance.sim.front import Front
from appliance.sim.listening import bind
from appliance.sim.settings import Settings, Sizes, Speeds

INSTANT = Speeds(0, 0)
START_S = 20.0


@attrs.frozen
class Running:
    """A sim under test."""

    front: Front
    port: int

    @property
    def engine(self) -> Engine:
        return self.front.engine

    @property
    def batch(self) -> Batch:
        return self.front.engine.batch

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"


@asynccontextmanager
async def serving(*, speeds: Speeds = INSTANT, sizes: Sizes | None = None, **settings: Any) -> AsyncIterator[Running]:
    """A sim in this Trio run, model `m` unless told otherwise, on a port of the kernel's choice; instant by default."""
    all_settings = Settings(**{"models": ("m",), "speeds": speeds, "sizes": sizes or Sizes(), **settings})
    listener = bind("127.0.0.1", 0, "--port")
    engine = Engine(all_settings, all_settings.name or "sim-test", time.time)
    front = Front(engine)
    async with trio.open_nursery() as nursery:
        await nursery.start(front.serve, listener)
        yield Running(front, listener.getsockname()[1])
        nursery.cancel_scope.cancel()


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    """Wait until `condition` holds, which something outside this task brings about; fails after `seconds`."""
    with trio.fail_after(seconds):
        while not condition():  # noqa: ASYNC110 - there is nobody to set an event: sockets lie between
            await trio.sleep(0.001)


@attrs.frozen
class Process:
    """A sim as a process; `url` without a trailing slash and without `/v1`."""

    popen: subprocess.Popen[str]
    url: str

    def metrics(self) -> dict[str, float]:
        """All samples of its `/metrics`, by name alone; of several with one name the sum."""
        import urllib.request

        with urllib.request.urlopen(f"{self.url}/metrics", timeout=10) as answer:
            return read_metrics(answer.read().decode())


def read_metrics(text: str) -> dict[str, float]:
    """Samples by name without labels; those that share a name are added up, buckets left out."""
    samples: dict[str, float] = {}
    for line in text.splitlines():
        if line and not line.startswith("#") and "_bucket{" not in line:
            name = re.split(r"[{ ]", line, maxsplit=1)[0]
            samples[name] = samples.get(name, 0.0) + float(line.rpartition(" ")[2])
    return samples


@contextmanager
def running(*flags: str, model: str = "m") -> Iterator[Process]:
    """`appliance sim` with these flags, ready; on a port of the kernel's choice unless the flags name one."""
    command = [sys.executable, "-m", "appliance", "sim", "--port", "0", "--model", model, *flags]
    popen = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        yield Process(popen, wait_until_ready(popen))
    finally:
        stop(popen)


def wait_until_ready(popen: subprocess.Popen[str]) -> str:
    """The address that the sim prints once it serves."""
    assert popen.stdout is not None
    for line in popen.stdout:
        if found := re.search(r" at (http://\S+)$", line.strip()):
            return found[1]
    raise AssertionError(f"the sim ended with {popen.wait()} before it served")


def stop(popen: subprocess.Popen[str]) -> int:
    """End a sim that may have ended already; its exit status."""
    if popen.poll() is None:
        os.kill(popen.pid, signal.SIGTERM)
    try:
        return popen.wait(START_S)
    except subprocess.TimeoutExpired:
        popen.kill()
        popen.wait()
        raise
    finally:
        if popen.stdout is not None:
            popen.stdout.close()

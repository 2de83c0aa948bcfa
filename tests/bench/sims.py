"""The project's own simulated engines, as processes: they keep honest gauges, which the C engine does not."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from urllib.request import urlopen

import attrs

from tests.bench import machine
from tests.bench.native import MODEL, Engine

_READY_WITHIN_S = 20.0
_SAMPLE = re.compile(r"^(?P<name>[a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{[^}]*\})? (?P<value>\S+)", re.MULTILINE)


def metric(port: int, name: str) -> float:
    """The sum over all label sets of one metric at a port's /metrics, matched by its whole name. KeyError: absent."""
    with urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as answer:
        text = answer.read().decode()
    values = [float(found["value"]) for found in _SAMPLE.finditer(text) if found["name"] == name]
    if not values:
        raise KeyError(name)
    return sum(values)


@attrs.frozen
class Gauges:
    """What the sims hold, added up: sequences in a batch, sequences that wait, share of the KV blocks."""

    running: float
    waiting: float
    kv_share: float

    @property
    def all_free(self) -> bool:
        return self.running == self.waiting == self.kv_share == 0


def gauges(sims: list[Engine]) -> Gauges:
    """Read one sim after the other, within milliseconds: one instant as long as no stream begins or ends."""
    names = ("vllm:num_requests_running", "vllm:num_requests_waiting", "vllm:kv_cache_usage_perc")
    return Gauges(*(sum(metric(sim.port, name) for sim in sims) for name in names))


@contextlib.contextmanager
def sims(number: int, core: int | None, folder: Path, *options: str) -> Iterator[list[Engine]]:
    """Start sims with the options of `appliance sim`; they end with the block. RuntimeError when one does not start."""
    command = Path(sys.executable).parent / "appliance"
    up: list[Engine] = []
    with contextlib.ExitStack() as stack:
        for index in range(number):
            port = machine.free_port()
            log = stack.enter_context((folder / f"sim-{index}.log").open("wb"))
            process = machine.spawn(
                [command, "sim", "--port", str(port), "--model", MODEL, *options], core=core, log=log, cwd=folder
            )
            stack.callback(machine.end, process)
            up.append(Engine(port=port, pid=process.pid))
        give_up = time.monotonic() + _READY_WITHIN_S
        for sim in up:
            while not _ready(sim.port):
                if time.monotonic() > give_up:
                    text = (folder / "sim-0.log").read_text(errors="replace")
                    raise RuntimeError(f"a sim was not ready within {_READY_WITHIN_S:.0f} s: {text[-500:]}")
                time.sleep(0.1)
        yield up


def _ready(port: int) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{port}/health", timeout=2) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False

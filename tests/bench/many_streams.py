"""Row `many_streams`: 1,000 streams at once over 3 sims; all complete, and every hang-up frees the engine.

Twice. First all streams are read to their end. Then every client is killed in mid-stream (the load generator gets
SIGKILL, so the kernel closes 1,000 sockets at once). After each, the gauges of the sims and of the router must read 0.
"""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TypeVar

import attrs

from tests.bench import machine, native
from tests.bench.native import Engine
from tests.bench.plan import Plan
from tests.bench.routers import Running, running
from tests.bench.sims import Gauges, gauges, metric, sims

_STREAMS, _SIMS, _WORDS, _WORDS_PER_S = 1_000, 3, 80, 8
_INFLIGHT = "appliance_endpoint_inflight"
_FREE_WITHIN_S = 10.0
_T = TypeVar("_T")


def measure(plan: Plan) -> None:
    report, cores = plan.report, plan.cores
    streams = plan.amount(_STREAMS, 30)
    words_per_s = plan.amount(_WORDS_PER_S, 40)
    # Ours alone is judged here; peers take part when they are asked for by name without us.
    names = tuple(name for name in plan.routers if name == "appliance") or plan.routers
    speed = ("--decode-tokens-per-second", str(words_per_s), "--max-num-seqs", str(streams))
    with ExitStack() as stack:
        engines = stack.enter_context(sims(_SIMS, cores.rest, plan.folder, *speed, "--kv-blocks", "65536"))
        up, skipped = stack.enter_context(running(names, engines, cores, plan.folder, engine="sim"))
        report.conditions(
            cores, up, streams=streams, sims=_SIMS, words_per_stream=_WORDS, words_per_s_and_stream=words_per_s
        )
        report.skipped(skipped)
        body = native.body_file(plan.folder, native.stream_body(_WORDS) | {"ignore_eos": True})
        for each in up:
            row = _Row(plan, each, engines, body, streams)
            row.all_complete()
            row.all_hang_up()


@attrs.frozen
class _Row:
    plan: Plan
    router: Running
    engines: list[Engine]
    body: Path
    streams: int

    def _inflight(self) -> float | None:
        """What the router believes is under way; None for a router that has no such gauge."""
        if self.router.name != "appliance":
            return None
        return metric(self.router.metrics_port, _INFLIGHT)

    def _begin(self) -> tuple[subprocess.Popen[bytes], Gauges, float | None]:
        process = native.begin(
            self.plan.cores.rest,
            self.router.port,
            self.body,
            *("--stream", "--connections", self.streams, "--each", 1, "--limit-s", 60),
        )
        seen = _watched(lambda: gauges(self.engines), lambda now: now.running == self.streams, 20.0)
        return process, seen, self._inflight()

    def _check_running(self, seen: Gauges, inflight: float | None) -> None:
        name, report = self.router.name, self.plan.report
        report.check(
            f"{self.streams} streams ran at one instant through {name}",
            seen.running == self.streams and inflight in (None, self.streams),
            engines=seen.running,
            router=inflight,
        )

    def _check_free(self, after: str) -> float:
        """Wait until every gauge reads 0; seconds until then."""
        began = time.monotonic()
        seen = _watched(lambda: gauges(self.engines), lambda now: now.all_free, _FREE_WITHIN_S)
        took_s = time.monotonic() - began
        inflight = _watched(self._inflight, lambda now: not now, _FREE_WITHIN_S)
        self.plan.report.check(
            f"after {after} every gauge of the sims and of {self.router.name} reads 0",
            seen.all_free and not inflight,
            engines=attrs.asdict(seen),
            router=inflight,
        )
        return took_s

    def all_complete(self) -> None:
        report, name = self.plan.report, self.router.name
        used = machine.cpu_s(self.router.pid)
        process, seen, inflight = self._begin()
        found = native.finished(process, timeout_s=80)
        used = machine.cpu_s(self.router.pid) - used
        self._check_running(seen, inflight)
        report.check(
            f"every stream through {name} ended with its end mark",
            found.streams == self.streams and not found.wrong,
            complete=found.streams,
            wrong=found.wrong,
        )
        self._check_free("all streams ended")
        report.figure("cpu_per_event", "us", name, used / max(1, found.events) * 1e6, events=found.events)
        report.figure("rss_after", "MiB", name, machine.rss_bytes(self.router.pid) / 2**20)

    def all_hang_up(self) -> None:
        process, seen, inflight = self._begin()
        self._check_running(seen, inflight)
        process.kill()
        machine.end(process)
        self.plan.report.figure(
            "freed_after_hang_up", "s", self.router.name, self._check_free("every client was killed in mid-stream")
        )


def _watched(read: Callable[[], _T], enough: Callable[[_T], bool], limit_s: float) -> _T:
    """Read until it is enough, or the limit has passed; the last reading."""
    give_up = time.monotonic() + limit_s
    while not enough(last := read()) and time.monotonic() < give_up:
        time.sleep(0.05)
    return last

"""Row `stream_cost`: 400 streams at once, 50 events each at 20 ms; CPU of the router per event.

An event is a `data:` line that reached the client whole: the role, 50 words, usage and the end mark make 53 of them.
Each connection takes three streams in turn, so that a sample lasts long enough for the kernel's 10 ms ticks. The load
is the same for every router whatever its speed, so wall time plays no part.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack

from tests.bench import machine, native
from tests.bench.plan import Plan
from tests.bench.report import paired_ratio
from tests.bench.routers import running

_STREAMS, _EACH, _WORDS, _INTERVAL_MS, _ENGINES = 400, 3, 50, 20, 2
EVENTS_OF_A_STREAM = _WORDS + 3


def measure(plan: Plan) -> None:
    report, cores = plan.report, plan.cores
    streams = plan.amount(_STREAMS, 20)
    each_takes = plan.amount(_EACH, 1)
    interval_ms = plan.amount(_INTERVAL_MS, 2)
    costs: dict[str, list[float]] = {}
    with ExitStack() as stack:
        engines = [
            stack.enter_context(native.engine(cores.rest, "--interval-ms", str(interval_ms))) for _ in range(_ENGINES)
        ]
        up, skipped = stack.enter_context(running(plan.routers, engines, cores, plan.folder))
        report.conditions(
            cores,
            up,
            streams=streams,
            streams_per_connection=each_takes,
            events_per_stream=EVENTS_OF_A_STREAM,
            interval_ms=interval_ms,
            engines=_ENGINES,
            rounds=plan.times(4),
        )
        report.skipped(skipped)
        body = native.body_file(plan.folder, native.stream_body(_WORDS))
        options = ("--stream", "--connections", streams)
        for router in up:
            native.load(cores.rest, router.port, body, *options, "--each", 1)
        expected = seen = missing = 0
        wrong: Counter[str] = Counter()
        for _ in range(plan.times(4)):
            for router in up:
                plan.patience.wait(cores)
                used = machine.cpu_s(router.pid)
                found = native.load(cores.rest, router.port, body, *options, "--each", each_takes)
                used = machine.cpu_s(router.pid) - used
                expected += streams * each_takes * EVENTS_OF_A_STREAM
                seen += found.events
                wrong += found.wrong
                missing += streams * each_takes - found.streams
                if found.events:
                    costs.setdefault(router.name, []).append(used / found.events * 1e6)
        aborted = sum(engine.stats()["aborted"] for engine in engines)
    report.check("every stream ended with its end mark", not wrong and not missing, wrong=wrong, missing=missing)
    report.check("every event arrived", seen == expected, seen=seen, expected=expected)
    report.check("no stream was broken off at the engine", aborted == 0, aborted=aborted)
    report.figures("cpu_per_event", "us", costs, better="lower")
    if "appliance" in costs and "vllm-router" in costs:
        value = paired_ratio(costs["appliance"], costs["vllm-router"]) or 0.0
        report.target("cpu_per_event at most 1.3x vllm-router", value, value <= 1.3)

"""Row `added_latency`: an engine that takes exactly 50 ms, with and without a router in front of it.

With and without are measured in turn and subtracted round by round. The quantiles are those of each round's answers;
one connection sees 20 answers a second, so its p99 is hardly more than its maximum.
"""

from __future__ import annotations

from collections import Counter
from contextlib import ExitStack
from statistics import median

from tests.bench import native
from tests.bench.plan import Plan
from tests.bench.report import paired_difference
from tests.bench.routers import DIRECT, running

_DELAY_MS, _SECONDS, _CONNECTIONS = 50, 2.0, (1, 32)
_P99_TARGET_US = 900.0


def measure(plan: Plan) -> None:
    report, cores = plan.report, plan.cores
    seconds = 0.4 if plan.quick else _SECONDS
    rounds = plan.times(4)
    names = (DIRECT, *(name for name in plan.routers if name != DIRECT))
    wrong: Counter[str] = Counter()
    added: dict[tuple[int, str, str], float] = {}
    with ExitStack() as stack:
        engine = stack.enter_context(native.engine(cores.rest, "--delay-ms", str(_DELAY_MS)))
        up, skipped = stack.enter_context(running(names, [engine], cores, plan.folder))
        report.conditions(cores, up, delay_ms=_DELAY_MS, seconds_each=seconds, engines=1, rounds=rounds)
        report.skipped(skipped)
        body = native.body_file(plan.folder, native.PLAIN_BODY)
        for connections in _CONNECTIONS:
            p50: dict[str, list[float]] = {}
            p99: dict[str, list[float]] = {}
            answers: dict[str, int] = {}
            for _ in range(rounds):
                for each in up:
                    plan.patience.wait(cores)
                    found = native.load(cores.rest, each.port, body, "--connections", connections, "--seconds", seconds)
                    wrong += found.wrong
                    answers[each.name] = answers.get(each.name, 0) + found.answers
                    p50.setdefault(each.name, []).append(found.p50_us)
                    p99.setdefault(each.name, []).append(found.p99_us)
            for quantile, values in (("p50", p50), ("p99", p99)):
                for name, theirs in values.items():
                    value = 0.0 if name == DIRECT else paired_difference(theirs, values[DIRECT])
                    added[connections, quantile, name] = value
                    report.figure(
                        f"added_{quantile}",
                        "us",
                        name,
                        value,
                        connections=connections,
                        answers=answers[name],
                        whole=[round(each) for each in theirs],
                        median_of_whole=median(theirs),
                    )
    report.check("every request was answered with 200", not wrong, wrong=wrong)
    _targets(plan, added)


def _targets(plan: Plan, added: dict[tuple[int, str, str], float]) -> None:
    if (32, "p99", "appliance") in added:
        value = added[32, "p99", "appliance"]
        plan.report.target("added p99 below 900 us at 32 connections", value, value < _P99_TARGET_US)
    for peer in ("vllm-router", "smg"):
        if (1, "p50", "appliance") in added and (1, "p50", peer) in added:
            value = added[1, "p50", "appliance"] - added[1, "p50", peer]
            plan.report.target(f"added p50 at 1 connection not above {peer} (difference, us)", value, value <= 0)

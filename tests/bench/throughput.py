"""Row `throughput`: short answers, 64 connections, the router on one core; requests per second and CPU per request.

Requests per second is only worth quoting when the router had its core and was what ran out: `core_used_by_router` is
then near 1 and `core_used_by_others` near 0 (medians, shares of the time measured). CPU per request comes from the
kernel's accounts and holds on a busy machine.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path
from statistics import median

from tests.bench import machine, native
from tests.bench.plan import Plan
from tests.bench.report import paired_ratio
from tests.bench.routers import Running, running

CONNECTIONS = 64
_SECONDS = 2.5
_ENGINES = 2


def measure(plan: Plan) -> None:
    report, cores = plan.report, plan.cores
    seconds = 0.3 if plan.quick else _SECONDS
    rates: dict[str, list[float]] = {}
    costs: dict[str, list[float]] = {}
    used: dict[str, list[float]] = {}
    others: dict[str, list[float]] = {}
    with ExitStack() as stack:
        engines = [stack.enter_context(native.engine(cores.rest)) for _ in range(_ENGINES)]
        up, skipped = stack.enter_context(running(plan.routers, engines, cores, plan.folder))
        report.conditions(
            cores, up, connections=CONNECTIONS, seconds_each=seconds, engines=_ENGINES, rounds=plan.times(5)
        )
        report.skipped(skipped)
        body = native.body_file(plan.folder, native.PLAIN_BODY)
        for each in up:
            native.load(cores.rest, each.port, body, "--connections", CONNECTIONS, "--seconds", seconds / 3)
        asked_before = sum(engine.stats()["requests"] for engine in engines)
        answers = 0
        wrong: Counter[str] = Counter()
        for _ in range(plan.times(5)):
            for each in up:
                plan.patience.wait(cores)
                found, cpu_s, took_s, foreign_s = _sample(each, plan, body, seconds)
                answers += found.answers
                wrong += found.wrong
                if not found.answers:
                    continue
                rates.setdefault(each.name, []).append(found.per_s)
                costs.setdefault(each.name, []).append(cpu_s / found.answers * 1e6)
                used.setdefault(each.name, []).append(cpu_s / took_s)
                others.setdefault(each.name, []).append(foreign_s / took_s)
        asked = sum(engine.stats()["requests"] for engine in engines) - asked_before
    report.check("every request was answered with 200", not wrong, wrong=wrong, answered=answers)
    report.check("the engines counted what the load generator counted", asked == answers, engines=asked, load=answers)
    report.figures("requests_per_s", "1/s", rates, better="higher")
    report.figures("cpu_per_request", "us", costs, better="lower")
    report.line(core_used_by_router=_medians(used), core_used_by_others=_medians(others))
    _targets(plan, rates, costs)


def _sample(each: Running, plan: Plan, body: Path, seconds: float) -> tuple[native.Load, float, float, float]:
    """One load; then CPU seconds of the router, seconds it took, CPU seconds that others had on the router's core."""
    core = plan.cores.router
    busy, used, began = machine.core_busy_s(core), machine.cpu_s(each.pid), time.monotonic()
    found = native.load(plan.cores.rest, each.port, body, "--connections", CONNECTIONS, "--seconds", seconds)
    took_s = time.monotonic() - began
    cpu_s = machine.cpu_s(each.pid) - used
    return found, cpu_s, took_s, max(0.0, machine.core_busy_s(core) - busy - cpu_s)


def _medians(shares: dict[str, list[float]]) -> dict[str, float]:
    return {name: round(median(values), 3) for name, values in shares.items()}


def _targets(plan: Plan, rates: dict[str, list[float]], costs: dict[str, list[float]]) -> None:
    for peer, least in (("vllm-router", 1.0), ("smg", 2.0)):
        if "appliance" in rates and peer in rates:
            value = paired_ratio(rates["appliance"], rates[peer]) or 0.0
            plan.report.target(f"requests_per_s at least {least}x {peer}", value, value >= least)
    if "appliance" in costs and "vllm-router" in costs:
        value = paired_ratio(costs["appliance"], costs["vllm-router"]) or 0.0
        plan.report.target("cpu_per_request at most 1.0x vllm-router", value, value <= 1.0)

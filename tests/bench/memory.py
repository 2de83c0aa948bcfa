"""Row `memory`: resident memory of a router: idle, after many requests and many prompts, holding idle connections.

The idle figure is taken after the first answers, so that what is loaded on first use is in it. "Flat after warm-up" is
the growth between a fifth of the requests and all of them. The distinct prompts differ in their first bytes and share
no prefix, which is what grows an index of prompts the fastest.
"""

from __future__ import annotations

import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from tests.bench import machine, native
from tests.bench.plan import Plan
from tests.bench.routers import Running, running

_IDLE_CONNECTIONS, _REQUESTS, _PROMPT_BYTES = 5_000, 100_000, 2_000
_MIB = 1024 * 1024
_IDLE_TARGET_MIB = 60.0
_FLAT = 1.05
_SETTLE_S = 0.5
_PEERS_DO = 5  # peers are compared, not judged: a fifth of the requests shows where they stand


def measure(plan: Plan) -> None:
    report, cores = plan.report, plan.cores
    connections = plan.amount(_IDLE_CONNECTIONS, 200)
    requests = plan.amount(_REQUESTS, 2_000)
    with ExitStack() as stack:
        engines = [stack.enter_context(native.engine(cores.rest)) for _ in range(2)]
        up, skipped = stack.enter_context(running(plan.routers, engines, cores, plan.folder))
        report.conditions(cores, up, idle_connections=connections, requests=requests, prompt_bytes=_PROMPT_BYTES)
        report.skipped(skipped)
        plain = native.body_file(plan.folder, native.PLAIN_BODY)
        distinct = native.body_file(plan.folder, native.distinct_body(_PROMPT_BYTES))
        for each in up:
            share = requests if each.name == "appliance" else requests // _PEERS_DO
            _measure_one(plan, each, plain, distinct, connections, share)


def _mib(each: Running) -> float:
    time.sleep(_SETTLE_S)  # closed connections are noticed in a pass or two of the router's own loop
    return machine.rss_bytes(each.pid) / _MIB


def _measure_one(plan: Plan, each: Running, plain: Path, distinct: Path, connections: int, requests: int) -> None:
    core, report = plan.cores.rest, plan.report
    wrong = native.load(core, each.port, plain, "--connections", 1, "--requests", 20).wrong
    idle = _mib(each)
    report.figure("rss_idle", "MiB", each.name, idle)
    after: list[float] = []
    for share in (requests // 5, requests - requests // 5):
        wrong += native.load(core, each.port, plain, "--connections", 64, "--requests", share).wrong
        after.append(_mib(each))
    growth = after[1] / after[0]
    report.figure("rss_after_requests", "MiB", each.name, after[1], requests=requests, after_a_fifth=round(after[0], 1))
    distinctly: list[float] = []
    half = requests // 2
    for first in (1, half + 1):
        options = ("--connections", 64, "--requests", half, "--first", first)
        wrong += native.load(core, each.port, distinct, *options).wrong
        distinctly.append(_mib(each))
    before = distinctly[1]
    report.figure(
        "rss_after_distinct_prompts", "MiB", each.name, before, requests=requests, after_half=round(distinctly[0], 1)
    )
    with native.held(core, each.port, plain, "--connections", connections, "--each", 1) as found:
        holding = _mib(each)
        wrong += found.wrong + Counter(never_opened=connections - found.peak_open)
    per_connection = (holding - before) * 1024 / connections
    report.figure("rss_idle_connections", "MiB", each.name, holding, kib_per_connection=round(per_connection, 2))
    report.check(f"every request through {each.name} was answered with 200", not wrong, wrong=wrong)
    if each.name == "appliance":
        report.target("60 MiB idle", idle, idle <= _IDLE_TARGET_MIB)
        report.target("flat after warm-up: growth from a fifth of the requests to all", growth, growth <= _FLAT)
        growth = distinctly[1] / distinctly[0]
        report.target("prompt index capped: growth from half of the distinct prompts to all", growth, growth <= _FLAT)

"""Row `admission_cost`: CPU that admission adds to a request when there is room.

Two figures. `all_of_it` is what a request pays for all that it asks of admission (its caller and band, the question,
the dispatch, the end), in this process and on one core, beside an empty loop: an upper bound, and the one that is
judged. `on_minus_off` is the difference between two routers under load, with admission and with `enabled = false`;
since a router counts places either way, it shows only what the decision costs, and less than the noise is nothing.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from contextlib import ExitStack
from statistics import median

from appliance.door.routes import CHAT
from appliance.facts.bands import AdmissionSettings
from appliance.facts.call import Ask, Call
from appliance.facts.endpoint import Endpoint
from appliance.facts.settings import Prefix
from appliance.gateway.admission import Gate
from appliance.gateway.identity import caller_of
from appliance.gateway.usage import Tally
from appliance.nursery.sleeper import Sleeper
from appliance.rules.scheduling.table import Table
from tests.bench import machine, native
from tests.bench.plan import Plan
from tests.bench.report import paired_difference
from tests.bench.routers import Running, running
from tests.bench.throughput import CONNECTIONS

TARGET_US = 15.0
_SECONDS = 2.5
_HEADERS = {b"host": b"x", b"content-type": b"application/json", b"x-session-id": b"s1", b"x-appliance-band": b"gold"}


def measure(plan: Plan) -> None:
    report, cores = plan.report, plan.cores
    rounds, requests = plan.times(7), plan.amount(20_000, 500)
    seconds = 0.3 if plan.quick else _SECONDS
    report.line(conditions={**machine.conditions(cores), "requests": requests, "endpoints": [1, 8], "rounds": rounds})
    for endpoints in (1, 8):
        samples = [all_of_it(endpoints, requests) for _ in range(rounds)]
        least = min(samples)  # is what it costs; everything above is somebody else's
        report.figure("all_of_it", "us", "appliance", least, endpoints=endpoints, median=round(median(samples), 2))
        met = least <= TARGET_US
        report.target(f"at most {TARGET_US:g} us of CPU per request, endpoints: {endpoints}", least, met)
    on, off = _under_load(plan, rounds, seconds)
    report.figure("on_minus_off", "us", "appliance", paired_difference(on, off), on=median(on), off=median(off))


def all_of_it(endpoints: int, requests: int) -> float:
    """Microseconds of CPU per request."""
    table = Table(Prefix())
    table.replace([Endpoint(f"e{i}", "127.0.0.1", 1, models=("m",), capacity=8192) for i in range(endpoints)], [])
    settings = AdmissionSettings()
    gate = Gate(settings, table, 120.0)
    gate.publish()
    entry, sleeper, tally = table.entries["m"], Sleeper(), Tally()
    tally.reported, tally.completion_tokens, tally.prompt_tokens = True, 16, 30
    ask = Ask(model="m")
    running: list[Callable[[], None]] = []

    def begin(i: int) -> None:
        caller = caller_of(_HEADERS, ask, "127.0.0.1:40000", settings)
        call = Call(b"r", b"POST", b"/", CHAT, _HEADERS, b"", ask, "m", False, caller, float(i))
        ticket = gate.ask(entry, call, sleeper, float(i))
        assert ticket.state == "granted"
        gate.crowded(ticket)
        gate.dispatched(ticket, entry.members[i % endpoints], float(i))
        running.append(lambda: gate.end(ticket, call, True, tally, float(i)))

    def nothing(i: int) -> None:
        call = Call(b"r", b"POST", b"/", CHAT, _HEADERS, b"", ask, "m", False, None, float(i))  # type: ignore[arg-type]
        running.append(lambda: call)  # type: ignore[arg-type,return-value]

    def cost(step: Callable[[int], None]) -> float:
        for i in range(CONNECTIONS):  # as many are always under way
            step(i)
        began = time.process_time()
        for i in range(CONNECTIONS, requests):
            running.pop(0)()
            step(i)
        took_s = time.process_time() - began
        while running:
            running.pop(0)()
        return took_s / (requests - CONNECTIONS) * 1e6

    return cost(begin) - cost(nothing)


def _under_load(plan: Plan, rounds: int, seconds: float) -> tuple[list[float], list[float]]:
    """CPU microseconds per request of the whole router, with admission on and off, round by round."""
    cores = plan.cores
    costs: dict[str, list[float]] = {"on": [], "off": []}
    wrong: Counter[str] = Counter()
    with ExitStack() as stack:
        engines = [stack.enter_context(native.engine(cores.rest)) for _ in range(2)]
        up: dict[str, Running] = {}
        for name in costs:
            home = plan.folder / name
            home.mkdir()
            settings = f"[admission]\nenabled = {str(name == 'on').lower()}\n"
            found, skipped = stack.enter_context(running(("appliance",), engines, cores, home, settings=settings))
            if skipped:
                raise RuntimeError(skipped[0].reason)
            up[name] = found[0]
        body = native.body_file(plan.folder, native.PLAIN_BODY)
        for _ in range(rounds):
            for name, each in up.items():
                plan.patience.wait(cores)
                used = machine.cpu_s(each.pid)
                load = native.load(cores.rest, each.port, body, "--connections", CONNECTIONS, "--seconds", seconds)
                wrong += load.wrong
                costs[name].append((machine.cpu_s(each.pid) - used) / max(1, load.answers) * 1e6)
    plan.report.check("every request was answered with 200", not wrong, wrong=wrong)
    return costs["on"], costs["off"]

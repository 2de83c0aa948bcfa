"""Row `admission`: what 500 bronze requests do to the latency of platinum ones, with admission and without.

The engines are two sims of 16 slots. A decode step gives every sequence of a batch one token and takes

    (1 + S * (batch - 1)) / rate        rate = 100 tokens/s, S = 0.01

the shape of a GPU's: a step reads all weights once, whatever the batch, and beside that what each sequence needs alone.
At S = 0.01 a batch of 16 takes 1.15 times the step of one sequence and gives 14 times its tokens. Prompts are short and
cost next to nothing, so what is measured is the queue and the batch.

Platinum answers have 32 tokens and come from 4 clients at a time. Bronze answers have 32 as well; 500 clients each send
the next request as soon as they have their answer. The same platinum load is measured alone, beside bronze, and beside
bronze at a router with `admission.enabled = false`. Each load is sent several times and the one with the median 99th
percentile counts: one stall of the machine, in which four requests are late, would else be the whole figure. Both
directions are checked: a ratio above 1.5 is a regression of admission, and one below 10 without it means that the load
is none.

A third sim serves another model, which nobody floods: its latency has to stay what it was.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import attrs

from tests.bench import machine, native
from tests.bench.native import Engine
from tests.bench.plan import Plan
from tests.bench.routers import Running, running
from tests.bench.sims import gauges, metric, sims

SLOTS, SLOWDOWN, WORDS_PER_S = 16, 0.01, 100
WORDS = 32
BRONZE = 500
OTHER = "other"
MOST, GOAL, LEAST = 1.5, 1.1, 10.0
_SETTLED_WITHIN_S = 20.0


@attrs.frozen
class Latency:
    """Of one load, in milliseconds."""

    p50: float
    p99: float
    answers: int

    @classmethod
    def of(cls, found: native.Load) -> Latency:
        if found.wrong or not found.answers:
            raise RuntimeError(f"answers that are none: {found.answers} good, {dict(found.wrong)}")
        return cls(found.p50_us / 1000, found.p99_us / 1000, found.answers)


@attrs.frozen
class Found:
    """What the row found; the ratios are of the 99th percentiles."""

    idle: Latency
    beside: Latency
    without: Latency
    other_idle: Latency
    other_beside: Latency
    waiting: float
    in_engines: float

    @property
    def with_admission(self) -> float:
        return self.beside.p99 / self.idle.p99

    @property
    def without_admission(self) -> float:
        return self.without.p99 / self.idle.p99

    @property
    def other_model(self) -> float:
        return self.other_beside.p50 / self.other_idle.p50


def measure(plan: Plan) -> None:
    report = plan.report
    bronze, each, rounds = plan.amount(BRONZE, 100), plan.amount(20, 4), plan.times(3)
    report.line(
        conditions={
            **machine.conditions(plan.cores),
            "sims": 2,
            "slots_each": SLOTS,
            "step_s": f"(1 + {SLOWDOWN} * (batch - 1)) / {WORDS_PER_S}",
            "tokens_per_answer": WORDS,
            "bronze_clients": bronze,
            "platinum_clients": 4,
            "platinum_requests": 4 * each,
            "loads": rounds,
        }
    )
    found = run(plan.cores, plan.folder, bronze=bronze, each=each, rounds=rounds)
    for name, latency in attrs.asdict(found, recurse=False).items():
        if isinstance(latency, Latency):
            report.figure(f"{name}_p99", "ms", "appliance", latency.p99, p50=latency.p50, answers=latency.answers)
    report.figure("bronze_waiting_in_router", "requests", "appliance", found.waiting)
    report.figure("bronze_in_engines", "requests", "appliance", found.in_engines)
    ratio, without, other = found.with_admission, found.without_admission, found.other_model
    report.target(f"platinum p99 beside bronze / idle: goal {GOAL}", ratio, ratio <= GOAL)
    judged = not plan.quick
    report.check(f"platinum p99 beside bronze at most {MOST}x its idle p99", ratio <= MOST or not judged, ratio=ratio)
    report.check(f"without admission at least {LEAST:g}x worse", without >= LEAST or not judged, ratio=without)
    report.check("another model's p50 is what it was (at most 1.1x)", other <= 1.1 or not judged, ratio=other)


def run(cores: machine.Cores, folder: Path, *, bronze: int = BRONZE, each: int = 20, rounds: int = 3) -> Found:
    """All phases. Raises RuntimeError when answers are wrong or the load is not there."""
    speed = ("--decode-tokens-per-second", str(WORDS_PER_S), "--decode-slowdown", str(SLOWDOWN))
    size = ("--max-num-seqs", str(SLOTS))
    with ExitStack() as stack:
        flooded = stack.enter_context(sims(2, cores.rest, _sub(folder, "flooded"), *speed, *size))
        quiet = stack.enter_context(sims(1, cores.rest, _sub(folder, "quiet"), *speed, *size, "--model", OTHER))
        scene = _Scene(cores, folder, flooded, bronze)
        table = f'[[endpoints]]\nid = "quiet"\nurl = "http://127.0.0.1:{quiet[0].port}/v1"\nmodels = ["{OTHER}"]\n'
        router = stack.enter_context(scene.router("on", f'{table}engine = "sim"\n'))
        scene.settle(router)
        idle = _middle([scene.platinum(router, each) for _ in range(rounds)])
        other_idle = scene.platinum(router, each // 2, model=OTHER)
        with scene.flood(router):
            waiting = metric(router.metrics_port, "appliance_queue_depth")
            in_engines = gauges(flooded).running
            beside = _middle([scene.platinum(router, each) for _ in range(rounds)])
            other_beside = scene.platinum(router, each // 2, model=OTHER)
        router = stack.enter_context(scene.router("off", "[admission]\nenabled = false\n"))
        with scene.flood(router):
            # everybody at once: one after the other would take minutes
            without = scene.platinum(router, 1, clients=40)
    return Found(idle, beside, without, other_idle, other_beside, waiting, in_engines)


@attrs.frozen
class _Scene:
    cores: machine.Cores
    folder: Path
    flooded: list[Engine]
    bronze: int

    @contextmanager
    def router(self, name: str, settings: str) -> Iterator[Running]:
        with running(
            ("appliance",),
            self.flooded,
            self.cores,
            _sub(self.folder, name),
            engine="sim",
            settings=settings,
            capacity=0,
        ) as (up, skipped):
            if skipped:
                raise RuntimeError(skipped[0].reason)
            yield up[0]

    def settle(self, router: Running) -> None:
        """Until the engines have told their slots: a router that has just started fills them carefully."""
        give_up = time.monotonic() + _SETTLED_WITHIN_S
        while time.monotonic() < give_up:
            if all(gauge.running == 0 for gauge in (gauges(self.flooded),)):
                return
            time.sleep(0.1)
        raise RuntimeError("the engines did not fall idle")

    def platinum(self, router: Running, each: int, *, clients: int = 4, model: str = native.MODEL) -> Latency:
        body = native.body_file(self.folder, _body(model))
        options = ("--connections", clients, "--each", each, "--header", "x-appliance-band: platinum")
        return Latency.of(native.load(self.cores.rest, router.port, body, *options, limit_s=90))

    @contextmanager
    def flood(self, router: Running) -> Iterator[None]:
        """Bronze clients that go on for the length of the block; it begins when all of them have asked."""
        body = native.body_file(self.folder, _body(native.MODEL))
        options = ("--connections", self.bronze, "--seconds", 600, "--limit-s", 120)
        process = native.begin(self.cores.rest, router.port, body, *options, "--header", "x-appliance-band: bronze")
        try:
            give_up = time.monotonic() + _SETTLED_WITHIN_S
            while True:
                seen = gauges(self.flooded)
                held = metric(router.metrics_port, "appliance_queue_depth")
                if seen.running + seen.waiting + held > 0.9 * self.bronze:
                    break
                if time.monotonic() > give_up:
                    raise RuntimeError(f"the flood did not come: {seen}, {held} wait in the router")
                time.sleep(0.05)
            yield
            if process.poll() is not None:
                raise RuntimeError("the flood ended before it was measured")
        finally:
            process.kill()
            machine.end(process)
            self.settle(router)


def _middle(loads: list[Latency]) -> Latency:
    return sorted(loads, key=lambda load: load.p99)[len(loads) // 2]


def _body(model: str) -> dict[str, object]:
    return native.PLAIN_BODY | {"model": model, "max_tokens": WORDS, "ignore_eos": True}


def _sub(folder: Path, name: str) -> Path:
    made = folder / name
    made.mkdir()
    return made

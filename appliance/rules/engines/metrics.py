"""What each engine publishes about its load, and what it means when it does not.

The table maps a meaning to the names that carry it, newest spelling first. A figure left out of an engine's table is
one that it does not publish: unknown, never zero. A figure in the table that is missing, unreadable or impossible is a
*violation*; an endpoint's `Contract` says so once when it starts and once when all is well again, and requests go on
meanwhile by what the router counts itself.

Names are matched exactly (`vllm:num_requests_waiting` is not `vllm:num_requests_waiting_by_reason`) and summed over
their labels: one endpoint may hold several engines or ranks. Only the wanted lines are parsed: reading vLLM's 50 KiB
takes 0.1 ms and not the 20 ms of a full parse, once a second per endpoint.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

import attrs

from ...facts.endpoint import Sample

SUM, MEAN = "sum", "mean"


@attrs.frozen
class Figure:
    """One meaning in one engine's text.

    `names` are spellings, newest first, of which one must be there; `also` are further families that are added where
    they are published (queues of special modes). `over` tells how label sets join. `late` figures appear only with
    their first use or in newer builds, so that missing is a violation only once they were seen.
    """

    meaning: str
    names: tuple[str, ...]
    also: tuple[str, ...] = ()
    over: str = SUM
    late: bool = False


VLLM = (
    Figure("running", ("vllm:num_requests_running",)),
    Figure("waiting", ("vllm:num_requests_waiting",)),
    Figure("kv", ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc"), over=MEAN),
    Figure("hits", ("vllm:prefix_cache_hits_total", "vllm:gpu_prefix_cache_hits_total")),
    Figure("queries", ("vllm:prefix_cache_queries_total", "vllm:gpu_prefix_cache_queries_total")),
    Figure("prompt_tokens", ("vllm:prompt_tokens_total",)),
    Figure("generated_tokens", ("vllm:generation_tokens_total",)),
    Figure("started", ("process_start_time_seconds",), late=True),
)
SIM = (*VLLM, Figure("capacity", ("sim:max_num_seqs",)))
SGLANG = (
    Figure("running", ("sglang:num_running_reqs",)),
    Figure(
        "waiting",
        ("sglang:num_queue_reqs",),
        also=(
            "sglang:num_grammar_queue_reqs",
            "sglang:num_prefill_bootstrap_queue_reqs",
            "sglang:num_prefill_inflight_queue_reqs",
            "sglang:num_decode_prealloc_queue_reqs",
            "sglang:num_decode_transfer_queue_reqs",
        ),
    ),
    Figure("kv", ("sglang:token_usage",), over=MEAN),
    Figure("hits", ("sglang:cached_tokens_total",), late=True),
    Figure("queries", ("sglang:prompt_tokens_total",), late=True),
    Figure("generated_tokens", ("sglang:generation_tokens_total",), late=True),
)
LLAMACPP = (
    Figure("running", ("llamacpp:requests_processing",)),
    Figure("waiting", ("llamacpp:requests_deferred",)),
    Figure("hits", ("llamacpp:prompt_tokens_cached_total",), late=True),
    # Computed tokens only, unlike vLLM's total: what was looked up is the sum of both.
    Figure("computed_tokens", ("llamacpp:prompt_tokens_total",)),
    Figure("generated_tokens", ("llamacpp:tokens_predicted_total",)),
)

TABLE: Mapping[str, tuple[Figure, ...]] = {"vllm": VLLM, "sglang": SGLANG, "llamacpp": LLAMACPP, "sim": SIM}
"""Engine kind to its figures. A kind that is not here is never scraped."""

MANDATORY = ("running", "waiting")
COUNTERS = ("hits", "queries", "prompt_tokens", "computed_tokens", "generated_tokens")
"""They only grow while an engine lives, so one that shrank is a new engine."""

HINTS = {
    ("sglang", 404): "SGLang publishes metrics only with --enable-metrics",
    ("llamacpp", 501): "llama-server publishes metrics only with --metrics",
}

MOST = float(1 << 53)
"""Above any figure of an engine, and far below where sums of them are no numbers any more."""
NO_TEXT = "its metrics page is not Prometheus text"

_VALUE = re.compile(rb'(?:\{(?:[^"}]|"(?:[^"\\]|\\.)*")*\})?[ \t]+(\S+)')
"""What follows a name: labels, whose values may hold braces and spaces, and the value; a timestamp may come after."""
_LINES = {
    engine: re.compile(
        rb"\n(%s)([{ \t][^\n]*)"
        % b"|".join(re.escape(name).encode() for figure in figures for name in (*figure.names, *figure.also))
    )
    for engine, figures in TABLE.items()
}
"""Finds the wanted lines. A leading newline and not `^`: three times as fast, since it can be searched for."""


def scraped(engine: str) -> bool:
    """Whether endpoints of this kind are asked for metrics at all."""
    return engine in TABLE


@attrs.frozen
class Reading:
    """What one text says. None is unknown. `started` is the process's start in seconds of the epoch. `counters` hold
    the totals that were there, by meaning; `spelled` the name that each meaning was read from; `missing` the late
    figures that were not there, by meaning with their newest name.
    """

    running: int | None
    waiting: int | None
    kv: float | None
    prefix_hits: float | None
    prefix_queries: float | None
    capacity: int | None
    started: float | None
    counters: Mapping[str, float]
    spelled: Mapping[str, str]
    missing: Mapping[str, str]
    violations: tuple[str, ...]


def read(engine: str, text: bytes | str) -> Reading:
    """Read the metrics text of an engine in `TABLE` (KeyError otherwise). Never raises for what the text holds."""
    data = text.encode("utf-8", "replace") if isinstance(text, str) else text
    found, faults = _collect(data, _LINES[engine])
    values: dict[str, float] = {}
    spelled: dict[str, str] = {}
    missing: dict[str, str] = {}
    violations: list[str] = []
    for figure in TABLE[engine]:
        for name in figure.names:
            if name in faults:
                violations.append(faults[name])
                break
            if name in found:
                numbers = found[name]
                total = math.fsum(numbers)
                for more in figure.also:
                    if more in faults:
                        violations.append(faults[more])
                    else:
                        total += math.fsum(found.get(more, ()))
                values[figure.meaning] = total / len(numbers) if figure.over == MEAN else total
                spelled[figure.meaning] = name
                break
        else:
            if figure.late:
                missing[figure.meaning] = figure.names[0]
            else:
                violations.append(f"{figure.names[0]} is missing")
    if not spelled and not faults and b"# TYPE " not in data:
        violations = [NO_TEXT]
        missing = {}
    kv = values.get("kv")
    if kv is not None and kv > 1.0 + 1e-6:
        violations.append(f"{spelled['kv']} is above 1: not a share of the cache")
        kv = None
    hits = values.get("hits")
    queries = values.get("queries")
    if "computed_tokens" in values and hits is not None:
        queries = hits + values["computed_tokens"]
    running = values.get("running")
    waiting = values.get("waiting")
    return Reading(
        None if running is None else int(running),
        None if waiting is None else int(waiting),
        kv,
        hits,
        queries,
        None if "capacity" not in values else int(values["capacity"]),
        values.get("started"),
        {meaning: values[meaning] for meaning in COUNTERS if meaning in values},
        spelled,
        missing,
        tuple(violations),
    )


def _collect(data: bytes, lines: re.Pattern[bytes]) -> tuple[dict[str, list[float]], dict[str, str]]:
    """The values of all lines of each wanted family, and what is wrong with families that have no usable values."""
    found: dict[str, list[float]] = {}
    faults: dict[str, str] = {}
    for name_bytes, rest in lines.findall(b"\n" + data):
        name = name_bytes.decode()
        parts = _VALUE.match(rest)
        try:
            value = float(parts[1]) if parts else math.nan
        except ValueError:
            value = math.nan
        if not math.isfinite(value):
            faults[name] = f"{name} has a line that is no number"
        elif value < 0.0:
            faults[name] = f"{name} is negative"
        elif value > MOST:
            faults[name] = f"{name} is beyond all measure"
        else:
            found.setdefault(name, []).append(value)
    return found, faults


@attrs.frozen
class Verdict:
    """What one scrape came to. `sample` None: the mandatory figures were not there. `warning` and `notice` are "" or
    one line for the log, when a violation started and when the last one cleared. `restarted`: the engine's counters
    began again since the last sample (its `generation` is new)."""

    sample: Sample | None
    warning: str = ""
    notice: str = ""
    restarted: bool = False


class Contract:
    """What one endpoint promised to publish, and whether it does.

    `violations` are the current ones; `spelled` tells which name each meaning was last read from. One owner calls
    `take` for every text and `unavailable` for every other answer; a scrape that got no answer at all is no violation
    but silence, and the member's own clock judges that.
    """

    __slots__ = ("_counters", "_seen", "_started", "endpoint", "engine", "generation", "spelled", "violations")

    def __init__(self, engine: str, endpoint: str) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self.generation = 0
        self.violations: tuple[str, ...] = ()
        self.spelled: Mapping[str, str] = {}
        self._seen: set[str] = set()
        self._counters: dict[str, float] = {}
        self._started = 0.0

    def take(self, text: bytes | str, now: float) -> Verdict:
        """Judge a text that arrived at `now`."""
        reading = read(self.engine, text)
        dropped = tuple(f"{name} is missing" for meaning, name in reading.missing.items() if meaning in self._seen)
        self._seen.update(reading.spelled)
        self.spelled = reading.spelled
        warning, notice = self._judge(reading.violations + dropped)
        before = self._counters
        restarted = any(value < before.get(meaning, 0.0) for meaning, value in reading.counters.items())
        if reading.started is not None:
            # Later than any start seen before: several processes behind one port may answer in turn.
            restarted = restarted or reading.started > self._started + 1.0 > 1.0
            self._started = max(self._started, reading.started)
        if restarted:
            self.generation += 1
            self._counters = dict(reading.counters)
        else:
            # What is missing this time keeps its value, so that an engine that restarts while its page is broken is
            # still noticed when the page comes back.
            before.update(reading.counters)
        if reading.running is None or reading.waiting is None:
            return Verdict(None, warning, notice, restarted)
        sample = Sample(
            at=now,
            running=reading.running,
            waiting=reading.waiting,
            kv=reading.kv,
            prefix_hits=reading.prefix_hits,
            prefix_queries=reading.prefix_queries,
            capacity=reading.capacity,
            generation=self.generation,
        )
        return Verdict(sample, warning, notice, restarted)

    def unavailable(self, status: int) -> Verdict:
        """The metrics page answered with this HTTP status instead of a text."""
        hint = HINTS.get((self.engine, status), "")
        warning, notice = self._judge((f"its metrics page answers HTTP {status}" + (f" ({hint})" if hint else ""),))
        return Verdict(None, warning, notice)

    def _judge(self, violations: tuple[str, ...]) -> tuple[str, str]:
        """Lines for what is new and for the end of it all."""
        before = self.violations
        self.violations = violations
        started = [violation for violation in violations if violation not in before]
        if started:
            told = "; ".join(started)
            return f"endpoint {self.endpoint}: {told}; it is judged by our own counts as far as needed", ""
        if before and not violations:
            return "", f"endpoint {self.endpoint}: its metrics are as expected again"
        return "", ""

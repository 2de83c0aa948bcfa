"""What the batch counts about itself; `metrics.py` writes it in vLLM's names."""

from __future__ import annotations

from bisect import bisect_left

import attrs

# fmt: off
TTFT_BOUNDS = (
    0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0, 160.0,
    640.0, 2560.0,
)
ITL_BOUNDS = (
    0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0,
)
REQUEST_BOUNDS = (
    0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 40.0, 50.0, 60.0, 120.0, 240.0, 480.0, 960.0,
    1920.0, 7680.0,
)
# fmt: on
"""Bucket bounds in seconds, as vLLM 0.32 publishes them."""


class Histogram:
    """Observations by upper bound, in Prometheus' sense. `counts` are per bucket, the last one without a bound."""

    __slots__ = ("bounds", "counts", "total")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.total = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.total += value * times


@attrs.define
class Counters:
    """Running totals since the start. Tokens, unless the name says otherwise; `finished` counts sequences by reason."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    generation_tokens: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    finished: dict[str, int] = attrs.field(factory=lambda: {"stop": 0, "length": 0, "abort": 0, "error": 0})
    first_token_s: Histogram = attrs.field(factory=lambda: Histogram(TTFT_BOUNDS))
    inter_token_s: Histogram = attrs.field(factory=lambda: Histogram(ITL_BOUNDS))
    queue_s: Histogram = attrs.field(factory=lambda: Histogram(REQUEST_BOUNDS))
    request_s: Histogram = attrs.field(factory=lambda: Histogram(REQUEST_BOUNDS))

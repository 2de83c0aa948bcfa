"""Counters of the request road, in plain numbers.

prometheus_client's own counters take a lock and a dictionary look-up per child, about a microsecond each, and a request
touches eight. These are attributes of one object per model; `admin/metrics.py` turns them into prometheus_client's
families when they are scraped.
"""

from __future__ import annotations

from bisect import bisect_left

from ..facts.choice import SCORERS, Choice

DURATION_BOUNDS_S = (0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0, 1800.0)
FIRST_TOKEN_BOUNDS_S = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
QUEUE_WAIT_BOUNDS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
INTER_TOKEN_BOUNDS_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.2, 0.5, 1.0)


class Histogram:
    """Counts by upper bound, not cumulated; the last place is for everything above."""

    __slots__ = ("bounds", "counts", "sum")

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times


class ModelMeters:
    """What is counted of one model. `requests` is by (band, status code)."""

    __slots__ = (
        "cached_tokens",
        "completion_tokens",
        "duration",
        "first_token",
        "inter_token",
        "prompt_tokens",
        "requests",
    )

    def __init__(self) -> None:
        self.requests: dict[tuple[str, int], int] = {}
        self.duration = Histogram(DURATION_BOUNDS_S)
        self.first_token = Histogram(FIRST_TOKEN_BOUNDS_S)
        self.inter_token = Histogram(INTER_TOKEN_BOUNDS_S)
        self.prompt_tokens = 0
        self.completion_tokens = 0
        self.cached_tokens = 0


class Meters:
    """All counters. `models` is by canonical name; a name that no configuration or endpoint knows counts as
    `UNKNOWN`. `scores` are the sums of what each of `SCORERS` gave the endpoint that was picked, over `scored` choices
    between several.
    """

    UNKNOWN = "unknown"

    def __init__(self) -> None:
        self.models: dict[str, ModelMeters] = {}
        self.rejections: dict[tuple[str, str], int] = {}
        self.filter_drops: dict[str, int] = {}
        self.prefix: dict[str, int] = {}
        self.scores = [0.0] * len(SCORERS)
        self.scored = 0
        self.trace_dropped = 0
        self.queue_wait: dict[str, Histogram] = {}

    def model(self, name: str) -> ModelMeters:
        meters = self.models.get(name)
        if meters is None:
            meters = self.models[name] = ModelMeters()
        return meters

    def chose(self, choice: Choice) -> None:
        """An endpoint was picked, or none could be."""
        picked = choice.picked
        if len(choice.candidates) > 1:
            self.scored += 1
            self.scores = [sum_ + scores[picked] for sum_, scores in zip(self.scores, choice.scores, strict=True)]
        for _, name in choice.drops:
            self.filter_drops[name] = self.filter_drops.get(name, 0) + 1
        prefix = choice.prefix
        if prefix != "off":
            self.prefix[prefix] = self.prefix.get(prefix, 0) + 1

    def waited(self, band: str, seconds: float) -> None:
        """A request of `band` left the queue after `seconds`, whatever came of it."""
        histogram = self.queue_wait.get(band)
        if histogram is None:
            histogram = self.queue_wait[band] = Histogram(QUEUE_WAIT_BOUNDS_S)
        histogram.observe(seconds)

    def keep_models(self, names: set[str]) -> None:
        """Forget models that are gone: their series go along."""
        for name in self.models.keys() - names - {self.UNKNOWN}:
            del self.models[name]

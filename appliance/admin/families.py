"""The road's plain counters as Prometheus families.

Everything is read from the objects that the road acts on, at the moment of a scrape: a model or an endpoint that is
gone has no series, without anybody having removed them. Label values come from names that the configuration or an
endpoint gave; what clients make up is counted as "unknown" where it is counted (`gateway/books.py`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
    SummaryMetricFamily,
)
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from .. import __version__
from ..facts.choice import SCORERS
from ..gateway.meters import Histogram, Meters, ModelMeters
from ..gateway.service import Gateway
from ..wire import exposition
from . import fleet

if TYPE_CHECKING:
    from ..control.plane import Plane

BREAKER_STATES = {"closed": 0, "half-open": 1, "open": 2}


def renderer(gateway: Gateway, plane: Callable[[], Plane | None]) -> Callable[[str], tuple[bytes, str]]:
    """A function from an Accept field to the document and its content type."""
    return exposition.renderer(Families(gateway, plane=plane))


class Families(Collector):
    """All families of the road, and those of the fleet where a control plane is there; `now` is `time.monotonic`,
    replaced in tests."""

    def __init__(
        self,
        gateway: Gateway,
        now: Callable[[], float] = time.monotonic,
        plane: Callable[[], Plane | None] = lambda: None,
    ) -> None:
        self._gateway = gateway
        self._now = now
        self._plane = plane

    def describe(self) -> list[Metric]:
        """Nothing beforehand: registering would otherwise collect once."""
        return []

    def collect(self) -> Iterator[Metric]:
        gateway = self._gateway
        yield _build()
        running = GaugeMetricFamily("appliance_requests_running", "Requests between their first and last byte.")
        running.add_metric([], len(gateway.books.live))
        yield running
        yield from _of_models(gateway.meters)
        yield from _of_bands(gateway, self._now())
        yield from _of_decisions(gateway.meters)
        yield from _of_endpoints(gateway, self._now())
        yield self._pools()
        plane = self._plane()
        if plane is not None:
            yield from _of_fleet(plane)

    def _pools(self) -> Metric:
        family = GaugeMetricFamily(
            "appliance_pool_saturation",
            "How full a pool is, as admission sees it: 1 is the healthy limit.",
            labels=["model", "pool"],
        )
        fullest: dict[tuple[str, str], float] = {}
        for model, pool, value in self._gateway.gate.rules.saturations():
            # one name may stand at two priorities, and a series only once
            fullest[model, pool] = max(value, fullest.get((model, pool), 0.0))
        for names, value in fullest.items():
            family.add_metric(names, value)
        return family


def _of_fleet(plane: Plane) -> Iterator[Metric]:
    nodes = GaugeMetricFamily("appliance_nodes", "Nodes by state.", labels=["state"])
    for state, count in fleet.node_states(plane.world).items():
        nodes.add_metric([state], count)
    yield nodes
    replicas = GaugeMetricFamily("appliance_replicas", "Replicas by state.", labels=["model", "state"])
    for model, states in fleet.replica_states(plane).items():
        for state, count in states.items():
            replicas.add_metric([model, state], count)
    yield replicas


def _build() -> Metric:
    family = GaugeMetricFamily("appliance_build_info", "Always 1; the version is in the label.", labels=["version"])
    family.add_metric([__version__], 1)
    return family


def _of_models(meters: Meters) -> Iterator[Metric]:
    models = meters.models
    requests = CounterMetricFamily(
        "appliance_requests", "Requests by how they ended; 499: the client left.", labels=["model", "band", "code"]
    )
    tokens = CounterMetricFamily(
        "appliance_tokens", "Tokens; cached ones are counted in prompt too.", labels=["model", "kind"]
    )
    for name, model in models.items():
        for (band, code), count in model.requests.items():
            requests.add_metric([name, band, str(code)], count)
        tokens.add_metric([name, "prompt"], model.prompt_tokens)
        tokens.add_metric([name, "cached"], model.cached_tokens)
        tokens.add_metric([name, "completion"], model.completion_tokens)
    yield requests
    yield _histograms(
        models, "appliance_request_duration_seconds", "From the request's arrival to its end.", lambda m: m.duration
    )
    yield _histograms(
        models,
        "appliance_time_to_first_token_seconds",
        "From dispatch to the first content of a stream.",
        lambda m: m.first_token,
    )
    yield _histograms(
        models,
        "appliance_inter_token_seconds",
        "Between two contents of a stream: its mean, counted once for each gap.",
        lambda m: m.inter_token,
    )
    yield tokens


def _of_bands(gateway: Gateway, now: float) -> Iterator[Metric]:
    depth = GaugeMetricFamily("appliance_queue_depth", "Requests that wait for a place.", labels=["band"])
    for band in gateway.gate.rules.bands(now):
        depth.add_metric([band.name], band.waiting)
    yield depth
    waits = HistogramMetricFamily(
        "appliance_queue_wait_seconds", "Time in the queue of those that had to wait.", labels=["band"]
    )
    for name, histogram in gateway.meters.queue_wait.items():
        waits.add_metric([name], _buckets(histogram), histogram.sum)
    yield waits


def _histograms(
    models: dict[str, ModelMeters], name: str, text: str, of: Callable[[ModelMeters], Histogram]
) -> HistogramMetricFamily:
    family = HistogramMetricFamily(name, text, labels=["model"])
    for model, meters in models.items():
        family.add_metric([model], _buckets(of(meters)), of(meters).sum)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Counts up to each bound, as the format wants them."""
    buckets: list[tuple[str, float]] = []
    total = 0
    for bound, count in zip((*histogram.bounds, float("inf")), histogram.counts, strict=True):
        total += count
        buckets.append((floatToGoString(bound), total))
    return buckets


def _of_decisions(meters: Meters) -> Iterator[Metric]:
    rejections = CounterMetricFamily(
        "appliance_rejections", "Requests refused before they were tried.", labels=["band", "reason"]
    )
    for (band, reason), count in meters.rejections.items():
        rejections.add_metric([band, reason], count)
    yield rejections
    drops = CounterMetricFamily(
        "appliance_filter_drops", "Endpoints left out of a choice, by filter.", labels=["filter"]
    )
    for name, count in meters.filter_drops.items():
        drops.add_metric([name], count)
    yield drops
    hits = CounterMetricFamily(
        "appliance_prefix_hits", "Choices by what the index of prompt heads came to.", labels=["result"]
    )
    for result, count in meters.prefix.items():
        hits.add_metric([result], count)
    yield hits
    scores = SummaryMetricFamily(
        "appliance_scorer_value", "What each scorer gave the endpoint that was picked among several.", labels=["scorer"]
    )
    for name, total in zip(SCORERS, meters.scores, strict=True):
        scores.add_metric([name], meters.scored, total)
    yield scores
    yield CounterMetricFamily(
        "appliance_trace_dropped", "Spans that the collector did not get.", value=meters.trace_dropped
    )


def _of_endpoints(gateway: Gateway, now: float) -> Iterator[Metric]:
    up = GaugeMetricFamily("appliance_endpoint_up", "1 when it may get requests.", labels=["endpoint"])
    inflight = GaugeMetricFamily(
        "appliance_endpoint_inflight", "Requests of this router running there.", labels=["endpoint"]
    )
    breaker = GaugeMetricFamily("appliance_endpoint_breaker", "0 closed, 1 half-open, 2 open.", labels=["endpoint"])
    violations = GaugeMetricFamily(
        "appliance_scrape_contract_violations",
        "Metrics it should publish and does not, or not as agreed.",
        labels=["endpoint"],
    )
    for member in gateway.table.members.values():
        up.add_metric([member.id], int(member.up))
        inflight.add_metric([member.id], member.in_flight)
        breaker.add_metric([member.id], BREAKER_STATES[member.breaker.state(now)])
        contract = gateway.contracts.get(member.id)
        if contract is not None:
            violations.add_metric([member.id], len(contract.violations))
    yield up
    yield inflight
    yield breaker
    yield violations

"""`/metrics` of an agent: everything is read, at the moment of a scrape, from the objects the agent acts on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from appliance import __version__
from appliance.agent.status import Look
from appliance.wire import exposition


def renderer(look: Look) -> Callable[[str], tuple[bytes, str]]:
    """A function from an Accept field to the document and its content type."""
    return exposition.renderer(Families(look))


class Families(Collector):
    """All families of an agent."""

    def __init__(self, look: Look) -> None:
        self._look = look

    def describe(self) -> list[Metric]:
        """Nothing beforehand: registering would otherwise collect once."""
        return []

    def collect(self) -> Iterator[Metric]:
        seen = self._look()
        build = GaugeMetricFamily("appliance_build_info", "Always 1; the version is in the label.", labels=["version"])
        build.add_metric([__version__], 1)
        yield build
        shards = GaugeMetricFamily("appliance_shards", "Shards on this node, by state.", labels=["model", "state"])
        for names, number in Counter((each.shard.model, each.state) for each in seen.reports.values()).items():
            shards.add_metric(names, number)
        yield shards
        waiting = GaugeMetricFamily(
            "appliance_replicas_waiting", "Replicas that are wanted and do not run.", labels=["model"]
        )
        for model, number in Counter(each.model for each in seen.waiting).items():
            waiting.add_metric([model], number)
        yield waiting
        failures = CounterMetricFamily(
            "appliance_shard_failures", "Shards that failed since the agent started.", labels=["model"]
        )
        for model, number in seen.failures.items():
            failures.add_metric([model], number)
        yield failures
        free = GaugeMetricFamily(
            "appliance_gpu_free",
            "Whether a shard may be put on the GPU as far as its health goes.",
            labels=["gpu", "gpu_class"],
        )
        total = GaugeMetricFamily("appliance_gpu_memory_bytes", "Memory of the GPU.", labels=["gpu", "gpu_class"])
        used = GaugeMetricFamily("appliance_gpu_memory_used_bytes", "Memory in use.", labels=["gpu", "gpu_class"])
        for gpu in seen.inventory.gpus:
            labels = [str(gpu.index), gpu.gpu_class]
            free.add_metric(labels, gpu.placeable)
            # Unknown is left out, never zero.
            if gpu.memory_bytes is not None:
                total.add_metric(labels, gpu.memory_bytes)
            if gpu.used_bytes is not None:
                used.add_metric(labels, gpu.used_bytes)
        yield from (free, total, used)

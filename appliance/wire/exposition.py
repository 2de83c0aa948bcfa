"""Metrics as Prometheus reads them: a collector of ours beside those of the process."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import CollectorRegistry, GCCollector, ProcessCollector
from prometheus_client.exposition import choose_encoder
from prometheus_client.registry import Collector


def renderer(families: Collector) -> Callable[[str], tuple[bytes, str]]:
    """A function from an Accept field to the document and its content type."""
    registry = CollectorRegistry()
    registry.register(families)
    ProcessCollector(registry=registry)
    GCCollector(registry=registry)

    def render(accept: str) -> tuple[bytes, str]:
        encode, content_type = choose_encoder(accept)
        return encode(registry), content_type

    return render

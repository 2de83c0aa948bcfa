"""A collector in the test's own loop: an OTLP/HTTP receiver that decodes what it gets, and fails when it is told to."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import attrs
import trio
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from tests.fake_engine import Asked, Peer, whole

Value = str | int | float | bool


@attrs.frozen
class Got:
    """One span as it arrived; ids in hex, `parent` "" for a root."""

    trace: str
    id: str
    parent: str
    name: str
    kind: int
    start_ns: int
    end_ns: int
    flags: int
    error: bool
    about: dict[str, Value]


def decoded(body: bytes) -> tuple[dict[str, Value], list[Got]]:
    """The resource's attributes, and all spans. One resource is all a router has."""
    (of_resource,) = ExportTraceServiceRequest.FromString(body).resource_spans
    spans = [
        Got(
            span.trace_id.hex(), span.span_id.hex(), span.parent_span_id.hex(), span.name, span.kind,
            span.start_time_unix_nano, span.end_time_unix_nano, span.flags, span.status.code == 2,
            _attributes(span.attributes),
        )
        for of_scope in of_resource.scope_spans
        for span in of_scope.spans
    ]  # fmt: skip
    return _attributes(of_resource.resource.attributes), spans


def _attributes(pairs: Any) -> dict[str, Value]:
    assert len({pair.key for pair in pairs}) == len(pairs)
    return {pair.key: getattr(pair.value, pair.value.WhichOneof("value")) for pair in pairs}


@attrs.define(eq=False)
class Collector:
    """`says` is the answer to every delivery, "silent" for none; so many as `closes` get the end of their connection
    instead. What it took is in `spans`, in order."""

    port: int
    says: bytes | str = attrs.field(factory=lambda: whole(200, b"", "content-type: application/x-protobuf"))
    closes: int = 0
    asked: list[Asked] = attrs.field(factory=list)
    spans: list[Got] = attrs.field(factory=list)
    resource: dict[str, Value] = attrs.field(factory=dict)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    async def _serve(self, stream: trio.SocketStream) -> None:
        peer = Peer(stream)
        async with stream:
            while peer.open and (asked := await peer.request()) is not None:
                self.asked.append(asked)
                if self.closes:
                    self.closes -= 1
                    return
                if isinstance(self.says, str):
                    await peer.left()
                    return
                if b" 200 " in self.says[:20]:
                    self.resource, spans = decoded(asked.body)
                    self.spans += spans
                await peer.send(self.says)

    def trace_of(self, request_id: str) -> list[Got]:
        """The spans of one request, its server span first; none until they are here."""
        for span in self.spans:
            if span.about.get("appliance.request_id") == request_id:
                return [span, *(other for other in self.spans if other.parent == span.id)]
        return []


def rejecting(count: int) -> bytes:
    """An answer that took all but `count` spans."""
    answer = ExportTraceServiceResponse()
    answer.partial_success.rejected_spans = count
    return whole(200, answer.SerializeToString(), "content-type: application/x-protobuf")


@asynccontextmanager
async def collector(port: int = 0) -> AsyncIterator[Collector]:
    """A collector that takes everything, on a port of the kernel's choice."""
    async with trio.open_nursery() as nursery:
        (listener,) = await trio.open_tcp_listeners(port, host="127.0.0.1")
        made = Collector(listener.socket.getsockname()[1])
        nursery.start_soon(trio.serve_listeners, made._serve, [listener])
        yield made
        nursery.cancel_scope.cancel()

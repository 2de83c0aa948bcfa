"""Delivery of spans to a collector: OTLP over HTTP, protobuf, on connections of our own.

One task. It encodes record by record with a turn for everybody else in between, since a batch at once would hold every
stream for tens of milliseconds, and a thread would fight them for the interpreter. While the collector does not take a
batch the task waits, encodes nothing, and the records behind give way, oldest first (`Tracer.finish`): a dead collector
costs the road nothing and memory no more than `MOST_WAITING` records.

The messages are opentelemetry-proto's; the SDK's exporter is left out, because it retries by sleeping in a thread,
which no stop could end. What operators know of it holds: `OTEL_EXPORTER_OTLP_HEADERS` is read, a refused batch (4xx) is
dropped, 429, 502, 503 and 504 are tried again.
"""

from __future__ import annotations

import base64
import os
import random
import re
import time
from collections.abc import Callable, Sequence
from typing import Any
from urllib.parse import unquote, urlsplit

import attrs
import structlog
import trio
from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import (
    ExportTraceServiceRequest,
    ExportTraceServiceResponse,
)

from .. import __version__
from ..facts.endpoint import Endpoint
from ..facts.settings import Tracing
from ..nursery.sleeper import Cut, Sleeper
from ..wire.line import Poller
from ..wire.tls import client_context
from .fetch import fetch
from .meters import Meters
from .record import Record
from .spans import Span, Value, spans_of
from .trace import Tracer, fresh_id
from .upstream import Upstream, UpstreamFailed

WITHIN_S = 10.0
"""The longest one delivery may take."""
FIRST_PAUSE_S = 1.0
MOST_PAUSE_S = 30.0
"""Pauses between two tries of a batch, doubled each time."""
GIVE_UP_S = 60.0
"""A batch that was not taken for so long is dropped: what comes after it is worth more."""
LAST_S = 3.0
"""At a stop, how long the collector may take for what is left."""
MOST_ANSWER_BYTES = 1 << 16
_PATH = "/v1/traces"
_IS_REMOTE_KNOWN, _IS_REMOTE, _SAMPLED = 0x100, 0x200, 1
_TRY_AGAIN = frozenset((429, 502, 503, 504))
_HEADER = re.compile(r"[A-Za-z0-9!#$%&'*+.^_`|~-]+")

log = structlog.get_logger("tracing")


@attrs.frozen
class Verdict:
    """What a try came to: `taken`, or else whether to try `again`; `trouble` is why not all of it was taken, or ""."""

    taken: bool = False
    again: bool = False
    trouble: str = ""


class Exporter:
    """The delivering side of a tracer. Made before the road starts; `run` in the ground nursery, `finish` at a stop."""

    def __init__(
        self, settings: Tracing, headers: str, meters: Meters, poller: Poller, sleepers: set[Sleeper],
        rng: random.Random | None = None, clock: Callable[[], float] = time.monotonic,
    ) -> None:  # fmt: skip
        """`headers` is `OTEL_EXPORTER_OTLP_HEADERS` as it is written. Raises ValueError where it is malformed."""
        self._rng = rng or random.Random()
        self._meters = meters
        self._clock = clock
        self._sleepers = sleepers
        self._sleeper = Sleeper()
        endpoint, password = collector_of(settings.endpoint)
        self._fields = (
            b"content-type: application/x-protobuf\r\nuser-agent: appliance/%b\r\n" % __version__.encode()
            + password
            + header_lines(headers)
        )
        self._url = endpoint.url
        self._upstream = Upstream(endpoint, poller, client_context() if endpoint.tls else None)
        self._resource: dict[str, Value] = {
            "service.name": "appliance",
            "service.version": __version__,
            "service.instance.id": fresh_id(self._rng, 16).hex(),
            "host.name": os.uname().nodename,
            "process.pid": os.getpid(),
        }
        self._failing = False
        self._ended = trio.Event()
        self.tracer = Tracer(settings.sample_ratio, meters, self._rng)

    async def run(self) -> None:
        """Deliver until `finish`."""
        self._sleepers.add(self._sleeper)
        try:
            while records := await self.tracer.batch():
                if not await self._deliver(await self._encoded(records)):
                    self.tracer.drop(*records)
                    if self.tracer.ending.is_set():
                        self.tracer.drop_waiting()
        finally:
            self._sleepers.discard(self._sleeper)
            self._upstream.close()
            self._ended.set()

    async def finish(self) -> None:
        """No more requests will come: deliver what is left, within `LAST_S`."""
        self.tracer.end()
        with trio.move_on_after(LAST_S):
            await self._ended.wait()

    async def _encoded(self, records: Sequence[Record]) -> bytes:
        request = ExportTraceServiceRequest()
        of_resource = request.resource_spans.add()
        _fill(of_resource.resource.attributes, self._resource)
        of_scope = of_resource.scope_spans.add()
        of_scope.scope.name = "appliance"
        of_scope.scope.version = __version__
        for record in records:
            try:
                for span in spans_of(record, self._rng):
                    encode(span, of_scope.spans.add())
            except Exception:  # a record that nobody thought of is not worth a router
                self.tracer.drop(record)
                log.exception("a request could not be told as spans", request_id=record.request_id)
            await trio.lowlevel.checkpoint()
        encoded: bytes = request.SerializeToString()
        return encoded

    async def _deliver(self, body: bytes) -> bool:
        """Try until it is taken; False when it never will be."""
        since = self._clock()
        pause_s = FIRST_PAUSE_S
        while True:
            verdict = await self._post(body)
            self._tell(verdict.trouble)
            if verdict.taken:
                return True
            if not verdict.again or self.tracer.ending.is_set() or self._clock() - since >= GIVE_UP_S:
                return False
            with trio.move_on_after(pause_s):
                await self.tracer.ending.wait()
            pause_s = min(2 * pause_s, MOST_PAUSE_S)

    async def _post(self, body: bytes) -> Verdict:
        """One delivery."""
        try:
            status, answer = await fetch(
                self._upstream, self._sleeper, _PATH.encode(), within_s=WITHIN_S, bound=MOST_ANSWER_BYTES,
                method=b"POST", fields=self._fields, body=body,
            )  # fmt: skip
        except UpstreamFailed as failed:
            return Verdict(again=True, trouble=failed.detail)
        except Cut:
            return Verdict(again=True, trouble=f"no answer within {WITHIN_S:g} s")
        if status in _TRY_AGAIN:
            return Verdict(again=True, trouble=f"it answers {status}")
        if not 200 <= status < 300:
            return Verdict(trouble=f"it answers {status}: is {self._url}{_PATH} an OTLP/HTTP receiver?")
        try:
            refused = ExportTraceServiceResponse.FromString(answer).partial_success.rejected_spans
        except DecodeError:  # an answer in JSON, or in no format at all: it was taken
            refused = 0
        self._meters.trace_dropped += refused
        return Verdict(taken=True, trouble=f"it rejected {refused} of the spans" if refused else "")

    def _tell(self, trouble: str) -> None:
        """One line when it starts to fail and one when it is over."""
        if trouble and not self._failing:
            log.warning("spans cannot be delivered, requests go on", collector=self._url, reason=trouble)
        elif not trouble and self._failing:
            log.info("spans are delivered again", collector=self._url, dropped=self._meters.trace_dropped)
        self._failing = bool(trouble)


def collector_of(url: str) -> tuple[Endpoint, bytes]:
    """Where spans go, and the header line for the user and password in the URL, b"" without one."""
    parts = urlsplit(url)
    tls = parts.scheme == "https"
    base = parts.path.rstrip("/").removesuffix(_PATH)
    endpoint = Endpoint("collector", parts.hostname or "", parts.port or (443 if tls else 80), tls, base)
    if parts.username is None:
        return endpoint, b""
    pair = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return endpoint, b"authorization: Basic %b\r\n" % base64.b64encode(pair.encode())


def header_lines(text: str) -> bytes:
    """`name=value,name=value`, the values percent-encoded, as header lines. Raises ValueError; its message is for an
    operator and holds no value, since one may be a key."""
    lines = b""
    for pair in text.split(","):
        if not pair.strip():
            continue
        name, equals, value = (part.strip() for part in pair.partition("="))
        plain = unquote(value)
        if not equals or not _HEADER.fullmatch(name) or not plain.isascii() or not plain.isprintable():
            shown = repr(name) if _HEADER.fullmatch(name) and equals else "an entry"
            raise ValueError(f"expected name=value pairs with commas between them; {shown} is none")
        lines += f"{name.lower()}: {plain}\r\n".encode()
    return lines


def encode(span: Span, into: Any) -> None:
    """Fill a protobuf Span. `into` is Any because generated messages carry no types."""
    into.trace_id = span.trace_id
    into.span_id = span.span_id
    into.parent_span_id = span.parent_id
    into.name = span.name
    into.kind = int(span.kind)
    into.start_time_unix_nano = span.start_ns
    into.end_time_unix_nano = span.end_ns
    into.flags = _SAMPLED | _IS_REMOTE_KNOWN | (_IS_REMOTE if span.remote else 0)
    if span.error:
        into.status.code = 2
    _fill(into.attributes, span.attributes)


def _fill(into: Any, attributes: dict[str, Value]) -> None:
    for key, value in attributes.items():
        to = into.add(key=key).value
        if isinstance(value, str):
            to.string_value = value
        elif isinstance(value, bool):
            to.bool_value = value
        elif isinstance(value, int):
            to.int_value = value
        else:
            to.double_value = value

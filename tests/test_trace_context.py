"""Which trace a request belongs to: reading and writing `traceparent`, and who is sampled."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.call import Ask, Call, Caller, Route
from appliance.facts.endpoint import Endpoint
from appliance.gateway.meters import Meters
from appliance.gateway.record import Record
from appliance.gateway.trace import Tracer
from appliance.nursery.sleeper import Sleeper
from appliance.wire import traceparent
from appliance.wire.traceparent import TraceParent

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
PARENT = f"00-{TRACE}-{SPAN}-01"
ENDPOINT = Endpoint("a", "127.0.0.1", 1)

ids = st.binary(min_size=16, max_size=16).filter(any)
span_ids = st.binary(min_size=8, max_size=8).filter(any)


@given(ids, span_ids, st.booleans())
def test_what_is_written_is_read_again(trace_id: bytes, span_id: bytes, sampled: bool) -> None:
    read = traceparent.read(traceparent.write(trace_id, span_id, sampled))
    assert read == TraceParent(trace_id, span_id, sampled)


@pytest.mark.parametrize(
    ("value", "sampled"),
    [
        (PARENT, True),
        (PARENT[:-2] + "00", False),
        (PARENT[:-2] + "03", True),
        (PARENT[:-2] + "fe", False),
        ("cc" + PARENT[2:], True),
        ("cc" + PARENT[2:] + "-what-comes-later", True),
    ],
)
def test_a_parent_of_any_version_is_read(value: str, sampled: bool) -> None:
    assert traceparent.read(value.encode()) == TraceParent(bytes.fromhex(TRACE), bytes.fromhex(SPAN), sampled)


@pytest.mark.parametrize(
    "value",
    [
        "",
        "00",
        PARENT.upper(),
        PARENT[:-1],
        PARENT + "0",
        PARENT + "-more",
        PARENT + "\n",
        "ff" + PARENT[2:],
        "cc" + PARENT[2:] + "more",
        f"00-{'0' * 32}-{SPAN}-01",
        f"00-{TRACE}-{'0' * 16}-01",
        f"00-{TRACE[:-1]}g-{SPAN}-01",
        PARENT.replace("-", "_"),
        f"{PARENT},{PARENT}",
    ],
)
def test_a_malformed_parent_is_none(value: str) -> None:
    assert traceparent.read(value.encode()) is None


@given(st.binary(max_size=70))
def test_bytes_of_any_kind_raise_nothing(value: bytes) -> None:
    traceparent.read(value)


def begun(ratio: float, headers: dict[bytes, bytes], seed: int = 1) -> tuple[Tracer, Record]:
    tracer = Tracer(ratio, Meters(), Random(seed))
    call = Call(
        b"id", b"POST", b"/v1/chat/completions", Route("chat"), headers, b"", Ask(), "llama", False, Caller(), 1.0
    )
    record = Record.of(call, Sleeper())
    record.trace = tracer.begin(call)
    return tracer, record


def sent(tracer: Tracer, record: Record) -> dict[str, str]:
    """The header lines of an attempt."""
    lines = tracer.attempt(record, ENDPOINT).decode().split("\r\n")
    assert lines.pop() == ""
    return dict(line.split(": ", 1) for line in lines)


@pytest.mark.parametrize("ratio", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("flag", ["00", "01"])
def test_the_decision_of_the_parent_holds(ratio: float, flag: str) -> None:
    value = PARENT[:-2] + flag
    tracer, record = begun(ratio, {b"traceparent": value.encode(), b"tracestate": b"a=1"})
    assert record.trace is not None
    assert record.trace.sampled is (flag == "01")
    lines = sent(tracer, record)
    assert lines["tracestate"] == "a=1"
    if flag == "00":
        assert lines["traceparent"] == value  # nothing of ours lies between
        assert not record.trace.tries
    else:
        (trial,) = record.trace.tries
        assert lines["traceparent"] == f"00-{TRACE}-{trial.span_id.hex()}-01"
        assert len({SPAN, record.trace.span_id.hex(), trial.span_id.hex()}) == 3


def test_a_malformed_parent_begins_a_new_trace_without_its_state() -> None:
    tracer, record = begun(1.0, {b"traceparent": b"00-junk", b"tracestate": b"a=1"})
    assert record.trace is not None
    assert (record.trace.parent_id, record.trace.sampled) == (b"", True)
    assert sent(tracer, record).keys() == {"traceparent"}


def test_who_is_not_recorded_tells_the_engine_so() -> None:
    tracer, record = begun(0.0, {})
    assert sent(tracer, record)["traceparent"].endswith("-00")


def test_the_ratio_decides_by_the_trace_id() -> None:
    tracer = Tracer(0.25, Meters(), Random(7))
    _, record = begun(0.25, {})
    call = Call(b"id", b"POST", b"/", Route("chat"), {}, b"", Ask(), "llama", False, Caller(), 1.0)
    traces = [tracer.begin(call) for _ in range(4000)]
    assert record.trace is not None
    assert len({trace.trace_id for trace in traces}) == 4000
    for trace in traces:
        assert trace.sampled is (int.from_bytes(trace.trace_id[8:], "big") < 2**62)
    assert 900 < sum(trace.sampled for trace in traces) < 1100


def test_every_attempt_has_a_span_of_its_own() -> None:
    tracer, record = begun(1.0, {})
    first, second = sent(tracer, record), sent(tracer, record)
    assert first != second
    assert first["traceparent"][:36] == second["traceparent"][:36]

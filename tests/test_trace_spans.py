"""What the collector hears of a request: one server span, and below it what was chosen and what was tried."""

from __future__ import annotations

import itertools
import socket
import time
from pathlib import Path
from random import Random

import pytest
import trio

from appliance.gateway.record import Record
from appliance.gateway.spans import Span, spans_of
from tests.collector import Collector, Got, collector
from tests.fake_engine import CHAT, DONE, Asked, FakeEngine, Peer, event, fake_engine, in_turn, says, streamed, whole
from tests.raw_client import BrokenOff, chat, request
from tests.routers import Running, router

TRACE, SPAN = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
INTERNAL, SERVER, CLIENT = 1, 2, 3
SECRET = "the launch code is 7734"


def tracing(to: Collector, ratio: float = 1.0) -> str:
    return f'[tracing]\nendpoint = "{to.url}"\nsample_ratio = {ratio}\n'


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch leaves without waiting for more."""
    monkeypatch.setattr("appliance.gateway.trace.FLUSH_S", 0.001)


async def trace_of(door: Running, to: Collector, request_id: str) -> list[Got]:
    await door.until(f"the spans of {request_id} arrive", lambda: to.trace_of(request_id))
    return to.trace_of(request_id)


def named(spans: list[Got], name: str) -> list[Got]:
    return [span for span in spans if span.name == name]


def sent_parents(engine: FakeEngine) -> list[str]:
    """The span id that each request to the engine named as its parent."""
    return [asked.by_name["traceparent"].split("-")[2] for asked in engine.asked]


async def test_a_good_request(tmp_path: Path) -> None:
    before = time.time_ns()
    async with fake_engine() as engine, collector() as to, router(tmp_path, engine, config=tracing(to)) as door:
        answer = await door.ask(chat("x-request-id: good", "authorization: Bearer sk-hush"))
        assert answer.status == 200
        spans = await trace_of(door, to, "good")
        server, admission, schedule, upstream = spans
        names = ["POST /v1/chat/completions", "admission", "schedule", "upstream"]
        assert [span.name for span in spans] == names
        assert [span.kind for span in spans] == [SERVER, INTERNAL, INTERNAL, CLIENT]
        assert {span.trace for span in spans} == {server.trace}
        assert [span.parent for span in spans] == ["", *[server.id] * 3]
        assert not any(span.error for span in spans)
        assert (
            before
            <= server.start_ns
            <= admission.start_ns
            <= admission.end_ns
            <= schedule.start_ns
            <= schedule.end_ns
            <= upstream.start_ns
        )
        assert upstream.start_ns < upstream.end_ns <= server.end_ns <= time.time_ns()
        assert server.about == {
            "http.request.method": "POST",
            "http.route": "/v1/chat/completions",
            "http.response.status_code": 200,
            "gen_ai.operation.name": "chat",
            "gen_ai.provider.name": "openai",
            "gen_ai.request.model": "llama",
            "gen_ai.response.model": "llama",
            "gen_ai.usage.input_tokens": 3,
            "gen_ai.usage.output_tokens": 1,
            "appliance.request_id": "good",
            "appliance.band": "silver",
            "appliance.outcome": "ok",
            "appliance.endpoint": "a",
        }
        assert admission.about["appliance.model"] == "llama"
        assert admission.about["appliance.band"] == "silver"
        assert schedule.about["appliance.endpoint"] == "a"
        assert schedule.about["appliance.model"] == "llama"
        assert upstream.about == {
            "http.request.method": "POST",
            "http.response.status_code": 200,
            "server.address": "127.0.0.1",
            "server.port": engine.port,
            "appliance.endpoint": "a",
        }
        assert to.resource["service.name"] == "appliance"
        # the engine goes on below the attempt
        assert engine.asked[0].by_name["traceparent"] == f"00-{server.trace}-{upstream.id}-01"


async def test_the_clients_trace_goes_on(tmp_path: Path) -> None:
    async with fake_engine() as engine, collector() as to, router(tmp_path, engine, config=tracing(to, 0.0)) as door:
        parent = f"traceparent: 00-{TRACE}-{SPAN}-01"
        await door.ask(chat("x-request-id: child", parent, "tracestate: vendor=1"))
        server, *_, upstream = await trace_of(door, to, "child")
        assert (server.trace, server.parent) == (TRACE, SPAN)
        assert server.flags & 0x300 == 0x300  # the parent is another process's
        assert upstream.flags & 0x300 == 0x100
        (asked,) = engine.asked
        assert asked.by_name["traceparent"] == f"00-{TRACE}-{upstream.id}-01"
        assert asked.by_name["tracestate"] == "vendor=1"
        assert [name for name, _ in asked.fields].count("traceparent") == 1


async def test_a_parent_that_is_not_recorded_passes_through(tmp_path: Path) -> None:
    async with fake_engine() as engine, collector() as to, router(tmp_path, engine, config=tracing(to)) as door:
        await door.ask(chat("x-request-id: unseen", f"traceparent: 00-{TRACE}-{SPAN}-00", "tracestate: vendor=1"))
        await door.ask(chat("x-request-id: seen"))
        await trace_of(door, to, "seen")
        assert not to.trace_of("unseen")
        assert engine.asked[0].by_name["traceparent"] == f"00-{TRACE}-{SPAN}-00"
        assert engine.asked[0].by_name["tracestate"] == "vendor=1"


async def test_without_tracing_the_clients_trace_is_not_touched(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        await door.ask(chat(f"traceparent: 00-{TRACE}-{SPAN}-01", "tracestate: vendor=1"))
        await door.ask(chat())
        assert engine.asked[0].by_name["traceparent"] == f"00-{TRACE}-{SPAN}-01"
        assert engine.asked[0].by_name["tracestate"] == "vendor=1"
        assert "traceparent" not in engine.asked[1].by_name


async def test_a_retried_request(tmp_path: Path) -> None:
    broken = whole(500, {"error": {"message": SECRET, "type": "server_error", "param": None, "code": None}})
    async with (
        fake_engine(in_turn(says(broken)), id="a") as first,
        fake_engine(in_turn(says(broken)), id="b") as second,
        fake_engine(says(whole(200, CHAT)), id="c") as third,
        collector() as to,
        router(tmp_path, first, second, third, config=tracing(to)) as door,
    ):
        for number in range(30):
            assert (await door.ask(chat(f"x-request-id: n{number}"))).status in (200, 500)
        await trace_of(door, to, "n29")
        retried = [spans for number in range(30) if len(named(spans := to.trace_of(f"n{number}"), "upstream")) > 1]
        assert retried
        engines = {"a": first, "b": second, "c": third}
        for spans in retried:
            server, tries, choices = spans[0], named(spans, "upstream"), named(spans, "schedule")
            assert all(span.parent == server.id and span.trace == server.trace for span in spans[1:])
            assert len(choices) == len(tries)
            # in order of time: choose, try, choose again, try again
            steps = [step for pair in zip(choices, tries, strict=True) for step in pair]
            assert all(step.end_ns <= after.start_ns for step, after in itertools.pairwise(steps))
            assert [choice.about["appliance.endpoint"] for choice in choices] == [
                trial.about["appliance.endpoint"] for trial in tries
            ]
            *failed, last = tries
            for number, trial in enumerate(failed):
                assert trial.error
                assert trial.about["error.type"] == "500"
                assert trial.about["http.response.status_code"] == 500
                assert trial.about["appliance.next"] == "retry another"
                assert trial.about.get("http.request.resend_count", 0) == number
            assert not last.error and not server.error
            assert last.about["http.request.resend_count"] == len(failed)
            assert server.about["appliance.endpoint"] == last.about["appliance.endpoint"] == "c"
            # each engine was told its own attempt's span
            for trial in tries:
                assert trial.id in sent_parents(engines[str(trial.about["appliance.endpoint"])])
        assert SECRET.encode() not in b"".join(asked.body for asked in to.asked)


async def test_the_same_endpoint_once_more(tmp_path: Path) -> None:
    answers = in_turn(says(whole(200, CHAT)), says(then="close"), says(whole(200, CHAT)))
    async with fake_engine(answers) as engine, collector() as to, router(tmp_path, engine, config=tracing(to)) as door:
        await door.ask(chat("x-request-id: before"))
        # the kept connection ends under the second request, which is sent again without a new choice
        assert (await door.ask(chat("x-request-id: again"))).status == 200
        spans = await trace_of(door, to, "again")
        first, second = named(spans, "upstream")
        assert len(named(spans, "schedule")) == 1
        assert first.about["error.type"] == "reset"
        assert first.about["appliance.next"] == "retry same"
        assert (first.error, second.error) == (True, False)
        assert first.end_ns <= second.start_ns
        assert sent_parents(engine)[1:] == [first.id, second.id]


async def test_a_streamed_request(tmp_path: Path) -> None:
    usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 4}}
    pieces = streamed(event("a"), event("b"), event("", usage=usage), DONE)
    async with fake_engine(says(*pieces)) as engine, collector() as to, router(
        tmp_path, engine, config=tracing(to)
    ) as door:  # fmt: skip
        await door.ask(chat("x-request-id: flow", stream=True))
        server, *_, upstream = await trace_of(door, to, "flow")
        assert server.about["gen_ai.request.stream"] is True
        assert server.about["gen_ai.usage.input_tokens"] == 9
        assert server.about["gen_ai.usage.output_tokens"] == 2
        assert server.about["gen_ai.usage.cache_read.input_tokens"] == 4
        first = server.about["gen_ai.response.time_to_first_chunk"]
        assert isinstance(first, float)
        assert 0 < first <= (server.end_ns - server.start_ns) / 1e9
        assert not any("usage" in key for key in upstream.about)  # told once, or it would be added up twice


async def test_a_stream_that_was_cut(tmp_path: Path) -> None:
    pieces = streamed(event("a"), end=b"")
    async with fake_engine(says(*pieces, then="reset")) as engine, collector() as to, router(
        tmp_path, engine, config=tracing(to)
    ) as door:  # fmt: skip
        client = await door.connect()
        await client.send(chat("x-request-id: cut", stream=True))
        try:
            await client.answer("POST")
        except BrokenOff:
            pass
        else:
            raise AssertionError("a cut stream looked whole")
        server, *_, upstream = await trace_of(door, to, "cut")
        assert server.error and upstream.error
        assert server.about["appliance.outcome"] == "cut"
        assert server.about["error.type"] == "upstream_failed"
        assert server.about["appliance.usage.estimated"] is True
        assert upstream.about["error.type"] in ("reset", "closed")


async def test_a_refused_request(tmp_path: Path) -> None:
    async with fake_engine() as engine, collector() as to, router(tmp_path, engine, config=tracing(to)) as door:
        assert (await door.ask(chat("x-request-id: no", model="nobody"))).status == 404
        (server,) = await trace_of(door, to, "no")
        assert server.about["http.response.status_code"] == 404
        assert server.about["error.type"] == "model_not_found"
        assert server.about["appliance.outcome"] == "refused"
        assert server.about["gen_ai.provider.name"] == "appliance"
        assert not server.error  # the conventions call only a 5xx the server's own
        assert not any("usage" in key for key in server.about)


async def test_a_request_that_waited_and_one_that_was_not_let_in(tmp_path: Path) -> None:
    free = trio.Event()

    async def held(asked: Asked, peer: Peer) -> None:
        await free.wait()
        await peer.send(whole(200, CHAT))

    async with fake_engine(held) as engine, collector() as to, trio.open_nursery() as clients:
        engine.capacity = 1
        config = f"{tracing(to)}[admission]\nqueue_capacity_total = 1\n{engine.toml}"
        async with router(tmp_path, config=config) as door:
            clients.start_soon(door.ask, chat("x-request-id: runs"))
            await door.until("the engine works", lambda: engine.asked)
            clients.start_soon(door.ask, chat("x-request-id: waits"))
            await door.until("the second waits", lambda: len(door.app.gateway.books.live) == 2)
            assert (await door.ask(chat("x-request-id: full"))).status == 503
            free.set()
            server, admission, schedule, _ = await trace_of(door, to, "waits")
            assert admission.about["appliance.blocker"] == "saturation"
            assert server.start_ns <= admission.start_ns < admission.end_ns <= schedule.start_ns
            server, admission = await trace_of(door, to, "full")
            assert admission.about["error.type"] == server.about["error.type"] == "queue_full"
            assert admission.error and server.error


async def test_a_fallback_asks_for_a_place_of_its_own(tmp_path: Path) -> None:
    broken = whole(500, {"error": {"message": "no", "type": "server_error", "param": None, "code": None}})
    async with fake_engine(says(broken), id="big") as big, fake_engine(id="small") as small, collector() as to:
        big.models, small.models = ("big",), ("small",)
        config = f'{tracing(to)}[[models]]\nname = "big"\nfallbacks = ["small"]\n'
        async with router(tmp_path, big, small, config=config) as door:
            assert (await door.ask(chat("x-request-id: fell", model="big"))).status == 200
            server, *steps = await trace_of(door, to, "fell")
            assert [span.name for span in steps] == ["admission", "schedule", "upstream"] * 2
            assert [span.about.get("appliance.model") for span in steps] == ["big", "big", None, "small", "small", None]
            assert all(before.end_ns <= after.start_ns for before, after in itertools.pairwise(steps[2:]))
            assert server.about["gen_ai.request.model"] == "big"
            assert server.about["gen_ai.response.model"] == "small"


async def test_nobody_can_be_reached(tmp_path: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))  # nobody else's, and nobody listens
        gone = FakeEngine(closed.getsockname()[1], says())
        async with collector() as to, router(tmp_path, gone, config=tracing(to)) as door:
            assert (await door.ask(chat("x-request-id: lost"))).status == 502
            spans = await trace_of(door, to, "lost")
            assert spans[0].error
            assert spans[0].about["error.type"] == "upstream_failed"
            (trial,) = named(spans, "upstream")
            assert trial.about["error.type"] == "refused"
            assert trial.about["appliance.next"] == "give up"


async def test_a_client_that_left(tmp_path: Path) -> None:
    async with fake_engine(says(then="silent")) as engine, collector() as to, router(
        tmp_path, engine, config=tracing(to)
    ) as door:  # fmt: skip
        client = await door.connect()
        await client.send(chat("x-request-id: left"))
        await door.until("the engine is asked", lambda: engine.asked)
        await client.close()
        server, *_, upstream = await trace_of(door, to, "left")
        assert server.about["http.response.status_code"] == 499
        assert server.about["appliance.outcome"] == "client left"
        assert upstream.about["error.type"] == "client_left"
        assert not server.error and not upstream.error  # nobody's fault but the client's
        assert upstream.end_ns <= server.end_ns


async def test_a_name_that_somebody_made_up_is_bounded(tmp_path: Path) -> None:
    async with fake_engine() as engine, collector() as to, router(tmp_path, engine, config=tracing(to)) as door:
        await door.ask(chat("x-request-id: long", model="x" * 5000))
        (server,) = await trace_of(door, to, "long")
        assert server.about["gen_ai.request.model"] == "x" * 200


async def test_a_record_that_makes_no_spans_costs_only_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def picky(record: Record, rng: Random) -> list[Span]:
        if record.request_id == "odd":
            raise ValueError("never seen before")
        return spans_of(record, rng)

    monkeypatch.setattr("appliance.gateway.otlp.spans_of", picky)
    async with fake_engine() as engine, collector() as to, router(tmp_path, engine, config=tracing(to)) as door:
        await door.ask(chat("x-request-id: odd"))
        await door.ask(chat("x-request-id: good"))
        await trace_of(door, to, "good")
        assert not to.trace_of("odd")
        assert door.app.gateway.meters.trace_dropped == 4
        (line,) = door.told("a request could not be told as spans")
        assert line["request_id"] == "odd"


async def test_the_id_of_a_stored_response_is_not_told(tmp_path: Path) -> None:
    made = {**CHAT, "id": "resp_7734", "object": "response"}
    async with fake_engine(says(whole(200, made))) as engine, collector() as to, router(
        tmp_path, engine, config=tracing(to)
    ) as door:  # fmt: skip
        body = b'{"model": "llama", "input": "' + SECRET.encode() + b'"}'
        await door.ask(request("POST", "/v1/responses", "x-request-id: make", body=body))
        await door.ask(request("GET", "/v1/responses/resp_7734?key=hush", "x-request-id: fetch"))
        (server, *_) = await trace_of(door, to, "fetch")
        assert server.name == "GET /v1/responses/{id}"
        assert server.about["http.request.method"] == "GET"
        told = b"".join(asked.body for asked in to.asked)
        for word in (b"resp_7734", b"hush", SECRET.encode()):
            assert word not in told

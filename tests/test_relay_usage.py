"""What an answer used: as each engine says it, and estimated where it does not, or where it was cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trio.testing import wait_all_tasks_blocked

from appliance.gateway.record import Record
from appliance.gateway.usage import Tally
from tests.fake_engine import CHAT, DONE, event, fake_engine, says, streamed, whole
from tests.raw_client import BrokenOff, chat
from tests.routers import Running, router
from tests.test_streams_broken import typed


async def record_of(door: Running) -> Record:
    await wait_all_tasks_blocked()
    return next(door.app.gateway.books.recent(1))


def figures(tally: Tally | None) -> tuple[int, int, int, int]:
    assert tally is not None
    return tally.prompt_tokens, tally.completion_tokens, tally.cached_tokens, tally.reasoning_tokens


def last(usage: Any, **more: Any) -> bytes:
    return b"data: " + json.dumps({"id": "c", "choices": [], "usage": usage, **more}).encode() + b"\n\n"


TIMINGS = {"prompt_n": 3, "predicted_n": 2, "usage": "not this"}
TWO = {"prompt_tokens": 31, "completion_tokens": 7}
LOGPROBS = [{"token": "usage", "logprob": -1}]
START = {"id": "m", "usage": {"input_tokens": 31, "cache_read_input_tokens": 16, "output_tokens": 1}}
EMBEDDINGS = {"data": [{"embedding": [0.1] * 4000}], "usage": {"prompt_tokens": 31, "total_tokens": 31}}
VLLM = {
    "prompt_tokens": 31, "total_tokens": 38, "completion_tokens": 7,
    "prompt_tokens_details": {"cached_tokens": 16}, "completion_tokens_details": {"reasoning_tokens": 3},
}  # fmt: skip
NULLS = {"prompt_tokens": 31, "completion_tokens": 7, "prompt_tokens_details": None, "completion_tokens_details": {}}

STREAMS: dict[str, tuple[str, tuple[bytes, ...], tuple[int, int, int, int]]] = {
    "vLLM": ("chat/completions", (event("a", usage=None), last(VLLM), DONE), (31, 7, 16, 3)),
    "vLLM, nulls": ("chat/completions", (event("a"), last(NULLS), DONE), (31, 7, 0, 0)),
    "vLLM, continuous": (
        "chat/completions",
        (
            event("a", usage={"prompt_tokens": 31, "completion_tokens": 1, "total_tokens": 32}),
            event("b", usage={"prompt_tokens": 31, "completion_tokens": 2, "total_tokens": 33}),
            last({"prompt_tokens": 31, "completion_tokens": 2, "total_tokens": 33}),
            DONE,
        ),
        (31, 2, 0, 0),
    ),
    "SGLang": (
        "chat/completions",
        (event("a", usage=None), last({**TWO, "prompt_tokens_details": None}), DONE),
        (31, 7, 0, 0),
    ),
    "llama.cpp": ("chat/completions", (event("a"), last(TWO, timings=TIMINGS), DONE), (31, 7, 0, 0)),
    "in the last chunk with content": ("completions", (event("a", usage=VLLM), DONE), (31, 7, 16, 3)),
    "responses": (
        "responses",
        (
            typed("response.created", response={"id": "resp_1", "usage": None}),
            typed("response.output_text.delta", delta='"usage": {"input_tokens": 999}'),
            typed("response.completed", response={"id": "resp_1", "usage": {
                "input_tokens": 31, "input_tokens_details": {"cached_tokens": 16}, "output_tokens": 7,
                "output_tokens_details": {"reasoning_tokens": 3}, "total_tokens": 38,
            }}),
        ),
        (31, 7, 16, 3),
    ),
    "messages": (
        "messages",
        (
            typed("message_start", message=START),
            typed("content_block_delta", delta={"type": "text_delta", "text": "a"}),
            typed("message_delta", delta={"stop_reason": "end_turn"}, usage={"output_tokens": 7}),
            typed("message_stop"),
        ),
        (31, 7, 16, 0),
    ),
    "a token called usage": (
        "chat/completions",
        (event("a", usage=TWO, logprobs=LOGPROBS), DONE),
        (31, 7, 0, 0),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("target", "events", "wanted"), STREAMS.values(), ids=STREAMS.keys())
async def test_a_stream_s_own_figures_count(
    tmp_path: Path, target: str, events: tuple[bytes, ...], wanted: tuple[int, int, int, int]
) -> None:
    async with fake_engine(says(*streamed(*events))) as engine, router(tmp_path, engine) as door:
        assert (await door.ask(chat(target=f"/v1/{target}", stream=True))).body == b"".join(events)
        record = await record_of(door)
        assert figures(record.tally) == wanted and not record.estimated
        meters = door.app.gateway.meters.models["llama"]
        assert (meters.prompt_tokens, meters.completion_tokens, meters.cached_tokens) == wanted[:3]


BODIES: dict[str, tuple[str, Any, tuple[int, int, int, int]]] = {
    "vLLM": ("chat/completions", {**CHAT, "usage": VLLM}, (31, 7, 16, 3)),
    "nulls": ("chat/completions", {**CHAT, "usage": NULLS}, (31, 7, 0, 0)),
    "llama.cpp": ("chat/completions", {**CHAT, "usage": TWO, "timings": TIMINGS}, (31, 7, 0, 0)),
    "embeddings": ("embeddings", EMBEDDINGS, (31, 0, 0, 0)),
    "responses": ("responses", {"id": "resp_1", "usage": {"input_tokens": 31, "output_tokens": 7}}, (31, 7, 0, 0)),
    "messages": ("messages", {"content": [], "usage": {"input_tokens": 31, "output_tokens": 7}}, (31, 7, 0, 0)),
    "a large one": ("chat/completions", {"choices": ["x" * 400_000], "usage": VLLM}, (31, 7, 16, 3)),
    "usage before a large rest that names it": (
        "chat/completions", {"usage": VLLM, "choices": [{"token": "usage"}, {"usage": 1}, "y" * 3000]}, (31, 7, 16, 3),
    ),
}  # fmt: skip


@pytest.mark.parametrize(("target", "said", "wanted"), BODIES.values(), ids=BODIES.keys())
@pytest.mark.parametrize("chunks", [False, True])
async def test_a_document_s_own_figures_count(
    tmp_path: Path, target: str, said: Any, wanted: tuple[int, int, int, int], chunks: bool
) -> None:
    raw = whole(200, said)
    if chunks:
        body = raw.partition(b"\r\n\r\n")[2]
        raw = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
        raw += b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body)
    async with fake_engine(says(raw)) as engine, router(tmp_path, engine) as door:
        assert (await door.ask(chat(target=f"/v1/{target}"))).json() == said
        record = await record_of(door)
        assert figures(record.tally) == wanted and not record.estimated


async def test_without_figures_it_is_estimated(tmp_path: Path) -> None:
    """Four bytes of the request a token, and a token an event."""
    async with fake_engine(says(*streamed(*[event("a")] * 9, DONE))) as engine, router(tmp_path, engine) as door:
        raw = chat(stream=True, filler="x" * 4000)
        await door.ask(raw)
        record = await record_of(door)
        assert record.estimated
        size = len(raw.partition(b"\r\n\r\n")[2])
        assert figures(record.tally) == (size // 4, 9, 0, 0)


CUT: dict[str, tuple[str, tuple[bytes, ...], int]] = {
    "without figures": ("chat/completions", tuple([event("a")] * 9), 9),
    "with a first figure": (
        "messages",
        (
            typed("message_start", message={"id": "m", "usage": {"input_tokens": 31, "output_tokens": 1}}),
            *[typed("content_block_delta", delta={"type": "text_delta", "text": "a"})] * 9,
        ),
        9,
    ),
    "with continuous figures": (
        "chat/completions",
        tuple(event("a", usage={"prompt_tokens": 31, "completion_tokens": n * 3}) for n in range(1, 10)),
        27,
    ),
}


@pytest.mark.parametrize(("target", "events", "completion"), CUT.values(), ids=CUT.keys())
async def test_a_cut_stream_is_charged_for_what_was_delivered(
    tmp_path: Path, target: str, events: tuple[bytes, ...], completion: int
) -> None:
    async with fake_engine(says(*streamed(*events, end=b""), then="close")) as engine, router(tmp_path, engine) as door:
        with pytest.raises(BrokenOff):
            await door.ask(chat(target=f"/v1/{target}", stream=True))
        record = await record_of(door)
        assert record.estimated and record.tally is not None
        assert record.tally.completion_tokens == completion
        assert record.tally.prompt_tokens == (31 if b"31" in events[0] else record.tally.prompt_tokens) > 0


async def test_a_client_that_left_is_charged_likewise(tmp_path: Path) -> None:
    script = says(*streamed(*[event("a")] * 5, end=b""), then="silent")
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=True))
        await wait_all_tasks_blocked()
        await client.close()
        record = await record_of(door)
        assert record.estimated and record.tally is not None and record.tally.completion_tokens == 5


async def test_nothing_is_charged_for_what_was_not_answered(tmp_path: Path) -> None:
    async with fake_engine(says(whole(500, CHAT))) as engine, router(tmp_path, engine) as door:
        await door.ask(chat())
        meters = door.app.gateway.meters.models["llama"]
        assert (meters.prompt_tokens, meters.completion_tokens) == (0, 0)


LIES = st.one_of(
    st.none(), st.booleans(), st.integers(), st.floats(allow_nan=False), st.text(max_size=5),
    st.lists(st.integers(), max_size=2), st.dictionaries(st.text(max_size=5), st.integers(), max_size=2),
)  # fmt: skip
NAMES = (
    "prompt_tokens", "completion_tokens", "input_tokens", "output_tokens", "cache_read_input_tokens",
    "prompt_tokens_details", "completion_tokens_details", "input_tokens_details", "output_tokens_details",
)  # fmt: skip


@settings(deadline=None)
@given(st.dictionaries(st.sampled_from(NAMES), LIES), st.booleans())
def test_no_lie_about_usage_does_harm(usage: dict[str, Any], streamed: bool) -> None:
    tally = Tally()
    if streamed:
        tally.event(last(usage), 1.0)
    else:
        tally.body(json.dumps({"usage": usage}).encode(), 1.0)
    tally.estimate(400)
    for figure in figures(tally):
        assert isinstance(figure, int) and 0 <= figure <= 1 << 40
    for name, place in (("prompt_tokens", 0), ("completion_tokens", 1)):
        value = usage.get(name)
        if type(value) is int and 0 < value <= 1 << 40:
            assert figures(tally)[place] == value, "a lie about one figure hides another"


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_no_bytes_do_harm(data: bytes) -> None:
    tally = Tally()
    tally.wants_id = True
    tally.event(b'data: {"usage":' + data, 1.0)
    tally.body(b'{"usage":' + data, 1.0)
    tally.estimate(4)


async def test_the_time_of_the_first_token_is_that_of_the_first_content(tmp_path: Path) -> None:
    role = event("").replace(b'"content": ""', b'"role": "assistant", "content": ""')
    async with (
        fake_engine(says(*streamed(role, event("a"), event("b"), DONE))) as engine,
        router(tmp_path, engine) as door,
    ):
        await door.ask(chat(stream=True))
        record = await record_of(door)
        assert record.tally is not None and record.tally.content_events == 2
        assert record.dispatched_at <= record.first_byte_at <= record.tally.last_content_at
        meters = door.app.gateway.meters.models["llama"]
        assert sum(meters.first_token.counts) == 1 and sum(meters.inter_token.counts) == 1

"""A stream that did not end as its route says never looks like a success: to a raw reader, to httpx, to the official
clients, nor in the books."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import attrs
import httpx
import openai
import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from appliance.gateway.record import Record
from tests.fake_engine import DONE, LAST, STREAM_HEAD, Script, chunk, event, fake_engine, says, streamed, whole
from tests.raw_client import BrokenOff, Client, chat, request
from tests.routers import Running, router

SSE_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n"
AB = (event("a"), event("b"))
ERROR = b'data: {"error":{"message":"the engine died","type":"InternalServerError","param":null,"code":500}}\n\n'
FLAT = b'data: {"object":"error","message":"the engine died","type":"X","param":null,"code":500}\n\n'
TORN = event("torn")[:40]

BROKEN: dict[str, tuple[Script, bool]] = {
    # an engine that breaks after its head has been passed on; whether an error event of ours can follow
    "closed between events": (says(*streamed(*AB, end=b""), then="close"), True),
    "reset between events": (says(*streamed(*AB, end=b""), then="reset"), True),
    "closed within an event": (says(*streamed(*AB, TORN, end=b""), then="close"), False),
    "reset within a chunk": (says(*streamed(*AB, end=b"50\r\n" + TORN), then="reset"), False),
    "closed within a size line": (says(*streamed(*AB, end=b"5"), then="close"), True),
    "closed within the last chunk": (says(*streamed(*AB, end=b"0\r\n"), then="close"), True),
    "garbage for a chunk": (says(*streamed(*AB, end=b"zz\r\n")), True),
    "a chunk longer than its size": (says(*streamed(*AB, end=b"2\r\nabcdef\r\n")), True),
    "a trailer": (says(*streamed(*AB, end=b"0\r\nx: y\r\n\r\n")), True),
    "a proper end, but not the engine's": (says(*streamed(*AB)), True),
    "a proper end within an event": (says(*streamed(*AB, TORN)), False),
    "a length, but no end": (
        says(SSE_HEAD + b"content-length: %d\r\n\r\n" % len(b"".join(AB)), b"".join(AB)), True,
    ),
    "shorter than its length": (says(SSE_HEAD + b"content-length: 9999\r\n\r\n", *AB, then="close"), True),
    "the end of the connection, but no end": (says(SSE_HEAD + b"\r\n", *AB, then="close"), True),
}  # fmt: skip


async def record_of(door: Running) -> Record:
    await wait_all_tasks_blocked()
    (record,) = door.app.gateway.books.recent(5)
    return record


@pytest.mark.parametrize(("script", "told"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_broken_stream_is_told_and_aborted(tmp_path: Path, script: Script, told: bool) -> None:
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        with pytest.raises(BrokenOff) as broken:
            await door.ask(chat(stream=True))
        answer = broken.value.args[0]
        assert answer.status == 200
        assert answer.body.startswith(b"".join(AB))
        assert b"[DONE]" not in answer.body
        last = answer.body[len(b"".join(AB)) :]
        if told:
            error = json.loads(last.removeprefix(b"data: "))["error"]
            assert set(error) == {"message", "type", "param", "code"}
            assert error["code"] == "upstream_failed"
        else:
            assert TORN.startswith(last), "nothing may be put into an open event"
        assert len(engine.asked) == 1, "a byte had come back"
        record = await record_of(door)
        assert (record.outcome, record.code, record.estimated) == ("cut", 502, True)
        assert door.app.gateway.table.members["a"].penalty > 0


@pytest.mark.parametrize(("script", "told"), BROKEN.values(), ids=BROKEN.keys())
async def test_a_client_without_chunks_sees_a_reset(tmp_path: Path, script: Script, told: bool) -> None:
    """To HTTP/1.0 the end of the connection is the end of the body: only a reset says that it was none."""
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=True, version="1.0"))
        raw, how = await client.rest()
        assert how == "reset"
        assert b"[DONE]" not in raw


MIDDLE: dict[str, Script] = {
    "an error, then its end": says(*streamed(*AB, ERROR, DONE)),
    "a flat error, then its end": says(*streamed(*AB, FLAT, DONE)),
    "an error field, then its end": says(*streamed(*AB, ERROR.replace(b"data:", b"error:"), DONE)),
    "an error under CRLF": says(*streamed(*AB, b"event: error\r\ndata: {}\r\n\r\n", DONE)),
}


@pytest.mark.parametrize("script", MIDDLE.values(), ids=MIDDLE.keys())
async def test_an_error_event_makes_it_a_failure_whatever_follows(tmp_path: Path, script: Script) -> None:
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=True))
        await client.until(b"\r\n\r\n")
        raw = await client.until(LAST)
        assert raw.startswith(chunk(AB[0]) + chunk(AB[1])) and raw.endswith(chunk(DONE) + LAST), (
            "the bytes pass as they are"
        )
        record = await record_of(door)
        assert (record.outcome, record.code, record.reason) == ("failed", 502, "error_event")
        assert door.app.gateway.table.members["a"].penalty > 0


async def test_an_error_without_an_end_is_told_once(tmp_path: Path) -> None:
    """The engine has said why: a second error of ours would only hide it. The body is aborted all the same."""
    async with fake_engine(says(*streamed(*AB, ERROR))) as engine, router(tmp_path, engine) as door:
        with pytest.raises(BrokenOff) as broken:
            await door.ask(chat(stream=True))
        assert broken.value.args[0].body == b"".join((*AB, ERROR))


async def test_a_client_error_in_the_middle_is_no_fault_of_the_engine(tmp_path: Path) -> None:
    error = ERROR.replace(b"500", b"400")
    async with fake_engine(says(*streamed(*AB, error, DONE))) as engine, router(tmp_path, engine) as door:
        await door.ask(chat(stream=True))
        assert (await record_of(door)).outcome == "failed"
        assert not door.app.gateway.table.members["a"].penalty


@pytest.mark.parametrize("comment", [b"", b": ping\n\n", b": a\r\n: b\r\n\r\n"])
@pytest.mark.parametrize("error", [ERROR, FLAT])
async def test_a_stream_that_begins_with_an_error_is_an_answer_with_a_status(
    tmp_path: Path, error: bytes, comment: bytes
) -> None:
    pieces = streamed(*([comment] if comment else []), error.replace(b"500", b"400"), DONE)
    async with fake_engine(says(*pieces)) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(stream=True))
        assert answer.status == 400 and answer.fields["content-type"] == "application/json"
        assert answer.error["message"] == "the engine died"
        assert (await record_of(door)).outcome == "failed"


@pytest.mark.parametrize("then", ["close", "reset"])
@pytest.mark.parametrize("before", [(), (b": ping\n\n",), (TORN,)], ids=["nothing", "a comment", "half an event"])
async def test_a_stream_that_ends_before_it_began_is_a_502(
    tmp_path: Path, before: tuple[bytes, ...], then: str
) -> None:
    async with fake_engine(says(*streamed(*before, end=b""), then=then)) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(stream=True))
        assert answer.status == 502 and answer.error["code"] == "upstream_failed"
        assert len(engine.asked) == 1, "a byte had come back"


async def test_an_end_without_its_empty_line_is_an_end(tmp_path: Path) -> None:
    async with fake_engine(says(*streamed(*AB, b"data: [DONE]\n"))) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(stream=True))
        assert answer.body.endswith(b"data: [DONE]\n")
        assert (await record_of(door)).outcome == "ok"


@pytest.mark.parametrize("end", [b"", b"zz\r\n", b"50\r\nhalf"], ids=["nothing", "garbage", "a torn chunk"])
async def test_what_breaks_after_the_engine_s_end_breaks_nothing(tmp_path: Path, end: bytes) -> None:
    async with (
        fake_engine(says(*streamed(*AB, DONE, end=end), then="reset")) as engine,
        router(tmp_path, engine) as door,
    ):
        try:
            body = (await door.ask(chat(stream=True))).body
        except BrokenOff as broken:
            assert b"half" in end, "only an open chunk cannot be ended"
            body = broken.args[0].body
        assert body.startswith(b"".join((*AB, DONE)))
        assert (await record_of(door)).outcome == "ok"


async def test_a_body_that_does_not_end_after_the_engine_s_end_is_ended(tmp_path: Path) -> None:
    async with (
        fake_engine(says(*streamed(*AB, DONE, end=b""), then="silent")) as engine,
        router(tmp_path, engine) as door,
    ):
        client = await door.connect()
        await client.send(chat(stream=True))
        await client.until(chunk(DONE))
        await wait_all_tasks_blocked()
        door.later(3)
        assert await client.until(LAST) == LAST
        record = await record_of(door)
        assert (record.outcome, record.estimated) == ("ok", True), "no usage was told"
        await client.send(chat(stream=True))  # the connection is in step
        await client.until(chunk(DONE))


async def test_a_client_that_leaves_at_the_end_it_knows_had_a_success(tmp_path: Path) -> None:
    """The official clients stop reading at `[DONE]`."""
    async with (
        fake_engine(says(*streamed(*AB, DONE, end=b""), then="silent")) as engine,
        router(tmp_path, engine) as door,
    ):
        client = await door.connect()
        await client.send(chat(stream=True))
        await client.until(chunk(DONE))
        await client.close()
        assert (await record_of(door)).outcome == "ok"


# -- other routes ------------------------------------------------------------------------------------------------------


def typed(kind: str, **more: Any) -> bytes:
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), json.dumps({"type": kind, **more}).encode())


RESPONSES = (
    typed("response.created", response={"id": "resp_1", "status": "in_progress", "error": None}),
    typed("response.output_text.delta", delta="a response.completed b"),
)
MESSAGES = (
    typed("message_start", message={"id": "msg_1", "usage": {"input_tokens": 25, "output_tokens": 1}}),
    typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "message_stop"}),
)
ENDS = {
    "/v1/responses": (RESPONSES, (typed("response.completed", response={}), typed("response.incomplete", response={}))),
    "/v1/messages": (MESSAGES, (typed("message_stop"),)),
    "/v1/completions": (AB, (DONE, b"data:[DONE]\n\n", b"data: [DONE] \r\n\r\n")),
}


@pytest.mark.parametrize("target", ENDS)
async def test_each_route_has_its_own_end(tmp_path: Path, target: str) -> None:
    events, ends = ENDS[target]
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for end in ends:
            engine.script = says(*streamed(*events, end))
            assert (await door.ask(chat(target=target, stream=True))).body == b"".join((*events, end))
        engine.script = says(*streamed(*events))
        with pytest.raises(BrokenOff) as broken:
            await door.ask(chat(target=target, stream=True))
        last = broken.value.args[0].body.removeprefix(b"".join(events))
        if target == "/v1/messages":
            assert last.startswith(b"event: error\ndata: ")
            assert json.loads(last[len(b"event: error\ndata: ") :])["type"] == "error"
        else:
            assert json.loads(last.removeprefix(b"data: "))["error"]["code"] == "upstream_failed"


async def test_a_failed_response_ends_properly_and_is_a_failure(tmp_path: Path) -> None:
    failed = typed("response.failed", response={"error": {"code": "server_error", "message": "died"}})
    async with fake_engine(says(*streamed(*RESPONSES, failed))) as engine, router(tmp_path, engine) as door:
        assert (await door.ask(chat(target="/v1/responses", stream=True))).body.endswith(failed)
        assert (await record_of(door)).outcome == "failed"


async def test_a_route_without_a_known_end_ends_with_its_body(tmp_path: Path) -> None:
    async with fake_engine(says(*streamed(*AB))) as engine, router(tmp_path, engine) as door:
        assert (await door.ask(chat(target="/generate", stream=True))).body == b"".join(AB)
        engine.script = says(*streamed(*AB, end=b""), then="close")
        with pytest.raises(BrokenOff):
            await door.ask(chat(target="/generate", stream=True))


# -- what clients make of it -------------------------------------------------------------------------------------------


@attrs.frozen
class Seen:
    """What a client got: the texts, and the exception that ended it, None for a success."""

    texts: list[str]
    error: Exception | None


def by_httpx(url: str) -> Seen:
    texts = []
    try:
        with httpx.stream("POST", f"{url}/v1/chat/completions", json={"model": "llama", "stream": True}) as answer:
            answer.raise_for_status()
            texts.extend(answer.iter_lines())
    except httpx.HTTPError as error:
        return Seen(texts, error)
    failed = any('"error"' in text or text.startswith("event: error") for text in texts)
    return Seen(texts, ValueError("an error event") if failed or "data: [DONE]" not in texts else None)


def by_openai(url: str) -> Seen:
    texts = []
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            stream = client.chat.completions.create(
                model="llama", messages=[{"role": "user", "content": "hi"}], stream=True
            )
            for piece in stream:  # one by one: what came stays when it breaks off
                texts.append(piece.choices[0].delta.content or "")
    except (openai.OpenAIError, httpx.HTTPError) as error:
        return Seen(texts, error)
    return Seen(texts, None)


def by_openai_responses(url: str) -> Seen:
    texts = []
    try:
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0) as client:
            for piece in client.responses.create(model="llama", input="hi", stream=True):
                texts.append(piece.type)
    except (openai.OpenAIError, httpx.HTTPError) as error:
        return Seen(texts, error)
    return Seen(texts, None)


def by_anthropic(url: str) -> Seen:
    texts = []
    try:
        with (
            anthropic.Anthropic(base_url=url, api_key="x", max_retries=0) as client,
            client.messages.stream(model="llama", max_tokens=5, messages=[{"role": "user", "content": "hi"}]) as stream,
        ):
            for text in stream.text_stream:
                texts.append(text)
    except (anthropic.AnthropicError, httpx.HTTPError) as error:
        return Seen(texts, error)
    return Seen(texts, None)


READERS: dict[str, Callable[[str], Seen]] = {"httpx": by_httpx, "openai": by_openai}
FAILURES = {**{name: script for name, (script, _) in BROKEN.items()}, **dict(list(MIDDLE.items())[:1])}


@pytest.mark.parametrize("reader", READERS)
async def test_no_client_takes_a_failure_for_a_success(tmp_path: Path, reader: str) -> None:
    read = READERS[reader]
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for name, script in FAILURES.items():
            engine.script = script
            seen = await trio.to_thread.run_sync(read, door.url)
            assert seen.error is not None, name
            assert len(seen.texts) >= 2, (name, seen)
            door.app.gateway.table.members["a"].breaker.__init__()  # type: ignore[misc]  # each case stands for itself
        engine.script = says(*streamed(ERROR, DONE))
        seen = await trio.to_thread.run_sync(read, door.url)
        assert seen.error is not None and not seen.texts
        engine.script = says(*streamed(*AB, DONE))
        assert (await trio.to_thread.run_sync(read, door.url)).error is None


TALK = (
    typed("message_start", message={
        "id": "msg_1", "type": "message", "role": "assistant", "model": "llama", "content": [], "stop_reason": None,
        "stop_sequence": None, "usage": {"input_tokens": 3, "output_tokens": 1},
    }),
    typed("content_block_start", index=0, content_block={"type": "text", "text": ""}),
    typed("content_block_delta", index=0, delta={"type": "text_delta", "text": "hello"}),
)  # fmt: skip
TALK_END = (
    typed("content_block_stop", index=0),
    typed("message_delta", delta={"stop_reason": "end_turn", "stop_sequence": None}, usage={"output_tokens": 2}),
    typed("message_stop"),
)


async def test_the_anthropic_client_sees_what_happened(tmp_path: Path) -> None:
    overloaded = typed("error", error={"type": "overloaded_error", "message": "Overloaded"})
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        engine.script = says(*streamed(*TALK, *TALK_END))
        assert await trio.to_thread.run_sync(by_anthropic, door.url) == Seen(["hello"], None)
        for script, kind in (
            (says(*streamed(*TALK, end=b""), then="reset"), anthropic.APIStatusError),
            (says(*streamed(*TALK)), anthropic.APIStatusError),
            (says(*streamed(*TALK, overloaded)), anthropic.APIStatusError),
            (says(*streamed(overloaded)), anthropic.APIStatusError),
            (says(whole(500, b"<html>died</html>", "content-type: text/html")), anthropic.InternalServerError),
        ):
            engine.script = script
            seen = await trio.to_thread.run_sync(by_anthropic, door.url)
            assert isinstance(seen.error, kind), seen


async def test_the_openai_client_sees_it_on_responses_too(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for script in (
            says(*streamed(*RESPONSES, end=b""), then="reset"),
            says(*streamed(*RESPONSES)),
            says(*streamed(ERROR)),
        ):
            engine.script = script
            seen = await trio.to_thread.run_sync(by_openai_responses, door.url)
            assert seen.error is not None, seen
        engine.script = says(*streamed(*RESPONSES, typed("response.failed", response={"status": "failed"})))
        seen = await trio.to_thread.run_sync(by_openai_responses, door.url)
        assert seen.error is None and seen.texts[-1] == "response.failed", "which is no success either"


async def test_a_raw_reader_and_a_pipelined_request_stay_in_step(tmp_path: Path) -> None:
    """A second request that came during the stream is answered after it, and not at all after a broken one."""
    async with fake_engine(says(*streamed(*AB, DONE))) as engine, router(tmp_path, engine) as door:
        client: Client = await door.connect()
        await client.send(chat(stream=True) + request("GET", "/v1/models"))
        assert (await client.answer("POST")).body.endswith(DONE)
        assert (await client.answer()).json()["object"] == "list"
        engine.script = says(*streamed(*AB))
        await client.send(chat(stream=True) + request("GET", "/v1/models"))
        raw, _ = await client.rest()
        assert b'"object":"list"' not in raw and raw.count(b"HTTP/1.1") == 1


async def test_the_first_event_is_not_waited_for_without_bound(tmp_path: Path) -> None:
    """Comments without end, or one event without end, must not fill the memory: they are passed on."""
    flood = chunk(b": " + b"x" * 60_000 + b"\n\n")
    async with fake_engine(says(STREAM_HEAD, *[flood] * 30, then="silent")) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(stream=True))
        await client.until(b"\r\n\r\n")
        await wait_all_tasks_blocked()
        door.later(601)
        raw, _ = await client.rest()
        assert b"first_token_s" in raw and b"upstream_timeout" in raw
        assert (await record_of(door)).outcome == "cut"

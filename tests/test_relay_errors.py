"""Errors of engines as clients get them, and the router's own key for an engine."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import trio

from tests.fake_engine import CHAT, DONE, Asked, Peer, event, fake_engine, in_turn, says, streamed, whole
from tests.raw_client import chat
from tests.routers import router

OURS = {"message": "too long", "type": "BadRequestError", "param": "messages", "code": 400}

UNTOUCHED = {
    "vLLM": b'{"error": {"message":"too long","type":"BadRequestError","param":null,"code":400}}',
    "OpenAI": b'{\n  "error": {\n    "message": "m",\n "type": "t",\n "param": "p",\n "code": "c"}, "more": 1.50}',
}


@pytest.mark.parametrize("body", UNTOUCHED.values(), ids=UNTOUCHED.keys())
@pytest.mark.parametrize("status", [400, 404, 422, 429, 500, 503])
async def test_an_error_in_the_right_shape_passes_untouched(tmp_path: Path, body: bytes, status: int) -> None:
    said = whole(status, body, "content-type: application/json; charset=utf-8", "x-more: 1", "retry-after: 17")
    async with fake_engine(says(said)) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat())
        assert (answer.status, answer.body) == (status, body)
        assert answer.fields["content-type"] == "application/json; charset=utf-8"
        assert answer.fields["retry-after"] == "17" and answer.fields["x-more"] == "1"


SHAPED: dict[str, tuple[Any, dict[str, Any]]] = {
    "SGLang's flat one": (
        {"object": "error", "message": "full", "type": "X", "param": None, "code": 400},
        {"message": "full", "type": "X", "param": None, "code": 400},
    ),
    "llama.cpp's, which lacks one key": (
        {"error": {"code": 400, "message": "exceeds", "type": "exceed_context_size_error", "n_ctx": 512}},
        {"message": "exceeds", "type": "exceed_context_size_error", "param": None, "code": 400, "n_ctx": 512},
    ),
    "a string": ({"error": "Unauthorized thing"}, {"message": "Unauthorized thing"}),
    "FastAPI's": ({"detail": "Not Found"}, {"message": "Not Found"}),
    "FastAPI's list": ({"detail": [{"loc": ["body"]}]}, {"message": '[{"loc":["body"]}]'}),
    "a page": (b"<html><body>502 Bad Gateway</body></html>", {"message": "the engine answered {} without saying why"}),
    "text": (b"  queue full \n", {"message": "queue full"}),
    "nothing": (b"", {"message": "the engine answered {} without saying why"}),
    "an object without any": ({}, {"message": "{}"}),
    "a list": ([1, 2], {"message": "[1, 2]"}),
    "text that is no text": (b"\xff\xfe", {"message": "\ufffd\ufffd"}),
    "a message that is none": ({"error": {"message": {"a": 1}}}, {"message": '{"a":1}'}),
    "much text": (b"x" * 5000, {"message": "x" * 500}),
}  # fmt: skip


@pytest.mark.parametrize("status", [400, 429, 500])
@pytest.mark.parametrize(("said", "wanted"), SHAPED.values(), ids=SHAPED.keys())
async def test_any_other_is_brought_into_shape(tmp_path: Path, said: Any, wanted: dict[str, Any], status: int) -> None:
    raw = whole(status, said, "etag: x", "retry-after: 3")
    async with fake_engine(says(raw)) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat())
        assert answer.status == status
        assert answer.fields["content-type"] == "application/json" and "etag" not in answer.fields
        assert answer.fields["retry-after"] == "3"
        kind = {429: "rate_limit_error", 500: "server_error"}.get(status, "invalid_request_error")
        full = {"message": "", "type": kind, "param": None, "code": "engine_error", **wanted}
        full["message"] = (
            full["message"].replace("{}", str(status)) if "without" in full["message"] else full["message"]
        )
        assert answer.json()["error"] == full


async def test_on_messages_the_shape_is_anthropics(tmp_path: Path) -> None:
    theirs = b'{"type":"error", "error":{"type":"overloaded_error","message":"Overloaded"},"request_id":"r"}'
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        engine.script = says(whole(529, theirs))
        assert (await door.ask(chat(target="/v1/messages"))).body == theirs
        for status, said, kind in (
            (400, UNTOUCHED["vLLM"], "invalid_request_error"),
            (404, {"detail": "too long"}, "not_found_error"),
            (429, {"object": "error", "message": "too long"}, "rate_limit_error"),
            (503, b"too long", "overloaded_error"),
            (500, {"error": "too long"}, "api_error"),
        ):
            engine.script = says(whole(status, said))
            answer = await door.ask(chat(target="/v1/messages"))
            assert answer.status == status
            assert answer.json() == {"type": "error", "error": {"type": kind, "message": "too long"}}
        engine.script = says(then="close")
        answer = await door.ask(chat(target="/v1/messages"))
        assert answer.status == 502 and answer.json()["error"]["type"] == "api_error"


async def test_room_that_passes_with_time_has_a_retry_after(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for status in (429, 503):
            engine.script = says(whole(status, {}))
            assert (await door.ask(chat())).fields["retry-after"] == "1"
        engine.script = says(whole(503, {}, "Retry-After: Wed, 21 Oct 2099 07:28:00 GMT"))
        assert (await door.ask(chat())).fields["retry-after"] == "Wed, 21 Oct 2099 07:28:00 GMT"
        engine.script = says(whole(400, {}))
        assert "retry-after" not in (await door.ask(chat())).fields


@pytest.mark.parametrize("status", [401, 403])
async def test_an_engine_that_refuses_our_key_is_a_502(tmp_path: Path, status: int) -> None:
    async with fake_engine(says(whole(status, {"error": "Unauthorized"}))) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat("authorization: Bearer sk-client", "x-api-key: sk-client"))
        assert answer.status == 502 and answer.error["code"] == "upstream_failed"
        assert "api_key_file" in answer.error["message"] and "the router's own key" in answer.error["message"]
        assert answer.fields["x-appliance-reason"] == "upstream_failed"
        engine.script = says(*streamed(b'data: {"error":{"message":"no","type":"t","code":%d}}\n\n' % status, DONE))
        answer = await door.ask(chat(stream=True))
        assert answer.status == 502 and "key" in answer.error["message"]
        answer = await door.ask(chat(target="/v1/messages"))
        assert answer.status == 502 and answer.json()["type"] == "error"


def needs(key: Callable[[], str]) -> Callable[[Asked, Peer], Any]:
    async def script(asked: Asked, peer: Peer) -> None:
        right = asked.by_name.get("authorization") == f"Bearer {key()}"
        await peer.send(whole(200, CHAT) if right else whole(401, {"error": "Unauthorized"}))

    return script


async def test_the_endpoint_s_own_key_is_sent_and_read_again_after_rotation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "key"
    file.write_text("  first-key\n")
    key = "first-key"
    async with fake_engine(needs(lambda: key)) as engine:
        config = engine.toml + f'api_key_file = "{file}"\n'
        async with router(tmp_path, config=config) as door:
            assert (await door.ask(chat("authorization: Bearer client"))).status == 200
            file.write_text("second-key")
            key = "second-key"
            upstream = door.app.gateway.upstreams["a"]
            upstream._key_until = time.monotonic()  # the second for which a key is kept is over
            assert (await door.ask(chat())).status == 200
            for bad in (" \n", "two\nlines", "\u00e9"):
                file.write_text(bad)
                upstream._key_until = 0.0
                answer = await door.ask(chat())
                assert answer.status == 502, bad
                (record,) = door.app.gateway.books.recent(1)
                assert "api_key_file" in record.attempts[0].detail and not record.attempts[0].sent
            file.unlink()
            upstream._key_until = 0.0
            assert (await door.ask(chat())).status == 502
            (record,) = door.app.gateway.books.recent(1)
            assert "cannot read" in record.attempts[0].detail


async def test_an_endpoint_without_a_key_gets_none(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        await door.ask(chat("authorization: Bearer sk-client", "x-api-key: sk-client"))
        assert not {"authorization", "x-api-key"} & engine.asked[0].by_name.keys()


# -- the official clients see what they expect -------------------------------------------------------------------------

CLASSES: dict[int, tuple[type[Exception], type[Exception]]] = {
    400: (openai.BadRequestError, anthropic.BadRequestError),
    401: (openai.InternalServerError, anthropic.InternalServerError),
    404: (openai.NotFoundError, anthropic.NotFoundError),
    409: (openai.ConflictError, anthropic.ConflictError),
    422: (openai.UnprocessableEntityError, anthropic.UnprocessableEntityError),
    429: (openai.RateLimitError, anthropic.RateLimitError),
    500: (openai.InternalServerError, anthropic.InternalServerError),
    503: (openai.InternalServerError, anthropic.APIStatusError),
}


async def test_the_clients_error_classes(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for status, (of_openai, of_anthropic) in CLASSES.items():
            engine.script = says(whole(status, {"detail": "it says why"}))

            def ask(of_openai: type[Exception] = of_openai, of_anthropic: type[Exception] = of_anthropic) -> list[str]:
                with (
                    openai.OpenAI(base_url=f"{door.url}/v1", api_key="x", max_retries=0) as first,
                    pytest.raises(of_openai) as seen,
                ):
                    first.chat.completions.create(model="llama", messages=[{"role": "user", "content": "hi"}])
                with (
                    anthropic.Anthropic(base_url=door.url, api_key="x", max_retries=0) as second,
                    pytest.raises(of_anthropic) as seen_too,
                ):
                    second.messages.create(model="llama", max_tokens=1, messages=[{"role": "user", "content": "hi"}])
                return [str(seen.value), str(seen_too.value)]

            for message in await trio.to_thread.run_sync(ask):
                assert "it says why" in message if status != 401 else "key" in message


async def test_a_client_that_tries_again_waits_as_the_engine_says(tmp_path: Path) -> None:
    """The official client's own retries, by the engine's Retry-After."""
    script = in_turn(says(whole(429, {}, "retry-after: 0.01")), says(whole(200, CHAT)))
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:

        def ask() -> str | None:
            with openai.OpenAI(base_url=f"{door.url}/v1", api_key="x", max_retries=1) as client:
                answer = client.chat.completions.create(model="llama", messages=[{"role": "user", "content": "hi"}])
                return answer.choices[0].message.content

        assert await trio.to_thread.run_sync(ask) == "hello"
        assert len(engine.asked) == 2


async def test_a_broken_stream_tells_the_engine_s_error_once(tmp_path: Path) -> None:
    error = json.dumps({"error": OURS}).encode()
    script = says(*streamed(event("a"), b"data: " + error + b"\n\n", DONE))
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        assert (await door.ask(chat(stream=True))).body.count(b'"error"') == 1

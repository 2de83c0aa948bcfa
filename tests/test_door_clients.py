"""The official clients at the door: its own refusals raise their error classes, and they try again when it says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
import trio

from tests.fake_engine import fake_engine, says
from tests.routers import Running, router

HI: Any = [{"role": "user", "content": "hi"}]
MODELS = '[[models]]\nname = "llama"\naliases = ["org/chat"]\n'


@pytest.fixture
def naps(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """How long the clients wanted to wait before another try; they do not."""
    found: list[float] = []
    for module in (openai._base_client, anthropic._base_client):
        monkeypatch.setattr(module.time, "sleep", found.append)
    return found


@contextmanager
def by_openai(door: Running, tries: int = 3) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{door.url}/v1", api_key="x", max_retries=tries - 1, timeout=20) as client:
        yield client


@contextmanager
def by_anthropic(door: Running, tries: int = 3) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=door.url, api_key="x", max_retries=tries - 1, timeout=20) as client:
        yield client


def chat_of(client: openai.OpenAI, **more: Any) -> Any:
    return client.chat.completions.create(**{"model": "llama", "messages": HI, **more})


def message_of(client: anthropic.Anthropic, **more: Any) -> Any:
    return client.messages.create(**{"model": "llama", "max_tokens": 5, "messages": HI, **more})


def refused(call: Callable[[], object], kind: type[Any]) -> Any:
    with pytest.raises(kind) as caught:
        call()
    return caught.value


async def in_thread(run: Callable[[], None]) -> None:
    await trio.to_thread.run_sync(run)


async def test_refusals_have_their_classes_and_are_not_repeated(tmp_path: Path, naps: list[float]) -> None:
    config = MODELS + "[server]\nmax_body_bytes = 2000\n"
    async with fake_engine() as engine, router(tmp_path, engine, config=config) as door:

        def run() -> None:
            with by_openai(door) as client:
                error = refused(lambda: chat_of(client, model="gpt-4"), openai.NotFoundError)
                assert (error.code, error.status_code, error.param) == ("model_not_found", 404, "model")
                assert "llama" in error.message and error.request_id.startswith("req-")
                error = refused(lambda: chat_of(client, model=""), openai.BadRequestError)
                assert error.code == "model_missing"
                error = refused(
                    lambda: chat_of(client, extra_headers={"x-appliance-band": "iron"}), openai.BadRequestError
                )
                assert (error.code, error.param) == ("unknown_band", "x-appliance-band")
                error = refused(lambda: chat_of(client, user="x" * 3000), openai.APIStatusError)
                assert (error.status_code, error.code) == (413, "body_too_large")
                error = refused(lambda: client.files.list(), openai.NotFoundError)
                assert error.code == "not_found"
                error = refused(lambda: client.models.delete("llama"), openai.APIStatusError)
                assert (error.status_code, error.response.headers["allow"]) == (405, "GET, HEAD, OPTIONS")
            with by_anthropic(door) as other:
                error = refused(lambda: message_of(other, model="claude"), anthropic.NotFoundError)
                assert error.body["error"]["type"] == "not_found_error"
                assert "llama" in error.message
                error = refused(lambda: message_of(other, system="x" * 3000), anthropic.APIStatusError)
                assert (error.status_code, error.body["error"]["type"]) == (413, "request_too_large")

        await in_thread(run)
        assert naps == []
        assert engine.asked == []


async def test_what_passes_with_time_is_tried_again_as_long_as_it_is_told_to(tmp_path: Path, naps: list[float]) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        buffers = door.app.buffers
        held = buffers.limit_bytes

        def run() -> None:
            with by_openai(door) as client:
                error = refused(lambda: chat_of(client), openai.InternalServerError)
                assert (error.status_code, error.code) == (503, "buffers_full")
                assert error.response.headers["retry-after"] == "1"
            assert naps == [1.0, 1.0]
            with by_anthropic(door, tries=2) as other:
                error = refused(lambda: message_of(other), anthropic.APIStatusError)
                assert (error.status_code, error.body["error"]["type"]) == (503, "overloaded_error")
            assert naps == [1.0] * 3

        buffers.reserve(held)
        try:
            await in_thread(run)
        finally:
            buffers.release(held)
        assert engine.asked == []


async def test_a_try_that_comes_at_a_better_time_succeeds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        buffers = door.app.buffers
        held = buffers.limit_bytes
        buffers.reserve(held)
        monkeypatch.setattr(openai._base_client.time, "sleep", lambda _: buffers.release(held))

        def run() -> None:
            with by_openai(door) as client:
                assert chat_of(client).choices[0].message.content == "hello"

        await in_thread(run)
        assert len(engine.asked) == 1


async def test_an_endpoint_that_breaks_off_is_a_server_error(tmp_path: Path, naps: list[float]) -> None:
    """Each try of the client is one of ours, and its second sending where the connection may have been at fault."""
    async with fake_engine(says(then="reset")) as engine, router(tmp_path, engine) as door:

        def run() -> None:
            with by_openai(door, tries=2) as client:
                error = refused(lambda: chat_of(client), openai.InternalServerError)
                assert (error.status_code, error.code) == (502, "upstream_failed")

        await in_thread(run)
        assert naps == [1.0]
        assert len(engine.asked) == 4


async def test_models_by_the_clients(tmp_path: Path) -> None:
    """They quote an id that holds a slash."""
    async with fake_engine() as engine, router(tmp_path, engine, config=MODELS) as door:

        def run() -> None:
            with by_openai(door) as client:
                assert [model.id for model in client.models.list()] == ["llama", "org/chat"]
                assert client.models.retrieve("org/chat").id == "org/chat"
                error = refused(lambda: client.models.retrieve("org/none"), openai.NotFoundError)
                assert error.code == "model_not_found"

        await in_thread(run)


async def test_the_clients_own_headers_are_no_hindrance(tmp_path: Path) -> None:
    """Their idempotency, timing and platform headers, a session and an id."""
    async with fake_engine() as engine, router(tmp_path, engine) as door:

        def run() -> None:
            with by_openai(door) as client:
                answer = client.chat.completions.with_raw_response.create(
                    model="llama", messages=HI, extra_headers={"x-request-id": "mine", "x-session-id": "s"}
                )
                assert answer.headers["x-request-id"] == "mine"
                assert answer.parse().choices[0].message.content == "hello"

        await in_thread(run)
        assert not [name for name in engine.asked[0].by_name if name.startswith("x-stainless")]
        assert engine.asked[0].by_name["user-agent"].startswith("OpenAI/Python")

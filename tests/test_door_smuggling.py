"""No request that two readers could cut differently is served: one refusal, an end, and nothing reaches an engine."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.fake_engine import FakeEngine, fake_engine
from tests.raw_client import request
from tests.routers import Running, router
from tests.smuggling import CHUNKS, HEADS, INNER, PATHS, Shape


@asynccontextmanager
async def door_and_engine(folder: Path) -> AsyncIterator[tuple[Running, FakeEngine]]:
    async with fake_engine() as engine, router(folder, engine) as door:
        yield door, engine


@pytest.mark.parametrize("shape", (*HEADS, *CHUNKS), ids=lambda shape: shape.name)
async def test_heads_and_chunks(tmp_path: Path, shape: Shape) -> None:
    """What comes behind a request that cannot be cut for certain is thrown away, whatever it looks like."""
    async with door_and_engine(tmp_path) as (door, engine):
        client = await door.connect()
        await client.send(shape.raw + INNER * 2)
        answer = await client.answer("POST")
        assert answer.status == shape.status
        assert answer.error["code"]
        assert answer.fields["x-request-id"]
        assert answer.fields["x-appliance-reason"] == answer.error["code"]
        assert answer.closes
        await client.stream.send_eof()
        assert await client.rest() == (b"", "closed")
        assert engine.asked == []


@pytest.mark.parametrize(
    "raw",
    [b"\x16\x03\x01\x02\x00", b"\x00", b"{", b"\r\r", b"get", b"GET / HTTP/1.1\n", b"GET / HTTP/1.1\r\nhost: x\n\n"],
)
async def test_what_can_become_no_request_is_refused_at_once(tmp_path: Path, raw: bytes) -> None:
    """Whoever sent it waits for an answer, and would wait until a deadline struck."""
    async with door_and_engine(tmp_path) as (door, _):
        client = await door.connect()
        await client.send(raw)
        answer = await client.answer()
        assert (answer.status, answer.error["code"], answer.closes) == (400, "bad_request", True)
        assert ("TLS" in answer.error["message"]) is raw.startswith(b"\x16\x03")


@pytest.mark.parametrize("shape", PATHS, ids=lambda shape: shape.name)
async def test_paths(tmp_path: Path, shape: Shape) -> None:
    """The framing is certain here: the connection stays in step."""
    async with door_and_engine(tmp_path) as (door, engine):
        client = await door.connect()
        await client.send(shape.raw + request("GET", "/healthz"))
        answer = await client.answer()
        assert answer.status == shape.status
        assert answer.error["code"] in ("bad_request", "not_found")
        assert not answer.closes
        assert (await client.answer()).status == 200
        assert engine.asked == []


async def test_an_engine_is_asked_what_was_asked_of_us(tmp_path: Path) -> None:
    """A body that looks like requests is a body."""
    async with door_and_engine(tmp_path) as (door, engine):
        body = b'{"model":"llama","x":"\\r\\n\\r\\n"}' + b"\n" * 3
        client = await door.connect()
        await client.send(request(body=body), request("POST", "/v1/embeddings", body=body))
        assert [(await client.answer("POST")).status for _ in range(2)] == [200, 200]
        assert [(asked.target, asked.body) for asked in engine.asked] == [
            ("/v1/chat/completions", body),
            ("/v1/embeddings", body),
        ]

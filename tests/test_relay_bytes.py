"""What the relay changes of a request and of an answer, which is next to nothing: bodies byte for byte in whatever
framing they come, headers by written rules."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fake_engine import CHAT, DONE, LAST, Asked, Peer, chunk, event, fake_engine, says, streamed, whole
from tests.raw_client import BrokenOff, chat, request
from tests.routers import router

ODD_BODIES = {
    "unknown fields": b'{"model":"llama","top_k":40,"x-nobody-knows":{"a":[1,{"b":null}]},"messages":[]}',
    "huge numbers": b'{"seed":123456789012345678901234567890,"temperature":1e-400,"p":1.50000,"model":"llama"}',
    "minus zero and exponents": b'{"model":"llama","a":-0,"b":-0.0,"c":1E+5,"d":0.1e-7}',
    "key order and blanks": b' \r\n{ "z" : 1 ,\t"model"\n:  "llama" , "a":2 , "messages" : [ ] }\n ',
    "escapes": '{"model":"\\u006clama","m":"\\u00e9\\ud83d\\ude00\\/\\b\\u0000","é":"☃"}'.encode(),
    "doubled keys that we do not read": b'{"tools":1,"tools":2,"model":"llama","seed":1,"seed":2,"bias":{"1":1,"1":2}}',
    "model inside others": b'{"metadata":{"model":"x","stream":true},"model":"llama","messages":[{"model":"y"}]}',
    "stream as a word": b'{"model":"llama","stream":"yes"}',
    "deep": b'{"model":"llama","a":' + b"[" * 400 + b"]" * 400 + b"}",
}  # fmt: skip


@pytest.mark.parametrize("body", ODD_BODIES.values(), ids=ODD_BODIES.keys())
async def test_odd_bodies_reach_the_engine_unchanged(tmp_path: Path, body: bytes) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        answer = await door.ask(request(body=body))
        assert answer.status == 200, answer.body
        assert engine.asked[0].body == body
        assert engine.asked[0].by_name["content-length"] == str(len(body))


async def test_a_large_body_arrives_whole(tmp_path: Path) -> None:
    filler = "".join(f"{number:07d}" for number in range(700_000))  # 4.9 MB, every part of it different
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        raw = chat(filler=filler)
        assert (await door.ask(raw)).status == 200
        assert engine.asked[0].body == raw.partition(b"\r\n\r\n")[2]


async def test_request_headers_go_by_an_allowlist(tmp_path: Path) -> None:
    sent = (
        "Accept: text/event-stream", "User-Agent: me/1", "X-Request-Id: mine-1",
        "Content-Type: application/json; charset=utf-8",
        "Traceparent: 00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01", "Tracestate: a=b",
        "Authorization: Bearer sk-client", "X-Api-Key: sk-client", "Cookie: a=b", "Connection: x-mine", "X-Mine: 1",
        "X-Forwarded-For: 10.0.0.1", "X-Appliance-Band: platinum", "X-Session-Id: s", "Accept-Encoding: gzip, br",
        "OpenAI-Organization: o", "Origin: https://evil.example", "TE: trailers", "Forwarded: for=1", "Via: 1.1 x",
        "X-Stainless-Lang: python", "Proxy-Authorization: Basic eA==", "Range: bytes=0-1", "If-None-Match: x",
    )  # fmt: skip
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        assert (await door.ask(chat(*sent))).status == 200
        asked = engine.asked[0]
    assert asked.by_name.pop("host") == f"127.0.0.1:{engine.port}"
    fields = {name: value for name, value in asked.fields if name not in ("host", "content-length")}
    assert fields.pop("traceparent").split("-")[:2] == ["00", "0af7651916cd43dd8448eb211c80319c"]
    assert fields == {
        "accept": "text/event-stream",
        "user-agent": "me/1",
        "x-request-id": "mine-1",
        "content-type": "application/json; charset=utf-8",
        "tracestate": "a=b",
    }
    assert len(asked.fields) == len(asked.by_name), "a field was sent twice"


async def test_target_and_query_reach_the_engine(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        await door.ask(chat(target="/v1/chat/completions/?api-version=1&x=%2F%C3%A9"))
        await door.ask(chat(target="/v1/things/engines-add"))
        assert [asked.target for asked in engine.asked] == [
            "/v1/chat/completions?api-version=1&x=%2F%C3%A9",
            "/v1/things/engines-add",
        ]


async def test_response_headers_go_by_a_rule(tmp_path: Path) -> None:
    answer = whole(
        200, CHAT, "Server: uvicorn", "Set-Cookie: a=b", "Access-Control-Allow-Origin:", "Access-Control-Max-Age: 1",
        "Keep-Alive: timeout=5", "Connection: keep-alive, X-Hop", "X-Hop: 1", "Upgrade: h2c", "Trailer: x",
        "Proxy-Authenticate: Basic", "X-Request-Id: theirs", "X-Appliance-Reason: theirs",
        "OpenAI-Processing-Ms: 12", "X-Ratelimit-Remaining: 5", "Cache-Control: no-cache", "X-Twice: 1", "X-Twice: 2",
        "Content-Type: application/json; charset=utf-8",
    )  # fmt: skip
    async with fake_engine(says(answer)) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat("x-request-id: mine"))
        head = await client.until(b"\r\n\r\n")
    assert head.lower().splitlines()[:-1] == [
        b"http/1.1 200 ok",
        b"openai-processing-ms: 12",
        b"x-ratelimit-remaining: 5",
        b"cache-control: no-cache",
        b"x-twice: 1",
        b"x-twice: 2",
        b"content-type: application/json; charset=utf-8",
        b"x-request-id: mine",
        b"content-length: %d" % len(json.dumps(CHAT)),
    ]


BODY = json.dumps(CHAT).encode()
HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"
SIZED = HEAD + b"content-length: %d\r\n\r\n" % len(BODY)
CHUNKED = HEAD + b"transfer-encoding: chunked\r\n\r\n"
INTERIM = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
FRAMINGS = {
    "with its head": ("keep", SIZED + BODY),
    "after its head": ("keep", SIZED, BODY[:20], BODY[20:]),
    "byte by byte": ("keep", *(bytes((byte,)) for byte in SIZED + BODY)),
    "in one chunk": ("keep", CHUNKED + chunk(BODY) + LAST),
    "in many chunks": ("keep", CHUNKED, *(chunk(BODY[at : at + 7]) for at in range(0, len(BODY), 7)), LAST),
    "until the end": ("close", HEAD + b"\r\n", BODY),
    "until the end, in HTTP/1.0": ("close", HEAD.replace(b"1.1", b"1.0") + b"\r\n", BODY),
    "after interim answers": ("keep", INTERIM + SIZED + BODY),
}


@pytest.mark.parametrize("version", ["1.0", "1.1"])
@pytest.mark.parametrize("said", FRAMINGS.values(), ids=FRAMINGS.keys())
async def test_a_body_arrives_whole_in_every_framing(tmp_path: Path, said: tuple[Any, ...], version: str) -> None:
    then, *pieces = said
    async with fake_engine(says(*pieces, then=then)) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(version=version))
        assert answer.status == 200 and answer.body == BODY
        assert answer.fields["content-type"] == "application/json"


@pytest.mark.parametrize("kind", ["audio/mpeg", "application/json"])
async def test_a_body_of_megabytes_passes_without_being_held(tmp_path: Path, kind: str) -> None:
    piece = bytes(range(256)) * 256
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %b\r\ntransfer-encoding: chunked\r\n\r\n" % kind.encode()
    async with fake_engine(says(head, *[chunk(piece)] * 40, LAST)) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(target="/v1/audio/speech"))
        assert answer.body == piece * 40
        assert engine.connections <= 2  # the request's own, and that of the question for models


async def test_speech_is_passed_on_as_it_comes(tmp_path: Path) -> None:
    """Held back, a spoken answer would begin when it ends."""
    head = b"HTTP/1.1 200 OK\r\ncontent-type: audio/wav\r\ntransfer-encoding: chunked\r\n\r\n"
    async with fake_engine(says(head, chunk(b"RIFF"), then="silent")) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(target="/v1/audio/speech"))
        assert (await client.until(b"RIFF")).startswith(b"HTTP/1.1 200 OK\r\n")
        await client.close()


@pytest.mark.parametrize("chunked", [True, False])
async def test_a_json_answer_that_breaks_off_is_no_torn_success(tmp_path: Path, chunked: bool) -> None:
    head = HEAD + (b"transfer-encoding: chunked\r\n\r\n" if chunked else b"content-length: %d\r\n\r\n" % len(BODY))
    piece = chunk(BODY[:50]) if chunked else BODY[:50]
    async with fake_engine(says(head, piece, then="reset")) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat())
        assert answer.status == 502 and answer.error["code"] == "upstream_failed"
        assert len(engine.asked) == 1, "a byte had come back: it must not be sent again"


async def test_a_large_answer_that_breaks_off_is_aborted(tmp_path: Path) -> None:
    head = HEAD + b"content-length: 2000000\r\n\r\n"
    async with fake_engine(says(head, b"x" * 1_000_000, then="reset")) as engine, router(tmp_path, engine) as door:
        with pytest.raises(BrokenOff) as broken:
            await door.ask(chat())
        assert broken.value.args[0].status == 200 and len(broken.value.args[0].body) < 2_000_000
        assert len(engine.asked) == 1


async def test_a_body_without_content_passes(tmp_path: Path) -> None:
    empty = b"HTTP/1.1 204 No Content\r\n\r\n"
    async with fake_engine(says(empty)) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat())
        assert answer.status == 204 and not answer.body and "content-length" not in answer.fields
        assert (await door.ask(chat())).status == 204


async def test_a_connection_to_the_engine_serves_again(tmp_path: Path) -> None:
    """It is idle from the end of its answer on, however long that took."""
    answered_at = 0.0

    async def script(asked: Asked, peer: Peer) -> None:
        nonlocal answered_at
        answered_at = time.monotonic()
        await peer.send(*streamed(event("a"), DONE))

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        for _ in range(5):
            assert (await door.ask(chat(stream=True))).status == 200
            await wait_all_tasks_blocked()
            assert max(door.app.gateway.upstreams["a"].idle.values()) >= answered_at
        assert len(engine.asked) == 5
        assert engine.connections <= 2  # one of them asked for the models


@pytest.mark.parametrize("stream", [False, True])
async def test_an_engine_that_wants_its_connection_closed_gets_no_reset(tmp_path: Path, stream: bool) -> None:
    """It would log a fault where there was none."""
    seen: list[bytes | str] = []

    async def script(asked: Asked, peer: Peer) -> None:
        said = streamed(event("a"), DONE) if stream else (whole(200, CHAT),)
        await peer.send(said[0].replace(b"\r\n", b"\r\nconnection: close\r\n", 1), *said[1:])
        try:
            seen.append(await peer.stream.receive_some(10))
        except trio.BrokenResourceError:
            seen.append("reset")

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        assert (await door.ask(chat(stream=stream))).status == 200
        await wait_all_tasks_blocked()
        assert seen == [b""]
        assert not door.app.gateway.upstreams["a"].idle

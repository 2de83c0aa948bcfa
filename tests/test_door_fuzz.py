"""Requests broken at random: whatever comes, the door answers HTTP or ends, and nothing inside it fails."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import h11
import pytest
import trio

from tests.fake_engine import CHAT, DONE, Asked, Peer, event, fake_engine, streamed, whole
from tests.raw_client import Client, chat, request
from tests.routers import Running, router

ASK = b'{"model":"llama","messages":[{"role":"user","content":"hi \\u00e9 \xc3\xa9"}],"stream":false}'
FORM = (
    b'--b0\r\nContent-Disposition: form-data; name="file"; filename="a"\r\n\r\nabc\r\n'
    b'--b0\r\nContent-Disposition: form-data; name="model"\r\n\r\nllama\r\n--b0--\r\n'
)
CHUNKS = b"20\r\n%b\r\n%x;a=b\r\n%b\r\n0\r\nx: y\r\n\r\n" % (ASK[:32], len(ASK[32:]), ASK[32:])
SEEDS = (
    chat(),
    chat(stream=True),
    chat(version="1.0"),
    request("POST", "/v1/completions", "transfer-encoding: chunked") + CHUNKS,
    request("POST", "/v1/audio/transcriptions", "content-type: multipart/form-data; boundary=b0", body=FORM),
    request("POST", "/v1/embeddings", "content-encoding: gzip", body=gzip.compress(ASK, mtime=0)),
    request("POST", "/v1/embeddings", "expect: 100-continue", body=ASK),
    request("GET", "/v1/models/llama"),
    request("HEAD", "/healthz"),
    request("OPTIONS", "/v1/chat/completions", "origin: http://x", "access-control-request-method: POST"),
    request("GET", "/v1/responses/resp_1?stream=true"),
    b"GET http://x/v1/models HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
)
WORDS = (
    b"\r\n", b"\n", b"\r", b"\x00", b" ", b":", b"\r\n\r\n", b"0\r\n\r\n", b"content-length: 5\r\n", b"\xff", b'"',
    b"\\", b'"model":"x",', b"{", b"[", b"}", b"transfer-encoding: chunked\r\n", b"%2F", b"/../", b"--b0", b"HTTP/1.1",
    b"99999999", b"upgrade: websocket\r\n", b"connection: close\r\n", b"content-encoding: zstd\r\n", b"e", b"-", b",",
)  # fmt: skip
EXPECTED = {200, 204, 400, 404, 405, 408, 413, 415, 417, 431, 501}


def broken(rng: random.Random) -> bytes:
    """One to three requests, with a few bytes cut out, put in, doubled or exchanged."""
    raw = bytearray(b"".join(rng.choices(SEEDS, k=rng.choice((1, 1, 2, 3)))))
    for _ in range(rng.choice((0, 1, 1, 2, 5))):
        at = rng.randrange(len(raw) + 1)
        match rng.randrange(5):
            case 0:
                del raw[at : at + rng.choice((1, 2, 10))]
            case 1:
                raw[at:at] = rng.choice(WORDS)
            case 2:
                raw[at : at + 1] = rng.choice(WORDS)
            case 3:
                raw[at:at] = raw[at : at + rng.choice((1, 20, 200))]
            case 4:
                del raw[at:]
    return bytes(raw)


async def answers(raw: bytes) -> list[int]:
    """The statuses in what came back, read by h11. It must be told what each was asked with: any answer may be to HEAD,
    so an answer that only makes sense as one is read as one."""
    found = []
    while raw:
        for method in ("POST", "HEAD"):
            http = h11.Connection(h11.CLIENT)
            http.send(h11.Request(method=method, target="/", headers=[("host", "x")]))
            http.send(h11.EndOfMessage())
            http.receive_data(raw)
            status = 0
            try:
                while not isinstance(got := http.next_event(), h11.EndOfMessage):
                    if got is h11.NEED_DATA:
                        http.receive_data(b"")
                    elif isinstance(got, h11.Response):
                        status = got.status_code
            except h11.RemoteProtocolError:
                continue
            rest = bytes(http.trailing_data[0])
            if rest and not rest.startswith(b"HTTP/1.1 "):
                continue
            found.append(status)
            raw = rest
            break
        else:
            raise AssertionError(f"no HTTP: {raw[:300]!r}")
    return found


async def play(door: Running, raw: bytes, rng: random.Random) -> list[int]:
    client = await door.connect()
    at = 0
    try:
        while at < len(raw):
            size = rng.choice((1, 7, 50, 10_000, 10_000))
            await client.send(raw[at : at + size])
            at += size
        await heard(client, door)
        await client.stream.send_eof()  # type: ignore[attr-defined]
        got, _ = await client.rest()
    except trio.BrokenResourceError:
        got = client.buffer
    await client.close()
    return await answers(got)


async def heard(client: Client, door: Running) -> None:
    """Let the door answer all it can before the client ends: the end counts as leaving."""
    with trio.move_on_after(0.02):
        while data := await client.stream.receive_some(65536):
            client.buffer += data


@pytest.mark.parametrize("seed", range(4))
async def test_broken_requests(tmp_path: Path, seed: int) -> None:
    async def script(asked: Asked, peer: Peer) -> None:
        stream = b'"stream": true' in asked.body
        await peer.send(*(streamed(event("a"), DONE) if stream else (whole(200, CHAT),)))

    rng = random.Random(seed)
    seen: set[int] = set()
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        for _ in range(80):
            raw = broken(rng)
            statuses = await play(door, raw, rng)
            assert set(statuses) <= EXPECTED, (raw, statuses)
            seen |= set(statuses)
        assert {200, 400} <= seen
        assert door.told("request failed inside the router") == []
        for asked in engine.asked:
            if asked.by_name.get("content-type", "").startswith("application/json"):
                assert json.loads(asked.body)["model"] == "llama"
        assert (await door.ask(chat())).status == 200

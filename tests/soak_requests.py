"""What the soak asks: every route, answers of every kind, and every way to walk away."""

from __future__ import annotations

import json
import random
import socket
import struct
from typing import Any

import attrs

from tests.raw_client import chat, request

CUT = struct.pack("ii", 1, 0)
LEAVINGS = ("stay", "reset", "close", "half-close")
"""Stay for the whole answer; or leave by a reset, a FIN, or a FIN of one direction."""
FAULTS: tuple[dict[str, Any], ...] = (
    {"cut_after": 2},
    {"reset_after": 1},
    {"error_after": 0},
    {"error_after": 2},
    {"stall_after": 1},
    {"no_done": True},
    {"status": 500},
    {"status": 429, "retry_after_s": 1},
    {"garbage": "head"},
    {"garbage": "chunk"},
    {"garbage": "body"},
)
PREAMBLES = tuple(" ".join(f"word{number * 31 + place}" for place in range(120)) for number in range(40))


@attrs.frozen
class Asking:
    """One request as raw bytes; how the client leaves, and after how many seconds it does (0: before the whole request
    was sent). `patience_s` bounds everybody's stay: some answers never come."""

    raw: bytes
    leaving: str
    after_s: float
    stalls: bool


def choose(rng: random.Random, response_ids: list[str]) -> Asking:
    raw, stalls = _request(rng, response_ids)
    leaving = rng.choices(LEAVINGS, (0.55, 0.15, 0.15, 0.15))[0]
    if stalls and leaving == "stay":
        leaving = rng.choice(LEAVINGS[1:])
    return Asking(raw, leaving, rng.choice((0.0, 0.001, 0.01, 0.03, 0.1)), stalls)


def endless(number: int) -> Asking:
    """An answer without an end, which the router looks at for some megabytes: memory that is given back, but a peak."""
    fault = {"garbage": ("endless_body", "endless_head")[number & 1]}
    return Asking(chat(model="m", stream=bool(number & 2), sim=fault), LEAVINGS[number >> 2 & 3], 0.3, stalls=True)


def _request(rng: random.Random, response_ids: list[str]) -> tuple[bytes, bool]:
    """Raw bytes of a request, and whether its answer may never end."""
    if rng.random() < 0.25:
        return _small(rng, response_ids), False
    stream = rng.random() < 0.6
    words = rng.choice((1, 3, 8, 20, 40))
    question = f"{rng.choice(PREAMBLES)} and {rng.randrange(5)}?" if rng.random() < 0.3 else f"ask {rng.randrange(99)}"
    body: dict[str, Any] = {"model": rng.choice(("m", "m", "m", "alias")), "stream": stream}
    path, fields = _kind(rng, body, question, words)
    if rng.random() < 0.12:
        body["sim"] = rng.choice(FAULTS)
    if stream and rng.random() < 0.5 and "messages" not in path:
        body["stream_options"] = {"include_usage": True}
    if rng.random() < 0.3:
        body["user"] = f"user{rng.randrange(20)}"
    encoded = json.dumps(body).encode()
    if rng.random() < 0.2:
        raw = request("POST", path, *fields, "transfer-encoding: chunked", body=b"")
        raw += b"".join(b"%x\r\n%b\r\n" % (len(piece), piece) for piece in _pieces(encoded)) + b"0\r\n\r\n"
    else:
        raw = request("POST", path, *fields, body=encoded)
    return raw, "stall_after" in body.get("sim", {})


def _kind(rng: random.Random, body: dict[str, Any], question: str, words: int) -> tuple[str, tuple[str, ...]]:
    """Fill the body of one of the generating routes; its path and fields of its own."""
    path = rng.choice(("chat/completions", "chat/completions", "completions", "responses", "messages"))
    messages = [{"role": "user", "content": question}]
    match path:
        case "chat/completions":
            body |= {"messages": messages, "max_tokens": words, "ignore_eos": True}
        case "completions":
            body |= {"prompt": question, "max_tokens": words, "ignore_eos": True}
        case "responses":
            body |= {"input": question, "max_output_tokens": words}
        case _:
            body |= {"messages": messages, "max_tokens": words}
            return "/v1/messages", ("anthropic-version: 2023-06-01",)
    return f"/v1/{path}", ()


def _small(rng: random.Random, response_ids: list[str]) -> bytes:
    """Routes whose answers are at hand, and requests that are refused."""
    stored = rng.choice(response_ids) if response_ids else "resp_none"
    form = (
        b'--x\r\ncontent-disposition: form-data; name="file"; filename="a.wav"\r\n\r\n'
        + bytes(3000)
        + b'\r\n--x\r\ncontent-disposition: form-data; name="model"\r\n\r\nm\r\n--x--\r\n'
    )
    return rng.choice(
        (
            request("POST", "/v1/embeddings", body=b'{"model":"m","input":"a b c"}'),
            request("POST", "/tokenize", body=b'{"model":"m","prompt":"a b c"}'),
            request("POST", "/detokenize", body=b'{"model":"m","tokens":[353]}'),
            request("POST", "/v1/rerank", body=b'{"model":"m","query":"q","documents":["d"]}'),
            request("POST", "/v1/audio/transcriptions", "content-type: multipart/form-data; boundary=x", body=form),
            request("GET", "/v1/models"),
            request("HEAD", "/v1/models"),
            request("GET", "/v1/models/m"),
            request("GET", "/v1/models/nothing"),
            request("GET", f"/v1/responses/{stored}"),
            request("DELETE", f"/v1/responses/{stored}"),
            request("POST", f"/v1/responses/{stored}/cancel", body=b""),
            request("GET", "/healthz"),
            request("GET", "/readyz"),
            request("GET", "/status.json"),
            request("GET", "/"),
            request("OPTIONS", "/v1/chat/completions", "origin: https://chat.example.org"),
            request("PUT", "/v1/chat/completions", body=b"{}"),
            request("GET", "/nowhere"),
            request("GET", "/v1/realtime", "connection: upgrade", "upgrade: websocket"),
            request("POST", "/v1/chat/completions", body=b"{not json"),
            request("POST", "/v1/chat/completions", body=b'{"model":"unheard-of","messages":[]}'),
            request("POST", "/v1/chat/completions", "content-encoding: rot13", body=b"{}"),
            request("POST", "/v1/chat/completions", "content-length: 999999999999"),
            b"GET /healthz HTTP/1.1\r\nhost: a\r\nhost: b\r\n\r\n",
            b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",
        )
    )


def _pieces(body: bytes) -> list[bytes]:
    half = max(1, len(body) // 2)
    return [piece for piece in (body[:half], body[half:]) if piece]


def cut(sock: Any) -> None:
    """Let the close of a socket be a reset."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, CUT)

"""The table of refusals (docs: "Refusals"): one test per row whose rule exists, each with its headers and its shape."""

from __future__ import annotations

import gzip
import re
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
import trio.testing

from appliance.door.connection import SLOWEST_BODY_BYTES_PER_S
from tests.fake_engine import Asked, Peer, Script, fake_engine, says, streamed, whole
from tests.raw_client import Answer, Client, chat, request
from tests.routers import Running, router

CHAT_PATH = "/v1/chat/completions"
FORM = "content-type: multipart/form-data; boundary=b0"


@attrs.frozen
class Row:
    """A request that is refused. `later`: waiting can help, so there is a Retry-After; `never`: it cannot, and the SDKs
    are told not to try; neither: a client's fault that no SDK repeats."""

    name: str
    raw: bytes
    status: int
    code: str
    param: str | None = None
    said: str = ""
    config: str = ""
    script: Script | None = None
    later: bool = False
    never: bool = False


def post(body: bytes, *fields: str) -> bytes:
    return request("POST", CHAT_PATH, *fields, body=body)


SHAPED = {"error": {"message": "no", "type": "t", "param": None, "code": "c"}}


def fails(status: int, *fields: str, body: Any = SHAPED) -> Script:
    return says(whole(status, body, *fields))


SMALL = "[server]\nmax_body_bytes = 1000\nmax_buffered_bytes = 1500\n"

ROWS = (
    # 400
    Row("not JSON", post(b"{model: llama}"), 400, "invalid_json", said="JSON"),
    Row("empty", post(b""), 400, "invalid_json", said="empty"),
    Row("no body at all", request("POST", CHAT_PATH), 400, "invalid_json", said="empty"),
    Row("not an object", post(b'["llama"]'), 400, "invalid_json", said="object"),
    Row("no model", post(b"{}"), 400, "model_missing", "model"),
    Row("model is no string", post(b'{"model": 5}'), 400, "model_missing", "model"),
    Row("two models", post(b'{"model": "a", "model": "b"}'), 400, "duplicate_field", "model"),
    Row("not a form", post(b"hello", FORM), 400, "invalid_multipart", said="boundary"),
    Row("form without a model", post(b"--b0--\r\n", FORM), 400, "model_missing", "model"),
    Row("not gzip", post(b"hello", "content-encoding: gzip"), 400, "invalid_encoding", said="gzip"),
    Row("unknown band", chat("x-appliance-band: iron"), 400, "unknown_band", "x-appliance-band", never=True),
    Row("bad path", request("GET", "/v1//models"), 400, "bad_request"),
    Row("bad head", b"GET / HTTP/1.1\r\nbad\r\n\r\n", 400, "bad_request"),
    # 404, 405
    Row("unknown model", chat(model="gpt-4"), 404, "model_not_found", "model", said="llama"),
    Row("unknown path", request("GET", "/v1/x"), 404, "not_found", never=True),
    Row("unknown response", request("GET", "/v1/responses/resp_1"), 404, "response_not_found", never=True),
    Row("wrong method", request("GET", CHAT_PATH), 405, "method_not_allowed", said="POST"),
    # 413, 415, 417, 431
    Row("length over the cap", post(b"x" * 1001), 413, "body_too_large", said="body_bytes", config=SMALL, never=True),
    Row(
        "chunks over the cap", request("POST", CHAT_PATH, "transfer-encoding: chunked") + b"3e9\r\n", 413,
        "body_too_large", said="max_body_bytes", config=SMALL, never=True,
    ),
    Row(
        "over the cap when expanded", post(gzip.compress(b" " * 1001), "content-encoding: gzip"), 413, "body_too_large",
        said="expanded", config=SMALL, never=True,
    ),
    Row("unknown coding", post(b"{}", "content-encoding: br"), 415, "unsupported_encoding", said="br", never=True),
    Row("unknown expectation", post(b"{}", "expect: tea"), 417, "bad_request"),
    Row("header too large", request("GET", "/", "x: " + "a" * 70000), 431, "header_too_large"),
    # 501
    Row("WebSocket", request("GET", "/v1/realtime", "upgrade: websocket"), 501, "upgrade_not_supported", never=True),
    Row("other coding of the transfer", request("POST", "/", "transfer-encoding: gzip, chunked"), 501, "bad_request"),
    # 429 and what else an engine says itself
    Row("engine busy", chat(), 429, "c", script=fails(429), later=True),
    Row("engine busy until", chat(), 429, "c", script=fails(429, "retry-after: 7"), later=True),
    Row("engine's own refusal", chat(), 422, "c", script=fails(422)),
    Row("engine's own words", chat(), 400, "engine_error", said="odd", script=fails(400, body=b"odd")),
    Row("engine's own detail", chat(), 404, "engine_error", said="no x", script=fails(404, body={"detail": "no x"})),
    # 502
    Row("key refused", chat(), 502, "upstream_failed", said="api_key_file", script=fails(401), later=True),
    Row("key forbidden", chat(), 502, "upstream_failed", said="api_key_file", script=fails(403), later=True),
    Row("reset", chat(), 502, "upstream_failed", said="2 attempts", script=says(then="reset"), later=True),
    Row("garbage", chat(), 502, "upstream_failed", said="not HTTP", script=says(b"hello\r\n"), later=True),
    Row(
        "cut answer", chat(), 502, "upstream_failed", said="broke off",
        script=says(whole(200, {"a": "b"})[:-3], then="close"), later=True,
    ),
    Row(
        "stream that begins with an error", chat(stream=True), 502, "x",
        script=says(*streamed(b'data: {"error":{"message":"m","type":"t","param":null,"code":"x"}}\n\n')),
    ),
    # 503
    Row("engine overloaded", chat(), 503, "c", script=fails(503), later=True),
    # 504
    Row(
        "first token late", chat(stream=True), 504, "upstream_timeout", said="first_token_s",
        config="[deadlines]\nfirst_token_s = 0.05\n", script=says(streamed()[0], then="silent"),
    ),
    Row(
        "answer late", chat(), 504, "upstream_timeout", said="total_s", config="[deadlines]\ntotal_s = 0.05\n",
        script=says(then="silent"),
    ),
)  # fmt: skip


def check(answer: Answer, row: Row) -> None:
    assert answer.status == row.status
    error = answer.error
    assert (error["code"], error["param"]) == (row.code, row.param)
    assert row.said.lower() in error["message"].lower()
    assert answer.fields["content-type"] == "application/json"
    assert answer.fields["x-request-id"]
    if row.later:
        assert int(answer.fields["retry-after"]) >= 1
    else:
        assert "retry-after" not in answer.fields
    assert (answer.fields.get("x-should-retry") == "false") is row.never


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_a_row(tmp_path: Path, row: Row) -> None:
    """Its answer, and that the connection goes on in step or ends cleanly."""
    async with fake_engine(row.script) as engine, router(tmp_path, engine, config=row.config) as door:
        client = await door.connect()
        await client.send(row.raw)
        answer = await client.answer(row.raw.split(b" ", 1)[0].decode())
        check(answer, row)
        if not row.script:
            assert answer.fields["x-appliance-reason"] == row.code
        if answer.closes:
            await client.stream.send_eof()  # type: ignore[attr-defined]
            assert await client.rest() == (b"", "closed")
        else:
            await client.send(request("GET", "/healthz"))
            assert (await client.answer()).status == 200


CLOSING = {
    "bad head", "length over the cap", "chunks over the cap", "unknown expectation", "header too large",
    "other coding of the transfer",
}  # fmt: skip


@pytest.mark.parametrize("row", ROWS, ids=lambda row: row.name)
async def test_only_what_leaves_the_end_in_doubt_closes(tmp_path: Path, row: Row) -> None:
    """A refusal that costs the client its connection costs it a handshake too."""
    async with fake_engine(row.script) as engine, router(tmp_path, engine, config=row.config) as door:
        assert (await door.ask(row.raw)).closes is (row.name in CLOSING)


# -- Anthropic's shape -------------------------------------------------------------------------------------------------

ANTHROPIC = (
    ("not JSON", request("POST", "/v1/messages", body=b"{"), 400, "invalid_request_error", ""),
    ("unknown model", chat(target="/v1/messages", model="x"), 404, "not_found_error", ""),
    ("wrong method", request("GET", "/v1/messages"), 405, "invalid_request_error", ""),
    ("management", request("POST", "/v1/messages/../sleep", body=b"{}"), 400, "invalid_request_error", ""),
    ("count", request("POST", "/v1/messages/count_tokens", body=b"{}"), 400, "invalid_request_error", ""),
    ("too large", request("POST", "/v1/messages", body=b"x" * 1001), 413, "request_too_large", SMALL),
)


@pytest.mark.parametrize(
    ("raw", "status", "kind", "config"), [row[1:] for row in ANTHROPIC], ids=[r[0] for r in ANTHROPIC]
)
async def test_the_shape_of_anthropic(tmp_path: Path, raw: bytes, status: int, kind: str, config: str) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config=config) as door:
        answer = await door.ask(raw)
        assert answer.status == status
        value = answer.json()
        assert (value["type"], value["error"]["type"]) == ("error", kind)
        assert set(value) == {"type", "error"} and set(value["error"]) == {"type", "message"}
        assert value["error"]["message"]
        assert answer.fields["x-appliance-reason"]


async def test_an_engine_error_in_the_shape_of_anthropic(tmp_path: Path) -> None:
    native = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}, "request_id": "r"}
    async with fake_engine(says(whole(529, native))) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(target="/v1/messages"))
        assert (answer.status, answer.json()) == (529, native)
        engine.script = fails(400)
        answer = await door.ask(chat(target="/v1/messages"))
        assert answer.json() == {"type": "error", "error": {"type": "invalid_request_error", "message": "no"}}


# -- nobody there ------------------------------------------------------------------------------------------------------


async def test_an_endpoint_that_refuses_connections(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        config = f'[[endpoints]]\nid = "a"\nurl = "http://127.0.0.1:{port}"\nmodels = ["llama"]\n'
        async with router(tmp_path, config=config) as door:
            answer = await door.ask(chat())
            check(answer, Row("", b"", 502, "upstream_failed", said="refused the connection", later=True))
            assert str(port) not in answer.body.decode() and "127.0.0.1" not in answer.body.decode()


async def test_a_model_whose_endpoints_are_all_away(tmp_path: Path) -> None:
    """The breaker is open: said at once, with the gate that is closed."""
    async with fake_engine(says(then="reset")) as engine, router(tmp_path, engine) as door:
        for _ in range(20):
            answer = await door.ask(chat())
            if answer.status == 503:
                break
        check(answer, Row("", b"", 503, "model_not_ready", "model", said="llama", later=True))


@pytest.mark.parametrize("field", ["", "transfer-encoding: chunked"])
async def test_full_buffers(tmp_path: Path, field: str) -> None:
    """Refused at the head where the length is told, in the middle where it is not; never waited for half-read."""
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        buffers = door.app.buffers
        held = buffers.limit_bytes - 10
        buffers.reserve(held)
        body = b'{"model":"llama"}'
        raw = request("POST", CHAT_PATH, field) + b"%x\r\n%b\r\n0\r\n\r\n" % (len(body), body) if field else post(body)
        answer = await door.ask(raw)
        check(answer, Row("", b"", 503, "buffers_full", later=True))
        assert answer.closes is bool(field)
        assert buffers.held_bytes == held
        answer = await door.ask(chat(target="/v1/messages"))
        assert (answer.status, answer.json()["error"]["type"]) == (503, "overloaded_error")
        buffers.release(held)
        assert (await door.ask(raw)).status == 200


# -- the queue ---------------------------------------------------------------------------------------------------------

BANDS = """
[[admission.bands]]
name = "gold"
ceiling = 1.0
capacity = 5
ttl_s = 30
[[admission.bands]]
name = "silver"
ceiling = 0.9
capacity = 1
ttl_s = {ttl_s}
"""


@asynccontextmanager
async def busy(folder: Path, admission: str = "", ttl_s: float = 30) -> AsyncIterator[tuple[Running, trio.Event]]:
    """A router whose one engine has one slot, taken by a request that ends with the event."""
    free = trio.Event()

    async def held(asked: Asked, peer: Peer) -> None:
        await free.wait()
        await says(whole(200, {"done": True}))(asked, peer)

    async with fake_engine(held) as engine:
        engine.capacity = 1
        config = f"[admission]\n{admission}\n{BANDS.format(ttl_s=ttl_s)}"
        async with router(folder, engine, config=config) as door, trio.open_nursery() as nursery:
            nursery.start_soon(door.ask, chat())
            await door.until("the slot is taken", lambda: engine.asked)
            try:
                yield door, free
            finally:
                free.set()


async def waiting(door: Running, nursery: trio.Nursery, answers: list[Answer], *fields: str) -> None:
    """One more request in the queue."""
    count = door.app.gateway.gate.rules.lines.count

    async def ask() -> None:
        answers.append(await door.ask(chat(*fields)))

    nursery.start_soon(ask)
    await door.until("one more waits", lambda: door.app.gateway.gate.rules.lines.count == count + 1)


async def test_a_full_queue(tmp_path: Path) -> None:
    async with busy(tmp_path) as (door, free), trio.open_nursery() as nursery:
        answers: list[Answer] = []
        await waiting(door, nursery, answers)
        check(await door.ask(chat()), Row("", b"", 503, "queue_full", said="silver", later=True))
        free.set()
        await door.until("the one that waited is served", lambda: answers)
        assert answers[0].status == 200


async def test_a_place_lost_to_a_higher_band(tmp_path: Path) -> None:
    async with busy(tmp_path, "queue_capacity_total = 1") as (door, free), trio.open_nursery() as nursery:
        answers: list[Answer] = []
        await waiting(door, nursery, answers)

        async def gold() -> None:
            assert (await door.ask(chat("x-appliance-band: gold"))).status == 200

        nursery.start_soon(gold)
        await door.until("the silver one is sent away", lambda: answers)
        check(answers[0], Row("", b"", 503, "displaced", said="gold", later=True))
        free.set()


async def test_a_wait_that_was_too_long(tmp_path: Path) -> None:
    async with busy(tmp_path, ttl_s=0.05) as (door, _):
        check(await door.ask(chat()), Row("", b"", 504, "queue_timeout", said="ttl_s", later=True))


# -- slow requests -----------------------------------------------------------------------------------------------------


async def test_a_slow_head(tmp_path: Path) -> None:
    async with router(tmp_path, config="[deadlines]\nhead_s = 100\n") as door:
        client = await door.connect()
        await client.send(b"GET /healthz HTTP/1.1\r\nhost: x\r\n")
        await door.until("it is read", lambda: any(not each.idle for each in door.app.listeners.connections))
        door.later(50)
        await nothing_comes(client)
        door.later(101)
        answer = await client.answer()
        check(answer, Row("", b"", 408, "request_timeout", later=True))
        assert answer.closes
        await client.send(b"\r\n")  # too late, and thrown away
        await client.stream.send_eof()  # type: ignore[attr-defined]
        assert await client.rest() == (b"", "closed")


async def nothing_comes(client: Client) -> None:
    with trio.move_on_after(0.02):
        assert await client.stream.receive_some(100) == "nothing yet"


@pytest.mark.parametrize("field", ["content-length: 1000000", "transfer-encoding: chunked"])
async def test_a_slow_body(tmp_path: Path, field: str) -> None:
    async with (
        fake_engine() as engine,
        router(tmp_path, engine, config="[deadlines]\nwrite_stall_s = 100\n") as door,
    ):
        client = await door.connect()
        body = b" " * 40 * SLOWEST_BODY_BYTES_PER_S
        await client.send(request("POST", CHAT_PATH, field), b"fffff\r\n" if "chunked" in field else b"", body)
        await door.until("it is read", lambda: any(not each.idle for each in door.app.listeners.connections))
        await trio.testing.wait_all_tasks_blocked(0.02)
        door.later(120)  # write_stall_s, and 40 s for what came
        await nothing_comes(client)
        door.later(141)
        answer = await client.answer("POST")
        check(answer, Row("", b"", 408, "request_timeout", said="body", later=True))
        assert answer.closes
        assert door.app.buffers.held_bytes == 0
        await client.stream.send_eof()  # type: ignore[attr-defined]
        assert await client.rest() == (b"", "closed")


# -- what the door itself cannot do ------------------------------------------------------------------------------------


@pytest.mark.parametrize("failure", [RuntimeError("x"), OSError(24, "Too many open files"), KeyError("x")])
async def test_a_fault_of_our_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: Exception) -> None:
    """Told to both: the client gets a 500 with an id, the log the rest under it."""
    async with fake_engine() as engine, router(tmp_path, engine) as door:

        async def fail(*_: object, **__: object) -> None:
            raise failure

        monkeypatch.setattr(door.app.gateway, "serve", fail)
        answer = await door.ask(chat("x-request-id: it"))
        check(answer, Row("", b"", 500, "internal_error", said="request id"))
        assert answer.closes
        (line,) = door.told("request failed inside the router")
        assert line["request_id"] == "it" and type(failure).__name__ in line["exception"]


# -- what is written about it ------------------------------------------------------------------------------------------


def test_the_table_in_the_docs() -> None:
    """Every row of it is true of some request here or there, and every code of the door's own stands in it."""
    text = (Path(__file__).parent.parent / "docs" / "interface.md").read_text()
    table = text.partition("## Refusals")[2].partition("\n## ")[0]
    told = {(int(status), code) for status, code in re.findall(r"^\| (\d{3}) \| `(\w+)` \|", table, re.MULTILINE)}
    own = {(row.status, row.code) for row in ROWS if not row.script or row.code.startswith("upstream")}
    elsewhere = {
        (403, "source_not_permitted"),
        (408, "request_timeout"), (500, "internal_error"), (503, "model_not_ready"), (503, "queue_full"),
        (503, "displaced"), (503, "buffers_full"), (503, "draining"), (503, "cancelled"), (504, "queue_timeout"),
        (503, "router_exhausted"), (508, "loop_detected"),
    }  # fmt: skip
    assert told == own | elsewhere

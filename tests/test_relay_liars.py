"""Engines that lie, and engines that never end: each harms its own requests only, and no request without bound."""

from __future__ import annotations

import contextlib
import gzip
import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fake_engine import (
    CHAT,
    DONE,
    LAST,
    STREAM_HEAD,
    Asked,
    Peer,
    Script,
    chunk,
    event,
    fake_engine,
    in_turn,
    says,
    streamed,
    whole,
)  # fmt: skip
from tests.raw_client import BEYOND_SOCKETS, WITHIN_S, Answer, BrokenOff, chat, request
from tests.routers import Running, router

GOOD = whole(200, CHAT)
JSON_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\n"


def forever(first: bytes, again: bytes) -> Script:
    """`first`, then `again` without pause until the router goes: a socket that is always ready."""

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(first)
        while peer.open:
            await peer.send(again)

    return script


NOT_HTTP = {
    "garbage": b"\x00\xff\x01garbage",
    "another protocol": b"SSH-2.0-OpenSSH_9.2\r\n",
    "HTTP/2": b"\x00\x00\x12\x04\x00\x00\x00\x00\x00",
    "HTTP/0.9": b"<html>hello</html>",
    "a wrong version": b"HTTP/2.0 200 OK\r\ncontent-length: 0\r\n\r\n",
    "no status": b"HTTP/1.1\r\n\r\n",
    "a status of two digits": b"HTTP/1.1 20 OK\r\n\r\n",
    "a status beyond all": b"HTTP/1.1 999 OK\r\ncontent-length: 0\r\n\r\n",
    "a protocol switched": b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\ncontent-length: 1\r\ncontent-length: 2\r\n\r\nab",
    "a length and chunks": b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\n0\r\n\r\n",
    "a negative length": b"HTTP/1.1 200 OK\r\ncontent-length: -1\r\n\r\n",
    "a length in words": b"HTTP/1.1 200 OK\r\ncontent-length: many\r\n\r\n",
    "an unknown coding": b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "a folded line": b"HTTP/1.1 200 OK\r\nx: a\r\n b\r\n\r\n",
    "a control character": b"HTTP/1.1 200 OK\r\nx: a\x00b\r\n\r\n",
    "a field without a name": b"HTTP/1.1 200 OK\r\n: x\r\n\r\n",
    "a bare LF": b"HTTP/1.1 200 OK\nx: y\n\n",
    "a header of 100 KB": b"HTTP/1.1 200 OK\r\n" + b"x: " + b"y" * 100_000 + b"\r\n\r\n",
    "500 fields": b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 500 + b"\r\n",
    "a chunk of garbage": JSON_HEAD + b"transfer-encoding: chunked\r\n\r\nzz\r\n",
    "a chunk of 2**64": JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n10000000000000000\r\nx",
    "a size line without end": JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n" + b"1" * 300,
}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("said", NOT_HTTP.values(), ids=NOT_HTTP.keys())
async def test_what_is_not_http_is_a_502_at_once(tmp_path: Path, said: bytes, stream: bool) -> None:
    """At once: the engine neither ends nor closes, and no clock moves."""
    async with fake_engine(says(said, then="silent")) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(stream=stream))
        assert answer.status == 502 and answer.error["code"] == "upstream_failed"
        assert len(engine.asked) == 1, "a byte came back"
        engine.script = says(GOOD)
        assert (await door.ask(chat())).json() == CHAT


ENDLESS: dict[str, tuple[Script, bool]] = {
    # an engine that never stops talking; whether the router sees by itself that this is no answer
    "a header": (forever(b"HTTP/1.1 200 OK\r\n", b"x-more: 1\r\n" * 100), True),
    "one field": (forever(b"HTTP/1.1 200 OK\r\nx: ", b"x" * 1000), True),
    "interim answers": (forever(b"", b"HTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"), True),
    "an error's body": (forever(b"HTTP/1.1 500 Oh\r\n\r\n", b"x" * 65_536), True),
    "an error's chunked body": (
        forever(b"HTTP/1.1 500 Oh\r\ntransfer-encoding: chunked\r\n\r\n", chunk(b"x" * 65_536)), True,
    ),
    "a body": (forever(JSON_HEAD + b"\r\n", b"x" * 65_536), False),
    "a chunked body": (forever(JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n", chunk(b"x" * 65_536)), False),
    "empty content": (forever(JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n", chunk(b" ") * 1000), False),
    "a stream of comments": (forever(STREAM_HEAD, chunk(b": x\n\n") * 100), False),
    "an event": (forever(STREAM_HEAD, chunk(b"x" * 65_536)), False),
    "a stream without empty lines": (forever(STREAM_HEAD, chunk(b"data: x\n") * 1000), False),
    "events": (forever(STREAM_HEAD, chunk(event("x")) * 100), False),
    "what follows the end": (forever(STREAM_HEAD + chunk(DONE), chunk(event("x")) * 100), False),
}  # fmt: skip


async def read_on(door: Running, raw: bytes) -> None:
    """A client that takes everything."""
    client = await door.connect()
    await client.send(raw)
    with trio.fail_after(WITHIN_S), contextlib.suppress(trio.BrokenResourceError):
        while await client.stream.receive_some(1 << 20):
            continue


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("name", ENDLESS)
async def test_nothing_goes_on_for_ever(tmp_path: Path, name: str, stream: bool) -> None:
    """Also not for a task that never sleeps, because engine and client are always ready: the deadline reaches it, and
    the memory stays bounded."""
    script, seen = ENDLESS[name]
    config = "[deadlines]\ntotal_s = 0.4\nstream_total_s = 0.4\nfirst_token_s = 0.4"
    async with fake_engine(script) as engine, router(tmp_path, engine, config=config) as door:
        tracemalloc.start()
        try:
            await read_on(door, chat("connection: close", stream=stream))
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
        assert peak < 16 << 20
        await wait_all_tasks_blocked()
        (record,) = door.app.gateway.books.recent(3)
        if name == "what follows the end":
            assert record.outcome == "ok", "the client has had its answer"
        elif seen:
            assert record.code in (500, 502)
        else:
            assert record.code == 504
        engine.script = says(GOOD)
        assert (await door.ask(chat())).json() == CHAT


LENGTHS: dict[str, tuple[tuple[bytes, ...], Callable[[Answer], bool]]] = {
    "longer than its length": ((JSON_HEAD + b"content-length: 2\r\n\r\n{}{}",), lambda answer: answer.body == b"{}"),
    "longer, later": ((JSON_HEAD + b"content-length: 2\r\n\r\n{}", b"garbage"), lambda answer: answer.body == b"{}"),
    "two answers": ((whole(200, {"a": 1}) + whole(200, {"stolen": 1}),), lambda answer: answer.json() == {"a": 1}),
    "two answers, apart": ((whole(200, {"a": 1}), whole(200, {"stolen": 1})), lambda answer: answer.json() == {"a": 1}),
    "a second head": ((whole(200, {"a": 1}) + b"HTTP/1.1 500",), lambda answer: answer.json() == {"a": 1}),
    "a body with a 204": ((b"HTTP/1.1 204 No\r\n\r\nbody",), lambda answer: answer.status == 204 and not answer.body),
    "a chunked body with a 204": (
        (b"HTTP/1.1 204 No\r\ntransfer-encoding: chunked\r\n\r\n3\r\nabc\r\n0\r\n\r\n",),
        lambda answer: answer.status == 204 and not answer.body,
    ),
    "a body with a 304": (
        (b"HTTP/1.1 304 No\r\ncontent-length: 5\r\n\r\nhello",),
        lambda answer: answer.status == 304 and not answer.body,
    ),
    "chunks after the last": (
        (JSON_HEAD + b"transfer-encoding: chunked\r\n\r\n2\r\n{}\r\n0\r\n\r\n6\r\nstolen\r\n",),
        lambda answer: answer.body == b"{}",
    ),
    "a longer error": ((b"HTTP/1.1 400 Bad\r\ncontent-length: 2\r\n\r\n{}{}",), lambda answer: answer.status == 400),
    "a stream with a tail": (
        (b"".join(streamed(event("a"), DONE)) + GOOD,), lambda answer: answer.body == event("a") + DONE,
    ),
    "a stream with a length and a tail": (
        (b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ncontent-length: 14\r\n\r\n" + DONE + GOOD,),
        lambda answer: answer.body == DONE,
    ),
}  # fmt: skip


@pytest.mark.parametrize(("said", "right"), LENGTHS.values(), ids=LENGTHS.keys())
async def test_what_is_beyond_an_answer_reaches_nobody(
    tmp_path: Path, said: tuple[bytes, ...], right: Callable[[Answer], bool]
) -> None:
    """Above all not the next request on that connection, which may be another client's."""
    async with fake_engine(says(*said)) as engine, router(tmp_path, engine) as door:
        for _ in range(2):
            answer = await door.ask(chat(stream=True))
            assert right(answer), answer
            await wait_all_tasks_blocked()
        assert not door.app.gateway.upstreams["a"].idle, "a connection that said too much was kept"
        engine.script = says(GOOD)
        client = await door.connect()
        for _ in range(3):
            await client.send(chat())
            assert (await client.answer("POST")).json() == CHAT
        assert len(engine.asked) == 5


async def test_an_answer_before_any_request_is_not_taken_for_one(tmp_path: Path) -> None:
    """An engine may send 408 on an idle connection; whatever it is, it answers nothing."""

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(GOOD)
        await wait_all_tasks_blocked()
        await peer.send(whole(408, {"stolen": True}))

    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        for _ in range(4):
            assert (await door.ask(chat())).json() == CHAT
            await wait_all_tasks_blocked()


async def test_a_wrong_model_in_the_answer_is_the_engines_affair(tmp_path: Path) -> None:
    lie = {**CHAT, "model": "another"}
    async with fake_engine(says(whole(200, lie))) as engine, router(tmp_path, engine) as door:
        assert (await door.ask(chat())).json() == lie
        assert door.app.gateway.table.available() == ["llama"]


async def test_compressed_bodies_pass_as_they_are(tmp_path: Path) -> None:
    """Nobody asked for them, since we send no Accept-Encoding; a client that gets one is told how it is encoded."""
    body = gzip.compress(json.dumps(CHAT).encode())
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        engine.script = says(whole(200, body, "content-encoding: gzip", "content-type: application/json"))
        answer = await door.ask(chat())
        assert answer.body == body and answer.fields["content-encoding"] == "gzip"
        engine.script = says(whole(500, body, "content-encoding: gzip", "content-type: application/json"))
        answer = await door.ask(chat())
        assert answer.status == 500 and "content-encoding" not in answer.fields
        assert answer.error["message"] == "the engine answered 500 without saying why"
        stream = gzip.compress(event("a") + DONE)
        head = STREAM_HEAD.replace(b"\r\n\r\n", b"\r\ncontent-encoding: gzip\r\n\r\n")
        engine.script = says(head, chunk(stream), LAST)
        assert (await door.ask(chat(stream=True))).status == 502, "no event can be found in there"


async def test_deep_and_odd_json_breaks_nothing(tmp_path: Path) -> None:
    bottomless = b"[" * 200_000
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for said in (
            whole(500, bottomless),
            whole(500, b'{"error":' + b'{"error":' * 100_000),
            whole(400, b'{"error":{"message":{"a":1},"code":[1],"type":5}}'),
            whole(400, b'{"error":["x"]}'),
            whole(400, b'"text"'),
            whole(400, b"\xff\xfe"),
            whole(400, b""),
        ):
            engine.script = says(said)
            answer = await door.ask(chat())
            assert answer.status in (400, 500) and answer.error
        for data in (b'{"error":' + bottomless, b'{"usage":{"prompt_tokens":' + bottomless, b'{"error', b"\xff", b""):
            engine.script = says(*streamed(event("a"), b"data: " + data + b"\n\n", DONE))
            answer = await door.ask(chat(stream=True))
            assert answer.body.endswith(DONE)
            engine.script = says(*streamed(b"data: " + data + b"\n\n", DONE))
            assert (await door.ask(chat(stream=True))).body.endswith(DONE)


@pytest.mark.parametrize("depth", [100, 900, 970, 980, 990, 1000, 1100, 5000])
async def test_an_answer_as_deep_as_decoders_go_passes_as_it_is(tmp_path: Path, depth: int) -> None:
    """Where a decoder gives up depends on how deep its caller stands, so the depths around its limit are tried."""
    deep = b"[" * depth + b"]" * depth
    usage = b'{"usage": {"prompt_tokens": 1, "completion_tokens": 1}, "x": %b}' % deep
    error = b'{"error": {"message": "m", "type": "t", "param": null, "code": "c", "x": %b}}' % deep
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for target in ("/v1/chat/completions", "/v1/responses", "/v1/messages"):
            engine.script = says(whole(200, usage))
            assert (await door.ask(chat(target=target))).body == usage
            for said in (error, error.replace(b'"code": "c"', b'"extra": 1'), b'{"detail": %b}' % deep):
                engine.script = says(whole(400, said))
                answer = await door.ask(chat(target=target))
                assert answer.status == 400 and answer.json()["error"]["message"], answer.body
        for data in (usage, error):
            engine.script = says(*streamed(event("a"), b"data: " + data + b"\n\n", DONE))
            assert (await door.ask(chat(stream=True))).body.endswith(DONE)
            engine.script = says(*streamed(b"data: " + data + b"\n\n", DONE))
            assert (await door.ask(chat(stream=True))).status in (200, 502)
        assert not door.told("request failed inside the router")


@pytest.mark.parametrize("depth", [900, 980, 990, 1000, 5000])
async def test_what_an_endpoint_says_of_itself_may_be_deep(tmp_path: Path, depth: int) -> None:
    deep = b"[" * depth + b"]" * depth

    async def script(asked: Asked, peer: Peer) -> None:
        said = {"/d/props": b'{"total_slots": 3, "x": %b}', "/d/v1/models": b'{"data": [{"id": "llama", "x": %b}]}'}
        await peer.send(whole(200, said[asked.target] % deep if asked.target in said else b"llamacpp:x 1\n"))

    async with fake_engine(script) as engine:
        url = engine.url.replace("/v1", "/d/v1")
        config = f'[[endpoints]]\nid = "a"\nurl = "{url}"\nmodels = ["llama"]\nengine = "llamacpp"\n'
        async with router(tmp_path, config=config) as door:
            await door.until("it was asked", lambda: "/d/props" in [asked.target for asked in engine.asked])
            await wait_all_tasks_blocked()
            for path in ("/v1/models", "/v1/models/llama"):
                assert (await door.ask(request("GET", path))).status == 200
            assert not door.told("request failed inside the router")


async def test_names_that_no_operator_could_read_are_passed_over(tmp_path: Path) -> None:
    names = [
        "good",
        "good/too",
        "häuser",
        "x" * 512,
        "x" * 513,
        "x" * 100_000,
        "a\nb",
        "\x1b[31m",
        "\u202ea",
        "\x00",
        "",
    ]

    async def script(asked: Asked, peer: Peer) -> None:
        listed = {"data": [{"id": name} for name in names]}
        await peer.send(whole(200, listed if asked.target == "/d/v1/models" else CHAT))

    async with fake_engine(script) as engine:
        url = engine.url.replace("/v1", "/d/v1")
        async with router(tmp_path, config=f'[[endpoints]]\nid = "a"\nurl = "{url}"\n') as door:
            await door.until("it was heard", lambda: door.app.gateway.table.entries)
            listed = (await door.ask(request("GET", "/v1/models"))).json()["data"]
            assert {entry["id"] for entry in listed} == set(names[:4])


# -- answers before the request is whole -------------------------------------------------------------------------------

LARGE = chat(filler="x" * BEYOND_SOCKETS)


def endpoint_at(listener: trio.SocketListener) -> str:
    return f'[[endpoints]]\nid = "a"\nurl = "http://127.0.0.1:{listener.socket.getsockname()[1]}"\nmodels = ["llama"]'


def early(*pieces: bytes, then: str = "silent") -> Callable[[trio.SocketStream], object]:
    async def serve(stream: trio.SocketStream) -> None:
        """Raw, since h11 would read the request first."""
        async with stream:
            data = await stream.receive_some(65536)
            if data.startswith(b"GET"):
                await stream.send_all(whole(200, {"object": "list", "data": []}))
                return
            for piece in pieces:
                await stream.send_all(piece)
                await wait_all_tasks_blocked()
            if then == "silent":
                await trio.sleep_forever()

    return serve


@pytest.mark.parametrize("then", ["silent", "close"])
@pytest.mark.parametrize("before", [b"", b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 102 Processing\r\n\r\n"])
async def test_an_early_refusal_of_a_large_upload_reaches_the_client(
    tmp_path: Path, before: bytes, then: str, nursery: trio.Nursery
) -> None:
    refusal = whole(413, {"error": {"message": "too large", "type": "x", "param": None, "code": "y"}})
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, early(before + refusal[:9], refusal[9:], then=then), [listener])
    async with router(tmp_path, config=endpoint_at(listener)) as door:
        answer = await door.ask(LARGE)
        assert answer.status == 413 and answer.error["message"] == "too large"
        (record,) = door.app.gateway.books.recent(3)
        assert [attempt.kind for attempt in record.attempts] == ["answer"]
        assert not door.app.gateway.table.members["a"].penalty
    nursery.cancel_scope.cancel()


async def test_an_early_success_is_one(tmp_path: Path, nursery: trio.Nursery) -> None:
    """The engine had heard enough. Its connection is in an unknown state, and does not serve again."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, early(*streamed(event("a"), DONE)), [listener])
    async with router(tmp_path, config=endpoint_at(listener)) as door:
        answer = await door.ask(chat(stream=True, filler="x" * BEYOND_SOCKETS))
        assert answer.status == 200 and answer.body == event("a") + DONE
        assert not door.app.gateway.upstreams["a"].idle
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("said", [b"", b"HTTP/1.1 100 Continue\r\n\r\n", b"HTT"])
async def test_an_engine_that_closes_within_a_large_upload_was_not_asked(
    tmp_path: Path, said: bytes, nursery: trio.Nursery
) -> None:
    """What was not handed over whole may be tried elsewhere, unless a byte came back."""
    (listener,) = await trio.open_tcp_listeners(0, host="127.0.0.1")
    nursery.start_soon(trio.serve_listeners, early(*([said] if said else []), then="close"), [listener])
    config = endpoint_at(listener) + '\npool_priority = 9\npool = "x"'
    async with fake_engine(id="b") as other, router(tmp_path, other, config=config) as door:
        answer = await door.ask(LARGE)
        (record,) = door.app.gateway.books.recent(3)
        first = record.attempts[0]
        if said:
            assert answer.status == 502 and first.answered and not other.asked
        else:
            assert answer.status == 200 and not first.sent and len(other.asked) == 1
    nursery.cancel_scope.cancel()


async def test_a_torn_upload_is_no_request(tmp_path: Path) -> None:
    """A client that leaves within its body reaches no engine."""
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(request(body=b'{"model":"llama"}', target="/v1/chat/completions")[:-3])
        await wait_all_tasks_blocked()
        await client.close()
        await wait_all_tasks_blocked()
        assert not engine.asked


async def test_a_liar_harms_nobody_else(tmp_path: Path) -> None:
    """Two engines, one of which says something else each time: every request is answered properly or refused, and
    those at the other engine never notice."""
    scripts = [says(said, then="silent") for said in NOT_HTTP.values()] + [
        says(*said) for said, _ in LENGTHS.values()
    ]  # fmt: skip
    async with (
        fake_engine(in_turn(*scripts), id="liar") as liar,
        fake_engine(id="honest") as honest,
    ):
        liar.models, honest.models = ("lies",), ("llama",)
        async with router(tmp_path, liar, honest) as door:
            for _ in scripts:
                answers: list[Answer] = []

                async def ask(raw: bytes, into: list[Answer] = answers) -> None:
                    into.append(await door.ask(raw))

                async with trio.open_nursery() as asking:
                    try:
                        asking.start_soon(ask, request(body=b'{"model":"lies","messages":[]}'))
                        asking.start_soon(ask, chat())
                    except BrokenOff:
                        raise AssertionError("torn") from None
                assert {
                    answer.json() == CHAT for answer in answers if answer.status == 200 and b"chatcmpl" in answer.body
                }
            assert len(honest.asked) == len(scripts)
            assert {r.outcome for r in door.app.gateway.books.recent(200) if r.model == "llama"} == {"ok"}

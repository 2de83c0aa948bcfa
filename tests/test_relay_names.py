"""Names on the way to an engine: aliases and fallbacks change the bytes of one value, and what an engine made is asked
for where it was made."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from trio.testing import wait_all_tasks_blocked

from appliance.facts.endpoint import Endpoint
from tests.fake_engine import CHAT, DONE, Asked, FakeEngine, Peer, event, fake_engine, in_turn, says, streamed, whole
from tests.raw_client import chat, request
from tests.routers import router
from tests.test_streams_broken import typed

ALIASES = '[[models]]\nname = "llama"\naliases = ["chat", "gpt-4o"]\n'
MODELS = ALIASES + 'fallbacks = ["small"]\n'


def body_of(name: bytes) -> bytes:
    return (
        b'\r\n{ "messages":[{"model":"x","content":"\\u00e9"}],"model" :\t'
        + name
        + b' ,"seed":1e400,"a":"m\xc3\xb6"}\n'
    )


@pytest.mark.parametrize(
    "name",
    [b'"chat"', b'"llama"', b'"gpt-4o"', b'"c\\u0068at"', b'"\\u006c\\u006cama"'],
    ids=["alias", "name", "other alias", "escaped alias", "escaped name"],
)
async def test_only_the_bytes_of_the_name_change(tmp_path: Path, name: bytes) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config=ALIASES) as door:
        answer = await door.ask(request(body=body_of(name)))
        assert answer.status == 200, answer.body
        sent = engine.asked[0]
        assert sent.body in (body_of(b'"llama"'), body_of(name) if json.loads(name) == "llama" else b"")
        assert sent.by_name["content-length"] == str(len(sent.body))


async def test_a_body_that_only_just_is_not_too_deep(tmp_path: Path) -> None:
    """It is decoded more than once, and a decoder goes the less deep the deeper its caller stands."""
    async with fake_engine() as engine, router(tmp_path, engine, config=ALIASES) as door:
        statuses = set()
        for depth in range(900, 1001, 2):
            deep = b"[" * depth + b"]" * depth
            body = b'{"model": "chat", "x": %b, "metadata": {"model": "\\u006d"}}' % deep
            answer = await door.ask(request(body=body))
            assert answer.status == 200 or (answer.status, answer.error["code"]) in (
                (400, "invalid_json"), (400, "duplicate_field"),
            ), (depth, answer.body)  # fmt: skip
            statuses.add(answer.status)
        assert statuses == {200, 400}
        assert all(b'"llama"' in asked.body for asked in engine.asked)


FORM_TYPE = 'multipart/form-data; boundary="a b"'
PARTS: dict[str, bytes] = {
    "before the file": (
        b'--a b\r\nContent-Disposition: form-data; name="model"\r\n\r\n%b\r\n'
        b'--a b\r\nContent-Disposition: form-data; name="file"; filename="model"\r\n\r\n\x00\xffmodel\r\n--a\r\n\r\n'
        b"--a b--\r\n"
    ),
    "after the file": (
        b"--a b\r\nContent-Type: audio/wav\r\n"
        b'content-disposition: form-data; filename="x"; name=file\r\n\r\n\x00\xffname="model"\r\n\r\nchat\r\n'
        b"--a b\r\nContent-Disposition: form-data; name=model\r\n\r\n%b\r\n--a b--\r\nepilogue"
    ),
}  # fmt: skip


@pytest.mark.parametrize("form", PARTS.values(), ids=PARTS.keys())
@pytest.mark.parametrize("name", [b"chat", b"llama"])
async def test_in_a_form_too(tmp_path: Path, form: bytes, name: bytes) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config=ALIASES) as door:
        raw = request("POST", "/v1/audio/transcriptions", f"content-type: {FORM_TYPE}", body=form % name)
        assert (await door.ask(raw)).status == 200
        sent = engine.asked[0]
        assert sent.body == form % b"llama"
        assert sent.by_name["content-type"] == FORM_TYPE
        assert sent.by_name["content-length"] == str(len(sent.body))


@pytest.mark.parametrize("stream", [False, True])
async def test_a_fallback_is_asked_by_its_own_name(tmp_path: Path, stream: bool) -> None:
    async with fake_engine(says(whole(500, {})), id="a") as a, fake_engine(id="b") as b:
        b.models = ("small",)
        b.script = says(*streamed(event("a"), DONE)) if stream else says(whole(200, {**CHAT, "model": "small"}))
        async with router(tmp_path, a, b, config=MODELS) as door:
            answer = await door.ask(chat(stream=stream, filler="é"))
            assert answer.status == 200
            assert a.asked[0].json()["model"] == "llama"
            assert b.asked[0].body == a.asked[0].body.replace(b'"llama"', b'"small"')
            form = PARTS["after the file"]
            raw = request("POST", "/v1/audio/transcriptions", f"content-type: {FORM_TYPE}", body=form % b"chat")
            await door.ask(raw)
            assert b.asked[1].body == form % b"small"
            (first, second) = door.app.gateway.books.recent(2)
            assert {first.endpoint, second.endpoint} == {"b"} and {first.model, second.model} == {"llama"}


async def test_fallbacks_in_their_order_and_the_first_answer_last(tmp_path: Path) -> None:
    """Where no fallback can either, the client is told what its own model said."""
    config = '[[models]]\nname = "llama"\nfallbacks = ["second", "third"]\n'
    async with (
        fake_engine(says(whole(503, {"error": {"message": "full", "code": "mine"}}, "retry-after: 9")), id="a") as a,
        fake_engine(says(then="reset"), id="b") as b,
        fake_engine(says(whole(404, {"error": {"message": "theirs"}})), id="c") as c,
    ):
        b.models, c.models = ("second",), ("third",)
        async with router(tmp_path, a, b, c, config=config) as door:
            await wait_all_tasks_blocked()
            door.app.gateway.drop_stale(float("inf"))
            answer = await door.ask(chat())
            assert [len(engine.asked) for engine in (a, b, c)] == [1, 2, 0], (
                "a loss ends it: it may have been worked on"
            )
            assert answer.status == 502
            b.script = says(whole(500, {}))
            c.script = says(whole(503, {}))
            answer = await door.ask(chat())
            assert answer.status == 503 and answer.json()["error"]["code"] == "mine"
            assert answer.fields["retry-after"] == "9"
            c.script = says(whole(200, CHAT))
            assert (await door.ask(chat())).status == 200


async def test_an_unready_model_falls_back_at_once(tmp_path: Path) -> None:
    async with fake_engine(id="b") as b:
        b.models = ("small",)
        async with router(tmp_path, b, config=MODELS) as door:
            assert (await door.ask(chat())).status == 200
            assert b.asked[0].json()["model"] == "small"
            answer = await door.ask(chat(model="nobody"))
            assert answer.status == 404 and "llama" in answer.error["message"] and "gpt-4o" in answer.error["message"]


# -- response ids ------------------------------------------------------------------------------------------------------


def storing(numbers: itertools.count[int], *, stream: bool) -> Callable[[Asked, Peer], Any]:
    """An engine that stores what it made, and says 404 to what it did not make."""
    made: set[str] = set()

    async def script(asked: Asked, peer: Peer) -> None:
        if asked.method == "POST" and asked.target == "/v1/responses":
            before = asked.json().get("previous_response_id")
            if before is not None and before not in made:
                await peer.send(whole(404, {"error": {"message": "not made here"}}))
                return
            name = f"resp_{next(numbers)}"
            made.add(name)
            response = {"id": name, "object": "response", "status": "completed", "output": [{"id": "msg_1"}]}
            if stream:
                created = {**response, "status": "in_progress", "previous_response_id": "resp_x"}
                await peer.send(
                    *streamed(
                        typed("response.created", response=created), typed("response.completed", response=response)
                    )
                )
            else:
                await peer.send(whole(200, response))
            return
        name = asked.target.split("/")[3].partition("?")[0]
        answer = whole(200, {"id": name, "by": "me"}) if name in made else whole(404, {})
        await peer.send(answer.partition(b"\r\n\r\n")[0] + b"\r\n\r\n" if asked.method == "HEAD" else answer)

    return script


@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_made_is_asked_for_where_it_was_made(tmp_path: Path, stream: bool) -> None:
    numbers = itertools.count()
    engines: list[FakeEngine] = []
    async with (
        fake_engine(storing(numbers, stream=stream), id="a") as a,
        fake_engine(storing(numbers, stream=stream), id="b") as b,
        fake_engine(storing(numbers, stream=stream), id="c") as c,
        router(tmp_path, a, b, c) as door,
    ):
        engines += [a, b, c]
        names = []
        for _ in range(12):
            answer = await door.ask(chat(target="/v1/responses", stream=stream))
            names.append(answer.body.partition(b'"id": "')[2].partition(b'"')[0].decode())
        assert len(set(names)) == 12 and sum(bool(engine.asked) for engine in engines) > 1
        for name in names:
            for method, path in (("GET", ""), ("POST", "/cancel"), ("DELETE", ""), ("GET", "?include=x")):
                answer = await door.ask(request(method, f"/v1/responses/{name}{path}"))
                assert answer.status == 200 and answer.json() == {"id": name, "by": "me"}, (method, path)
            answer = await door.ask(chat(target="/v1/responses", stream=stream, previous_response_id=name))
            assert answer.status == 200, "a continuation knows nothing elsewhere"
            head = await door.ask(request("HEAD", f"/v1/responses/{name}"))
            assert head.status == 200 and not head.body and int(head.fields["content-length"]) > 10
        assert (await door.ask(request("GET", "/v1/responses/resp_nobody"))).status == 404
        unknown = await door.ask(chat(target="/v1/responses", previous_response_id="resp_nobody"))
        assert unknown.status == 404 and unknown.error["message"] == "not made here", "the engine's own word"


async def test_a_response_whose_client_left_can_be_asked_for(tmp_path: Path) -> None:
    created = typed("response.created", response={"id": "resp_7", "status": "in_progress"})
    script = in_turn(says(*streamed(created, end=b""), then="silent"), says(whole(200, {"id": "resp_7"})))
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        client = await door.connect()
        await client.send(chat(target="/v1/responses", stream=True, background=True))
        await client.until(created)
        await client.close()
        await wait_all_tasks_blocked()
        assert (await door.ask(request("GET", "/v1/responses/resp_7"))).json() == {"id": "resp_7"}


@pytest.mark.parametrize("how", ["header", "user", "session_id"])
async def test_a_session_stays_where_it_was(tmp_path: Path, how: str) -> None:
    async with (
        fake_engine(id="a") as a,
        fake_engine(id="b") as b,
        fake_engine(id="c") as c,
        router(tmp_path, a, b, c) as door,
    ):
        for number in range(8):
            for _ in range(6):
                if how == "header":
                    await door.ask(chat(f"x-session-id: s{number}"))
                else:
                    await door.ask(chat(**{how: f"s{number}"}))
        homes: dict[str, set[str]] = {}
        for record in door.app.gateway.books.recent(100):
            homes.setdefault(record.tenant, set()).add(record.endpoint)
        assert len(homes) == 8 and all(len(home) == 1 for home in homes.values()), homes
        assert len(set.union(*homes.values())) > 1


async def test_a_continuation_whose_name_is_no_text_is_the_engines_to_refuse(tmp_path: Path) -> None:
    said = whole(400, {"error": {"message": "no such id"}})
    async with fake_engine(says(said)) as engine, router(tmp_path, engine) as door:
        body = b'{"model": "llama", "input": "x", "previous_response_id": "\xff"}'
        answer = await door.ask(request("POST", "/v1/responses", body=body))
        assert answer.status == 400 and answer.error["message"] == "no such id"
        assert engine.asked[0].body == body
        assert not door.told("request failed inside the router")


@pytest.mark.parametrize("body", [b"{}", b"\xff", b'{"model": "chat"}'])
async def test_a_body_with_a_stored_response_passes_as_it_is(tmp_path: Path, body: bytes) -> None:
    """Also where the endpoint knows the model by another name: there is none in it that would have to be replaced."""
    async with fake_engine(storing(itertools.count(), stream=False)) as engine:
        config = '[[models]]\nname = "llama"\naliases = ["theirs"]\ngroups = true\n'
        async with router(tmp_path, config=config) as door:
            group = Endpoint("group:g", "127.0.0.1", engine.port, models=("theirs",), announced=True, retries=False)
            door.app.gateway.announce((group,), {}, {}, {})
            made = (await door.ask(chat(target="/v1/responses"))).json()["id"]
            for method, path in (("POST", "/cancel"), ("DELETE", "")):
                answer = await door.ask(request(method, f"/v1/responses/{made}{path}", body=body))
                assert answer.status == 200 and answer.json() == {"id": made, "by": "me"}, answer.body
                assert engine.asked[-1].body == body

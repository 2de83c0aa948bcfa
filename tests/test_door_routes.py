"""What is served where: paths, methods, the model list, CORS, and what is never passed on."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.door.routes import ENGINE_MANAGEMENT
from tests.fake_engine import CHAT, MODEL, fake_engine, says, whole
from tests.raw_client import Answer, chat, request
from tests.routers import Running, router

MODELS = """
[[models]]
name = "llama"
aliases = ["org/chat", "c\u00e9"]
"""


async def answers(door: Running, *raws: bytes) -> list[Answer]:
    """The answers to requests on one connection, which must survive them all."""
    client = await door.connect()
    found = []
    for raw in raws:
        await client.send(raw)
        found.append(await client.answer(raw.split(b" ", 1)[0].decode()))
        assert not found[-1].closes, raw
    return found


async def test_what_is_read_is_served_to_get_and_head(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config=MODELS) as door:
        for path in ("/", "/healthz", "/readyz", "/status.json", "/v1/models", "/v1/models/llama", "/v1/models/"):
            get, head = await answers(door, request("GET", path), request("HEAD", path))
            assert (get.status, head.status) == (200, 200), path
            assert get.json() and head.body == b""
            assert head.fields["content-length"] == str(len(get.body))
            assert head.fields["content-type"] == get.fields["content-type"] == "application/json"


@pytest.mark.parametrize(
    ("method", "path", "allowed"),
    [
        ("POST", "/v1/models", "GET, HEAD, OPTIONS"),
        ("DELETE", "/v1/models/llama", "GET, HEAD, OPTIONS"),
        ("POST", "/healthz", "GET, HEAD, OPTIONS"),
        ("PUT", "/", "GET, HEAD, OPTIONS"),
        ("GET", "/v1/chat/completions", "POST, OPTIONS"),
        ("HEAD", "/v1/chat/completions", "POST, OPTIONS"),
        ("DELETE", "/v1/messages", "POST, OPTIONS"),
        ("GET", "/tokenize", "POST, OPTIONS"),
        ("PATCH", "/v1/embeddings/", "POST, OPTIONS"),
        ("POST", "/v1/responses/resp_1", "GET, HEAD, DELETE, OPTIONS"),
        ("GET", "/v1/responses/resp_1/cancel", "POST, OPTIONS"),
        ("TRACE", "/v1/models", "GET, HEAD, OPTIONS"),
        ("BREW", "/v1/models", "GET, HEAD, OPTIONS"),
    ],
)
async def test_other_methods_are_told_which_ones_there_are(
    tmp_path: Path, method: str, path: str, allowed: str
) -> None:
    async with router(tmp_path) as door:
        answer, options, after = await answers(
            door, request(method, path), request("OPTIONS", path), request("GET", "/healthz")
        )
        assert (answer.status, answer.fields["allow"]) == (405, allowed)
        if method != "HEAD":
            error = answer.json()["error"]
            assert "message" in error
        assert (options.status, options.fields["allow"], options.body) == (204, allowed, b"")
        assert after.status == 200


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("GET", "/v1"),
        ("GET", "/v1/nothing"),
        ("GET", "/nothing"),
        ("POST", "/nothing"),
        ("OPTIONS", "/nothing"),
        ("GET", "/v1/responses"[:-1]),
        ("GET", "/v1/responses/a/b"),
        ("GET", "/v1/responses/" + "a" * 201),
        ("POST", "/v1/a b".replace(" ", "%20")),
        ("POST", "/v1/a;b"),
        ("POST", "/metrics"),
        ("GET", "/metrics"),
        ("GET", "/docs"),
        ("GET", "/openapi.json"),
    ],
)
async def test_unknown_paths(tmp_path: Path, method: str, path: str) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        answer, after = await answers(door, request(method, path), request("GET", "/healthz"))
        assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert answer.fields["x-should-retry"] == "false"
        assert after.status == 200
        assert engine.asked == []


@pytest.mark.parametrize("path", sorted(path.decode() for paths in ENGINE_MANAGEMENT.values() for path in paths))
async def test_engine_management_is_never_passed_on(tmp_path: Path, path: str) -> None:
    body = b'{"model":"llama"}'
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for answer in await answers(
            door,
            request("POST", path, body=body),
            request("POST", path + "/", body=body),
            request("GET", path),
            request("POST", path + "?a=b", body=body),
            request("OPTIONS", path),
        ):
            assert (answer.status, answer.error["code"]) == (404, "not_found")
        assert engine.asked == []


@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions", "/v1/completions", "/v1/embeddings", "/v1/responses", "/v1/messages", "/v1/rerank",
        "/v1/messages/count_tokens", "/v1/score", "/v1/audio/speech", "/v1/images/generations", "/v1/what.ever/comes",
        "/v2/rerank"[:0] + "/rerank", "/tokenize", "/detokenize", "/score", "/generate", "/invocations",
    ],
)  # fmt: skip
async def test_what_engines_answer_goes_to_them(tmp_path: Path, path: str) -> None:
    body = b'{"model": "llama", "x": 1e400}'
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        for target, seen in ((path, path), (path + "/", path), (path + "?a=b%20c&a=", path + "?a=b%20c&a=")):
            answer = await door.ask(request("POST", target, body=body))
            assert (answer.status, answer.json()) == (200, CHAT)
            assert (engine.asked[-1].target, engine.asked[-1].body) == (seen, body)


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/realtime", "/v1/models"])
async def test_upgrades_are_refused(tmp_path: Path, path: str) -> None:
    async with router(tmp_path) as door:
        answer, after = await answers(
            door,
            request("GET", path, "connection: Upgrade", "upgrade: WebSocket", "sec-websocket-version: 13"),
            request("GET", "/healthz"),
        )
        assert (answer.status, answer.error["code"]) == (501, "upgrade_not_supported")
        assert after.status == 200
        (answer,) = await answers(door, request("GET", "/v1/realtime?model=llama"))
        assert answer.status == 501


async def test_an_upgrade_that_may_be_ignored_is(tmp_path: Path) -> None:
    """Some clients offer HTTP/2 with every request; nothing obliges a server to take the offer."""
    offer = ("connection: Upgrade, HTTP2-Settings", "upgrade: h2c", "http2-settings: AAMAAABkAAQAAP__")
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        listed, answer = await answers(door, request("GET", "/v1/models", *offer), chat(*offer))
        assert (listed.status, answer.status) == (200, 200)
        assert not {"upgrade", "connection", "http2-settings"} & set(engine.asked[0].by_name)


# -- models ------------------------------------------------------------------------------------------------------------


async def test_the_list_of_models(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config=MODELS) as door:
        await door.until("the engine's own list is known", lambda: door.app.gateway.listed)
        entries = (await door.ask(request("GET", "/v1/models"))).json()
        assert entries["object"] == "list"
        by_id = {entry["id"]: entry for entry in entries["data"]}
        assert set(by_id) == {"llama", "org/chat", "cé"}
        assert by_id["llama"] == {"id": MODEL, "object": "model", "created": 0, "owned_by": "fake"}
        for path in (
            "llama", "llama/", "org/chat", "org%2Fchat", "org%2fchat", "%6Clama", "c%C3%A9", "llama?after=x",
        ):  # fmt: skip
            answer = await door.ask(request("GET", f"/v1/models/{path}"))
            assert answer.status == 200, path
            assert answer.json() in entries["data"]


@pytest.mark.parametrize("path", ["none", "org", "org/chat/x", "org%2Fchat%2F", "llama%00", "llama%0d%0aset-cookie: x"])
async def test_models_that_are_not_there(tmp_path: Path, path: str) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config=MODELS) as door:
        answer = await door.ask(request("GET", f"/v1/models/{path.replace(' ', '%20')}"))
        assert (answer.status, answer.error["code"]) == (404, "model_not_found")
        assert "llama" in answer.error["message"]
        assert "set-cookie" not in answer.fields


async def test_ready_and_not_ready(tmp_path: Path) -> None:
    async with router(tmp_path) as door:
        (answer,) = await answers(door, request("GET", "/readyz"))
        assert (answer.status, answer.error["code"], answer.fields["retry-after"]) == (503, "model_not_ready", "1")
        door.app.door.draining = True
        client = await door.connect()
        await client.send(request("GET", "/readyz"))
        answer = await client.answer()
        assert (answer.status, answer.error["code"]) == (503, "draining")
        assert answer.closes and answer.fields["retry-after"]
        door.app.door.draining = False


# -- CORS --------------------------------------------------------------------------------------------------------------

PAGE = "https://chat.example.org"
CORS = f'[server]\ncors_origins = ["{PAGE}", "http://localhost:3000"]\nmax_body_bytes = 100000\n'


def allows(answer: Answer) -> str | None:
    sent = {name for name in answer.fields if name.startswith("access-control-")}
    if not sent:
        return None
    assert "origin" in answer.fields["vary"].lower()
    return answer.fields["access-control-allow-origin"]


async def test_a_page_of_an_allowed_origin(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config=CORS) as door:
        origin = f"origin: {PAGE}"
        preflight, answer, listed = await answers(
            door,
            request(
                "OPTIONS", "/v1/chat/completions", origin, "access-control-request-method: POST",
                "access-control-request-headers: content-type,authorization",
            ),
            chat(origin),
            request("GET", "/v1/models", origin),
        )  # fmt: skip
        assert preflight.status == 204
        assert preflight.fields["access-control-allow-methods"] == "POST, OPTIONS"
        assert preflight.fields["access-control-allow-headers"] == "content-type,authorization"
        assert [allows(each) for each in (preflight, answer, listed)] == [PAGE] * 3
        assert "retry-after" in answer.fields["access-control-expose-headers"]
        assert "origin" not in engine.asked[0].by_name
        assert answer.json() == CHAT


async def test_errors_carry_it_too(tmp_path: Path) -> None:
    """Else the page sees a network failure where the door had a reason to tell."""
    engine_fails = says(whole(400, {"error": {"message": "no", "type": "x", "param": None, "code": None}}))
    async with fake_engine(engine_fails) as engine, router(tmp_path, engine, config=CORS) as door:
        origin = f"origin: {PAGE}"
        for raw, status in (
            (chat(origin), 400),
            (chat(origin, model="none"), 404),
            (request("POST", "/v1/embeddings", origin, body=b"{"), 400),
            (request("GET", "/v1/embeddings", origin), 405),
            (request("GET", "/v1//x", origin), 400),
            (request("GET", "/v1/nothing", origin), 404),
            (request("POST", "/v1/embeddings", origin, "content-encoding: br", body=b"{}"), 415),
            (request("POST", "/v1/embeddings", origin, "content-length: 999999999"), 413),
        ):
            answer = await door.ask(raw)
            assert (answer.status, allows(answer)) == (status, PAGE), raw


@pytest.mark.parametrize("origin", ["https://evil.example.org", "null", PAGE + ":443", PAGE.upper(), PAGE + "/", ""])
async def test_pages_of_other_origins(tmp_path: Path, origin: str) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config=CORS) as door:
        for raw in (
            chat(f"origin: {origin}"),
            request("OPTIONS", "/v1/models", f"origin: {origin}", "access-control-request-method: GET"),
        ):
            assert allows(await door.ask(raw)) is None


async def test_nothing_but_v1_is_for_pages_of_others(tmp_path: Path) -> None:
    with_it = f"origin: {PAGE}"
    async with fake_engine() as engine, router(tmp_path, engine, config=CORS) as door:
        for path in ("/healthz", "/status.json", "/", "/readyz", "/nothing", "/v1x", "/mcp"):
            assert allows(await door.ask(request("GET", path, with_it))) is None, path
        assert allows(await door.ask(request("POST", "/tokenize", with_it, body=b'{"model":"llama"}'))) is None


async def test_by_default_no_page_may(tmp_path: Path) -> None:
    """And what an engine says of it does not count."""
    says_star = says(whole(200, CHAT, "access-control-allow-origin: *", "vary: accept"))
    async with fake_engine(says_star) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(f"origin: {PAGE}"))
        assert allows(answer) is None
        assert answer.fields["vary"] == "accept"


# -- what goes along ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("my-id_1.2:3/4", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("a b", False),
        ("", False),
        ("caf\xe9", False),
        ("a\tb", False),
    ],
)
async def test_the_id_of_a_request(tmp_path: Path, given: str, kept: bool) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(f"x-request-id: {given}"))
        named = answer.fields["x-request-id"]
        assert (named == given) is kept
        assert named
        assert engine.asked[0].by_name["x-request-id"] == named
        assert door.app.gateway.books.find(named) is not None


async def test_every_request_has_an_id_of_its_own(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        ids = {(await door.ask(chat())).fields["x-request-id"] for _ in range(5)}
        refused = await door.ask(request("GET", "/nothing"))
        assert len(ids | {refused.fields["x-request-id"]}) == 6


async def test_what_reaches_an_engine_and_what_comes_back(tmp_path: Path) -> None:
    """By allowlist there; all but what belongs to the hop back."""
    script = says(
        whole(
            200, CHAT, "server: engine", "set-cookie: a=b", "x-custom: 1", "keep-alive: timeout=5", "x-request-id: own"
        )
    )
    secret = (
        "authorization: Bearer sk-1",
        "cookie: a=b",
        "x-forwarded-for: 1.1.1.1",
        "x-appliance-band: gold",
        "te: x",
    )
    async with fake_engine(script) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(
            chat(
                *secret,
                "accept: text/x",
                "user-agent: me/1",
                "traceparent: 00-1-2-01",
                "x-other: 1",
                "referer: http://x",
            )
        )
        asked = engine.asked[0].by_name
        assert set(asked) - {"traceparent"} == {
            "host", "content-type", "content-length", "accept", "user-agent", "x-request-id",
        }  # fmt: skip
        assert (asked["accept"], asked["user-agent"]) == ("text/x", "me/1")
        assert answer.fields["x-custom"] == "1"
        assert answer.fields["x-request-id"] == asked["x-request-id"]
        assert not {"server", "set-cookie", "keep-alive"} & set(answer.fields)


async def test_the_log_of_requests_names_the_client_behind_a_trusted_proxy(tmp_path: Path) -> None:
    config = '[server]\naccess_log = true\ntrusted_proxies = ["127.0.0.0/8"]\n'
    async with fake_engine() as engine, router(tmp_path, engine, config=config) as door:
        await door.ask(chat("x-forwarded-for: 1.2.3.4, 203.0.113.7", "x-request-id: one"))
        await door.ask(request("GET", "/nothing", "x-request-id: two"))
        await door.ask(b"GET nothing\r\n\r\n")
        await door.until("three lines are written", lambda: len(door.told("request")) == 3)
        one, two, bad = door.told("request")
        assert (one["client"], one["path"], one["status"]) == ("203.0.113.7", "/v1/chat/completions", 200)
        assert one["request_id"] == "one" and one["bytes"] > 100
        assert two["client"].startswith("127.0.0.1:") and two["status"] == 404
        assert (bad["method"], bad["path"], bad["status"]) == ("-", "-", 400)
        assert door.app.gateway.books.find("one").tenant == "203.0.113.7"  # type: ignore[union-attr]


async def test_by_default_no_proxy_is_trusted(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine, config="[server]\naccess_log = true") as door:
        await door.ask(chat("x-forwarded-for: 203.0.113.7"))
        await door.until("a line is written", lambda: door.told("request"))
        assert door.told("request")[0]["client"].startswith("127.0.0.1:")


async def test_what_is_kept_of_a_request_is_bounded(tmp_path: Path) -> None:
    """The books hold thousands of records: none of what a client writes may be kept at its length."""
    long = "x" * 200_000
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat("x-session-id: " + "s" * 30_000, model=long, user=long))
        assert answer.status == 404 and len(answer.body) < 2000
        assert (await door.ask(chat("x-session-id: " + "s" * 30_000, user=long))).status == 200
        for record in door.app.gateway.books.recent(5):
            values = [getattr(record, name) for name in record.__slots__]
            texts = [value for value in values if isinstance(value, str | bytes)]
            assert max(map(len, texts)) < 1000
        sessions = door.app.gateway.table.entries["llama"].sessions
        assert len(sessions) == 0

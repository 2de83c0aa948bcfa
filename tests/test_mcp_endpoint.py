"""The endpoint as clients see it: statuses, headers, versions, and what is refused."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.facts.errors import Refusal
from appliance.facts.mcp import McpSettings
from appliance.rules.mcp import protocol
from appliance.rules.mcp.asking import VERSIONS, Ask, Rejected, accepted, judge, own_origin
from tests.toolservers.scripted import META, Got, Scene, Server, scene

BOTH = "application/json, text/event-stream"


def request(method: str, identity: Any = 1, **params: Any) -> Any:
    return {"jsonrpc": "2.0", "id": identity, "method": method, "params": params}


async def code_of(here: Scene, message: Any, **how: Any) -> tuple[int, int]:
    got = await here.post(message, **how)
    return got.status, got.message["error"]["code"]


@pytest.mark.parametrize(
    ("asked", "agreed"),
    [
        ("2024-11-05", "2024-11-05"),
        ("2025-06-18", "2025-06-18"),
        ("2025-11-25", "2025-11-25"),
        ("2026-07-28", "2025-11-25"),
        ("1999-01-01", "2025-11-25"),
        (None, "2025-11-25"),
        (3, "2025-11-25"),
    ],
)
async def test_the_handshake_agrees_on_a_version(monkeypatch: pytest.MonkeyPatch, asked: Any, agreed: str) -> None:
    async with scene(monkeypatch, {}) as here:
        # also with a version header, which official clients leave out here
        for header in ({}, {"mcp_protocol_version": "2031-01-01"}):
            got = await here.post(request("initialize", protocolVersion=asked), **header)
            result = got.message["result"]
            assert (got.status, result["protocolVersion"]) == (200, agreed)
            assert result["capabilities"] == {"tools": {"listChanged": False}}
            assert result["serverInfo"]["name"] == "appliance"
            assert len(got.fields["mcp-session-id"]) == 32


async def test_sessions_are_only_names(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch, {}) as here:
        for session in ({}, {"mcp_session_id": "never given out"}):
            got = await here.post(request("ping"), mcp_protocol_version="2025-11-25", **session)
            assert (got.status, got.message["result"]) == (200, {})
            assert "mcp-session-id" not in got.fields
        ended = await here.raw("DELETE", {"mcp-session-id": "x", "mcp-protocol-version": "2025-11-25"}, b"")
        assert (ended.status, ended.body) == (200, b"")


@pytest.mark.parametrize("method", ["GET", "PUT", "DELETE", "PATCH"])
async def test_other_methods_are_not_taken(monkeypatch: pytest.MonkeyPatch, method: str) -> None:
    async with scene(monkeypatch, {}) as here:
        for headers in ({}, {"mcp-session-id": "x", "mcp-protocol-version": protocol.MODERN}):
            with pytest.raises(Refusal) as refused:
                await here.raw(method, headers, b"")
            assert refused.value.status == 405
            assert dict(refused.value.headers)["Allow"].startswith("POST")


async def test_the_modern_era_needs_no_handshake_and_has_none(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch, {"g": Server()}) as here:
        found = (await here.post(request("server/discover"), modern=True)).message["result"]
        assert found["supportedVersions"] == [protocol.MODERN]
        assert found["resultType"] == "complete"
        assert found["_meta"][protocol.META_SERVER]["name"] == "appliance"
        listed = (await here.post(request("tools/list"), modern=True)).message["result"]
        assert (listed["ttlMs"], listed["cacheScope"], listed["resultType"]) == (0, "private", "complete")
        for method in ("initialize", "ping", "subscriptions/listen", "resources/list"):
            assert await code_of(here, request(method), modern=True) == (404, -32601)
        for method in ("server/discover", "resources/list", "prompts/get", "logging/setLevel"):
            assert await code_of(here, request(method)) == (200, -32601)
        old = (await here.post(request("tools/list"))).message["result"]
        assert set(old) == {"tools"}


async def test_headers_and_body_must_agree(monkeypatch: pytest.MonkeyPatch) -> None:
    server = Server(tools=["größe"])
    async with scene(monkeypatch, {"g": server}) as here:
        call = lambda: request("tools/call", name="g__größe")  # noqa: E731
        good = await here.post(call(), modern=True)
        assert good.status == 200
        for wrong in (
            {"mcp_method": "tools/list"},
            {"mcp_name": "g__other"},
            {"mcp_name": "=?base64?!!!?="},
            {"mcp_name": ""},
            {"Mcp_Method": "tools/call"},  # twice
        ):
            assert await code_of(here, call(), modern=True, **wrong) == (400, -32020), wrong
        message = call()
        message["params"]["_meta"] = {protocol.META_VERSION: "2025-11-25"}
        assert await code_of(here, message, modern=True) == (400, -32020)
        for lacking in ({}, {protocol.META_VERSION: protocol.MODERN}, None, 3):
            message = request("tools/list", _meta=lacking)
            fields = {"mcp-protocol-version": protocol.MODERN, "mcp-method": "tools/list"}
            got = await here.raw("POST", fields, json.dumps(message).encode())
            assert (got.status, got.message["error"]["code"]) == (400, -32602)
    assert len(server.ran) == 1


async def test_an_unknown_version_is_told_which_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch, {}) as here:
        got = await here.post(request("tools/list"), mcp_protocol_version="2031-01-01")
        assert (got.status, got.message["error"]["code"]) == (400, -32022)
        assert got.message["error"]["data"] == {"supported": list(VERSIONS), "requested": "2031-01-01"}


@pytest.mark.parametrize(
    ("body", "code"),
    [
        (b"", -32700),
        (b"{", -32700),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":{"a":NaN}}', -32700),
        (b"\xff\xfe", -32700),
        (b'{"a":' * 100_000, -32700),
        (b"3", -32600),
        (b"[]", -32600),
        (b'[{"jsonrpc":"2.0","id":1,"method":"ping"}]', -32600),
        (b'{"id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"1.0","id":1,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":null,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":true,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1.5,"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":{},"method":"ping"}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":3}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":""}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"method":"ping","params":[]}', -32600),
        (b'{"jsonrpc":"2.0","id":1}', -32600),
        (b'{"jsonrpc":"2.0","id":1,"error":3}', -32600),
    ],
)
async def test_what_is_no_message(monkeypatch: pytest.MonkeyPatch, body: bytes, code: int) -> None:
    async with scene(monkeypatch, {}) as here:
        got = await here.raw("POST", {"accept": BOTH}, body)
        assert (got.status, got.message["error"]["code"], got.message["id"]) == (400, code, None)


async def test_notices_and_answers_are_taken_and_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch, {}) as here:
        for message in (
            {"jsonrpc": "2.0", "method": "notifications/initialized"},
            {"jsonrpc": "2.0", "method": "notifications/cancelled", "params": {"requestId": {}}},
            {"jsonrpc": "2.0", "id": 3, "result": {}},
            {"jsonrpc": "2.0", "id": 3, "error": {"code": 1, "message": "no"}},
        ):
            got = await here.post(message, mcp_session_id="x")
            assert (got.status, got.body) == (202, b"")
        notice = {"jsonrpc": "2.0", "method": "notifications/cancelled"}
        assert (await here.post(notice, mcp_protocol_version=protocol.MODERN)).status == 202
        answer = {"jsonrpc": "2.0", "id": 3, "result": {}}
        assert await code_of(here, answer, mcp_protocol_version=protocol.MODERN) == (400, -32600)


@pytest.mark.parametrize("params", [{}, {"name": 3}, {"name": "x", "arguments": []}, {"name": "x", "arguments": "y"}])
async def test_calls_that_name_nothing(monkeypatch: pytest.MonkeyPatch, params: Any) -> None:
    async with scene(monkeypatch, {}) as here:
        assert await code_of(here, request("tools/call", **params)) == (200, -32602)
        message = json.dumps(request("tools/call", **params, _meta=META)).encode()
        name = params.get("name") if isinstance(params.get("name"), str) else ""
        fields = {"mcp-protocol-version": protocol.MODERN, "mcp-method": "tools/call", "mcp-name": name}
        got = await here.raw("POST", fields, message)
        assert (got.status, got.message["error"]["code"]) == (400, -32602)


async def test_what_an_answer_looks_like_follows_accept(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch, {"g": Server()}) as here:
        for message in (request("ping"), request("tools/list"), request("tools/call", name="g__add")):
            for accept in ("", "*/*", BOTH, "application/json"):
                got = await here.post(message, accept=accept)
                assert got.fields["content-type"] == "application/json"
            got = await here.post(message, accept="text/event-stream")
            assert [event["id"] for event in got.events] == [1]
        for accept in ("text/html", "application/json;q=0"):
            with pytest.raises(Refusal) as refused:
                await here.post(request("ping"), accept=accept)
            assert refused.value.status == 406


async def test_http_that_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    async with scene(monkeypatch, {}, McpSettings(max_body_bytes=100)) as here:
        for status, headers, body in (
            (413, {}, b"x" * 101),
            (415, {"content-type": "text/plain"}, b"{}"),
            (403, {"origin": "http://evil.example", "host": "10.0.0.1:6381"}, b"{}"),
            (403, {"origin": "null"}, b"{}"),
        ):
            with pytest.raises(Refusal) as refused:
                await here.raw("POST", headers, body)
            assert refused.value.status == status
        with pytest.raises(Refusal) as refused:
            await here.raw("DELETE", {"mcp-session-id": "x", "origin": "http://evil.example"}, b"")
        assert refused.value.status == 403
        got = await here.raw("POST", {}, b'{"jsonrpc":"2.0","id":1,"method":"ping"}')
        assert got.status == 200


@pytest.mark.parametrize(
    ("origin", "host", "own"),
    [
        ("http://10.0.0.1:6381", "10.0.0.1:6381", True),
        ("https://10.0.0.1", "10.0.0.1", True),
        ("http://[::1]:6381", "[::1]:6381", True),
        ("http://localhost:6381", "localhost:6381", True),
        ("https://named.example", "other", True),
        # a name may be made to lead here, so that it matches proves nothing
        ("http://box:6381", "box:6381", False),
        ("http://evil.example:6381", "evil.example:6381", False),
        ("http://10.0.0.1:80", "10.0.0.1:6381", False),
        ("http://10.0.0.2:6381", "10.0.0.1:6381", False),
        ("null", "10.0.0.1", False),
        ("", "", False),
        ("http://[", "[", False),
        ("file://10.0.0.1", "10.0.0.1", False),
    ],
)
def test_whose_pages_may_ask(origin: str, host: str, own: bool) -> None:
    assert own_origin(origin, host, ("https://named.example",)) is own


@pytest.mark.parametrize(
    ("accept", "plain", "streams"),
    [
        ("", True, True),
        (BOTH, True, True),
        ("*/*", True, True),
        ("application/*", True, False),
        ("Application/JSON; q=0.5", True, False),
        ("text/event-stream, */*;q=0.1", True, True),
        ("text/event-stream;q=x", False, True),
        ("application/json;q=0, text/event-stream", False, True),
        ("text/html", False, False),
    ],
)
def test_what_is_accepted(accept: str, plain: bool, streams: bool) -> None:
    assert accepted(accept) == (plain, streams)


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)
_MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "jsonrpc": st.just("2.0") | _JSON,
        "id": _JSON,
        "method": st.sampled_from(["ping", "tools/call", "initialize"]) | _JSON,
        "params": _JSON | st.fixed_dictionaries({"_meta": _JSON | st.just(META), "name": _JSON}),
        "result": _JSON,
        "error": _JSON,
    },
)


@settings(deadline=None)
@given(
    _MESSAGE.map(lambda message: json.dumps(message).encode()) | st.binary(max_size=40),
    st.lists(
        st.tuples(
            st.sampled_from(["mcp-protocol-version", "mcp-method", "mcp-name", "accept", "origin", "host"]),
            st.sampled_from([*VERSIONS, "tools/call", "x", "", BOTH, "=?base64??=", "http://[::1"]),
        ),
        max_size=4,
    ),
)
def test_no_request_is_too_strange_to_judge(body: bytes, fields: list[tuple[str, str]]) -> None:
    try:
        judged = judge("POST", fields, body, origins=(), most_bytes=1 << 20)
    except Refusal as refusal:
        assert refusal.status in (403, 406)
    else:
        assert isinstance(judged, Ask | Rejected)
        if isinstance(judged, Rejected):
            assert judged.status == 400
            assert "error" in json.loads(judged.body)


async def test_a_got_reply_is_what_the_door_would_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths are exact, and every answer ends."""
    async with scene(monkeypatch, {"g": Server("modern", events=True)}) as here:
        for message in (request("ping"), request("tools/list"), request("tools/call", name="g__add")):
            got: Got = await here.post(message)
            assert got.ended

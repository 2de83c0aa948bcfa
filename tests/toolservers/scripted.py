"""Tool servers in memory, as well or badly behaved as a test wants, and a client's side to talk to the endpoint."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
import trio

from appliance.facts.mcp import McpSettings, Source
from appliance.mcp import conversation
from appliance.mcp.merge import Merge, open_merge
from appliance.mcp.serve import Endpoint
from appliance.rules.mcp import protocol

CLIENT = {"name": "appliance", "version": "1"}
META = {
    protocol.META_VERSION: protocol.MODERN,
    protocol.META_CAPABILITIES: {},
    protocol.META_CLIENT: {"name": "test", "version": "1"},
}


class Body(httpx.AsyncByteStream):
    def __init__(self, pieces: AsyncIterator[bytes]) -> None:
        self._pieces = pieces

    def __aiter__(self) -> AsyncIterator[bytes]:
        return self._pieces


class Once:
    def __init__(self, piece: bytes) -> None:
        self._pieces = [piece]

    def __aiter__(self) -> Once:
        return self

    async def __anext__(self) -> bytes:
        await trio.lowlevel.checkpoint()
        if not self._pieces:
            raise StopAsyncIteration
        return self._pieces.pop()


def response(
    status: int, body: bytes = b"", headers: Mapping[str, str] | None = None, content_type: str = "application/json"
) -> httpx.Response:
    """As it comes over a wire: not read yet."""
    return httpx.Response(status, headers={"content-type": content_type, **(headers or {})}, stream=Body(Once(body)))


class Server:
    """One tool server. `seen` are the requests (method, headers, decoded body), `ran` the calls it carried out.

    `era` is "modern" or "handshake"; `events` lets it answer in events. `before` may answer a request itself: it gets
    method, headers and message, and returns a response or None. `tool` is what its tools do; it may send notices.
    """

    def __init__(self, era: str = "handshake", tools: Sequence[str] = ("add",), events: bool = False) -> None:
        self.era = era
        self.events = events
        self.tools: list[dict[str, Any]] = [{"name": name, "inputSchema": {"type": "object"}} for name in tools]
        self.per_page = 100
        self.sessions: set[str] = set()
        self.made = 0
        self.keeps_sessions = True
        self.seen: list[tuple[str, httpx.Headers, Any]] = []
        self.ran: list[dict[str, Any]] = []
        self.path = ""  # of the latest request
        self.hung = False
        self.before: Callable[[str, httpx.Headers, Any], httpx.Response | None] = lambda *_: None
        self.tool: Callable[..., Any] = self._echo

    def restart(self) -> None:
        self.sessions.clear()

    def asked(self, method: str) -> list[Any]:
        return [body for _, _, body in self.seen if isinstance(body, dict) and body.get("method") == method]

    async def handle(self, request: httpx.Request) -> httpx.Response:
        self.path = request.url.path
        body = json.loads(request.content) if request.content else None
        self.seen.append((request.method, request.headers, body))
        if self.hung:
            await trio.sleep_forever()
        own = self.before(request.method, request.headers, body)
        if own is not None:
            return own
        if self.era == "modern":
            return await self._modern(request, body)
        return await self._handshake(request, body)

    async def _modern(self, request: httpx.Request, body: Any) -> httpx.Response:
        meta = body.get("params", {}).get("_meta", {})
        if request.headers.get("mcp-protocol-version") != protocol.MODERN or protocol.META_CAPABILITIES not in meta:
            return failed(400, body.get("id"), -32602)
        name = body["params"].get("name")
        if request.headers.get("mcp-method") != body["method"]:
            return failed(400, body["id"], -32020)
        if name is not None and protocol.header_text(request.headers.get("mcp-name", "")) != name:
            return failed(400, body["id"], -32020)
        if body["method"] == "server/discover":
            return said(body["id"], {"supportedVersions": [protocol.MODERN], "capabilities": {"tools": {}}})
        return await self._common(body)

    async def _handshake(self, request: httpx.Request, body: Any) -> httpx.Response:
        session = request.headers.get("mcp-session-id")
        if request.method == "DELETE":
            self.sessions.discard(session or "")
            return response(200)
        if body.get("method") == "initialize":
            headers = {}
            if self.keeps_sessions:
                self.made += 1
                session = f"s{self.made}"
                self.sessions.add(session)
                headers = {"mcp-session-id": session}
            result = {"protocolVersion": "2025-11-25", "capabilities": {}, "serverInfo": {"name": "s", "version": ""}}
            return said(body["id"], result, headers)
        if self.keeps_sessions:
            if session is None:
                return failed(400, "server-error", -32600, {"mcp-session-id": "fresh"})
            if session not in self.sessions:
                return failed(404, "server-error", -32600)
        if "id" not in body or "method" not in body:
            return response(202)
        return await self._common(body)

    async def _common(self, body: Any) -> httpx.Response:
        params = body.get("params", {})
        if body["method"] == "tools/list":
            first = int(params.get("cursor", 0))
            end = first + self.per_page
            page: dict[str, Any] = {"tools": self.tools[first:end]}
            if end < len(self.tools):
                page["nextCursor"] = str(end)
            return said(body["id"], page)
        if body["method"] != "tools/call":
            return failed(404 if self.era == "modern" else 200, body["id"], -32601)
        self.ran.append(params)
        if not self.events:
            return said(body["id"], await self.tool(params, None))
        send, receive = trio.open_memory_channel[bytes](100)
        result = await self.tool(params, lambda notice: send.send_nowait(event(notice)))
        send.send_nowait(event({"jsonrpc": "2.0", "id": body["id"], "result": result}))
        send.close()
        return httpx.Response(200, headers={"content-type": "text/event-stream"}, stream=Body(receive))

    async def _echo(self, params: Any, notify: Any) -> Any:
        return {"content": [{"type": "text", "text": json.dumps([params["name"], params.get("arguments")])}]}


def said(identity: Any, result: Any, headers: Mapping[str, str] | None = None) -> httpx.Response:
    return response(200, json.dumps({"jsonrpc": "2.0", "id": identity, "result": result}).encode(), headers)


def failed(status: int, identity: Any, code: int, headers: Mapping[str, str] | None = None) -> httpx.Response:
    body = {"jsonrpc": "2.0", "id": identity, "error": {"code": code, "message": f"error {code}"}}
    return response(status, json.dumps(body).encode(), headers)


def event(message: Any) -> bytes:
    return b"event: message\ndata: " + json.dumps(message).encode() + b"\n\n"


class Scene:
    """Servers by host name, and the endpoint before them."""

    def __init__(self, merge: Merge) -> None:
        self.merge = merge
        self.endpoint = Endpoint(merge)

    async def post(self, message: Any, *, modern: bool = False, **fields: str) -> Got:
        """One message from a client. Modern ones get their headers and `_meta`. `fields` in Python's spelling."""
        headers = {"content-type": "application/json", "accept": "application/json, text/event-stream"}
        if modern:
            params = message.setdefault("params", {})
            params["_meta"] = {**META, **params.get("_meta", {})}
            headers |= {"mcp-protocol-version": protocol.MODERN, "mcp-method": message["method"]}
            if "name" in params:
                headers["mcp-name"] = protocol.header_value(params["name"])
        headers |= {name.replace("_", "-"): text for name, text in fields.items()}
        return await self.raw("POST", headers, json.dumps(message).encode())

    async def raw(self, method: str, headers: Mapping[str, str], body: bytes, got: Got | None = None) -> Got:
        got = got or Got()
        await self.endpoint.answer(method, list(headers.items()), body, got)
        return got

    async def call(self, name: str, arguments: Any = None, *, modern: bool = False, **more: Any) -> Any:
        """A tool's result: the text, or ("failed", text)."""
        params = {"name": name, **more} if arguments is None else {"name": name, "arguments": arguments, **more}
        got = await self.post({"jsonrpc": "2.0", "id": 7, "method": "tools/call", "params": params}, modern=modern)
        result = got.message["result"]
        text = result["content"][0]["text"]
        return ("failed", text) if result.get("isError") else text

    async def names(self, *, modern: bool = False) -> list[str]:
        got = await self.post({"jsonrpc": "2.0", "id": 1, "method": "tools/list"}, modern=modern)
        return [tool["name"] for tool in got.message["result"]["tools"]]


class Got:
    """A client's reply, as it was written. `on_send` may do something when a piece comes."""

    def __init__(self, on_send: Callable[[bytes], None] = lambda _: None) -> None:
        self.status = 0
        self.fields: dict[str, str] = {}
        self.body = b""
        self.ended = False
        self._on_send = on_send

    def start(self, status: int, fields: list[tuple[bytes, bytes]], length: int | None) -> None:
        assert not self.status
        self.status = status
        self.fields = {name.decode(): text.decode() for name, text in fields}
        self.length = length

    async def send(self, data: bytes) -> None:
        assert self.status
        await trio.lowlevel.checkpoint()
        self._on_send(data)
        self.body += data

    async def end(self) -> None:
        self.ended = True
        assert self.length is None or self.length == len(self.body)

    @property
    def events(self) -> list[Any]:
        assert self.fields["content-type"] == "text/event-stream"
        lines = [line for line in self.body.decode().split("\n\n") if line and not line.startswith(":")]
        return [json.loads(line.partition("data: ")[2]) for line in lines]

    @property
    def message(self) -> Any:
        """The whole answer, or the last of its events."""
        return self.events[-1] if "event-stream" in self.fields["content-type"] else json.loads(self.body)


@asynccontextmanager
async def scene(
    monkeypatch: pytest.MonkeyPatch,
    servers: Mapping[str, Server],
    settings: McpSettings | None = None,
    hidden: Collection[str] = (),
) -> AsyncIterator[Scene]:
    """The endpoint before these servers, each under the group's name as its host. Groups may be added to `servers`;
    `hidden` ones are announced no more, and answer still."""

    async def handle(request: httpx.Request) -> httpx.Response:
        server = servers.get(request.url.host)
        if server is None:
            raise httpx.ConnectError("refused")
        return await server.handle(request)

    def client(url: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(transport=httpx.MockTransport(handle), timeout=None)

    monkeypatch.setattr(conversation, "open_client", client)

    def sources() -> list[Source]:
        return [Source(group, f"http://{group}/mcp") for group in servers if group not in hidden]

    async with open_merge(sources, lambda: {"models": {"m": 1}}, settings or McpSettings(), CLIENT) as merge:
        yield Scene(merge)

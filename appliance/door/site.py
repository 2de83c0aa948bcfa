"""What the public listener serves: the OpenAI-compatible routes, health, and the status document."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
import structlog
import trio

from .. import __version__
from ..facts.call import ABSENT, Ask, Call, Caller
from ..facts.errors import Refusal
from ..facts.mcp import MAX_BODY_BYTES
from ..gateway.identity import BAND_FIELD, band_of, caller_of
from ..gateway.service import Gateway
from ..rules.groups.published import PREFIX as GROUP
from ..wire import multipart, via
from ..wire.head import RequestHead
from . import body as bodies
from .aside import Aside, aside
from .buffers import Buffers
from .proxies import Proxies
from .reply import JSON, HttpReply
from .routes import OF_GROUPS, Found, Kind, find, find_of_groups, forwarded_target, is_anthropic

log = structlog.get_logger("access")
_NO_ASK = Ask()

Tools = Callable[[str, Sequence[tuple[str, str]], bytes, Aside], Awaitable[None]]
"""Who answers at /mcp: gets the method, the header fields and the body. Raises Refusal while nothing was sent."""


class Door:
    """The site of the public listener. `configure` takes changed settings at any time. What bodies grow by when they
    are expanded is counted in `buffers`, like the bodies themselves.
    """

    carried = True

    def __init__(self, gateway: Gateway, buffers: Buffers) -> None:
        self.gateway = gateway
        self.draining = False
        self.taken_over = False
        """Another process answers at the door's address: ready, as far as those who ask are concerned."""
        self.ready: Callable[[], bool] = lambda: True
        self.replicas: Callable[[], Mapping[str, Mapping[str, int]]] = dict
        """Of each model that is placed on nodes: how many replicas are in which state."""
        self.groups: Callable[[], Mapping[str, Any]] = dict
        """Daemons, announced groups and their models, for the status document; empty where none are looked for."""
        self.tools: Tools | None = None
        self.permits: Callable[[str], bool] | None = None
        """Whether a client of this address may ask at all; None: everybody may."""
        self._buffers = buffers
        self._origins: frozenset[bytes] = frozenset()
        self._proxies: Proxies | None = None
        self._max_body_bytes = 0
        self._access_log = False

    def configure(
        self, cors_origins: tuple[str, ...], max_body_bytes: int, access_log: bool, trusted_proxies: tuple[str, ...]
    ) -> None:
        self._origins = frozenset(origin.encode() for origin in cors_origins)
        self._proxies = Proxies(trusted_proxies) if trusted_proxies else None
        self._max_body_bytes = max_body_bytes
        self._access_log = access_log

    # -- Site --------------------------------------------------------------------------------------------------------

    def admit(self, head: RequestHead, reply: HttpReply, peer: str) -> Found:
        if self._origins and b"origin" in head.by_name and head.path.startswith(b"/v1/"):
            self._allow_origin(head, reply)
        reply.peer = peer if self._proxies is None else self._proxies.client_of(peer, head.fields)
        if self.permits is not None and not self.permits(reply.peer.rpartition(":")[0].strip("[]")):
            raise Refusal(
                403, "source_not_permitted", "this address is not in the router's ALLOWED_SOURCES", should_retry=False
            )
        try:
            found = find(head)
        except Refusal as refusal:
            of_groups = find_of_groups(head) if refusal.status == 404 and self._has_groups() else None
            if of_groups is None:
                reply.anthropic = is_anthropic(head.path)
                raise
            found = of_groups
        reply.anthropic = found.route.anthropic
        if BAND_FIELD in head.by_name and found.kind is Kind.FORWARD:
            band_of(head.by_name, self.gateway.admission)
        if found.kind is Kind.MCP and head.length > MAX_BODY_BYTES:
            why = f"the request body is larger than {MAX_BODY_BYTES} bytes"
            raise Refusal(413, "body_too_large", why, should_retry=False)  # before any of it is read
        return found

    def answer(self, plan: object, head: RequestHead, body: bytes, reply: HttpReply) -> Awaitable[None]:
        assert isinstance(plan, Found)
        if body and b"content-encoding" in head.by_name:
            return self._expanded(plan, head, body, reply)
        if plan.kind is Kind.FORWARD:
            return self._forward(plan, head, body, reply)
        return self._answer(plan, head, body, reply)

    async def _expanded(self, plan: Found, head: RequestHead, body: bytes, reply: HttpReply) -> None:
        """The same with the body as it was before its Content-Encoding."""
        async with self._without_encoding(body, head.by_name[b"content-encoding"]) as body:
            if plan.kind is Kind.FORWARD:
                await self._forward(plan, head, body, reply)
            else:
                await self._answer(plan, head, body, reply)

    async def _answer(self, plan: Found, head: RequestHead, body: bytes, reply: HttpReply) -> None:
        await trio.lowlevel.checkpoint()  # at home from here on: some of these open a nursery
        match plan.kind:
            case Kind.STORED:
                await self._stored(plan, head, body, reply)
            case Kind.MODELS:
                await self._models(head, reply)
            case Kind.MODEL:
                await reply.whole(200, msgspec.json.encode(self._model(plan.id)))
            case Kind.HEALTH | Kind.STATUS:
                document = self.status()
                await reply.whole(200, msgspec.json.encode(document), fields=[(b"cache-control", b"no-store")])
            case Kind.READY:
                await self._ready(reply)
            case Kind.OPTIONS:
                await self._options(plan, head, reply)
            case Kind.MCP:
                await self._mcp(head, body, reply)

    def status(self) -> dict[str, Any]:
        """What `/status.json` shows."""
        return status_document(self.gateway, self.draining, self.replicas(), self.groups())

    def record(self, head: RequestHead | None, reply: HttpReply, peer: str, started: float) -> None:
        if not self._access_log:
            return
        log.info(
            "request",
            client=(reply.peer or peer).removesuffix(":0"),
            method=head.method.decode() if head else "-",
            path=head.path.decode("latin-1") if head else "-",
            status=reply.status if reply.started else 499,
            bytes=reply.sent_bytes,
            seconds=round(time.monotonic() - started, 4) if started else 0.0,
            request_id=reply.request_id.decode("latin-1"),
        )

    # -- routes --------------------------------------------------------------------------------------------------------

    def _forward(self, found: Found, head: RequestHead, body: bytes, reply: HttpReply) -> Awaitable[None]:
        headers = head.by_name
        content_type = headers.get(b"content-type", b"")
        if content_type != JSON and multipart.is_form(content_type):
            ask = bodies.read_multipart(body, content_type)
        else:
            if body.startswith(bodies.BOM):
                body = body[len(bodies.BOM) :]
            ask = bodies.read_json(body)
        model = str(ask.model)
        if found.route is OF_GROUPS:
            self._only_of_groups(model, head)
        call = Call(
            reply.request_id,
            head.method,
            forwarded_target(head),
            found.route,
            headers,
            body,
            ask,
            model,
            ask.stream is not ABSENT and bytes(ask.stream) == b"true",
            caller_of(headers, ask, reply.peer, self.gateway.admission),
            time.monotonic(),
        )
        if via.FIELD in headers:
            call.marks = via.marks_in(head.fields)
        return self.gateway.serve(call, reply)

    @asynccontextmanager
    async def _without_encoding(self, body: bytes, encoding: bytes) -> AsyncIterator[bytes]:
        """A body expanded, and what it has grown to held in `buffers` meanwhile. Raises Refusal."""
        held = 0
        try:
            for coding in bodies.codings(encoding):
                pieces = []
                for piece in bodies.expanding(body, coding, self._max_body_bytes):
                    self._buffers.reserve(len(piece))
                    held += len(piece)
                    pieces.append(piece)
                    await trio.lowlevel.checkpoint()
                body = b"".join(pieces)
            yield body
        finally:
            self._buffers.release(held)

    async def _stored(self, found: Found, head: RequestHead, body: bytes, reply: HttpReply) -> None:
        """To the endpoint that made the response; nobody else knows it."""
        gateway = self.gateway
        endpoint = gateway.table.responses.get(found.id)
        member = gateway.table.members.get(endpoint)
        names = [entry.name for entry in gateway.table.entries.values() if member in entry.members] if member else []
        if member is None or not names:
            shown = found.id[:100]
            raise Refusal(
                404,
                "response_not_found",
                f"no response {shown!r} was made through this router lately",
                should_retry=False,
            )
        stream = b"stream=true" in head.query
        call = Call(
            reply.request_id, head.method, forwarded_target(head), found.route, head.by_name, body, _NO_ASK, names[0],
            stream, Caller(band=gateway.admission.default_band), time.monotonic(),
        )  # fmt: skip
        await gateway.serve(call, reply, only=member.id)

    async def _mcp(self, head: RequestHead, body: bytes, reply: HttpReply) -> None:
        tools = self.tools
        if tools is None:
            raise Refusal(404, "not_found", "/mcp: there is no such path", should_retry=False)
        method = head.method.decode()
        fields = [(name.decode("latin-1"), text.decode("latin-1")) for name, text in head.fields]
        await aside(reply, lambda out: tools(method, fields, body, out))

    async def _models(self, head: RequestHead, reply: HttpReply) -> None:
        """Another router that asks gets what this one does not have from routers, and is told that it has asked one."""
        marks = via.marks_in(head.fields) if via.FIELD in head.by_name else ()
        if via.goes_round(marks):
            raise Refusal(508, "loop_detected", "this router itself asks that", should_retry=False)
        document = {"object": "list", "data": model_entries(self.gateway, to_router=bool(marks))}
        fields = [(via.FIELD, via.value().encode())] if marks else []
        await reply.whole(200, msgspec.json.encode(document), fields=fields)

    def _has_groups(self) -> bool:
        return any(member.endpoint.announced for member in self.gateway.table.members.values())

    def _only_of_groups(self, model: str, head: RequestHead) -> None:
        """Refuse a path that is passed on to announced groups alone where others serve the model. Raises Refusal."""
        members = self.gateway.table.resolve(model).members
        if not all(member.endpoint.announced for member in members):
            shown = head.path[:200].decode("latin-1")
            why = f"{shown}: only models of announced groups are asked at this path"
            raise Refusal(404, "not_found", why, should_retry=False)

    def _model(self, name: str) -> dict[str, Any]:
        for entry in model_entries(self.gateway):
            if entry["id"] == name:
                return entry
        raise self.gateway.table.unknown(name)

    def not_ready(self) -> Refusal | None:
        """Why nobody should send requests here now, None when they should."""
        if self.draining and not self.taken_over:
            return Refusal(503, "draining", "this router is stopping", retry_after_s=5)
        if not self.ready():
            return Refusal(503, "model_not_ready", "no endpoint is configured or answering yet", retry_after_s=1)
        return None

    async def _ready(self, reply: HttpReply) -> None:
        refusal = self.not_ready()
        if refusal is not None:
            raise refusal
        await reply.whole(200, b'{"status":"ready"}')

    async def _options(self, plan: Found, head: RequestHead, reply: HttpReply) -> None:
        """A preflight without a key: the browser sends none with it."""
        allowed = plan.id.encode()
        fields = [(b"allow", allowed)]
        if reply.extra:
            fields.append((b"access-control-allow-methods", allowed))
            asked = head.by_name.get(b"access-control-request-headers", b"")
            if asked:
                fields.append((b"access-control-allow-headers", asked))
            fields.append((b"access-control-max-age", b"600"))
        reply.start(204, fields, 0)
        await reply.end()

    def _allow_origin(self, head: RequestHead, reply: HttpReply) -> None:
        origin = head.by_name[b"origin"]
        if origin in self._origins:
            reply.extra = (
                b"access-control-allow-origin: %b\r\nvary: origin\r\n"
                b"access-control-expose-headers: x-request-id, x-appliance-reason, retry-after\r\n" % origin
            )


def model_entries(gateway: Gateway, *, to_router: bool = False) -> list[dict[str, Any]]:
    """The list of models: the engine's own entry where it gave one, under every name that clients may ask for. To
    another router without those that only routers serve."""
    entries = []
    for name in gateway.table.available():
        entry = gateway.table.find(name)
        assert entry is not None
        if to_router and entry.members and all(member.endpoint.router for member in entry.members):
            continue
        shown: dict[str, Any] = {"id": name, "object": "model", "created": 0, "owned_by": "appliance"}
        for listed in gateway.entries_of(entry):
            shown = {**shown, **listed, "id": name, "owned_by": listed.get("owned_by") or "appliance"}
            break
        entries.append(shown)
    return entries


def status_document(
    gateway: Gateway,
    draining: bool,
    replicas: Mapping[str, Mapping[str, int]] | None = None,
    groups: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    """`/healthz`, `/status.json` and `/`: what is served, and how it is. `groups` is what announced groups say."""
    models: dict[str, dict[str, Any]] = {}
    for name, entry in sorted(gateway.table.entries.items()):
        up = sum(member.up for member in entry.members)
        models[name] = {
            "ready": up > 0,
            "waking": not up and bool(entry.waking),
            "endpoints": len(entry.members),
            "endpoints_up": up,
            "aliases": list(entry.aliases),
        }
        if replicas and name in replicas:
            models[name]["replicas"] = replicas[name]
        for member in entry.members:
            if groups and member.endpoint.announced:
                group = member.id.removeprefix(GROUP)
                models[name] |= {"group": group, "url": groups["groups"].get(group, {}).get("openai")}
                break
    return {
        **({key: groups[key] for key in ("uptime_s", "verify", "daemons", "groups")} if groups else {}),
        "status": "draining" if draining else "ok",
        "version": __version__,
        "models": models,
        "requests_running": len(gateway.books.live),
    }

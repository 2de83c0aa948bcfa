"""The endpoint that clients talk to, in both eras.

It keeps no state of clients. A session id is handed out at the handshake for one reason: in that era a client cancels a
call by posting its id, and ids of different clients are alike. Any session id is believed, also one of before a restart
or of another router, so no client ever has to begin again; nobody can guess another's.

Answers are JSON, unless something comes before the result (progress, or `ping_s` of silence) and the client takes
events: then they are a stream. A client that leaves ends its call, because the task that serves it is cancelled.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from typing import Protocol

import structlog
import trio

from .. import __version__
from ..rules.mcp import messages, protocol
from ..rules.mcp.asking import Ask, Rejected, judge, own_origin
from ..rules.mcp.messages import Id, Message
from ..rules.mcp.translate import Asked, finished, progress, result_for
from ..wire import via
from .conversation import Answered
from .merge import Failed, Merge

NAME = {"name": "appliance", "version": __version__}
CANCELLED = -32800
_INSTRUCTIONS = "Tools of every group behind this router. serve_status tells what is served and what is not, and why."
_PING = b": ping\n\n"
_Fields = list[tuple[bytes, bytes]]

log = structlog.get_logger("mcp")


class Out(Protocol):
    """Where an answer goes: `start` once, `send` as often as needed, `end` once. `length` None: not known beforehand.
    `send` may raise, when there is nobody to send to any more; the call is ended then."""

    def start(self, status: int, fields: _Fields, length: int | None) -> None: ...

    async def send(self, data: bytes) -> None: ...

    async def end(self) -> None: ...


class Endpoint:
    """`POST /mcp` and `/mcp/`. One for a process; `answer` is called for every request, side by side."""

    def __init__(self, merge: Merge) -> None:
        self._merge = merge
        self._running: dict[tuple[str, Id], trio.CancelScope] = {}

    async def answer(self, method: str, fields: Sequence[tuple[str, str]], body: bytes, out: Out) -> None:
        """Answer one request; `fields` are its header fields, in any case. Raises Refusal for wrong HTTP, and whatever
        `out` raises. Cancelling it ends what it started."""
        settings = self._merge.settings
        marks = via.marks(text for name, text in fields if name.lower() == via.FIELD.decode())
        if marks:
            out = _ToRouter(out)
        if via.goes_round(marks):
            wrong = messages.error(
                None, protocol.INVALID_REQUEST, "this router itself listens there: the request has been here before"
            )
            await _whole(out, 508, wrong)
            return
        if method == "DELETE" and self._ends_session(fields):
            await _whole(out, 200, b"")
            return
        ask = judge(method, fields, body, origins=settings.origins, most_bytes=settings.max_body_bytes)
        if isinstance(ask, Rejected):
            await _whole(out, ask.status, ask.body)
            return
        message = ask.message
        if not message.is_request:
            if message.method == "notifications/cancelled":
                self._cancel(ask.session, messages.value((message.params or {}).get("requestId")))
            await _whole(out, 202, b"")
            return
        match message.method:
            case "initialize" if not ask.modern:
                asked_for = messages.value((message.params or {}).get("protocolVersion"))
                await _answer(out, ask, _welcome(asked_for), [(b"mcp-session-id", secrets.token_hex(16).encode())])
            case "ping" if not ask.modern:
                await _answer(out, ask, {})
            case "server/discover" if ask.modern:
                await _answer(out, ask, _discovered())
            case "tools/list":
                tools: dict[str, object] = {"tools": await self._merge.listing(to_router=bool(marks))}
                await _answer(out, ask, _cacheable(tools) if ask.modern else tools)
            case "tools/call":
                await self._call(ask, marks, out)
            case other:
                await _refuse(out, ask, protocol.METHOD_NOT_FOUND, f"no method {other[:100]!r}")

    def _ends_session(self, fields: Sequence[tuple[str, str]]) -> bool:
        by_name = {name.lower(): text for name, text in fields}
        origin = by_name.get("origin")
        own = origin is None or own_origin(origin, by_name.get("host", ""), self._merge.settings.origins)
        return (
            own and bool(by_name.get(protocol.SESSION_FIELD)) and by_name.get(protocol.VERSION_FIELD) != protocol.MODERN
        )

    def _cancel(self, session: str, request: object) -> None:
        if isinstance(request, int | str) and (scope := self._running.get((session, request))) is not None:
            scope.cancel()

    # -- a call -------------------------------------------------------------------------------------------------------

    async def _call(self, ask: Ask, marks: tuple[str, ...], out: Out) -> None:
        params = ask.message.params or {}
        name = messages.value(params.get("name"))
        if not isinstance(name, str):
            await _refuse(out, ask, protocol.INVALID_PARAMS, "params.name is the name of a tool")
            return
        arguments = params.get("arguments")
        if not (messages.is_object(arguments) or messages.is_null(arguments)):
            await _refuse(out, ask, protocol.INVALID_PARAMS, "params.arguments is an object")
            return
        # Header values outside ASCII are told in base64; others are no words of this protocol.
        repeated = {
            key: text for key, text in ask.fields.items() if key.startswith(protocol.PARAM_FIELDS) and text.isascii()
        }
        call = _Call(self._merge, Asked(ask.modern, params, repeated, marks), name, ask)
        identity = ask.message.id
        assert identity is not None
        key = (ask.session, identity)
        if ask.session:
            self._running[key] = call.scope
        try:
            await call.run(out)
        finally:
            if self._running.get(key) is call.scope:
                del self._running[key]


class _ToRouter:
    """An answer to another router, which is told that it has asked one."""

    def __init__(self, out: Out) -> None:
        self._out = out

    def start(self, status: int, fields: _Fields, length: int | None) -> None:
        self._out.start(status, [*fields, (via.FIELD, via.value().encode())], length)

    async def send(self, data: bytes) -> None:
        await self._out.send(data)

    async def end(self) -> None:
        await self._out.end()


class _Call:
    """One call of a tool: a task that talks to its server, and the client's own that writes what comes."""

    def __init__(self, merge: Merge, asked: Asked, name: str, ask: Ask) -> None:
        self.scope = trio.CancelScope()
        """Around the talk with the server: cancelled by the client's own word."""
        self._merge = merge
        self._asked = asked
        self._name = name
        self._ask = ask
        self._outcome: bytes | None = None
        self._status = 200
        self._notices, self._heard = trio.open_memory_channel[bytes](0)

    async def run(self, out: Out) -> None:
        """Raises what `out` raises, bare: nobody who asked for one answer should have to look into a group."""
        failed: Exception | None = None
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._talk)
            try:
                await self._write(out)
            except Exception as error:
                failed = error
            nursery.cancel_scope.cancel()
        if failed is not None:
            raise failed

    async def _talk(self) -> None:
        async with self._notices:
            with self.scope:
                try:
                    answer = await self._merge.call(self._asked, self._name, self._deliver)
                    self._finish(answer)
                except Exception:
                    log.exception("mcp_call_failed", tool=self._name)
                    self._fail(protocol.INTERNAL_ERROR, "the router failed; its log says why")

    def _finish(self, answer: object) -> None:
        identity, modern = self._ask.message.id, self._ask.modern
        if isinstance(answer, Answered):
            if answer.result is None:
                self._status = protocol.http_status(answer.code, modern=modern)
                self._outcome = messages.passed_error(identity, answer.error)
                return
            shown = result_for(answer.result, modern=modern, server=NAME)
        else:
            own = messages.failure(answer.text) if isinstance(answer, Failed) else answer
            assert isinstance(own, dict)
            shown = finished(own, {}, "complete", NAME) if modern else own
        self._outcome = messages.result(identity, shown)

    def _fail(self, code: int, text: str) -> None:
        self._outcome = messages.error(self._ask.message.id, code, text)

    async def _deliver(self, notice: Message, number: int) -> None:
        """What the server says before its answer, as far as the client asked to hear it."""
        if not self._ask.streams:
            return
        params: object = None
        if notice.method == "notifications/progress":
            params = progress(notice.params, number, self._asked.progress_token)
        elif notice.method == "notifications/message" and self._asked.wants_log:
            params = notice.params
        if isinstance(params, dict):
            await self._notices.send(messages.event(messages.notification(notice.method, params)))

    async def _write(self, out: Out) -> None:
        started = False
        async with self._heard:
            while True:
                piece = _PING
                with trio.move_on_after(self._merge.settings.ping_s if self._ask.streams else float("inf")):
                    try:
                        piece = await self._heard.receive()
                    except trio.EndOfChannel:
                        break
                if not started:
                    started = True
                    out.start(200, _event_fields(), None)
                await out.send(piece)
        if self._outcome is None and not self._ask.streams:
            self._fail(CANCELLED, "cancelled by the client")
        if not started and self._ask.plain and self._outcome is not None:
            await _whole(out, self._status, self._outcome)
            return
        if not started:
            out.start(200, _event_fields(), None)
        if self._outcome is not None:
            await out.send(messages.event(self._outcome))
        # Cancelled: a stream without an answer, since the client has forgotten the id, and Python's 2.3 falls over a
        # message that nobody waits for.
        await out.end()


def _welcome(asked_for: object) -> dict[str, object]:
    return {
        "protocolVersion": protocol.negotiated(asked_for),
        "capabilities": {"tools": {"listChanged": False}},
        "serverInfo": NAME,
        "instructions": _INSTRUCTIONS,
    }


def _discovered() -> dict[str, object]:
    return _cacheable(
        {
            "supportedVersions": [protocol.MODERN],
            "capabilities": {"tools": {"listChanged": False}},
            "instructions": _INSTRUCTIONS,
        }
    )


def _cacheable(shown: dict[str, object]) -> dict[str, object]:
    """With the two fields that say how long a client may keep it: not at all, since groups come and go, and asking
    again costs a look at our own lists."""
    return {**shown, "ttlMs": 0, "cacheScope": "private"}


async def _answer(out: Out, ask: Ask, shown: dict[str, object], fields: _Fields | None = None) -> None:
    whole = finished(shown, {}, "complete", NAME) if ask.modern else shown
    await _said(out, ask, 200, messages.result(ask.message.id, whole), fields)


async def _refuse(out: Out, ask: Ask, code: int, text: str) -> None:
    status = protocol.http_status(code, modern=ask.modern)
    await _said(out, ask, status, messages.error(ask.message.id, code, text))


async def _said(out: Out, ask: Ask, status: int, message: bytes, fields: _Fields | None = None) -> None:
    """A message that is there whole, as events only for those who take nothing else."""
    if ask.plain:
        await _whole(out, status, message, fields)
        return
    out.start(200, [*_event_fields(), *(fields or [])], None)
    await out.send(messages.event(message))
    await out.end()


async def _whole(out: Out, status: int, body: bytes, fields: _Fields | None = None) -> None:
    out.start(status, [(b"content-type", b"application/json"), *(fields or [])], len(body))
    await out.send(body)
    await out.end()


def _event_fields() -> _Fields:
    return [
        (b"content-type", b"text/event-stream"),
        (b"cache-control", b"no-cache, no-transform"),
        (b"x-accel-buffering", b"no"),
    ]

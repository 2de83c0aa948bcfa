"""The management API: a Quart-Trio app on Hypercorn, for ctl and later the dashboard. Routes translate, nothing more.

Importing this file imports Quart and Hypercorn; `admin/site.py` says when that happens.
"""

from __future__ import annotations

import os
import socket
import time
from collections.abc import Awaitable, Callable
from typing import Any

import hypercorn.config
import hypercorn.trio
import structlog
import trio
from quart import Response
from quart import request as asked
from quart_trio import QuartTrio
from werkzeug.exceptions import HTTPException
from werkzeug.routing import BaseConverter

from ..facts.errors import Refusal
from ..store.failed import StoreFailed
from . import control, documents, memory, onboarding, tasks
from .answers import caller, gathered, json, number, refused
from .running import Running

MOST_REQUESTS = 4000

log = structlog.get_logger("admin")


class _AnyText(BaseConverter):
    """A name or a request id: clients choose them, with slashes wherever they like."""

    regex = ".+?"
    part_isolating = False


def server(running: Running) -> Callable[..., Awaitable[None]]:
    """A function that serves the app on a listening socket until it is cancelled."""
    app = make(running)

    async def serve(sock: socket.socket, task_status: trio.TaskStatus[Any] = trio.TASK_STATUS_IGNORED) -> None:
        config = hypercorn.config.Config()
        config.bind = [f"fd://{os.dup(sock.fileno())}"]  # Hypercorn closes its own
        config.accesslog = config.errorlog = None
        config.include_server_header = False
        config.graceful_timeout = 0.0
        await hypercorn.trio.serve(app, config, task_status=task_status)

    return serve


def make(running: Running) -> QuartTrio:
    """The app, with its routes."""
    app = QuartTrio("appliance.admin", static_folder=None)
    app.url_map.merge_slashes = False
    app.url_map.converters["any_text"] = _AnyText
    app.url_map.strict_slashes = False
    _reads(app, running)
    _actions(app, running)
    control.add(app, running)
    onboarding.add(app, running)
    _debugging(app)
    _errors(app)
    return app


def _reads(app: QuartTrio, running: Running) -> None:
    gateway = running.gateway

    @app.get("/status")
    async def status() -> Response:
        return json(documents.status(running, time.monotonic()))

    @app.get("/endpoints")
    async def endpoints() -> Response:
        return json({"endpoints": documents.endpoints(gateway, time.monotonic())})

    @app.get("/models")
    async def models() -> Response:
        return json({"models": documents.models(gateway, time.monotonic(), running.plane())})

    @app.get("/models/<any_text:name>")
    async def model(name: str) -> Response:
        document = documents.model(gateway, name, time.monotonic(), running.plane())
        if document is None:
            unknown = gateway.table.unknown(name)
            return refused(404, "model_not_found", unknown.detail or unknown.message)
        return json(document)

    @app.get("/bands")
    async def bands() -> Response:
        return json({"bands": documents.bands(gateway, time.monotonic())})

    @app.get("/requests")
    async def requests() -> Response:
        limit = number("limit", 1, MOST_REQUESTS, 20)
        if limit is None:
            return refused(400, "bad_limit", f"limit: expected 1 to {MOST_REQUESTS}")
        return json({"requests": await gathered(documents.requests(gateway, limit, time.monotonic()))})

    @app.get("/requests/<any_text:request_id>")
    async def request(request_id: str) -> Response:
        document = documents.request(gateway, request_id, time.monotonic())
        return _unknown_request(request_id) if document is None else json(document)

    @app.get("/config")
    async def config() -> Response:
        return json(running.configuration())


def _actions(app: QuartTrio, running: Running) -> None:
    @app.post("/requests/<any_text:request_id>/cancel")
    async def cancel(request_id: str) -> Response:
        record = running.gateway.books.find(request_id)
        if record is None:
            return _unknown_request(request_id)
        if not record.cancel():
            return refused(409, "request_over", f"request {request_id} is over: {record.outcome}")
        log.info("request cancelled", request_id=request_id, by_uid=caller())
        return json({"id": request_id, "cancelled": True})

    @app.post("/reload")
    async def reload() -> Response:
        log.info("reload asked for", by_uid=caller())
        why_not = running.reload()
        if why_not:
            return json({"taken": False, "faults": why_not.splitlines(), "needs_restart": []}, 409)
        return json({"taken": True, "faults": [], "needs_restart": running.configuration()["needs_restart"]})


def _debugging(app: QuartTrio) -> None:
    @app.get("/debug/tasks")
    async def debug_tasks() -> Response:
        tree = tasks.tree()
        if asked.args.get("format") == "text":
            return Response("\n".join(tasks.lines(tree)) + "\n", content_type="text/plain; charset=utf-8")
        return json(tree)

    @app.get("/debug/memory")
    async def debug_memory() -> Response:
        top = asked.args.get("top", "0")
        if not top.isascii() or not top.isdigit():
            return refused(400, "bad_top", "top: expected a number of rows")
        return json(memory.document(int(top)))

    @app.post("/debug/memory/<switch>")
    async def debug_tracing(switch: str) -> Response:
        if switch not in ("trace", "untrace"):
            return refused(404, "not_found", "expected /debug/memory/trace or /debug/memory/untrace")
        log.info("tracing of allocations switched", on=switch == "trace", by_uid=caller())
        memory.trace(switch == "trace")
        return json({"tracing": switch == "trace"})


def _errors(app: QuartTrio) -> None:
    @app.errorhandler(HTTPException)
    async def not_served(error: HTTPException) -> Response:
        status = error.code or 500
        code = {404: "not_found", 405: "method_not_allowed"}.get(status, "bad_request")
        answer = refused(status, code, f"{asked.path}: {error.name.lower()}")
        for name, value in error.get_headers():
            if name.lower() == "allow":
                answer.headers["allow"] = value
        return answer

    @app.errorhandler(Refusal)
    async def no(refusal: Refusal) -> Response:
        return refused(refusal.status, refusal.code, refusal.message)

    @app.errorhandler(StoreFailed)
    async def store_failed(error: StoreFailed) -> Response:
        log.error("the database failed", path=asked.path, reason=str(error))
        return refused(503, "store_unavailable", str(error))

    @app.errorhandler(Exception)
    async def failed(error: Exception) -> Response:
        log.error("management API failed", path=asked.path, exc_info=error)
        return refused(500, "internal_error", "the router failed; its log says where")


def _unknown_request(request_id: str) -> Response:
    told = (
        f"no request {request_id[:100]} is known: it was refused before it had a model, or is older than the last 4000"
        " (ctl requests)"
    )
    return refused(404, "request_not_found", told)

"""Routes of the management API about nodes, replicas and where models are placed."""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import aclosing
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from quart import Response
from quart import request as asked
from quart_trio import QuartTrio

from ..facts.catalog import Model
from ..facts.errors import Refusal
from . import fleet, placing
from .answers import caller, caller_name, json, number, refused
from .running import Running

if TYPE_CHECKING:
    from ..control.plane import Plane

MOST_LINES = 10_000

log = structlog.get_logger("admin")


def add(app: QuartTrio, running: Running) -> None:
    """The routes. Without a control plane each of them says so."""

    def plane() -> Plane:
        there = running.plane()
        if there is None:
            raise Refusal(
                409,
                "no_control_plane",
                "this router runs no control plane: no model has a profile ([[models.profiles]]), so nothing is placed",
            )
        return there

    @app.get("/nodes")
    async def nodes() -> Response:
        return json(await fleet.nodes(plane(), time.monotonic()))

    @app.get("/nodes/<any_text:name>")
    async def node(name: str) -> Response:
        return json(await fleet.node(plane(), name, time.monotonic()))

    @app.post("/nodes/<any_text:name>/<any(cordon, uncordon, drain):verb>")
    async def change_node(name: str, verb: str) -> Response:
        there = plane()
        fleet.known_node(there, name)
        log.info(f"{verb} asked for", node=name, by_uid=caller())
        changed = await getattr(there, verb)(name, caller_name())
        return json(await fleet.changed(there, name, verb, bool(changed), time.monotonic()))

    @app.get("/replicas")
    async def replicas() -> Response:
        return json(await fleet.replicas(plane(), time.monotonic()))

    @app.get("/placement/<any_text:name>")
    async def placement(name: str) -> Response:
        return json(placing.placement(plane(), name, time.monotonic()))

    @app.post("/models/<any_text:name>/<any(start, stop, scale):verb>")
    async def change_model(name: str, verb: str) -> Response:
        there = plane()
        model = placing.known_model(there, name)
        count = _count(verb, asked.args.get("replicas", ""), model)
        log.info(f"{verb} asked for", model=model.name, replicas=count, by_uid=caller())
        unnoted = await there.scale(model.name, count, caller_name())
        return json(placing.scaled(there, model.name, unnoted))

    @app.get("/audit")
    async def audit() -> Response:
        lines = number("lines", 1, MOST_LINES, 50)
        if lines is None:
            return refused(400, "bad_lines", f"lines: expected 1 to {MOST_LINES}")
        return json(await fleet.audit(plane(), lines))

    @app.get("/logs/<any_text:replica>")
    async def logs(replica: str) -> Response:
        rank, lines, follow = number("rank", 0, 9999, 0), number("lines", 0, MOST_LINES, 200), number("follow", 0, 1, 0)
        if rank is None or lines is None or follow is None:
            return refused(400, "bad_query", f"rank, lines (at most {MOST_LINES}): expected numbers; follow: 0 or 1")
        there = plane()
        pieces = there.log(replica, rank, lines, bool(follow))
        first: Sequence[str] | None = ()
        if replica not in there.world.replicas:
            # One that was given up may have left a log with its node, one that failed its last lines with its report;
            # of any other the answer is no, and comes at once.
            try:
                first = await anext(pieces, None)
            except Refusal as refusal:
                if refusal.code != "replica_not_found":
                    raise
                first = fleet.last_words(there, replica, rank)
                if first is None:
                    message = fleet.unknown("replica", replica, there.world.replicas)
                    raise Refusal(404, "replica_not_found", message) from None
                first = first[-lines:] if lines else ()
        answer = Response(_lines(replica, rank, first, pieces), content_type="application/x-ndjson")
        answer.timeout = None  # a follow lasts as long as somebody reads; when they leave, the request is cancelled
        return answer


async def _lines(
    replica: str, rank: int, first: Sequence[str] | None, pieces: AsyncGenerator[Sequence[str], None]
) -> AsyncIterator[bytes]:
    """One document a line: pieces of the log as they come, and at last how it ended. `first` None: there are none."""
    yield _line({"replica": replica, "rank": rank})
    reason = ""
    async with aclosing(pieces):
        if first:
            yield _line({"lines": list(first)})
        try:
            async for piece in pieces:
                yield _line({"lines": list(piece)})
        except Refusal as refusal:
            reason = refusal.message
    yield _line({"ended": reason})


def _line(document: dict[str, Any]) -> bytes:
    return msgspec.json.encode(document) + b"\n"


def _count(verb: str, text: str, model: Model) -> int | None:
    """How many replicas a verb means; None leaves it to the settings and the load. Raises Refusal."""
    if verb == "stop":
        return 0
    if verb == "start":
        return None if model.scaling.min_replicas else 1  # left to itself it would stay at zero until it is asked for
    if text == "auto":
        return None
    if not text.isascii() or not text.isdigit() or len(text) > 9:
        raise Refusal(400, "bad_replicas", "replicas: expected a number or auto")
    return int(text)

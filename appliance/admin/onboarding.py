"""Routes of the management API about who may become a node, and who no longer is one."""

from __future__ import annotations

from typing import TYPE_CHECKING

import structlog
from quart import Response
from quart import request as asked
from quart_trio import QuartTrio

from ..facts.errors import Refusal
from ..store.failed import StoreFailed
from .answers import caller, caller_name, json
from .running import Running

if TYPE_CHECKING:
    from ..control.joining import Joining

log = structlog.get_logger("admin")


def add(app: QuartTrio, running: Running) -> None:
    """The routes. Without a cluster of its own each of them says what is missing."""

    def joining() -> Joining:
        there = running.joining()
        if there is not None:
            return there
        if running.plane() is None:
            raise Refusal(
                409,
                "no_control_plane",
                "this router runs no control plane: no model has a profile ([[models.profiles]]), so it needs no nodes",
            )
        raise Refusal(
            409,
            "not_initialised",
            "this router began without certificates for a cluster: run 'appliance ctl init', unless that is done, and"
            " then restart 'appliance serve'",
        )

    @app.post("/nodes")
    async def add_node() -> Response:
        name, host = asked.args.get("name", ""), asked.args.get("host", "")
        plane = running.plane()
        if plane is not None and plane.own(name):
            raise Refusal(
                409,
                "own_node",
                f"{name} is this router's own machine, whose agent runs in it (serve --with-agent): choose another name"
                " for the machine that is to join",
            )
        try:
            made = await joining().add(name, caller_name(), host)
        except StoreFailed as failed:
            raise _unusable(failed) from None
        return json({"node": made.node, "command": made.command, "expires": made.expires_at, "known": made.known})

    @app.get("/node-certificates")
    async def certificates() -> Response:
        try:
            return json({"nodes": await joining().nodes()})
        except StoreFailed as failed:
            raise _unusable(failed) from None

    @app.post("/node-certificates/<any_text:name>/revoke")
    async def revoke(name: str) -> Response:
        there = running.plane()
        try:
            # The plane ends the node's connection too.
            serials = await (there.revoke if there is not None else joining().revoke)(name, caller_name())
        except StoreFailed as failed:
            raise _unusable(failed) from None
        return json({"node": name, "revoked": serials})


def _unusable(failed: StoreFailed) -> Refusal:
    log.error("operator's action failed", reason=str(failed), by_uid=caller())
    return Refusal(503, "store_unavailable", str(failed), retry_after_s=5)

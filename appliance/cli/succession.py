"""What a router does for the one that takes over from it; `takeover.py` is the other side."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import structlog

from ..admin.handover import Offer
from ..facts.errors import Refusal

if TYPE_CHECKING:
    from .router import Router

log = structlog.get_logger("serve")


def offer(router: Router) -> Offer:
    """Every socket, and the replicas that are known. Changes nothing. Raises Refusal."""
    if why := router.successor_refused:
        raise Refusal(409, "takeover_refused", why)
    sockets = router.sockets
    about = {
        "door": len(sockets.door),
        "metrics": len(sockets.metrics),
        "replicas": router.gateway.published(),
        "daemons": router.groups.groups.daemons.addresses() if router.groups is not None else (),
    }
    return Offer(about, sockets.descriptors())


async def give_way(router: Router) -> dict[str, Any]:
    """Another process listens from now on, and another control plane decides. Running requests are finished here,
    however long they take. Returns within `plane.END_S`."""
    router.sockets.pass_on()
    router.listeners.shared = router.door.taken_over = router.door.draining = True
    router.operations.give_up()
    router.stop.set()
    running = router.requests
    log.info("another process has taken over, running requests are finished here", requests=running)
    if router.groups is not None:
        router.groups.end()
    if router.control is not None:
        await router.control.end()
    return {"requests": running}

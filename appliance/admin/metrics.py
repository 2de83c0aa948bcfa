"""The site of the metrics listener: `/metrics`, `/healthz`, `/readyz`, and nothing else.

It is served by the door's listeners and connections, which the composition root puts in front of it; this file names
only what it needs of an answer. prometheus_client is imported by the first scrape: a router that nobody scrapes does
not carry it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

import msgspec

from .. import __version__
from ..facts.call import Fields
from ..facts.errors import Refusal
from ..gateway.service import Gateway
from ..wire.head import RequestHead

if TYPE_CHECKING:
    from ..control.plane import Plane

_PATHS = (b"/metrics", b"/healthz", b"/readyz")
_NO_STORE: Fields = [(b"cache-control", b"no-store")]


class Answer(Protocol):
    """What this site needs of the door's answer."""

    async def whole(self, status: int, body: bytes, content_type: bytes = ..., fields: Fields | None = ...) -> None:
        """An answer that is complete at once."""


class MetricsSite:
    """`render` makes the document for an Accept field: body and content type. `not_ready` says why the router should
    get no requests now, None when it should."""

    def __init__(
        self,
        render: Callable[[str], tuple[bytes, str]],
        not_ready: Callable[[], Refusal | None],
        draining: Callable[[], bool],
    ) -> None:
        self.carried = False
        self.draining = False  # of this listener: it answers until the process ends
        self._render = render
        self._not_ready = not_ready
        self._draining = draining

    def admit(self, head: RequestHead, reply: Answer, peer: str) -> bytes:
        path = head.path.rstrip(b"/")
        if path not in _PATHS:
            shown = head.path[:200].decode("latin-1")
            raise Refusal(404, "not_found", f"{shown}: here are /metrics, /healthz and /readyz", should_retry=False)
        if head.method not in (b"GET", b"HEAD"):
            raise Refusal(
                405, "method_not_allowed", f"{path.decode()} takes GET, HEAD", headers=(("Allow", "GET, HEAD"),)
            )
        return path

    async def answer(self, plan: object, head: RequestHead, body: bytes, reply: Answer) -> None:
        if plan == b"/metrics":
            text, content_type = self._render(head.by_name.get(b"accept", b"").decode("latin-1"))
            await reply.whole(200, text, content_type.encode(), _NO_STORE)
        elif plan == b"/healthz":
            status = {"status": "draining" if self._draining() else "ok", "version": __version__}
            await reply.whole(200, msgspec.json.encode(status), fields=_NO_STORE)
        else:
            refusal = self._not_ready()
            if refusal is not None:
                raise refusal
            await reply.whole(200, b'{"status":"ready"}', fields=_NO_STORE)

    def record(self, head: RequestHead | None, reply: Answer, peer: str, started: float) -> None:
        """Not written down: a scrape every few seconds would bury everything else."""


class Scrapes:
    """The renderer of the metrics of a gateway and, where there is one, a control plane; made by the first scrape."""

    def __init__(self, gateway: Gateway, plane: Callable[[], Plane | None] = lambda: None) -> None:
        self._gateway = gateway
        self._plane = plane
        self._render: Callable[[str], tuple[bytes, str]] | None = None

    def __call__(self, accept: str) -> tuple[bytes, str]:
        if self._render is None:
            from .families import renderer

            self._render = renderer(self._gateway, self._plane)
        return self._render(accept)

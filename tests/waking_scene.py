"""What a control plane would publish, published by a test: replicas that are scripted engines, and models that wake."""

from __future__ import annotations

import time

import attrs

from appliance.facts.endpoint import Endpoint
from tests.fake_engine import FakeEngine
from tests.routers import Running

LOADING = "it is loading on node-a, since 40 s"
AT_ZERO = '[[models]]\nname = "llama"\naliases = ["chat"]\n'


def replica(engine: FakeEngine, id: str = "llama.abcde", *, key: str = "", model: str = "llama") -> Endpoint:
    """The engine as a running replica of `model`."""
    return Endpoint(id, "127.0.0.1", engine.port, models=(model,), capacity=engine.capacity, api_key=key)


@attrs.define(eq=False)
class Plane:
    """Stands in for the control plane of `door`. `wanted` are the models it was asked to wake, `reason` is why a model
    that does not wake is not there."""

    door: Running
    wanted: list[str] = attrs.field(factory=list)
    reason: str = ""
    waking: dict[str, str] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.door.app.gateway.wanted = self.wanted.append
        self.door.app.gateway.why_not = lambda model: self.waking.get(model, self.reason)

    def publish(self, *endpoints: Endpoint, waking: dict[str, str] | None = None) -> None:
        self.waking = waking or {}
        self.door.app.gateway.publish(endpoints, self.waking)
        self.door.app.watches.follow()

    def after(self, seconds: float) -> None:
        """Let the queue see a clock `seconds` ahead."""
        self.door.app.gateway.gate.sweep(time.monotonic() + seconds)

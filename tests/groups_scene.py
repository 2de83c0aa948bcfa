"""Announced groups under test: short intervals, and a way to wait for what they come to.

async with scene(daemons=[daemon.address]) as found:
    await found.serving("m")
"""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Any

import attrs
import structlog
import trio

from appliance.facts.groups import GroupsSettings
from appliance.groups.groups import Groups
from tests.fake_daemon import free_udp_port

WITHIN_S = 10.0
QUICK = GroupsSettings(
    daemons=(),
    announce_port=0,
    poll_interval_s=30.0,
    probe_interval_s=0.05,
    probe_timeout_s=2.0,
    probe_fresh_s=30.0,
    model_ttl_s=3600.0,
)
"""Probes follow each other closely; documents are read again only when there is an event."""


async def until(what: str, wanted: Callable[[], Any]) -> Any:
    """What `wanted` gives once that is true; `what` is the sentence that a test fails with."""
    with trio.move_on_after(WITHIN_S):
        while not (found := wanted()):  # noqa: ASYNC110  the kernel is in between, so there is no event to wait for
            await trio.sleep(0.005)
        return found
    raise AssertionError(f"never true: {what}")


@attrs.define(eq=False)
class Scene:
    groups: Groups
    log: list[dict[str, Any]]
    offset: list[float]

    @property
    def status(self) -> dict[str, Any]:
        return self.groups.status()

    @property
    def models(self) -> list[str]:
        return sorted(self.status["models"])

    def later(self, seconds: float) -> None:
        """Let the groups' clock run ahead."""
        self.offset[0] += seconds

    def why(self, group: str) -> str | None:
        row = self.status["groups"].get(group)
        return None if row is None else row["why_not"] or ""

    def told(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == event]

    async def serving(self, *models: str) -> None:
        await until(f"{models} are served", lambda: self.models == sorted(models))

    async def gated(self, group: str, why: str) -> str:
        """Wait until the group is gated for a reason that begins so; the whole reason."""
        return str(
            await until(f"{group} is gated: {why}", lambda: (self.why(group) or "").startswith(why) and self.why(group))
        )


@asynccontextmanager
async def scene(
    key: bytes = b"", own: Callable[[], Sequence[Any]] | None = None, **settings: Any
) -> AsyncIterator[Scene]:
    offset = [0.0]
    if settings.pop("udp", False):
        settings["announce_port"] = free_udp_port()
    made = attrs.evolve(
        QUICK, **{name: tuple(value) if isinstance(value, list) else value for name, value in settings.items()}
    )
    more: dict[str, Any] = {} if own is None else {"own": own}
    with structlog.testing.capture_logs() as log:
        async with trio.open_nursery() as nursery:
            groups = Groups(made, key, clock=lambda: time.monotonic() + offset[0], **more)
            await nursery.start(groups.run)
            yield Scene(groups, log, offset)
            nursery.cancel_scope.cancel()

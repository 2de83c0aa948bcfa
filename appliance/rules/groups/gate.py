"""Whether a group gets requests, and if not, why: the gates in their order, and what its probes have said.

    announced? -> reachable? -> an actor running? -> probed? -> the probe good? -> the probe fresh?

A failed probe closes the gate at once: engines that fail one fail requests too. What it said last stays known, so that
a name it served is refused with a reason instead of as unknown.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from ...facts.groups import Announced

NO_ENDPOINT = "no announced OpenAI endpoint"
NO_ACTORS = "no running actors"
NOT_PROBED = "not probed yet"
PROBE_STALE = "endpoint probe stale"

PROBE_FAILED = "endpoint probe failed"
UNREACHABLE = "the router does not reach the address it announces"

Entries = Mapping[str, Mapping[str, Any]]
"""What an engine says of its models, by name."""


class Standing:
    """What is known of one group beside what daemons tell. Times are those of the caller's clock.

    `url` is the address that answered last: it is kept while it does, since moving without need costs caches; `router`
    tells that another router of this kind answers there. `names`
    and `entries` are from the last good probe, whenever that was.
    """

    __slots__ = (
        "entries",
        "error",
        "first_seen_at",
        "names",
        "probed_at",
        "router",
        "seen_at",
        "servable_at",
        "top_at",
        "url",
    )

    def __init__(self, now: float) -> None:
        self.first_seen_at = self.seen_at = now
        self.servable_at: float | None = None
        self.url = ""
        self.router = False
        self.names: tuple[str, ...] = ()
        self.entries: Entries = {}
        self.probed_at: float | None = None
        self.error = ""
        self.top_at = now

    # -- what is heard -----------------------------------------------------------------------------------------------

    def seen(self, group: Announced, now: float) -> None:
        """A daemon still tells of it. A result for an address that it is not at any more is none."""
        self.seen_at = now
        if self.url and self.url not in group.candidates:
            self.url, self.probed_at, self.error = "", None, ""

    def order(self, group: Announced, now: float, promote_s: float) -> tuple[str, ...]:
        """The addresses to try now: the one that answered last, then the others; now and then the best first."""
        candidates = group.candidates
        if not candidates:
            return ()
        if not self.url or self.url == candidates[0] or now - self.top_at >= promote_s:
            self.top_at = now
            return candidates
        return (self.url, *(url for url in candidates if url != self.url))

    def answered(self, group: Announced, url: str, entries: Entries, now: float, *, router: bool = False) -> None:
        """A good probe. An engine that names no model serves one called like its group; a router that names none has
        none at the moment."""
        self.url, self.probed_at, self.error, self.router = url, now, "", router
        self.names = tuple(sorted(entries)) or (() if router else (group.name,))
        self.entries = entries

    def failed(self, errors: Sequence[tuple[str, str]]) -> None:
        """No address answered; each with what came instead."""
        self.url = ""
        self.probed_at = None
        self.error = "; ".join(f"{url}: {error}" for url, error in errors)

    def judged(self, group: Announced, why: str, now: float) -> None:
        """A round is over. A group that has tools alone serves while one of its agents lives."""
        if not why or (group.mcp and not group.announces and group.agents_alive):
            self.servable_at = now

    # -- what follows ------------------------------------------------------------------------------------------------

    def retired(self, now: float, ttl_s: float) -> bool:
        """Whether it has not served for so long that it is shown no more. It is still probed."""
        since = self.first_seen_at if self.servable_at is None else self.servable_at
        return now - since > ttl_s


def why_not(group: Announced, standing: Standing, now: float, fresh_s: float) -> str:
    """The first shut gate in words, "" where all are open."""
    if not group.announces:
        return NO_ENDPOINT
    if not group.candidates:
        return group.unreachable
    if group.actors:
        if not group.actors_running:
            return NO_ACTORS
    elif group.list_shaped and group.gpus_total > 0:
        return NO_ACTORS  # older documents list an actor wherever a GPU is used
    if standing.error:
        noted = f" (agent reports: {group.note})" if group.note else ""
        return f"{PROBE_FAILED}: {standing.error}{noted}"
    if standing.probed_at is None:
        return NOT_PROBED
    return PROBE_STALE if now - standing.probed_at > fresh_s else ""


def for_clients(why: str) -> str:
    """Which gate is shut, without what only operators are told: addresses, and what answered there."""
    if why.startswith(PROBE_FAILED):
        return PROBE_FAILED
    return UNREACHABLE if why.startswith("announced ") else why

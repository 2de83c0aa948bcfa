"""What is said to a request that is not let in, and how soon it is worth coming back.

`Retry-After` is worked out from how fast the queue in question has been moving: those ahead, over the places given out
per second. Where nothing has moved yet it is the band's own time limit, since by then everybody who waits now has been
let in or sent away; that is a bound, not a guess.
"""

from __future__ import annotations

import math

from appliance.facts.bands import Band
from appliance.facts.errors import Refusal

REASONS = ("queue_full", "displaced", "queue_timeout")
"""What the queue refuses for; a model without an endpoint is not its doing."""
PACE_S = 15.0
"""Time constant of a queue's pace."""
NOT_READY_RETRY_S = 5.0
"""How soon to ask again for a model that has no endpoint: nothing here knows when one comes, and a launch takes longer
than a breaker stays open, so this serves the second case and is harmless in the first."""


class Pace:
    """How many places per second a queue was given lately: a count that forgets, corrected for its short memory."""

    __slots__ = ("_at", "_count", "_since")

    def __init__(self) -> None:
        self._count = 0.0
        self._since = 0.0
        self._at: float | None = None

    def note(self, now: float) -> None:
        """One place was given to a waiter."""
        if self._at is None:
            self._since = now
        else:
            self._count *= math.exp((self._at - now) / PACE_S)
        self._count += 1.0
        self._at = now

    def per_second(self, now: float) -> float:
        """0 while fewer than two places were given, or all of them at one moment."""
        if self._at is None or now <= self._since or self._count <= 1.0:
            return 0.0
        seen = PACE_S * -math.expm1((self._since - now) / PACE_S)
        return self._count * math.exp((self._at - now) / PACE_S) / seen


def retry_after_s(ahead: int, pace: float, ttl_s: float) -> float:
    """Seconds until a request with `ahead` others before it would be let in: at least 1, at most the time limit."""
    wait = (ahead + 1) / pace if pace > 0 else ttl_s
    return max(1.0, min(wait, ttl_s))


def queue_full(band: Band, waiting: int, everything: bool, retry_s: float) -> Refusal:
    """`everything`: the bound over all bands was reached, and nobody below could be displaced."""
    whose = "requests in all" if everything else f"{band.name} requests"
    return _later(503, "queue_full", f"The queue is full: {waiting} {whose} are waiting.", retry_s)


def displaced(band: Band, by: Band, retry_s: float) -> Refusal:
    return _later(
        503,
        "displaced",
        f"The queue is full, and a {by.name} request took the place of this one, the newest of the {band.name} band.",
        retry_s,
    )


def queue_timeout(band: Band, model: str, waited_s: float, retry_s: float) -> Refusal:
    return _later(
        504,
        "queue_timeout",
        f"No place for a {band.name} request at {model} within {waited_s:.0f} s (deadline: admission.bands ttl_s).",
        retry_s,
    )


def not_woken(
    model: str, waited_s: float, why: str = "it was scaled to zero", deadline: str = "control.wake_wait_s"
) -> Refusal:
    """`why` is what is being done to have it ready, as half a sentence; `deadline` the setting that ended the wait."""
    return _later(
        503,
        "model_not_ready",
        f"{model} is not ready after {waited_s:.0f} s: {why} (deadline: {deadline}).",
        NOT_READY_RETRY_S,
    )


def not_ready(model: str) -> Refusal:
    return _later(503, "model_not_ready", f"{model} has no endpoint that is ready.", NOT_READY_RETRY_S)


def _later(status: int, code: str, what: str, retry_s: float) -> Refusal:
    seconds = math.ceil(retry_s)
    return Refusal(status, code, f"{what} Try again in {seconds} s.", retry_after_s=retry_s)

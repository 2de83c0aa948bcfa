"""When an endpoint that fails is left alone, and how it comes back.

Closed, it passes everything. It opens on failures only, by either of two rules, because each misses what the other
sees:

- five in a row. An engine that died fails everything at once, and this notices before a sixth request is wasted;
- half of the last twenty outcomes (ten at least). An engine that fails every other request never fails five in a row.

A request that an engine answers with a 5xx may be what is wrong, and its client sends it again and again: a library
that retries by itself makes three failures of one. So an answered failure counts once for each request that it was told
to, and a client with one bad request does not shut the endpoint for everybody. An engine that fails whatever it is
asked is told so by as many requests as ever; connections that break count always.

The window counts outcomes and not seconds: a replica that gets three requests a minute is judged by as many outcomes as
one that gets three hundred a second.

Open, it passes nothing for a while that doubles each time it opens again (2 s to 60 s) and is jittered, so that the
replicas that one cause took down are not all probed at one instant. Then it is half-open: exactly one request is let
through. Its success closes the breaker, its failure opens it for longer; anything else (the client left, the engine was
full) decides nothing, and the next request becomes the probe.
"""

from __future__ import annotations

from random import Random

IN_A_ROW = 5
WINDOW = 20
WINDOW_LEAST = 10
FIRST_OPEN_S = 2.0
LONGEST_OPEN_S = 60.0
JITTER = 0.25
CAUSES = 16
"""Requests that are remembered as having failed, the latest: those that fail by turns are few."""
CALM_S = 120.0
"""Closed for so long, the next opening is a new story and starts at `FIRST_OPEN_S`."""

_ROW = (1 << IN_A_ROW) - 1
_ALL = (1 << WINDOW) - 1


class Breaker:
    """One endpoint's breaker. All times are seconds of one clock; nothing is raised.

    Whoever dispatches calls `begin` and hands what it returned to exactly one of `succeed`, `fail` and `release`.
    """

    __slots__ = ("causes", "closed_at", "history", "known", "open_until", "probing", "trips")

    def __init__(self) -> None:
        self.history = 0
        self.known = 0
        self.trips = 0
        self.open_until = 0.0
        """0 while closed."""
        self.closed_at = float("-inf")
        self.probing = False
        self.causes: tuple[int, ...] = ()
        """Of the failures since it was closed."""

    @property
    def closed(self) -> bool:
        return not self.open_until

    def state(self, now: float) -> str:
        """ "closed", "open" or "half-open"."""
        if not self.open_until:
            return "closed"
        return "open" if now < self.open_until else "half-open"

    def allows(self, now: float) -> bool:
        """Whether a request may be dispatched now."""
        return not self.open_until or (now >= self.open_until and not self.probing)

    def begin(self, now: float) -> bool:
        """A request is dispatched. True when it is the probe, whose outcome decides."""
        if not self.open_until or self.probing or now < self.open_until:
            return False
        self.probing = True
        return True

    def succeed(self, now: float, probe: bool) -> None:
        if not self.open_until:
            self._note(0)
        elif probe:
            self.open_until = 0.0
            self.probing = False
            self.closed_at = now
            self.history = self.known = 0
            self.causes = ()
        # A stream that began before the trouble and ends well now proves nothing about new requests.

    def fail(self, now: float, rng: Random, probe: bool, cause: int = 0) -> bool:
        """A failure; True when it opened the breaker. Without `probe`, it counts only while closed: the forty requests
        that die with an engine open it once. `cause` stands for the request that the engine has answered so, 0 where it
        gave no answer."""
        if self.open_until:
            if probe:
                self.probing = False
                self._open(now, rng)
            return probe
        if cause:
            if cause in self.causes:
                return False
            self.causes = (*self.causes[1 - CAUSES :], cause)
        self._note(1)
        in_a_row = self.history & _ROW == _ROW
        half = self.known >= WINDOW_LEAST and self.history.bit_count() * 2 >= self.known
        if in_a_row or half:
            if now - self.closed_at > CALM_S:
                self.trips = 0
            self._open(now, rng)
            return True
        return False

    def release(self, probe: bool) -> None:
        """The request ended in a way that says nothing about the endpoint."""
        if probe:
            self.probing = False

    def _note(self, failed: int) -> None:
        self.history = (self.history << 1 | failed) & _ALL
        if self.known < WINDOW:
            self.known += 1

    def _open(self, now: float, rng: Random) -> None:
        length = min(LONGEST_OPEN_S, FIRST_OPEN_S * 2.0 ** min(self.trips, 16))
        self.trips += 1
        self.open_until = now + length * rng.uniform(1.0 - JITTER, 1.0 + JITTER)

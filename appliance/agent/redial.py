"""How long an agent waits before it calls its control plane again.

Three things end a call, and each asks for another patience. A connection that was lost is most likely a restart of the
control plane, which is back in a second: the first try comes within a quarter of that. One that cannot be had at all is
tried ever more rarely, and for ever. A refusal was an answer: asking again at once would only be refused again.
"""

from __future__ import annotations

from random import Random

FIRST_S = 0.25
LONGEST_S = 15.0
"""Less than `control.settle_s`: after its own start the control plane waits for agents before it decides anything."""

REFUSED_S = 5.0
REFUSED_LONGEST_S = 60.0

LASTED_S = 10.0
"""A connection that lasted so long makes its loss a first one."""


class Redial:
    """Made once. After each end of a call one of the three methods says how long to wait, in seconds."""

    def __init__(self, rng: Random) -> None:
        self._rng = rng
        self._losses = 0
        self._refusals = 0

    def lost(self, lasted_s: float) -> float:
        """The control plane had said welcome `lasted_s` ago."""
        self._refusals = 0
        if lasted_s >= LASTED_S:
            self._losses = 0
        return self._next()

    def failed(self) -> float:
        """There was no control plane to talk to."""
        return self._next()

    def refused(self) -> float:
        """It did not want us."""
        base = REFUSED_S * 2.0 ** min(self._refusals, 10)
        self._refusals += 1
        return min(REFUSED_LONGEST_S, base * self._rng.uniform(1.0, 1.3))

    def _next(self) -> float:
        longest = min(LONGEST_S, FIRST_S * 2.0 ** min(self._losses, 10))
        self._losses += 1
        # Half of it by chance: a control plane that comes back is called by all its agents.
        return longest * self._rng.uniform(0.5, 1.0)

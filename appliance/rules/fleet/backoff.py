"""How long to wait before a model that failed is tried again.

The wait belongs to the model and not to one replica: what broke one (a missing file, a wrong argument, too little
memory) breaks the next one too, and each try may load for minutes.
"""

from __future__ import annotations

from random import Random

import attrs

FIRST_S = 2.0
LONGEST_S = 300.0
SOON_S = 1.0
STEADY_S = 60.0
"""Served for so long, a model has recovered, and its next failure is a first one."""


@attrs.frozen
class Backoff:
    """`failures` of the model in a row; no new try before `until` (in the clock of `now`), because of `reason`."""

    failures: int = 0
    until: float = 0.0
    reason: str = ""

    def waits(self, now: float) -> bool:
        """Whether it is too early. Nobody waits for longer than LONGEST_S: then the clock was set back meanwhile, and
        the wait, told by the one that was, would last until it is there again."""
        return self.until - LONGEST_S - 1.0 <= now < self.until


def failed(before: Backoff, reason: str, now: float, rng: Random) -> Backoff:
    """What follows on one more failure. Those that come while a wait is running are of the same trouble."""
    if before.waits(now):
        return before
    failures = before.failures + 1
    longest = min(LONGEST_S, FIRST_S * 2.0 ** min(failures - 1, 30))
    # Half of it by chance: what failed together, on one machine or on many, is not tried again together.
    return Backoff(failures, now + longest * rng.uniform(0.5, 1.0), reason)


def hindered(before: Backoff, reason: str, now: float) -> Backoff:
    """What follows when something that the model has no part in failed a try, and the next one will be different: it
    comes soon, however often that was so, and as many failures are counted as before."""
    return before if before.waits(now) else attrs.evolve(before, until=now + SOON_S, reason=reason)

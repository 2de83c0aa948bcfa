"""How much a model is asked for: what the request road tells the control plane."""

from __future__ import annotations

import math

import attrs


@attrs.frozen
class Demand:
    """One model at one moment.

    `waiting` requests are in its queue, `running` are at its endpoints, which take `slots` at once (0: not known).
    `asked_at` is when it was last asked for, in the clock of whoever decides; minus infinity for never.
    """

    waiting: int = 0
    running: int = 0
    slots: int = 0
    asked_at: float = -math.inf


NO_DEMAND = Demand()

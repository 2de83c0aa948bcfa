"""What is remembered of a model's failures: how long to wait, where not to try first, and what its shards said.

The wait belongs to the model, as in `backoff.py`; the nodes it failed on are tried last as long as the wait's history
is kept, and both are forgotten together once all that is wanted of the model has served for a while.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from random import Random

import attrs

from appliance.rules.fleet.actions import Failure
from appliance.rules.fleet.backoff import STEADY_S, Backoff, failed, hindered

KEPT = 5
"""Failures of each model that are kept for operators."""


@attrs.define
class History:
    """By model: `backoffs`, `avoided` nodes, the last `failures` (the latest first) and `total`, all there were."""

    backoffs: dict[str, Backoff] = attrs.field(factory=dict)
    avoided: dict[str, set[str]] = attrs.field(factory=dict)
    failures: dict[str, tuple[Failure, ...]] = attrs.field(factory=dict)
    total: dict[str, int] = attrs.field(factory=dict)

    def note(self, model: str, failures: tuple[Failure, ...]) -> None:
        """One more replica has failed; `failures` are those of its shards."""
        self.failures[model] = (*failures, *self.failures.get(model, ()))[:KEPT]
        self.total[model] = self.total.get(model, 0) + 1

    def wait(self, model: str, reason: str, nodes: Iterable[str], now: float, rng: Random) -> Backoff:
        """Have the model wait before it is tried again, on other nodes if there are any."""
        self.backoffs[model] = failed(self.backoffs.get(model, Backoff()), reason, now, rng)
        self.avoided.setdefault(model, set()).update(nodes)
        return self.backoffs[model]

    def wait_briefly(self, model: str, reason: str, now: float) -> Backoff:
        """Have the model tried again in a moment, wherever that would be: it was not the model that failed."""
        self.backoffs[model] = hindered(self.backoffs.get(model, Backoff()), reason, now)
        return self.backoffs[model]

    def waiting(self, model: str, now: float) -> Backoff | None:
        """The wait that is running, None when none is."""
        backoff = self.backoffs.get(model)
        return backoff if backoff is not None and backoff.waits(now) else None

    def shunned(self, model: str) -> Collection[str]:
        """Nodes that are tried last."""
        return self.avoided.get(model, ())

    def steady_at(self, model: str, ready_at: Iterable[float]) -> float | None:
        """When a model all of whose replicas serve has recovered, None when there is nothing to recover from."""
        backoff = self.backoffs.get(model)
        return max([backoff.until, *ready_at]) + STEADY_S if backoff is not None else None

    def forgive(self, model: str) -> None:
        """It is tried at once, anywhere. What happened stays on record."""
        self.backoffs.pop(model, None)
        self.avoided.pop(model, None)

    def forget(self, model: str) -> None:
        """It is no longer configured."""
        self.forgive(model)
        self.failures.pop(model, None)
        self.total.pop(model, None)

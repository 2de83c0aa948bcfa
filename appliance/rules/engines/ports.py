"""Ports of one node, given out so that no two shards on it ever share one, inner ports included.

vLLM binds with SO_REUSEPORT, so two engines told the same port would both start and silently share its connections.
Whether a stranger holds a port is not known here: whoever starts the plan tries to bind each and, where that fails,
asks again with those ports taken.
"""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from appliance.facts.launch import PortUse


class NoPort(Exception):
    """There is no free port, or none in a row; the text says how many were asked for and where."""


@attrs.frozen
class PortPool:
    """The ports from `first` to `last` (both included) that are not `taken`. A value: taking gives no change here."""

    first: int
    last: int
    taken: frozenset[int] = frozenset()

    def without(self, ports: Iterable[int]) -> PortPool:
        """The pool after somebody else has taken `ports`."""
        return attrs.evolve(self, taken=self.taken | frozenset(ports))

    def why_not(self, port: int) -> str:
        """Why `port` cannot be used here, "" if it can."""
        if not self.first <= port <= self.last:
            return f"port {port} is outside port_range {self.first}-{self.last}"
        return f"port {port} is in use by another shard" if port in self.taken else ""


@attrs.define
class PortLease:
    """The ports that one plan takes from a pool, lowest first, each with its purpose. Made for one plan and thrown
    away with it; `uses` is what the plan keeps."""

    pool: PortPool
    uses: tuple[PortUse, ...] = ()

    def take(self, name: str, count: int = 1) -> int:
        """The first of `count` free ports in a row. Raises NoPort."""
        gone = self.pool.taken.union(*(use.numbers for use in self.uses))
        run = 0
        for port in range(self.pool.first, self.pool.last + 1):
            run = 0 if port in gone else run + 1
            if run == count:
                self.uses += (PortUse(name, port - count + 1, count),)
                return port - count + 1
        asked = f"{count} free ports in a row" if count > 1 else "free port"
        raise NoPort(f"no {asked} for {name} in port_range {self.pool.first}-{self.pool.last}")

    def hold(self, name: str, port: int) -> None:
        """Keep a port that was decided elsewhere, so that nothing else of this plan takes it."""
        self.uses += (PortUse(name, port),)

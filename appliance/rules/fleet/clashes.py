"""Two replicas on one GPU. It must not be, so some agent does what nobody told it, and somebody has to give way."""

from __future__ import annotations

from collections.abc import Iterable

import attrs

from appliance.rules.fleet.world import World


@attrs.frozen
class Clash:
    """Two replicas that both have a GPU (this one, or more), as the agent or our own book says."""

    node: str
    gpu: str
    one: str
    other: str


@attrs.define
class Clashes:
    """Those that were told of, so that each is told once."""

    told: set[tuple[str, str]] = attrs.field(factory=set)

    def settle(self, world: World, found: Iterable[Clash]) -> None:
        """Of each two that are to run the one that is worth less must end: what does not serve, or the younger."""
        self.told = {pair for pair in self.told if set(pair) <= world.replicas.keys()}
        for clash in found:
            if (clash.one, clash.other) not in self.told:
                self.told.add((clash.one, clash.other))
                _part(world, clash)


def _part(world: World, clash: Clash) -> None:
    both = [world.replicas.get(clash.one), world.replicas.get(clash.other)]
    wanted = [placed for placed in both if placed is not None and placed.stage == "running" and not placed.broken]
    stopped = "the one that ends anyway"
    if len(wanted) == 2:
        loser = min(wanted, key=lambda placed: (placed.ready_at is not None, -placed.made_at))
        world.break_off(loser, f"it was given GPU {clash.gpu} on {clash.node}, which another replica has")
        stopped = loser.id
    told = {"node": clash.node, "gpu": clash.gpu, "one": clash.one, "other": clash.other, "stopped": stopped}
    world.tell("error", "gpu_has_two_replicas", **told)

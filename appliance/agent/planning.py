"""A shard's plan on this machine as it is now: a disk that has answered, and ports that nobody else has.

What a plan says is decided by rules alone (`rules/engines/`). Here they are given what they ask for: the hardware as
last seen, programs and weights as they lie on the disk, and ports; and they are asked again for as long as ports of
their choice turn out to be somebody else's.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

import attrs
import trio

from appliance.agent import sockets
from appliance.agent.node import Node
from appliance.agent.unanswered import Unanswered
from appliance.facts.hardware import Inventory
from appliance.facts.launch import LaunchPlan
from appliance.facts.replica import Shard
from appliance.rules.engines.engine import Site
from appliance.rules.engines.plan import CannotLaunch, plan
from appliance.rules.engines.ports import PortPool

AHEAD = 256
"""How many ports are tried together once one was found to be somebody else's."""

PLANS = 8
"""How often a plan is made anew because others hold ports of it; they may take more while it is made."""

DISK_S = 30.0
"""How long a disk may take to say whether the programs and weights of a plan are there; a shared one wakes up first."""


@attrs.frozen
class Planned:
    """`weight_bytes` is how much there is to load, 0 unknown; `inventory` the hardware that it was planned on."""

    plan: LaunchPlan
    weight_bytes: int
    inventory: Inventory


class Planning:
    """The planning of one shard's start. `folder` is the shard's own, `others` gives the ports that all other shards
    hold."""

    def __init__(
        self, node: Node, shard: Shard, marker: str, folder: str, others: Callable[[str], frozenset[int]]
    ) -> None:
        self._node = node
        self._shard = shard
        self._marker = marker
        self._folder = folder
        self._others = others

    async def plan(self, hold: Callable[[frozenset[int]], None], refuse: Callable[[int], None]) -> Planned:
        """A plan whose ports are free; `hold` is called with them at once, before anything is awaited. `refuse` is
        called with the rendezvous port where that is why there is none. Raises CannotLaunch."""
        node, shard, foreign = self._node, self._shard, frozenset[int]()
        weight_bytes = await self._ask_disk()
        inventory = node.inventory()
        for _ in range(PLANS):
            pool = node.ports.without(self._others(shard.id) | foreign)
            if shard.leads and shard.rendezvous_port in pool.taken:
                refuse(shard.rendezvous_port)
            made = plan(shard, self._site(inventory, pool))
            numbers = frozenset(number for use in made.ports for number in use.numbers)
            # Held before anything is awaited, or a second shard would plan with the same ones.
            hold(numbers)
            busy = await self._taken(numbers, pool, refuse)
            if not busy:
                return Planned(made, weight_bytes, inventory)
            foreign |= busy
        raise CannotLaunch([f"ports are taken faster than plans are made ({len(foreign)} are held by others)"])

    async def _ask_disk(self) -> int:
        """How much there is to load, once the disk has said what a plan will ask it: a plan is made in one go, while
        everything else waits, and a disk may never answer. Raises CannotLaunch."""
        node, shard = self._node, self._shard

        def look() -> int:
            with contextlib.suppress(CannotLaunch):
                plan(shard, self._site(node.inventory(), node.ports))
            return _weight_bytes(shard.weights)

        try:
            return await node.questions.ask(f"the disk with the programs and weights of {shard.id}", look, DISK_S)
        except Unanswered as silent:
            raise CannotLaunch([str(silent)]) from None

    async def _taken(self, numbers: frozenset[int], pool: PortPool, refuse: Callable[[int], None]) -> frozenset[int]:
        """What others hold of `numbers`, and if anything, of the ports after it too: a plan for each one found would
        take as many plans as others have ports. Raises CannotLaunch for the rendezvous, which cannot be another one.

        For the moment in which a port is tried nobody else can bind it. So one shard tries at a time, and never the
        ports of another one, whose engine may be about to.
        """
        meeting = self._shard.rendezvous_port
        async with self._node.trying:
            busy = await trio.to_thread.run_sync(sockets.taken, numbers)
            if meeting in busy:
                if await trio.to_thread.run_sync(sockets.listened_on, [meeting]):
                    refuse(meeting)
                    raise CannotLaunch([f"rendezvous port {meeting} is in use by another process"])
                busy.discard(meeting)
            if busy:
                others = self._others(self._shard.id) | {meeting}
                near = range(min(busy), min(min(busy) + AHEAD, pool.last) + 1)
                busy |= await trio.to_thread.run_sync(sockets.taken, [port for port in near if port not in others])
        return frozenset(busy)

    def _site(self, inventory: Inventory, pool: PortPool) -> Site:
        node = self._node
        return Site(
            inventory=inventory,
            ports=pool,
            folder=self._folder,
            run_folder=node.run_dir,
            marker=self._marker,
            which=node.which,
            exists=os.path.exists,
            executables=node.executables,
            environment=node.environment,
            bundle=node.bundle,
            own_argv=node.own_argv,
            llamacpp_threads=node.llamacpp_threads,
        )


def _weight_bytes(weights: str) -> int:
    """How much there is to read before it serves; 0 when the engine will fetch it."""
    path = Path(weights)
    with contextlib.suppress(OSError):
        if path.is_absolute() and path.is_file():
            return path.stat().st_size
        if path.is_absolute() and path.is_dir():
            return sum(each.stat().st_size for each in path.rglob("*") if each.is_file())
    return 0

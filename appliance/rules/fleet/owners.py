"""Which node a GPU belongs to. A UUID is one card in all the world, so two nodes that announce the same one are two
agents on one machine (in containers, or with state folders of their own), or a card that was moved. Whoever announced
it first has it, until that node is lost, taken out, or announces it no more.
"""

from __future__ import annotations

from collections.abc import Collection

import attrs

from appliance.facts.hardware import Hindrance, Inventory


class Owners:
    """All announcements. Plain calls; each returns the other nodes whose GPUs may be others now."""

    def __init__(self) -> None:
        self._nodes: dict[str, list[str]] = {}  # by UUID, the first one has it
        self._uuids: dict[str, tuple[str, ...]] = {}

    def announce(self, node: str, inventory: Inventory) -> Collection[str]:
        """What a node has now, whatever it had before."""
        before = self._uuids.get(node, ())
        now = self._uuids[node] = tuple(gpu.uuid for gpu in inventory.gpus)
        if now == before:
            return ()
        there = set(now)
        touched = self._drop(node, [uuid for uuid in before if uuid not in there])
        for uuid in now:
            nodes = self._nodes.setdefault(uuid, [])
            if node not in nodes:
                nodes.append(node)
        return touched

    def withdraw(self, node: str) -> Collection[str]:
        """It has nothing any more that we know of."""
        return self._drop(node, self._uuids.pop(node, ()))

    def judged(self, node: str, inventory: Inventory) -> Inventory:
        """The inventory with a hindrance on each GPU that is another node's."""
        others = {gpu.uuid: owner for gpu in inventory.gpus if (owner := self._nodes[gpu.uuid][0]) != node}
        if not others:
            return inventory
        gpus = tuple(
            attrs.evolve(gpu, hindrances=(*gpu.hindrances, _twice(others[gpu.uuid]))) if gpu.uuid in others else gpu
            for gpu in inventory.gpus
        )
        return attrs.evolve(inventory, gpus=gpus)

    def _drop(self, node: str, uuids: Collection[str]) -> set[str]:
        touched: set[str] = set()
        for uuid in uuids:
            nodes = self._nodes[uuid]
            nodes.remove(node)
            touched.update(nodes)
            if not nodes:
                del self._nodes[uuid]
        return touched


def _twice(owner: str) -> Hindrance:
    return Hindrance("twice", f"{owner} has announced the same GPU: do two agents run on that machine?")

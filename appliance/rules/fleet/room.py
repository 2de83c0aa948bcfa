"""Which GPUs of one node a replica on this node alone would get, or why it cannot run here."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from appliance.facts.catalog import Profile
from appliance.facts.hardware import Gpu, Inventory
from appliance.rules.placement import fit
from appliance.rules.placement.fit import NoRoom as NoRoom


def choose_gpus(profile: Profile, inventory: Inventory, taken: Mapping[str, str]) -> tuple[Gpu, ...]:
    """What the control plane would choose on this node. `taken` says by UUID who has a GPU. Raises NoRoom.

    The disk is not asked: with one node there is nothing to choose from, and what must be fetched may be there already.
    """
    if profile.nodes > 1:
        raise NoRoom(f"it needs {profile.nodes} nodes, and this agent runs replicas on one node only")
    return fit.choose_gpus(profile, inventory, taken)


def holders(shards: Collection[tuple[str, tuple[str, ...]]]) -> dict[str, str]:
    """Who has which GPU: from pairs of a replica and its GPUs."""
    return {gpu: replica for replica, gpus in shards for gpu in gpus}

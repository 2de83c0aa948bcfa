"""From a place to a replica: its id, its key, and where its ranks meet."""

from __future__ import annotations

from random import Random

from appliance.facts.catalog import Model
from appliance.facts.replica import Shard
from appliance.rules.fleet.members import Node, Placed
from appliance.rules.fleet.world import World
from appliance.rules.placement.spots import Placement

LETTERS = "abcdefghijklmnopqrstuvwxyz234567"
ID_LETTERS = 5
KEY_BITS = 256


def make(world: World, model: Model, placement: Placement, now: float, rng: Random) -> Placed:
    """A new replica at that place. The key is what routers show the engine, so `rng` must not be guessable."""
    name = _name(world, model.name, rng)
    lead = placement.seats[0]
    several = len(placement.seats) > 1
    port = _meeting_port(world.nodes[lead.node], now, rng) if several else 0
    key = f"{rng.getrandbits(KEY_BITS):0{KEY_BITS // 4}x}"
    shards = {
        rank: Shard(
            replica=name,
            model=model.name,
            profile=placement.profile,
            rank=rank,
            node=seat.node,
            address=seat.address,
            leader=lead.address,
            rendezvous_port=port,
            gpus=seat.gpus,
            gpu_class=placement.gpu_class,
            fabric=placement.fabric,
            key=key,
            context_tokens=model.context_tokens,
        )
        for rank, seat in enumerate(placement.seats)
    }
    return Placed(name, model.name, placement.profile, shards, made_at=now, checked=model)


def _name(world: World, model: str, rng: Random) -> str:
    """An id that nothing has that may still run somewhere: whatever was superseded is known by its id."""
    while True:
        name = f"{model}.{''.join(rng.choice(LETTERS) for _ in range(ID_LETTERS))}"
        if name not in world.replicas and name not in world.tombs:
            return name


def _meeting_port(node: Node, now: float, rng: Random) -> int:
    """One that no shard holds and nobody else was found to have, by chance: agents give out the lowest ones first, and
    may have done so without our having heard of it. Whether a stranger has it is seen by the leader's agent alone.

    Where all are taken, the one of which that was seen the longest ago; 0, which no agent takes, when shards hold all.
    """
    first, last = node.port_range
    held = {port for report in node.reports.values() for port in (*report.ports, report.shard.rendezvous_port)}
    held.update(shard.rendezvous_port for shard in node.booked.values())
    refused = node.refused_ports(now)
    for _ in range(32):
        port = rng.randint(first, last)
        if port not in held and port not in refused:
            return port
    free = [port for port in range(first, last + 1) if port not in held]
    fresh = [port for port in free if port not in refused]
    return rng.choice(fresh) if fresh else min(free, key=node.refused.__getitem__, default=0)

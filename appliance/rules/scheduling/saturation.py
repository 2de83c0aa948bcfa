"""How full an endpoint and a pool are: 1.0 is the healthy limit, above it requests wait or share too few blocks.

An endpoint's figure is the largest of

- requests waiting in it / 5. "Waiting" is the larger of what it reports and what we have in flight beyond its batch,
  because its report is up to a scrape old and a burst is younger than that;
- KV cache in use / 0.8, where it publishes that;
- in flight (ours with leases, and what other routers brought) / capacity, where the capacity is known.

What is not published counts as unknown and never as zero or full. An endpoint that had good samples and goes silent
counts as full for ten seconds (it may be drowning), then as what we have in flight there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from .member import Member

QUEUE_LIMIT = 5.0
KV_LIMIT = 0.8
HEALTHY = 1.0


def saturation(member: Member, now: float, leases: float = 0.0) -> float:
    """How full `member` is, from 0.0; `leases` are grants not yet dispatched that are counted to it."""
    if member.fresh_until > now:
        return heard_saturation(member, leases)
    if now < member.full_until:
        return max(HEALTHY, own_saturation(member, leases))
    return own_saturation(member, leases)


def heard_saturation(member: Member, leases: float = 0.0) -> float:
    """The figure by the member's last sample, however old (`saturation` judges its age)."""
    busy = member.in_flight + member.foreign + leases
    waiting = float(member.waiting)
    if member.batch and busy - member.batch > waiting:
        waiting = busy - member.batch
    full = waiting / QUEUE_LIMIT
    if member.kv is not None and member.kv / KV_LIMIT > full:
        full = member.kv / KV_LIMIT
    if member.capacity and busy / member.capacity > full:
        full = busy / member.capacity
    return full


def own_saturation(member: Member, leases: float = 0.0) -> float:
    """The figure from what we have in flight there alone; 0.0 where neither capacity nor batch is known."""
    busy = member.in_flight + leases
    full = max(0.0, busy - member.batch) / QUEUE_LIMIT if member.batch else 0.0
    if member.capacity and busy / member.capacity > full:
        full = busy / member.capacity
    return full


def pool_saturation(members: Sequence[Member] | Iterable[Member], now: float, leases: float = 0.0) -> float:
    """The mean over `members` (the ready ones of a pool); `leases` are spread over them evenly. 0.0 for none.

    When every member has gone silent they are judged by what we have in flight, at once: a monitoring outage must not
    become an outage of the service.
    """
    members = tuple(members)
    if not members:
        return 0.0
    share = leases / len(members)
    silent = all(member.fresh_until <= now for member in members)
    total = 0.0
    for member in members:
        total += own_saturation(member, share) if silent else saturation(member, now, share)
    return total / len(members)

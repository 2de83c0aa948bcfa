"""How much each candidate is wanted, by one measure a function: 0.0 to 1.0, higher is better.

A scorer takes all candidates at once and answers with a list in their order: a call per candidate and measure would
cost more than the arithmetic. Weighing them is `pipeline.choose`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence

from .member import Member
from .prefixes import Match, Prefixes
from .saturation import QUEUE_LIMIT, heard_saturation

SOFTENING = 0.25
"""Difference in load (in batches) at which `inflight` falls by half. Small differences are noise and give small votes:
one request in sixteen slots costs 0.2, so that it decides between equals and does not break up a shared prefix."""
COLD_VOTE = 0.25
"""The most that `prefix` gives for a head nobody has seen, so that new heads settle where the fewest others live."""
STRAIN_LIMIT = 1.0
STRAIN_RATIO = 1.5
GUARDED_PENALTY = 0.25


def queue(members: Sequence[Member]) -> list[float]:
    """1.0 with nothing waiting, 0.0 from `QUEUE_LIMIT` waiting requests on. What is in flight beyond a known batch
    counts as waiting: the endpoint's own report is a scrape old."""
    scores = []
    for member in members:
        waiting = member.waiting
        if member.batch and member.in_flight + member.foreign - member.batch > waiting:
            waiting = member.in_flight + member.foreign - member.batch
        scores.append(1.0 - waiting / QUEUE_LIMIT if waiting < QUEUE_LIMIT else 0.0)
    return scores


def kv(members: Sequence[Member]) -> list[float]:
    """The share of the KV cache that is free; 0.5 where it is not published."""
    return [member.kv_free for member in members]


def inflight(members: Sequence[Member]) -> list[float]:
    """1.0 for the least loaded candidate, less for others by their distance to it, counted in batches."""
    loads = [(member.in_flight + member.foreign) * member.per_slot for member in members]
    least = min(loads)
    return [SOFTENING / (SOFTENING + load - least) for load in loads]


def prefix(
    members: Sequence[Member], guarded: Sequence[bool] | None, tree: Prefixes, match: Match, least_match: int
) -> list[float]:
    """The share of the prompt that the tree speaks for, per candidate. Guarded ones get nothing, and their votes go to
    the next that knows the head.

    When the tree speaks for nobody (a new head, a head shorter than `least_match`, or one that needs another home), the
    candidates that hold the fewest bytes get a small vote. Placed by momentary load alone, thirty long preambles end up
    14, 9 and 7 to a replica, and the replica with 14 caches none of them.
    """
    size = len(match.text)
    if match.matched_bytes >= least_match:
        if guarded is None:
            allowed = [member.prefix_id for member in members]
            won = tree.votes(match, allowed, len(members))
            if any(won):
                return [bytes_ / size for bytes_ in won]
        else:
            allowed = [member.prefix_id for member, barred in zip(members, guarded, strict=True) if not barred]
            won = tree.votes(match, allowed, len(members))
            if any(won):
                spoken = iter(won)
                return [0.0 if barred else next(spoken) / size for barred in guarded]
    owned = tree.owned
    held = [owned.get(member.prefix_id, 0) for member in members]
    most = max(held)
    # One prompt's length less than the fullest is worth half of the vote, two are worth all of it.
    return [COLD_VOTE * min(1.0, (most - mine) / (2 * size)) for mine in held]


def session(members: Sequence[Member], guarded: Sequence[bool] | None, home: str) -> list[float]:
    """1.0 for the endpoint that served the session last, unless it is guarded."""
    if guarded is None:
        return [1.0 if member.id == home else 0.0 for member in members]
    return [1.0 if member.id == home and not barred else 0.0 for member, barred in zip(members, guarded, strict=True)]


def guards(members: Sequence[Member], now: float) -> list[bool] | None:
    """Which candidates may not attract by affinity: those that are busy by themselves *and* clearly busier than the
    others. None when there is none.

    Judged one by one: a replica that drowns loses the prompts it knows, and the others keep theirs. Both halves are
    needed: when everybody is busy, moving a prompt wins nothing and costs a cache; and one request beside an idle
    neighbour is no load.
    """
    total = 0.0
    strains = []
    high = False
    for member in members:
        strain = (member.in_flight + member.foreign) * member.per_slot
        full = heard_saturation(member)
        if full > strain:
            strain = full
        strains.append(strain)
        total += strain
        if strain >= STRAIN_LIMIT or member.penalty:
            high = True
    if not high or len(members) < 2:
        return None
    rest = len(members) - 1
    barred = [
        (strain >= STRAIN_LIMIT and strain * rest > STRAIN_RATIO * (total - strain))
        or member.penalised(now) > GUARDED_PENALTY
        for member, strain in zip(members, strains, strict=True)
    ]
    return barred if any(barred) else None

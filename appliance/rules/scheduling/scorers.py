"""How much each candidate is wanted, by one measure a function: 0.0 to 1.0, higher is better.

A scorer takes all candidates at once and answers with a list in their order: a call per candidate and measure would
cost more than the arithmetic. Weighing them is `pipeline.choose`'s business.
"""

from __future__ import annotations

from collections.abc import Sequence

from .member import Member
from .prefixes import Match, Prefixes
from .saturation import QUEUE_LIMIT

SOFTENING = 0.5
"""Difference in load, in batches, at which `inflight` falls by half. Small differences are noise and give small votes:
one request in sixteen slots costs 0.1, enough to decide between equals and not enough to break up a shared prefix."""
COLD_VOTE = 0.5
"""The most that `prefix` gives for a head nobody has seen, so that new heads settle where the fewest others live."""
STRAIN_BATCHES = 1.5
STRAIN_WAITING = 1.5 * QUEUE_LIMIT
STRAIN_KV = 0.9
"""Load in batches, waiting requests, or share of the KV cache, that make up a strain of 1.0. Above the healthy limits,
because a few requests behind a full batch wait less than computing a long head again takes: at the limits themselves,
the simulation in `tests/test_scheduling_affinity.py` lost a fifth of the hits whenever as many clients asked as there
were slots."""
STRAIN_LEAST = 0.25
STRAIN_RATIO = 2.0
"""A strained endpoint is guarded when its strain is this many times the mean of the others. Below a strain of 1.0 it
takes proportionally more, and below the least nothing does: half a batch beside idle neighbours is an imbalance, two
requests are not. At 1.5 the same simulation moved prompts for noise; at 3 a replica ten times slower than the others
kept more than half of the prompts it knew."""
GUARDED_PENALTY = 0.25


def by_load(members: Sequence[Member]) -> tuple[list[float], list[float], list[float]]:
    """The scores `queue`, `kv` and `inflight`, which every choice is made by, in one pass over the candidates.

    `queue`: 1.0 with nothing waiting, 0.0 from `QUEUE_LIMIT` waiting requests on. What is in flight beyond a known
    batch counts as waiting: the endpoint's own report is a scrape old. `kv`: the share of the KV cache that is free;
    0.5 where it is not published. `inflight`: 1.0 for the least loaded candidate, less for others by their distance to
    it, counted in batches.
    """
    queue = []
    kv = []
    loads = []
    for member in members:
        busy = member.in_flight + member.foreign
        waiting = member.waiting
        batch = member.batch
        if batch and busy - batch > waiting:
            waiting = busy - batch
        queue.append(1.0 - waiting / QUEUE_LIMIT if waiting < QUEUE_LIMIT else 0.0)
        kv.append(member.kv_free)
        loads.append(busy * member.per_slot)
    least = min(loads)
    return queue, kv, [SOFTENING / (SOFTENING + (load - least)) for load in loads]


def prefix(
    members: Sequence[Member], guarded: Sequence[bool] | None, tree: Prefixes, match: Match, least_match: int
) -> tuple[list[float], bool]:
    """The share of the prompt that the tree speaks for, per candidate, and whether it speaks for anybody. Guarded ones
    get nothing, and their votes go to the next that knows the head.

    When the tree speaks for nobody (a new head, a head shorter than `least_match`, or one that needs another home), the
    candidates that hold the fewest bytes get a small vote, the idle ones only while any is idle. Placed by momentary
    load alone, heads pile up on one replica until its cache holds fewer than it is asked for.
    """
    size = len(match.text)
    if match.matched_bytes >= least_match:
        if guarded is None:
            allowed = [member.prefix_id for member in members]
            won = tree.votes(match, allowed, len(members))
            if any(won):
                return [length / size for length in won], True
        else:
            allowed = [member.prefix_id for member, barred in zip(members, guarded, strict=True) if not barred]
            won = tree.votes(match, allowed, len(members))
            if any(won):
                spoken = iter(won)
                return [0.0 if barred else next(spoken) / size for barred in guarded], True
    owned = tree.owned
    held = [owned.get(member.prefix_id, 0) for member in members]
    most = max(held)
    # One prompt's length less than the fullest is worth half of the vote, two are worth all of it.
    votes = [COLD_VOTE * min(1.0, (most - mine) / (2 * size)) for mine in held]
    idle = [not (member.in_flight or member.foreign) for member in members]
    if any(idle):
        # At low load an idle replica is worth more than an even spread.
        votes = [vote if free else 0.0 for vote, free in zip(votes, idle, strict=True)]
    return votes, False


def session(members: Sequence[Member], guarded: Sequence[bool] | None, home: str) -> list[float]:
    """1.0 for the endpoint that served the session last, unless it is guarded."""
    if guarded is None:
        return [1.0 if member.id == home else 0.0 for member in members]
    return [1.0 if member.id == home and not barred else 0.0 for member, barred in zip(members, guarded, strict=True)]


def guards(members: Sequence[Member], now: float) -> list[bool] | None:
    """Which candidates may not attract by affinity: those that are strained by themselves *and* clearly more than the
    others, and those that failed a moment ago. None when there is none.

    Judged one by one: a replica that drowns loses the prompts it knows, and the others keep theirs. Both halves are
    needed: when everybody is busy, moving a prompt wins nothing and costs a cache; and two requests beside an idle
    neighbour are no load.
    """
    total = 0.0
    strains = []
    suspect = False
    for member in members:
        strain = (member.in_flight + member.foreign) * member.per_slot / STRAIN_BATCHES
        if member.waiting > strain * STRAIN_WAITING:
            strain = member.waiting / STRAIN_WAITING
        if member.kv is not None and member.kv > strain * STRAIN_KV:
            strain = member.kv / STRAIN_KV
        strains.append(strain)
        total += strain
        if strain >= STRAIN_LEAST or member.penalty:
            suspect = True
    if not suspect or len(members) < 2:
        return None
    rest = len(members) - 1
    barred = [
        (strain >= STRAIN_LEAST and min(strain, 1.0) * strain * rest > STRAIN_RATIO * (total - strain))
        or member.penalised(now) > GUARDED_PENALTY
        for member, strain in zip(members, strains, strict=True)
    ]
    return barred if any(barred) else None

"""Choosing an endpoint: names were resolved, now a pool, the filters, the scorers and a picker.

`choose` is on the road of every request and is written for that: the usual case (one pool, everybody up and fresh) runs
no filter at all, because `Member.up` and `Member.fresh_until` were settled when something changed; scorers work on
whole lists; and the `Choice` keeps the lists as they are. Three candidates without prompt text take about four
microseconds, with a 4 KiB prompt about sixteen.
"""

from __future__ import annotations

from collections.abc import Collection
from random import Random

import attrs

from ...facts.choice import Choice
from ...facts.errors import Refusal
from ...facts.settings import Scheduling
from . import scorers
from .filters import Drop, gate, narrow
from .member import Member
from .pickers import PICKERS, Picker
from .saturation import HEALTHY, pool_saturation
from .table import LATER_S as LATER_S
from .table import Entry, Pool

ONLY_POOL = "the only pool"
GRANTED_POOL = "the pool that admission let it in for"
NOT_SATURATED = "the first pool that is not saturated"
ALL_SATURATED = "the preferred pool, all being saturated"


@attrs.frozen
class Policy:
    """How to choose, from the settings; made once per load of the configuration."""

    queue: float = 1.0
    kv: float = 1.0
    inflight: float = 1.0
    prefix: float = 2.0
    session: float = 1.0
    picker: Picker = PICKERS["best"]
    least_match: int = 256
    """Shortest prompt head, in bytes, that is looked up and that counts as seen before."""

    @classmethod
    def of(cls, scheduling: Scheduling) -> Policy:
        weights = scheduling.weights
        return cls(
            weights.queue,
            weights.kv,
            weights.inflight,
            weights.prefix,
            weights.session,
            PICKERS[scheduling.picker],
            scheduling.prefix.min_match_bytes,
        )


def choose(
    entry: Entry,
    policy: Policy,
    now: float,
    rng: Random,
    text: bytes = b"",
    session: str | bytes = "",
    tried: Collection[str] = (),
    only: str = "",
    granted: str = "",
    closed: Collection[str] = (),
) -> tuple[Member | None, Choice]:
    """The member to dispatch to now, or None; and every stage's outcome.

    `text` is the raw JSON of the prompt (`messages`, `prompt` or `input`), b"" to leave the prefix index out; `session`
    names the client's session. Both are remembered for the picked member. `tried` are ids that this request has been
    at; `only` is the id of the one endpoint that can serve it (it made the response that is continued), or "".
    `granted` names the pool that admission let the request in for, "" when it did not say: that pool is taken while it
    has a candidate. `closed` are ids that hold as many requests as admission wants there; they are passed over
    while another candidate is left.
    """
    pools = entry.pools
    pool: Pool | None
    drops: tuple[Drop, ...] = ()
    if len(pools) == 1 and not tried and not only and not closed:
        pool = pools[0]
        why = ONLY_POOL
        members = [member for member in pool.members if member.up and member.fresh_until > now]
        ids = pool.ids
        if len(members) != len(ids):
            members, drops = narrow(pool.members, now, tried, only)
            ids = tuple([member.id for member in members])
    else:
        pool, why, members, drops = _take_pool(pools, now, tried, only, granted)
        members, drops = _without(members, closed, drops)
        ids = tuple([member.id for member in members])
    if not members or pool is None:
        return None, Choice(entry.name, "", "", (), drops, (), [], -1, (), "off", 0, 0, ())

    queue, kv, inflight = scorers.by_load(members)
    wq = policy.queue
    wk = policy.kv
    wi = policy.inflight
    totals = [wq * a + wk * b + wi * c for a, b, c in zip(queue, kv, inflight, strict=True)]

    match = None
    matched = size = 0
    spoken = False
    result = "off"
    prefix = sessions = _zeros(len(members))
    guarded: tuple[str, ...] = ()
    if session or (len(text) >= policy.least_match and policy.prefix):
        barred = scorers.guards(members, now)
        if barred is not None:
            guarded = tuple([name for name, bar in zip(ids, barred, strict=True) if bar])
        if policy.prefix and len(text) >= policy.least_match:
            match = entry.tree.match(text)
            size = len(match.text)
            matched = match.matched_bytes if match.matched_bytes >= policy.least_match else 0
            prefix, spoken = scorers.prefix(members, barred, entry.tree, match, policy.least_match)
            weight = policy.prefix
            totals = [total + weight * vote for total, vote in zip(totals, prefix, strict=True)]
        if session:
            home = entry.sessions.get(session)
            if home:
                sessions = scorers.session(members, barred, home)
                weight = policy.session
                totals = [total + weight * vote for total, vote in zip(totals, sessions, strict=True)]

    penalties: tuple[float, ...] = ()
    for member in members:
        if member.penalty:
            penalties = tuple([member.penalised(now) for member in members])
            # By the sum of all weights: whatever a replica that fails at once earns by looking idle, it loses here.
            weight = wq + wk + wi + policy.prefix + policy.session
            totals = [total - weight * penalty for total, penalty in zip(totals, penalties, strict=True)]
            break

    picked = policy.picker(totals, rng) if len(members) > 1 else 0
    member = members[picked]
    if match is not None:
        entry.tree.record(match, member.prefix_id)
        if not matched:
            result = "cold"
        elif not spoken:
            result = "spread"
        else:
            result = "hit" if prefix[picked] >= max(prefix) else "moved"
    if session:
        entry.sessions.put(session, member.id)
    return member, Choice(
        entry.name,
        pool.name,
        why,
        ids,
        drops,
        (queue, kv, inflight, prefix, sessions),
        totals,
        picked,
        penalties,
        result,
        size,
        matched,
        guarded,
    )


def has_another(entry: Entry, now: float, tried: Collection[str]) -> bool:
    """Whether a request that was tried at `tried` could be dispatched to a further member now."""
    return any(member.id not in tried and not gate(member, now) for member in entry.members)


def not_ready(entry: Entry, now: float) -> Refusal:
    """Why nobody can take a request for this model: every gate that is shut, and for how many of its endpoints."""
    if not entry.members:
        told = f"the model '{entry.name}' has no endpoint"
        return Refusal(503, "model_not_ready", told, param="model", retry_after_s=LATER_S)
    gates: dict[str, int] = {}
    back_s: list[float] = []
    for member in entry.members:
        word = gate(member, now)
        if word == "ready":
            word = member.failing
        elif word == "breaker":
            left = member.breaker.open_until - now
            word = "stopped after failures" if left > 0 else "being tried again after failures"
            back_s.append(max(1.0, left))
        elif not word:
            word = "tried already"
        gates[word] = gates.get(word, 0) + 1
    count = len(entry.members)
    told = ", ".join(f"{number} {word}" for word, number in gates.items())
    return Refusal(
        503,
        "model_not_ready",
        f"the model '{entry.name}' has no ready endpoint: of {count}, {told}",
        param="model",
        retry_after_s=min(back_s, default=LATER_S),
    )


def _without(
    members: list[Member], closed: Collection[str], drops: tuple[Drop, ...]
) -> tuple[list[Member], tuple[Drop, ...]]:
    """The members without the closed ones, unless that would leave none."""
    left = [member for member in members if member.id not in closed] if closed else members
    if not left or len(left) == len(members):
        return members, drops
    return left, (*drops, *((member.id, "full") for member in members if member.id in closed))


def _take_pool(
    pools: tuple[Pool, ...], now: float, tried: Collection[str], only: str, granted: str
) -> tuple[Pool | None, str, list[Member], tuple[Drop, ...]]:
    """The first pool by priority that is not saturated, or the first that has anybody; with who was dropped on the way.

    A pool without a candidate is passed over: its saturation is that of nobody.
    """
    drops: list[Drop] = []
    usable: list[tuple[Pool, list[Member]]] = []
    taken: tuple[Pool, list[Member]] | None = None
    for pool in pools:
        members, dropped = narrow(pool.members, now, tried, only)
        drops.extend(dropped)
        if not members:
            continue
        usable.append((pool, members))
        if granted:
            if pool.name == granted:
                taken = (pool, members)
        elif taken is None and (len(pools) == 1 or pool_saturation(members, now) < HEALTHY):
            taken = (pool, members)
    if not usable:
        return None, "", [], tuple(drops)
    if len(pools) == 1:
        why = ONLY_POOL
    elif granted and taken is not None:
        why = GRANTED_POOL
    else:
        why = NOT_SATURATED if taken is not None else ALL_SATURATED
    pool, members = taken or usable[0]
    drops.extend((member.id, "pool") for other, group in usable if other is not pool for member in group)
    return pool, why, members, tuple(drops)


_ZEROS: dict[int, list[float]] = {}


def _zeros(count: int) -> list[float]:
    """The scores of a scorer that had nothing to go by. One list for all choices of a width: nobody writes to them."""
    zeros = _ZEROS.get(count)
    if zeros is None:
        zeros = _ZEROS[count] = [0.0] * count
    return zeros

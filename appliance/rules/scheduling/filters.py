"""Which members may be considered, and which filter dropped the others.

The names are those of `facts.choice.FILTERS`; metrics and `ctl explain` use them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from .member import Member

Drop = tuple[str, str]
"""Endpoint id, filter name."""

GATES: tuple[tuple[str, Callable[[Member, float], bool]], ...] = (
    ("ready", lambda member, now: not member.failing),
    ("draining", lambda member, now: not member.draining),
    ("breaker", lambda member, now: member.breaker.allows(now)),
)
"""What a member must pass to be dispatched to at all."""


def gate(member: Member, now: float) -> str:
    """The name of the first gate that is shut, "" when all are open."""
    if member.up:
        return ""
    for name, passes in GATES:
        if not passes(member, now):
            return name
    return ""


def counts_as_full(member: Member, now: float) -> bool:
    """Whether its metrics went silent lately. Silent for longer, it is judged by our own count from now on."""
    if now < member.fresh_until:
        return False
    if now < member.full_until:
        return True
    member.forget_load()
    return False


def narrow(
    members: Sequence[Member], now: float, tried: Collection[str], only: str
) -> tuple[list[Member], tuple[Drop, ...]]:
    """The members that may be considered, and who was dropped by what.

    `tried` are ids that had their chance with this request; `only` an id that the request belongs to, or "". Silence
    drops a member only while another is left: all silent never blocks a pool.
    """
    left: list[Member] = []
    silent: list[Member] = []
    drops: list[Drop] = []
    for member in members:
        shut = gate(member, now)
        if shut:
            drops.append((member.id, shut))
        elif member.id in tried:
            drops.append((member.id, "tried"))
        elif only and member.id != only:
            drops.append((member.id, "pinned"))
        elif counts_as_full(member, now):
            silent.append(member)
        else:
            left.append(member)
    if not left:
        return silent, tuple(drops)
    drops.extend((member.id, "fresh") for member in silent)
    return left, tuple(drops)

"""A model that nobody serves but that is being woken, or could be: who waits for it, and what is said in the end.

A request for such a model waits in its band, for `control.wake_wait_s` at most. It does not where somebody else can
take it now: a fallback that is awake serves it at once, and the model is woken all the same, since it was asked for.
Nobody waits for one model after the other: who has waited in vain goes to those that are awake, or is told.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..facts.errors import Refusal
from ..rules.admission.refusals import not_woken
from ..rules.admission.ticket import Ticket
from ..rules.groups.gate import for_clients
from ..rules.scheduling.filters import gate
from ..rules.scheduling.pipeline import LATER_S, not_ready
from ..rules.scheduling.table import Entry


def awake(entry: Entry, now: float) -> bool:
    """Whether an endpoint takes requests for it now."""
    return any(not gate(member, now) for member in entry.members)


def asleep(entry: Entry, now: float) -> bool:
    """Whether a request for it may wait for its first endpoint."""
    return bool(entry.waking) and not awake(entry, now)


def worth_asking(entry: Entry, fallbacks: Iterable[Entry], tickets: Iterable[Ticket], now: float) -> bool:
    """Whether a request goes to this one of its fallbacks. One that sleeps is woken only where none is awake, and only
    by a request that has not waited for another one to wake (`tickets` are its places in line)."""
    if not asleep(entry, now):
        return True
    waited = any(ticket.blocker == "loading" for ticket in tickets)
    return not waited and not any(awake(other, now) for other in fallbacks)


def absent(entry: Entry, why: str, ticket: Ticket | None, now: float) -> Refusal:
    """What a request is told that found nobody, or waited in vain. `why` is what the control plane knows, "" where it
    knows nothing; `ticket` is its place in line."""
    refusal = _absent(entry, for_clients(why), ticket, now)
    if why:
        refusal.detail = _absent(entry, why, ticket, now).message
    return refusal


def _absent(entry: Entry, why: str, ticket: Ticket | None, now: float) -> Refusal:
    if why and ticket is not None and ticket.blocker == "loading" and ticket.left_queue_at >= ticket.expires_at:
        deadline = "control.wake_wait_s" if entry.configured else "groups.model_wait_s"
        return not_woken(entry.name, ticket.wait_s(now), why, deadline)
    if why and not entry.members:
        told = f"the model '{entry.name}' is not ready: {why}"
        return Refusal(503, "model_not_ready", told, param="model", retry_after_s=LATER_S)
    return not_ready(entry, now)

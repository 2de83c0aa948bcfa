"""Sentences about endpoints and about what became of requests, for operators.

The facts come from the road (`Member`, `Attempt`, `Step`, `Record`); here they are only put into words. Operators may
read addresses and endpoint names, which a client's refusal must not hold (`rules/scheduling/retry.py`).
"""

from __future__ import annotations

from ..facts import choice
from ..facts.choice import Attempt
from ..gateway.record import Record
from ..gateway.service import Gateway
from ..rules.admission.outlook import Outlook
from ..rules.admission.ticket import Explanation
from ..rules.scheduling.filters import gate
from ..rules.scheduling.member import Member
from ..rules.scheduling.retry import LATE, GiveUp, PassOn, Retry, Step

FAILING = {
    "unreachable": "no connection to it; tried again every second",
    "silent": "it takes connections and does not answer; asked again every second",
    "loading": "it says that it is not ready yet; asked again every second",
    "without a list of models": "its /v1/models is no list, and the configuration names no models for it",
}
"""What lies behind the words of `Member.failing`."""


def state(gateway: Gateway, member: Member, now: float) -> tuple[str, str]:
    """One word for a table, and why it is so, or what speaks against it."""
    word, why = _state(member, now)
    if not why and (failed := gateway.unanswered.get(member.id)):
        why = f"requests may go there, but it did not answer when asked for its models: {failed}"
    return word, why


def _state(member: Member, now: float) -> tuple[str, str]:
    shut = gate(member, now)
    match shut:
        case "":
            if member.breaker.open_until:
                return "probing", "its breaker was open after failures; the next request tries it"
            return "ready", ""
        case "ready":
            return member.failing, FAILING.get(member.failing, "it cannot serve now; it is asked again every second")
        case "draining":
            return "draining", "no new requests are sent there"
        case _:
            left = member.breaker.open_until - now
            when = f"tried again in {left:.0f} s" if left > 0 else "one request is trying it now"
            failures, known = member.breaker.history.bit_count(), member.breaker.known
            return "stopped", f"its breaker opened after {failures} failures in its last {known} requests; {when}"


def troubles(gateway: Gateway, member: Member, now: float) -> list[str]:
    """What an operator should know of an endpoint, a sentence each."""
    word, why = state(gateway, member, now)
    told = [f"{member.id}: {word}: {why}"] if why else []
    contract = gateway.contracts.get(member.id)
    return told + [f"{member.id}: {violation}" for violation in (contract.violations if contract else ())]


def waited(place: Explanation) -> str:
    """Why a request had to wait, "" for one that did not."""
    match place.blocker:
        case "saturation":
            ceiling = f"{place.band} is let in up to {place.ceiling:.0%}, itself counted"
            why = f"its pool was {place.saturation:.0%} full, and {ceiling}"
        case "unproven":
            why = "every endpoint held as many requests as one may whose capacity is not known yet"
        case "loading":
            why = "the model had to be started"
        case _:
            return ""
    return f"{why}; {place.ahead or 'nobody'} ahead of it"


def prospect(each: Outlook) -> str:
    """What a request of a band would meet."""
    if each.room:
        return "gets a place at once"
    match each.blocker:
        case "loading":
            return f"waits until the model is started, {each.ahead or 'nobody'} ahead of it"
        case "unproven":
            why = "every endpoint holds as many requests as one may whose capacity is not known yet"
        case _:
            ceiling = f"with it would be above the {each.ceiling:.0%} of its band"
            why = f"the pool is {each.saturation:.0%} full, and {ceiling}"
    return f"waits, {each.ahead or 'nobody'} ahead of it: {why}"


def became(record: Record) -> str:
    """The last sending of a request, where it did not fail there."""
    match record.outcome:
        case "running":
            return "it is being answered" if record.first_byte_at else "nothing has come back yet"
        case "ok":
            return f"it answered with {record.code}"
        case "failed" if record.reason == "error_event":
            return "its stream carried an error event, which was passed on"
        case "cancelled":
            return record.message or "the router stopped"
        case _:
            return f"it ended: {record.outcome}"


def happened(attempt: Attempt) -> str:
    """What ended an attempt."""
    detail = f" ({attempt.detail})" if attempt.detail else ""
    match attempt.kind:
        case choice.ANSWER:
            return f"it answered with an error, HTTP {attempt.status}"
        case choice.ERROR_EVENT:
            return f"its stream began with an error{f', {attempt.status}' if attempt.status else ''}"
        case choice.DEADLINE:
            return LATE.get(attempt.deadline, f"{attempt.deadline} passed")
        case choice.CLIENT_LEFT:
            if attempt.deadline:
                return f"the client took no bytes for longer than {attempt.deadline}"
            return "the client closed its connection" + ("" if attempt.answered else " before anything came back")
        case choice.REFUSED:
            return f"no connection{detail}"
        case _:
            when = "in the middle of its answer" if attempt.answered else "before it answered"
            return f"it broke off {when}{detail}"


def followed(attempt: Attempt, step: Step) -> str:
    """What was done next, and why that was allowed."""
    match step:
        case Retry(same=True) if attempt.reused:
            return "the connection was an idle one that it had closed, so the request went there again on a fresh one"
        case Retry(same=True):
            return "it may have been the connection alone, so the request went there once more on a fresh one"
        case Retry():
            why = "it had not been sent" if not attempt.sent else "nothing had reached the client"
            return f"{why}, so another endpoint was tried"
        case PassOn(fallback=True):
            return "no other endpoint of the model could take it"
        case PassOn():
            return "no other endpoint would say anything else, so this is the answer"
        case GiveUp(fallback=True):
            return "no other endpoint of the model could take it"
        case GiveUp() if attempt.answered:
            return "a part of the answer was there already, so nothing else was tried"
        case GiveUp() if attempt.kind == choice.DEADLINE:
            return "after a deadline nothing else is tried"
        case GiveUp() if attempt.lost:
            return "it may have been carried out already, so it was not sent again"
        case GiveUp():
            return "nothing else could be tried"
    return ""

"""What happens after an attempt that ended.

Three bounds hold together:

- at most three attempts, and none once anything has been passed on to the client, nor after a deadline;
- once the request was handed over whole and its fate is unknown (the connection broke), it is sent one more time at
  most, fallbacks included: a request that kills engines must not be handed round;
- once a byte of an answer came back on a connection that then broke, it is not sent again at all.

Endpoints that want each request once (announced groups) get it once: only a refused connection, on which nothing can
have been sent, lets a request go elsewhere.

An idle connection that the engine closed meanwhile looks like such a loss; its one more sending is spent at once, on a
fresh connection to the same endpoint, which is the one whose cache was chosen.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from ...facts.choice import Attempt, Outcome
from ...facts.errors import Refusal
from .outcomes import KEY_STATUSES, classify

MOST_ATTEMPTS = 3


@attrs.frozen
class Retry:
    """Try again. `same` True: the same endpoint, on a fresh connection; False: another one, by a new choice in which
    the endpoints of all attempts count as tried."""

    same: bool


@attrs.frozen
class PassOn:
    """Hand the engine's own answer to the client, with its Retry-After if it has one (at least 1 s on 429 and 503)."""

    fallback: bool
    """The model's fallbacks may be tried instead."""


@attrs.frozen
class GiveUp:
    """Refuse; what has been passed on to the client is ended with an error event and an aborted body."""

    refusal: Refusal
    fallback: bool


Step = Retry | PassOn | GiveUp

ANOTHER = Retry(same=False)
SAME = Retry(same=True)
MAY_FALL_BACK = PassOn(fallback=True)
FINAL = PassOn(fallback=False)

LATE = {
    "dial_s": "connecting to the endpoint took longer than dial_s",
    "first_token_s": "the first token took longer than first_token_s",
    "idle_s": "the endpoint sent nothing for longer than idle_s",
    "total_s": "the answer took longer than total_s",
    "stream_total_s": "the stream took longer than stream_total_s",
}


def next_step(
    attempts: Sequence[Attempt],
    *,
    passed_on: bool,
    another: bool,
    before: Sequence[Attempt] = (),
    once: bool = False,
) -> Step:
    """What to do after the last of `attempts`: all attempts of this request at this model, in order, at least one.

    `passed_on`: bytes of the answer have left towards the client. `another`: an endpoint of this model that has not
    been tried could take it (`pipeline.has_another`). `before`: attempts at the models that this one is a fallback for;
    a loss among them counts, but they do not count towards the three, or a fallback could never be asked. `once`: the
    last endpoint wants no request a second time, wherever that would be sent.
    """
    last = attempts[-1]
    if last.kind == "client_left":
        return GiveUp(Refusal(499, "client_left", "the client closed the connection"), fallback=False)
    if passed_on or last.kind == "deadline":
        return GiveUp(_refusal(last, len(attempts)), fallback=False)

    if once and last.kind != "refused":
        passes = last.kind == "answer" and last.status not in KEY_STATUSES
        return FINAL if passes else GiveUp(_refusal(last, len(attempts)), fallback=False)

    may_send = not _sent_since_loss((*before, *attempts))
    may_try = may_send and len(attempts) < MOST_ATTEMPTS

    if last.kind in ("reset", "closed", "garbage"):
        if last.answered:
            return GiveUp(_refusal(last, len(attempts)), fallback=False)
        if may_try and last.reused:
            return SAME
        if may_try and another:
            return ANOTHER
        # Alone, it gets its one more sending all the same: what broke may have been the connection.
        if may_try and last.sent:
            return SAME
        return GiveUp(_refusal(last, len(attempts)), fallback=may_send)
    if classify(last) in (Outcome.SUCCESS, Outcome.NEUTRAL):
        return FINAL
    if may_try and another:
        return ANOTHER
    if last.kind == "answer" and last.status not in KEY_STATUSES:
        return MAY_FALL_BACK if may_send else FINAL
    return GiveUp(_refusal(last, len(attempts)), fallback=may_send)


def _sent_since_loss(attempts: Sequence[Attempt]) -> bool:
    """Whether the request was handed over again after an attempt that lost it."""
    lost = False
    for attempt in attempts:
        if lost and attempt.sent:
            return True
        lost = lost or attempt.lost
    return False


def _refusal(last: Attempt, count: int) -> Refusal:
    """What the client is told. No addresses and no endpoint names: it may be anybody's client."""
    if last.kind == "deadline":
        late = LATE.get(last.deadline, f"the endpoint took longer than {last.deadline}")
        return Refusal(504, "upstream_timeout", late)
    match last.kind:
        case "refused":
            what = "the endpoint refused the connection"
        case "answer" if last.status in KEY_STATUSES:
            what = f"the endpoint refused the router's own key (HTTP {last.status}); the operator must set api_key_file"
        case "error_event":
            what = "the endpoint ended its stream with an error"
        case "garbage":
            what = "the endpoint's answer was not HTTP"
        case "answer":
            what = f"the endpoint answered HTTP {last.status}"
        case _:
            what = "the endpoint broke off before its answer was complete"
    tries = "1 attempt" if count == 1 else f"{count} attempts"
    return Refusal(502, "upstream_failed", f"{what} ({tries})", retry_after_s=1.0)

"""What an attempt's end says about the endpoint."""

from __future__ import annotations

from ...facts.choice import Attempt, Outcome

BACKPRESSURE_STATUSES = frozenset((429, 503, 529))
"""529 is how Anthropic's API says that it is overloaded."""
KEY_STATUSES = frozenset((401, 403))
NOT_IMPLEMENTED = 501


def of_status(status: int) -> Outcome:
    """The class of an engine's complete answer.

    401 and 403 are failures although they are 4xx: clients' credentials never reach an engine, so it is *our* key that
    it refuses. As client faults they would let a replica with a wrong key refuse in a millisecond, look idle and win.

    501 is none although it is 5xx: llama.cpp answers so where it was not started for a route (embeddings of a model for
    chats). As a failure it would let a client who asks five times take the model away from everybody else.
    """
    if status < 400:
        return Outcome.SUCCESS
    if status == NOT_IMPLEMENTED:
        return Outcome.NEUTRAL
    if status in BACKPRESSURE_STATUSES:
        return Outcome.BACKPRESSURE
    if status >= 500 or status in KEY_STATUSES:
        return Outcome.FAILURE
    return Outcome.NEUTRAL


def classify(attempt: Attempt) -> Outcome:
    """The class of an attempt, whatever its kind."""
    match attempt.kind:
        case "answer":
            return of_status(attempt.status)
        case "client_left":
            return Outcome.NEUTRAL
        case "error_event":
            return of_status(attempt.status) if attempt.status >= 400 else Outcome.FAILURE
        case "reset" | "closed" if attempt.reused and not attempt.answered:
            # The engine closed an idle connection, as it may. Whether it lives, the fresh connection will tell.
            return Outcome.NEUTRAL
    return Outcome.FAILURE

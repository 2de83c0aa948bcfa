"""A finished record as spans.

    POST /v1/chat/completions     server: the request from its arrival to its end
    |- admission                  internal: one per model that was asked for a place
    |- schedule                   internal: one per choice of an endpoint, also of none
    '- upstream                   client: one per attempt, parent of what the engine records

The request's span carries the GenAI attributes, once: it covers the operation with all its attempts, and tokens told of
an attempt too would be counted twice by whoever adds them up. Where the conventions have no name, ours begin with
`appliance.`. Nothing here holds a prompt, an answer or a key, because the record holds none; messages of engines and
details of failures stay out, as they may quote one.
"""

from __future__ import annotations

import enum
from collections import deque
from random import Random

import attrs

from ..facts.choice import ANSWER, CLIENT_LEFT, DEADLINE, Attempt, Choice
from ..rules.admission.ticket import Ticket
from ..rules.scheduling.retry import PassOn, Retry, Step
from .record import Record
from .trace import Trace, Try, fresh_id

Value = str | int | float | bool

OPERATIONS = {
    "chat": "chat",
    "messages": "chat",
    "responses": "chat",
    "completions": "text_completion",
    "generate": "text_completion",
    "embeddings": "embeddings",
}
"""Route -> `gen_ai.operation.name`. Other routes are no operation that the conventions know."""
MOST_TEXT = 200
"""Characters kept of a text that a client made up: the name of a model, a path."""
_RESPONSE = "/v1/responses/"


class Kind(enum.IntEnum):
    """As OTLP numbers them."""

    INTERNAL = 1
    SERVER = 2
    CLIENT = 3


@attrs.frozen
class Span:
    """One span. `start_ns` and `end_ns` are nanoseconds since 1970; `parent_id` b"" is a root; `remote` tells that the
    parent is another process's; `error` that the operation failed."""

    trace_id: bytes
    span_id: bytes
    parent_id: bytes
    name: str
    kind: Kind
    start_ns: int
    end_ns: int
    attributes: dict[str, Value]
    error: bool = False
    remote: bool = False


def spans_of(record: Record, rng: Random) -> list[Span]:
    """All spans of a settled record that is traced, the request's own first; `rng` makes the ids that nobody was told
    of yet."""
    trace = record.trace
    assert trace is not None and trace.sampled, "traced"

    def ns(at: float) -> int:
        """`time.monotonic` as wall-clock time: the record knows both of its beginning, and a clock that is set
        meanwhile bends no span."""
        return int((record.began_at + at - record.arrived) * 1e9)

    def child(
        name: str, kind: Kind, start: float, end: float, span_id: bytes, about: dict[str, Value], error: bool = False
    ) -> Span:
        identity = span_id or fresh_id(rng, 8)
        return Span(trace.trace_id, identity, trace.span_id, name, kind, ns(start), ns(max(start, end)), about, error)

    method = trace.method.decode("latin-1")
    spans = [
        Span(
            trace.trace_id,
            trace.span_id,
            trace.parent_id,
            f"{method} {_route(trace)}",
            Kind.SERVER,
            ns(record.arrived),
            ns(record.ended_at),
            _of_request(record, trace, method),
            error=record.code >= 500,
            remote=bool(trace.parent_id),
        )
    ]
    tickets, tries = deque(record.tickets), deque(enumerate(trace.tries))
    free, model = record.arrived, ""  # when the step before was over, and which model was being asked

    def admission() -> float:
        ticket = tickets.popleft()
        left = ticket.left_queue_at or record.ended_at
        error = ticket.refusal is not None and ticket.refusal.status >= 500
        spans.append(child("admission", Kind.INTERNAL, ticket.asked_at, left, b"", _of_ticket(ticket), error))
        return left

    for number, choice in enumerate(record.choices, 1):
        while choice.model != model and tickets:  # tickets of models before it were refused
            model = tickets[0].model
            free = max(free, admission())
        made = tries[0][1].started if tries and tries[0][1].choices == number else free
        spans.append(child("schedule", Kind.INTERNAL, free, made, b"", _of_choice(choice)))
        free = max(free, made)
        while tries and tries[0][1].choices == number:
            index, trial = tries.popleft()
            failed = record.attempts[index] if index < len(record.attempts) else None
            over, step = record.steps[index] if index < len(record.steps) else (record.ended_at, None)
            error = _error_of_try(record, failed)
            about = _of_try(trial, method, index, failed, step, error)
            if failed is None and not error:
                about["http.response.status_code"] = record.code
            at_fault = bool(error) and error != CLIENT_LEFT
            spans.append(child("upstream", Kind.CLIENT, trial.started, over, trial.span_id, about, at_fault))
            free = max(trial.started, over)
    while tickets:
        admission()
    return spans


def _route(trace: Trace) -> str:
    """The path without what makes it one of many: no query, and no id of a stored response, which is as good as a key
    to it."""
    path = trace.target.partition(b"?")[0].decode("latin-1")
    if path.startswith(_RESPONSE):
        return _RESPONSE + "{id}" + ("/cancel" if path.endswith("/cancel") else "")
    return path[:MOST_TEXT]


def _of_request(record: Record, trace: Trace, method: str) -> dict[str, Value]:
    about: dict[str, Value] = {
        "http.request.method": method,
        "http.route": _route(trace),
        "http.response.status_code": record.code,
        "gen_ai.request.model": record.wanted[:MOST_TEXT],
        "gen_ai.provider.name": trace.tries[-1].endpoint.engine if trace.tries else "appliance",
        "appliance.request_id": record.request_id,
        "appliance.band": record.band,
        "appliance.outcome": record.outcome,
    }
    operation = OPERATIONS.get(record.route)
    if operation is not None:
        about["gen_ai.operation.name"] = operation
    if record.stream:
        about["gen_ai.request.stream"] = True
    if record.endpoint:
        about["appliance.endpoint"] = record.endpoint
    if record.outcome in ("refused", "failed", "cut", "cancelled"):
        about["error.type"] = record.reason or str(record.code)
    tally = record.tally
    if tally is None or not record.first_byte_at:
        return about
    if record.choices:
        about["gen_ai.response.model"] = record.choices[-1].model
    about["gen_ai.usage.input_tokens"] = tally.prompt_tokens
    about["gen_ai.usage.output_tokens"] = tally.completion_tokens
    if tally.cached_tokens:
        about["gen_ai.usage.cache_read.input_tokens"] = tally.cached_tokens
    if tally.reasoning_tokens:
        about["gen_ai.usage.reasoning.output_tokens"] = tally.reasoning_tokens
    if record.estimated:
        about["appliance.usage.estimated"] = True
    if record.stream and tally.first_content_at:
        about["gen_ai.response.time_to_first_chunk"] = tally.first_content_at - record.arrived
    return about


def _of_ticket(ticket: Ticket) -> dict[str, Value]:
    about: dict[str, Value] = {"appliance.model": ticket.model, "appliance.band": ticket.band}
    if ticket.pool:
        about["appliance.pool"] = ticket.pool
    if ticket.blocker:
        about["appliance.blocker"] = ticket.blocker
        about["appliance.ahead"] = ticket.ahead
    if ticket.refusal is not None:
        about["error.type"] = ticket.refusal.code
    return about


def _of_choice(choice: Choice) -> dict[str, Value]:
    about: dict[str, Value] = {
        "appliance.model": choice.model,
        "appliance.candidates": len(choice.candidates),
        "appliance.dropped": len(choice.drops),
        "appliance.prefix": choice.prefix,
    }
    if choice.pool:
        about["appliance.pool"] = choice.pool
    if choice.endpoint:
        about["appliance.endpoint"] = choice.endpoint
    return about


def _of_try(
    trial: Try, method: str, number: int, failed: Attempt | None, step: Step | None, error: str
) -> dict[str, Value]:
    endpoint = trial.endpoint
    about: dict[str, Value] = {
        "http.request.method": method,
        "server.address": endpoint.host,
        "server.port": endpoint.port,
        "appliance.endpoint": endpoint.id,
    }
    if number:
        about["http.request.resend_count"] = number
    if error:
        about["error.type"] = error
    if failed is not None and failed.status:
        about["http.response.status_code"] = failed.status
    if step is not None:
        about["appliance.next"] = _next(step)
    return about


def _error_of_try(record: Record, failed: Attempt | None) -> str:
    """What kind of failure an attempt was, "" for none. The last one leaves no note where the engine is not at fault,
    or where its stream told an error and was passed on all the same."""
    if failed is None:
        return "" if record.outcome in ("ok", "running") else record.reason or record.outcome
    if failed.kind == ANSWER:
        return str(failed.status)
    return failed.deadline if failed.kind == DEADLINE else failed.kind


def _next(step: Step) -> str:
    """What was done after a failed attempt."""
    if isinstance(step, Retry):
        return "retry same" if step.same else "retry another"
    return "pass on" if isinstance(step, PassOn) else "give up"

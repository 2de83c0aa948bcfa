"""The documents of the management API: plain dictionaries, made from the objects that the road acts on.

`docs/operations.md` lists them. Times of day are in seconds since the epoch, durations in seconds, and what is not
known is null. They hold no prompt, no answer and no key. Sentences come from the rule that decided or from
`telling.py`, never from whoever shows a document, so that ctl and the dashboard tell one story.
"""

from __future__ import annotations

import math
import os
import resource
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from .. import __version__
from ..facts.choice import SCORERS, Attempt, Choice
from ..gateway.promises import Promises
from ..gateway.record import Record
from ..gateway.service import Gateway
from ..gateway.waking import absent, asleep
from ..rules.admission.outlook import Outlook, outlook
from ..rules.admission.refusals import REASONS
from ..rules.admission.ticket import Ticket
from ..rules.scheduling.filters import gate
from ..rules.scheduling.member import Member
from ..rules.scheduling.retry import Retry, Step
from ..rules.scheduling.table import Entry
from . import fleet, placing
from .memory import resident
from .running import Running
from .telling import became, followed, happened, prospect, state, troubles, waited

if TYPE_CHECKING:
    from ..control.plane import Plane

Document = dict[str, Any]
WORDS_BYTES = 200
"""A name that a client made up is shown up to this length."""


def status(running: Running, now: float) -> Document:
    """`/status`: the router at a glance. `now` is `time.monotonic`, here and below."""
    gateway = running.gateway
    members = gateway.table.members.values()
    entries = gateway.table.entries.values()
    by_code: dict[str, int] = {}
    for model in gateway.meters.models.values():
        for (_, code), count in model.requests.items():
            by_code[str(code)] = by_code.get(str(code), 0) + count
    configuration, plane, groups = running.configuration(), running.plane(), running.groups()
    gated = {name: why for name, why in groups.items() if why}
    return {
        "version": __version__,
        "pid": os.getpid(),
        "state": "draining" if running.draining() else "serving",
        "started_at": running.started_at,
        "uptime_s": max(0.0, time.time() - running.started_at),
        "listen": list(running.listen),
        "metrics_listen": list(running.metrics),
        "admin_socket": running.admin_socket,
        "config_file": configuration["file"],
        "needs_restart": configuration["needs_restart"],
        "keys": running.keys,
        "loopback": running.loopback,
        "open_files_limit": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "connections": running.connections(),
        "rss_bytes": resident().get("rss_bytes"),
        "requests": {"running": len(gateway.books.live), "ended": sum(by_code.values()), "by_code": by_code},
        "endpoints": {"known": len(members), "up": sum(member.up for member in members)},
        "models": {
            "known": len(entries),
            "ready": sum(any(member.up for member in entry.members) for entry in entries),
        },
        "groups": {"known": len(groups), "healthy": len(groups) - len(gated), "why_not": gated},
        "waiting": {band.name: band.waiting for band in gateway.gate.rules.bands(now)},
        "fleet": None if plane is None else fleet.summary(plane, now),
        "troubles": [
            *(told for member in members for told in troubles(gateway, member, now)),
            *(fleet.troubles(plane, now) if plane is not None else ()),
            *(f"group {name}: {why}" for name, why in gated.items()),
            *running.tool_troubles(),
        ],
    }


# -- endpoints -------------------------------------------------------------------------------------------------------


def endpoints(gateway: Gateway, now: float) -> list[Document]:
    """`/endpoints`."""
    serving: dict[str, list[str]] = {}
    for name, entry in sorted(gateway.table.entries.items()):
        for member in entry.members:
            serving.setdefault(member.id, []).append(name)
    return [_endpoint(gateway, member, serving.get(member.id, []), now) for member in gateway.table.members.values()]


def _endpoint(gateway: Gateway, member: Member, models: list[str], now: float) -> Document:
    endpoint, breaker, sample = member.endpoint, member.breaker, member.sample
    load, contract = gateway.gate.rules.loads.get(member.id), gateway.contracts.get(member.id)
    word, why = state(gateway, member, now)
    return {
        "id": member.id,
        "url": endpoint.url,
        "engine": endpoint.engine,
        "pool": endpoint.pool,
        "pool_priority": endpoint.pool_priority,
        "models": models,
        "state": word,
        "why": why,
        "in_flight": member.in_flight,
        "elsewhere": member.foreign,
        "waiting": member.waiting if sample is not None else None,
        "kv": member.kv,
        "capacity": member.capacity or None,
        "capacity_learnt": member.learnt or None,
        "limit": load.limit if load is not None else None,
        "saturation": load.saturation if load is not None else None,
        "penalty": member.penalised(now),
        "violations": list(contract.violations) if contract is not None else [],
        "metrics_age_s": None if sample is None else max(0.0, now - sample.at),
        "breaker": {
            "state": breaker.state(now),
            "open_for_s": max(0.0, breaker.open_until - now) if breaker.open_until else None,
            "trips": breaker.trips,
            "failures": breaker.history.bit_count(),
            "of": breaker.known,
        },
    }


# -- models ----------------------------------------------------------------------------------------------------------


def models(gateway: Gateway, now: float, plane: Plane | None = None) -> list[Document]:
    """`/models`."""
    return [_model(gateway, entry, now, plane) for _, entry in sorted(gateway.table.entries.items())]


def _model(gateway: Gateway, entry: Entry, now: float, plane: Plane | None) -> Document:
    lane = gateway.gate.rules.lanes.get(entry.name)
    fullness = {pool.name: pool.saturation for pool in lane.pools} if lane is not None else {}
    up = [member for member in entry.members if not gate(member, now)]
    return {
        "name": entry.name,
        "aliases": list(entry.aliases),
        "fallbacks": list(entry.fallbacks),
        "configured": entry.configured,
        "context_tokens": entry.context_tokens or None,
        "ready": bool(up),
        "why": "" if up else _why_absent(gateway, entry, now),
        "waking": entry.waking if asleep(entry, now) else "",
        "endpoints": len(entry.members),
        "endpoints_up": len(up),
        "in_flight": sum(member.in_flight for member in entry.members),
        "waiting": len(lane) if lane is not None else 0,
        "pools": [
            {
                "name": pool.name,
                "priority": pool.priority,
                "saturation": fullness.get(pool.name),
                "endpoints": list(pool.ids),
            }
            for pool in entry.pools
        ],
        "prefixes": {"nodes": len(entry.tree), "bytes": entry.tree.size_bytes},
        "replicas": None if plane is None else placing.of_model(plane, entry.name, now),
    }


def _why_absent(gateway: Gateway, entry: Entry, now: float) -> str:
    refusal = absent(entry, gateway.why_absent(entry.name), None, now)
    return refusal.detail or refusal.message


def model(gateway: Gateway, name: str, now: float, plane: Plane | None = None) -> Document | None:
    """`/models/{name}`: a name or an alias, and what a request for it would meet now; None for an unknown name."""
    entry = gateway.table.find(name)
    if entry is None:
        return None
    return {
        **_model(gateway, entry, now, plane),
        "asked_for": name,
        "members": [
            {**_endpoint(gateway, member, [entry.name], now), "known_as": entry.upstream_name(member)}
            for member in entry.members
        ],
        "chain": [_model(gateway, other, now, plane) for other in gateway.table.chain(entry)],
        "outlook": [_outlook(each) for each in outlook(gateway.gate.rules, entry.name)],
    }


def _outlook(each: Outlook) -> Document:
    """What a request of a band would meet."""
    return {
        "band": each.band,
        "ceiling": each.ceiling,
        "waiting": each.waiting,
        "room": each.room,
        "ahead": each.ahead,
        "blocker": each.blocker,
        "saturation": each.saturation,
        "told": prospect(each),
    }


# -- bands -----------------------------------------------------------------------------------------------------------


def bands(gateway: Gateway, now: float) -> list[Document]:
    """`/bands`, the highest first."""
    meters = gateway.meters
    ended: dict[str, int] = {}
    for model in meters.models.values():
        for (name, _), count in model.requests.items():
            ended[name] = ended.get(name, 0) + count
    return [
        {
            "name": band.name,
            "ceiling": band.ceiling,
            "capacity": band.capacity,
            "ttl_s": band.ttl_s,
            "waiting": band.waiting,
            "oldest_s": band.oldest_s,
            "models": band.models,
            "ended": ended.get(band.name, 0),
            "waited": sum(meters.queue_wait[band.name].counts) if band.name in meters.queue_wait else 0,
            "refused": sum(meters.rejections.get((band.name, reason), 0) for reason in REASONS),
        }
        for band in gateway.gate.rules.bands(now)
    ]


# -- requests --------------------------------------------------------------------------------------------------------


def requests(gateway: Gateway, limit: int, now: float) -> Iterator[Document]:
    """`/requests`: live ones first, then past ones, newest first."""
    return (_request(record, now) for record in gateway.books.recent(limit))


def request(gateway: Gateway, request_id: str, now: float) -> Document | None:
    """`/requests/{id}`: the decision record; None when it is not known (any more)."""
    record = gateway.books.find(request_id)
    if record is None:
        return None
    sleeper = record.sleeper
    return {
        **_request(record, now),
        "message": record.message,
        "deadlines": None if record.promises is None else _deadlines(record.promises, stream=record.stream),
        "deadline_next": None
        if sleeper is None or sleeper.due == math.inf
        else {"name": sleeper.due_name, "in_s": sleeper.due - now},
        "places": [_place(ticket, record.ended_at or now) for ticket in record.tickets],
        "rounds": _rounds(record, now),
        "dispatched_after_s": _after(record, record.dispatched_at),
    }


def _request(record: Record, now: float) -> Document:
    tally = record.tally
    first = tally.first_content_at if tally is not None else 0.0
    return {
        "id": record.request_id,
        "began_at": record.began_at,
        "model": record.model or None,
        "asked_for": record.wanted[:WORDS_BYTES],
        "served_as": record.choices[-1].model if record.choices else None,
        "route": record.route,
        "stream": record.stream,
        "band": record.band,
        "tenant": record.tenant[:WORDS_BYTES],
        "outcome": record.outcome,
        "code": record.code or None,
        "reason": record.reason,
        "endpoint": record.endpoint,
        "attempts": _attempts(record),
        "queue_wait_s": record.queue_wait_s,
        "first_token_s": _after(record, first),
        "first_byte_s": _after(record, record.first_byte_at),
        "duration_s": (record.ended_at or now) - record.arrived,
        "tokens": None
        if tally is None
        else {
            "prompt": tally.prompt_tokens,
            "cached": tally.cached_tokens,
            "completion": tally.completion_tokens or tally.content_events,
            "reasoning": tally.reasoning_tokens,
            "estimated": record.estimated or not tally.reported,
        },
    }


def _attempts(record: Record) -> int:
    """How often it was sent to an endpoint: every choice that picked one, and every second sending to the same."""
    again = sum(isinstance(step, Retry) and step.same for _, step in record.steps)
    return sum(choice.picked >= 0 for choice in record.choices) + again


def _after(record: Record, at: float) -> float | None:
    return at - record.arrived if at else None


def _place(ticket: Ticket, now: float) -> Document:
    """Its place in line for one model; the last four fields are as they were when it asked."""
    explained = ticket.explain(now)
    return {
        "model": explained.model,
        "band": explained.band,
        "state": explained.state,
        "work": explained.work,
        "wait_s": explained.wait_s,
        "pool": explained.pool,
        "blocker": explained.blocker,
        "ahead": explained.ahead,
        "saturation": explained.saturation,
        "ceiling": explained.ceiling,
        "told": waited(explained),
    }


def _rounds(record: Record, now: float) -> list[Document]:
    """The road of one request: each choice with the attempts that followed it, each with what was done next."""
    rounds: list[Document] = []
    ended = list(record.attempts)
    steps = list(record.steps)
    for choice in record.choices:
        tries: list[Document] = []
        rounds.append({**_choice(choice), "attempts": tries})
        if choice.picked < 0:
            continue
        while True:
            attempt = ended.pop(0) if ended else None
            at, step = steps.pop(0) if attempt is not None and steps else (record.ended_at or now, None)
            tries.append(_attempt(record, attempt, step, at))
            if not (isinstance(step, Retry) and step.same):
                break
    return rounds


def _choice(choice: Choice) -> Document:
    return {
        "model": choice.model,
        "pool": choice.pool,
        "why": choice.why,
        "picked": choice.endpoint or None,
        "candidates": [
            {
                "endpoint": name,
                "scores": {scorer: column[index] for scorer, column in zip(SCORERS, choice.scores, strict=True)},
                "penalty": choice.penalties[index] if choice.penalties else 0.0,
                "total": choice.totals[index],
            }
            for index, name in enumerate(choice.candidates)
        ],
        "drops": [{"endpoint": name, "filter": why} for name, why in choice.drops],
        "prefix": {"result": choice.prefix, "looked_up": choice.text_bytes, "seen_before": choice.matched_bytes},
        "guarded": list(choice.guarded),
        "told": choice.tell(),
    }


def _attempt(record: Record, attempt: Attempt | None, step: Step | None, at: float) -> Document:
    """One sending. `attempt` None: it did not fail (it is running, was answered, or was cancelled)."""
    if attempt is None:
        return {
            "endpoint": record.endpoint,
            "kind": "running" if record.outcome == "running" else record.outcome,
            "ended_after_s": at - record.arrived,
            "told": became(record),
            "next": "",
            "next_told": "",
        }
    return {
        "endpoint": attempt.endpoint,
        "kind": attempt.kind,
        "status": attempt.status or None,
        "deadline": attempt.deadline or None,
        "sent": attempt.sent,
        "answered": attempt.answered,
        "detail": attempt.detail,
        "ended_after_s": at - record.arrived,
        "told": happened(attempt),
        "next": type(step).__name__.lower() if step is not None else "",
        "next_told": followed(attempt, step) if step is not None else "",
    }


def _deadlines(promises: Promises, *, stream: bool) -> Document:
    """The deadlines that held for a request, in seconds; 0 means none."""
    names: tuple[str, ...]
    if stream:
        names = ("dial_s", "first_token_s", "idle_s", "stream_total_s", "write_stall_s")
    else:
        names = ("dial_s", "total_s", "write_stall_s")
    return {name: getattr(promises, name) for name in names}

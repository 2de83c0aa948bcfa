"""One request at one model: a place in line, then attempts until the client has its answer.

    place -> choose a member -> one exchange -> what next?   (`rules/` decide each of them)
                    ^------------- another, or the same ---'

`at_model` is one coroutine, because each await of a request is passed down through every coroutine above it, and nearly
all requests are let in at once, and answered by the first endpoint. What is done for the others has functions of its
own. A lease is finished once, a ticket given back once, and the connection to the engine is gone before the client's
is: an engine never works for nobody.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import msgspec

from ..facts.call import Call
from ..facts.choice import ANSWER, CLIENT_LEFT, CLOSED, DEADLINE, ERROR_EVENT, Attempt, Outcome
from ..facts.errors import Refusal
from ..nursery.sleeper import Cut, DeadlinePassed
from ..rules.admission.ticket import Ticket
from ..rules.scheduling.member import Member
from ..rules.scheduling.outcomes import classify, of_status
from ..rules.scheduling.pipeline import Policy, choose, has_another
from ..rules.scheduling.retry import GiveUp, PassOn, Retry, Step, next_step
from ..rules.scheduling.table import Entry
from ..wire import fields
from .errand import Errand
from .errors import ErrorAnswer, error_event, error_of_event, shaped_error
from .identity import prompt_head
from .promises import Promises
from .record import Record
from .relay import Exchange, tell_waiting
from .reply import Cancelled, ClientLeft, EndpointLost, Left
from .roster import Roster
from .stream import FirstEventIsError
from .upstream import UpstreamFailed
from .waking import absent, asleep, awake

if TYPE_CHECKING:
    from .trace import Tracer

Ended = ErrorAnswer | Refusal
"""What a client is told where nobody else can take its request."""

_CAUSE_BYTES = 32768
"""So much of a body's beginning and of its end tell it from others: a failure must not cost a look at 128 MiB."""

_FAILURES = (ErrorAnswer, FirstEventIsError, UpstreamFailed, DeadlinePassed, ClientLeft, Left, EndpointLost)
"""How an exchange ends that did not bring the client its whole answer."""


class Attempts(Roster):
    """What a gateway does with a request for a model that it has found. The settings are the gateway's to keep."""

    policy: Policy
    promises: Promises
    rng: random.Random
    tracer: Tracer | None
    _other_promises: dict[float, Promises]

    async def at_model(self, errand: Errand, now: float, before: tuple[Attempt, ...] | None) -> Ended | None:
        """All attempts at `errand.entry`; `before` are those at the models it is a fallback for, None for the first.

        None: the client has its answer. Otherwise what it would be told if no fallback could take the request. Raises
        Refusal where no fallback may, and ClientLeft.
        """
        entry, record, reply = errand.entry, errand.record, errand.reply
        ended: Ended | None = self._ask_for_place(errand, now, first=before is None)
        if ended is not None:
            return ended
        ticket = errand.ticket
        try:
            if ticket is not None:
                if ticket.state == "waiting":
                    await self._wait(ticket, errand)
                    now = time.monotonic()
                if ticket.refusal is not None:
                    return self._not_let_in(entry, ticket)
            attempts: tuple[Attempt, ...] = ()
            tried = errand.barred
            member: Member | None = None
            while True:
                fresh = member is not None
                if member is None:
                    member = self._choose(errand, now, tried)
                    if member is None:
                        return ended or absent(entry, self.why_absent(entry.name), None, now)
                exchange = self._dispatch(errand, member, now)
                outcome = Outcome.NEUTRAL
                cause = 0
                try:
                    # Where nothing is sent twice, an idle connection that is just being closed would lose the request.
                    status = await exchange.run(now, fresh=fresh or not member.endpoint.retries)
                    outcome = _answered(record, exchange, status)
                    if outcome is Outcome.FAILURE:
                        cause = _cause(errand.call)
                    return None
                except _FAILURES as error:
                    end, held = _how_it_ended(error, member, exchange)
                    record.attempts += (end,)
                    outcome = classify(end)
                    if end.kind in (ANSWER, ERROR_EVENT):
                        cause = _cause(errand.call)
                except Cancelled as cancelled:
                    await self._end_cancelled(errand, exchange, cancelled)
                    return None
                finally:
                    self._let_go(errand, member, exchange, outcome, cause)
                if end.kind == CLIENT_LEFT:
                    raise ClientLeft
                if reply.started:
                    await self._break_off(errand, exchange, end, held)
                now = time.monotonic()
                attempts += (end,)
                tried += (member.id,)
                step = self._next_step(errand, member, attempts, tried, before or (), now)
                match step:
                    case Retry(same=same):
                        ended = held if held is not None else ended
                        if not same or self.table.members.get(member.id) is not member:  # gone with a reload
                            member = None
                        continue
                    case PassOn():
                        assert held is not None
                        ended = held
                    case GiveUp(refusal=refusal):
                        if reply.started:
                            record.refused(refusal, "cut")
                            return None
                        # a stream that began with an error is told in the engine's own words
                        ended = held if held is not None and end.kind == ERROR_EVENT else refusal
                if step.fallback:
                    return ended
                await self.tell_end(ended, errand, "failed")
                return None
        finally:
            if ticket is not None:
                whole = record.outcome == "ok"
                self.gate.end(ticket, errand.call, whole, record.tally, time.monotonic())
                ticket.waiter = None  # the record keeps the ticket, and this would keep the task

    async def tell_end(self, ended: Ended, errand: Errand, outcome: str) -> None:
        """Nobody can take the request: hand the engine's own error to the client, or raise the Refusal."""
        if isinstance(ended, Refusal):
            errand.record.refused(ended, outcome)
            raise ended
        call, reply, record = errand.call, errand.reply, errand.record
        status, answer_fields, body = shaped_error(ended, anthropic=call.route.anthropic)
        if status in (429, 503) and not any(name == b"retry-after" for name, _ in answer_fields):
            answer_fields = [*answer_fields, (b"retry-after", b"1")]
        record.outcome, record.code, record.reason = "failed", status, "engine_error"
        if reply.started:  # by comments: the status is given away
            await tell_waiting(reply, error_event(ended, anthropic=call.route.anthropic))
            reply.give_up()
            return
        reply.sleeper.disarm()
        reply.start(status, answer_fields, len(body))
        try:
            await reply.end(body)
        except Cut:
            raise ClientLeft from None

    # -- a place in line ---------------------------------------------------------------------------------------------

    def _ask_for_place(self, errand: Errand, now: float, *, first: bool) -> Refusal | None:
        """Ask admission; the answer stands in `errand.ticket`, which the caller gives back. A Refusal where a fallback
        is asked instead. `first`: no other model was asked before."""
        entry, call = errand.entry, errand.call
        errand.ticket = None
        if errand.only and call.ask.model is None:
            # what is stored lies at one endpoint, and looking at it is no work: there is nothing to wait for
            return None
        entry.asked_at = now
        if entry.waking and asleep(entry, now):
            self.wanted(entry.name)
            if first and not errand.only and any(awake(other, now) for other in self.table.chain(entry)):
                return absent(entry, self.why_absent(entry.name), None, now)
        ticket = errand.ticket = self.gate.ask(entry, call, errand.reply.sleeper, now)
        errand.record.tickets += (ticket,)
        return None

    async def _wait(self, ticket: Ticket, errand: Errand) -> None:
        """Raises ClientLeft, or the Refusal of an operator's cancellation."""
        sleeper = errand.reply.sleeper
        sleeper.forget_deadline()  # the queue has time limits of its own
        try:
            await self.gate.wait(ticket, sleeper)
        except Cancelled as cancelled:
            raise _cancelled(errand.record, cancelled) from None
        except Cut:
            raise ClientLeft from None

    def _not_let_in(self, entry: Entry, ticket: Ticket) -> Refusal:
        refused = ticket.refusal
        assert refused is not None
        if refused.code == "model_not_ready":
            return absent(entry, self.why_absent(entry.name), ticket, time.monotonic())
        return refused

    # -- one attempt -------------------------------------------------------------------------------------------------

    def _choose(self, errand: Errand, now: float, tried: tuple[str, ...]) -> Member | None:
        call, ticket = errand.call, errand.ticket
        text = prompt_head(call.ask, self.policy.least_match)
        granted, crowded = ("", ()) if ticket is None else (ticket.pool, self.gate.crowded(ticket))
        member, choice = choose(
            errand.entry, self.policy, now, self.rng, text, call.caller.session, tried, errand.only, granted, crowded
        )
        errand.record.choices += (choice,)
        self.meters.chose(choice)
        return member

    def _dispatch(self, errand: Errand, member: Member, now: float) -> Exchange:
        """Count the request at `member`, in the step that chose it. `_let_go` ends that on every path."""
        record, ticket = errand.record, errand.ticket
        body = self._body_for(errand.entry, member, errand.call)
        errand.lease = member.begin(now)
        if ticket is not None:
            self.gate.dispatched(ticket, member, now)
        if not member.up:
            self.gate.health_changed(now)  # this is the probe of its breaker, and the only one
        if not record.dispatched_at:
            record.dispatched_at = now
        record.endpoint = member.id
        promises = record.promises = self._promises_of(member)
        exchange = Exchange(errand, body, self.upstreams[member.id], promises)
        record.tally = exchange.tally
        if self.tracer is not None:
            exchange.trace = self.tracer.attempt(record, member.endpoint)
        return exchange

    def _body_for(self, entry: Entry, member: Member, call: Call) -> bytes:
        """The call's body, with the name by which the member knows the model. Raises Refusal."""
        name = entry.upstream_name(member)
        if name == call.model or not call.body or call.ask.model is None:  # the last: it goes where it is stored
            return call.body
        try:
            return fields.renamed(call.body, call.headers.get(b"content-type", b""), name)
        except fields.Unclear as unclear:
            raise Refusal(400, "invalid_json", f"the name in this body cannot be replaced: {unclear}") from None

    def _promises_of(self, member: Member) -> Promises:
        """The deadlines of requests to it."""
        total_s = member.endpoint.total_s
        if not total_s:
            return self.promises
        known = self._other_promises.get(total_s)
        if known is None:
            known = self._other_promises[total_s] = msgspec.structs.replace(self.promises, total_s=total_s)
        return known

    def _let_go(self, errand: Errand, member: Member, exchange: Exchange, outcome: Outcome, cause: int) -> None:
        """The exchange is over, whatever came of it."""
        answer_id = exchange.tally.answer_id
        if answer_id:  # a stored response is found again where it was made
            self.table.responses.put(answer_id, member.id)
        lease = errand.lease
        assert lease is not None, "dispatched"
        was_up, now = member.up, time.monotonic()
        lease.finish(outcome, now, self.rng, cause)
        if not (was_up and member.up):
            self.gate.health_changed(now)  # its breaker opened: nobody is to wait for it; or it is back

    # -- where the client has no whole answer -------------------------------------------------------------------------

    def _next_step(
        self,
        errand: Errand,
        member: Member,
        attempts: tuple[Attempt, ...],
        tried: tuple[str, ...],
        before: tuple[Attempt, ...],
        now: float,
    ) -> Step:
        passed_on = errand.reply.started
        another = not passed_on and not errand.only and has_another(errand.entry, now, tried)
        once = not member.endpoint.retries
        step = next_step(attempts, passed_on=passed_on, another=another, before=before, once=once)
        errand.record.steps += ((now, step),)
        return step

    async def _break_off(self, errand: Errand, exchange: Exchange, end: Attempt, held: ErrorAnswer | None) -> None:
        """A part of the answer has left, and no more will come: say why, and end it improperly."""
        step = next_step([end], passed_on=True, another=False)
        assert isinstance(step, GiveUp)
        await exchange.tell(held or step.refusal)
        errand.reply.give_up()

    async def _end_cancelled(self, errand: Errand, exchange: Exchange, cancelled: Cancelled) -> None:
        """An operator ended the request. Raises its Refusal while nothing has left for the client."""
        refusal = _cancelled(errand.record, cancelled)
        if not errand.reply.started:
            raise refusal from None
        await exchange.tell(refusal)
        errand.reply.give_up()


def _cancelled(record: Record, cancelled: Cancelled) -> Refusal:
    refusal = Refusal(503, "cancelled", str(cancelled), should_retry=False)
    record.refused(refusal, "cancelled")
    return refusal


def _cause(call: Call) -> int:
    """What stands for the request where it fails: the same number when it is sent again."""
    body = call.body
    return hash((call.target, len(body), body[:_CAUSE_BYTES], body[-_CAUSE_BYTES:])) or 1


def _answered(record: Record, exchange: Exchange, status: int) -> Outcome:
    """The client has the engine's whole answer, which may be a stream that told a failure."""
    stream = exchange.stream
    if stream is not None and stream.error:
        # whose fault it was, the event says as an answer would have
        record.outcome, record.code, record.reason = "failed", 502, "error_event"
        return of_status(error_of_event(stream.error).status)
    record.outcome, record.code = "ok", status
    return Outcome.SUCCESS


def _how_it_ended(error: Exception, member: Member, exchange: Exchange) -> tuple[Attempt, ErrorAnswer | None]:
    """One of `_FAILURES` in words, and the engine's own error answer where it gave one."""
    at, sent, answered = member.id, exchange.sent, exchange.passed_on
    match error:
        case ErrorAnswer():
            error.__traceback__ = None  # it is kept by the frame that its traceback would keep
            return Attempt(at, ANSWER, error.status, sent=True, answered=True), error
        case FirstEventIsError():
            held = error_of_event(error.data)
            return Attempt(at, ERROR_EVENT, held.status, sent=True, answered=True), held
        case UpstreamFailed():
            end = Attempt(
                at, error.kind, sent=error.sent, answered=error.answered, reused=error.reused, detail=error.detail
            )
        case DeadlinePassed() if error.name == "write_stall_s":
            end = Attempt(at, CLIENT_LEFT, sent=True, deadline=error.name)
        case DeadlinePassed():
            end = Attempt(at, DEADLINE, sent=sent, answered=answered, deadline=error.name)
        case EndpointLost():
            end = Attempt(at, CLOSED, sent=sent, answered=answered, detail=str(error))
        case _:
            end = Attempt(at, CLIENT_LEFT, sent=sent, answered=answered)
    return end, None

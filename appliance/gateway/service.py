"""The service: a call goes in, an answer comes out through its reply, and the books know why.

    resolve the name -> choose a member -> one attempt -> what next?   (`rules/scheduling` decides each of them)
                              ^------------- another, or the same ---'

Whatever happens on the way, `settle` is called once, a lease is finished once, and the connection to the engine is gone
before the client's is: an engine never works for nobody.
"""

from __future__ import annotations

import random
import time
from typing import TYPE_CHECKING

import attrs
import msgspec

from ..facts.call import Call
from ..facts.choice import ANSWER, CLIENT_LEFT, DEADLINE, ERROR_EVENT, Attempt, Choice, Outcome
from ..facts.errors import Refusal
from ..facts.settings import Settings
from ..nursery.sleeper import Cut, DeadlinePassed
from ..rules.admission.ticket import Ticket
from ..rules.scheduling.member import Member
from ..rules.scheduling.outcomes import classify, of_status
from ..rules.scheduling.pipeline import Policy, choose, has_another
from ..rules.scheduling.retry import GiveUp, PassOn, Retry, next_step
from ..rules.scheduling.table import Change, Entry
from ..wire import fields
from ..wire.line import Poller
from .errors import ErrorAnswer, error_event, error_of_event, shaped_error
from .identity import prompt_head
from .record import CLIENT_LEFT as CLIENT_LEFT_CODE
from .record import Books, Record
from .relay import Attempt as Try
from .relay import Promises, ping_while_silent, tell_waiting
from .reply import Cancelled, ClientLeft, EndpointLost, Left, Reply
from .roster import Roster
from .stream import FirstEventIsError
from .upstream import UpstreamFailed
from .waking import absent, asleep, awake, worth_asking

if TYPE_CHECKING:
    from .trace import Tracer


class Gateway(Roster):
    """Everything between the door and the engines. `configure` and `publish` may be called again at any time; `close`
    ends it."""

    def __init__(self, settings: Settings, poller: Poller, rng: random.Random | None = None) -> None:
        super().__init__(settings, poller)
        self.rng = rng or random.Random()
        self.books = Books(self.meters)
        self.tracer: Tracer | None = None
        self.configure(settings)

    # -- settings ------------------------------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> Change:
        """Take new settings. Members that survive keep their connections and live state; requests on removed ones
        run on.
        """
        deadlines = settings.deadlines
        self.policy = Policy.of(settings.scheduling)
        self.scrape_s = settings.scheduling.scrape_s
        self.promises = Promises(
            deadlines.dial_s,
            deadlines.first_token_s,
            deadlines.idle_s,
            deadlines.total_s,
            deadlines.stream_total_s,
            deadlines.write_stall_s,
            deadlines.sse_ping_s,
            deadlines.sse_ping_before_first_token,
        )
        self._other_promises: dict[float, Promises] = {}
        self.admission = settings.admission
        return self._configure(settings)

    # -- the road ----------------------------------------------------------------------------------------------------

    async def serve(self, call: Call, reply: Reply, only: str = "") -> None:
        """Serve one call. `only` names the endpoint that must serve it, "" for any of its model.

        Raises Refusal while nothing was sent, ClientLeft when there is nobody left to answer; otherwise the reply has
        been ended or given up.
        """
        record = Record(call, reply.sleeper)
        self.books.open(record)
        if self.tracer is not None:
            record.trace = self.tracer.begin(call)
        if self.promises.sse_ping_before_first_token and call.stream and call.route.stream_ends:
            ping_while_silent(reply, self.promises.sse_ping_s, time.monotonic())
        try:
            entry = self.table.find(call.model) or self.table.resolve(call.model)
            record.model = entry.name
            if not only and call.route.name == "responses":
                only = self._maker(entry, call)
            ended = await self._at_model(entry, call, reply, record, only, None)
            if ended is not None:
                await self._fall_back(entry, ended, call, reply, record, only)
        except Refusal as refusal:
            if record.outcome == "running":
                record.refused(refusal)
            # The record keeps the refusal, and its traceback would keep every frame on the way: the body, the sockets.
            refusal.__traceback__ = refusal.__context__ = None
            if not reply.started:
                raise attrs.evolve(refusal) from None
            await tell_waiting(reply, error_event(refusal, anthropic=call.route.anthropic))
            reply.give_up()
        except ClientLeft:
            record.outcome, record.code = "client left", CLIENT_LEFT_CODE
            raise
        finally:
            if record.outcome == "running":  # Trio's cancellation: the router stops now
                record.outcome, record.code = "cancelled", 503
            reply.sleeper.on_sweep = None
            self.books.settle(record, len(call.body))
            if self.tracer is not None:
                self.tracer.finish(record)

    async def _fall_back(
        self, entry: Entry, ended: ErrorAnswer | Refusal, call: Call, reply: Reply, record: Record, only: str
    ) -> None:
        """Its own model could not take the request; `ended` is what the client is told if no fallback can either."""
        before = list(record.attempts)
        fallbacks = () if only else tuple(self.table.chain(entry))
        for model in fallbacks:
            if not worth_asking(model, fallbacks, record.tickets, time.monotonic()):
                continue
            if await self._at_model(model, call, reply, record, only, before) is None:
                return
            before = list(record.attempts)
        if isinstance(ended, Refusal):
            record.refused(ended, "failed" if record.attempts else "refused")
            raise ended
        await self._pass_on(ended, call, reply, record)

    async def _at_model(
        self, entry: Entry, call: Call, reply: Reply, record: Record, only: str, before: list[Attempt] | None
    ) -> ErrorAnswer | Refusal | None:
        """All attempts at one model. None: the client has its answer. Otherwise what it would be told if no fallback
        could take the request. Raises Refusal where no fallback may."""
        if only and call.ask.model is None:
            # what is stored lies at one endpoint, and looking at it is no work: there is nothing to wait for
            return await self._with_retries(entry, call, reply, record, only, before, None)
        now = call.arrived if before is None else time.monotonic()
        entry.asked_at = now
        if entry.waking and asleep(entry, now):
            self.wanted(entry.name)
            if before is None and not only and any(awake(other, now) for other in self.table.chain(entry)):
                return absent(entry, self.why_absent(entry.name), None, now)
        ticket = self.gate.ask(entry, call, reply.sleeper, now)
        record.tickets.append(ticket)
        try:
            if ticket.state == "waiting":
                await self._wait(ticket, reply, record)
            if ticket.refusal is not None:
                refused = ticket.refusal
                if refused.code == "model_not_ready":
                    return absent(entry, self.why_absent(entry.name), ticket, time.monotonic())
                return refused
            return await self._with_retries(entry, call, reply, record, only, before, ticket)
        finally:
            self.gate.end(ticket, call, record.outcome == "ok", record.tally, time.monotonic())
            ticket.waiter = None  # the record keeps the ticket, and this would keep the task

    async def _wait(self, ticket: Ticket, reply: Reply, record: Record) -> None:
        """Raises ClientLeft, or the Refusal of an operator's cancellation."""
        reply.sleeper.forget_deadline()  # the queue has time limits of its own
        try:
            await self.gate.wait(ticket, reply.sleeper)
        except Cancelled as cancelled:
            refusal = Refusal(503, "cancelled", str(cancelled), should_retry=False)
            record.refused(refusal, "cancelled")
            raise refusal from None
        except Cut:
            raise ClientLeft from None

    async def _with_retries(
        self,
        entry: Entry,
        call: Call,
        reply: Reply,
        record: Record,
        only: str,
        before: list[Attempt] | None,
        ticket: Ticket | None,
    ) -> ErrorAnswer | Refusal | None:
        """The attempts themselves; `ticket` holds its place."""
        text = prompt_head(call.ask, self.policy.least_match)
        session = call.caller.session
        attempts: list[Attempt] = []
        tried: list[str] = []
        ended: ErrorAnswer | Refusal | None = None
        member: Member | None = None
        now = call.arrived if before is None and (ticket is None or not ticket.number) else time.monotonic()
        granted = "" if ticket is None else ticket.pool
        while True:
            fresh = member is not None
            if member is None:
                crowded = () if ticket is None else self.gate.crowded(ticket)
                member, choice = choose(entry, self.policy, now, self.rng, text, session, tried, only, granted, crowded)
                record.choices.append(choice)
                if choice.drops or text:
                    self._count(choice)
                if member is None:
                    return ended or absent(entry, self.why_absent(entry.name), None, now)
            attempt, held = await self._try(entry, member, call, reply, record, fresh, now, ticket)
            if attempt is None:
                return None
            now = time.monotonic()
            attempts.append(attempt)
            tried.append(member.id)
            passed_on = reply.started
            another = not passed_on and not only and has_another(entry, now, tried)
            once = not member.endpoint.retries
            step = next_step(attempts, passed_on=passed_on, another=another, before=before or (), once=once)
            record.steps.append((now, step))
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
                    if passed_on:
                        record.refused(refusal, "cut")
                        return None
                    # a stream that began with an error is told in the engine's own words
                    ended = held if held is not None and attempt.kind == ERROR_EVENT else refusal
            if step.fallback:
                return ended
            if isinstance(ended, ErrorAnswer):
                await self._pass_on(ended, call, reply, record)
                return None
            record.refused(ended, "failed")
            raise ended

    async def _try(
        self,
        entry: Entry,
        member: Member,
        call: Call,
        reply: Reply,
        record: Record,
        fresh: bool,
        now: float,
        ticket: Ticket | None,
    ) -> tuple[Attempt | None, ErrorAnswer | None]:
        """One attempt. (None, None): the client has its whole answer. Otherwise how it ended, and the engine's own
        error answer where it gave one. Raises ClientLeft, Refusal (an operator's cancellation).
        """
        body = self._body_for(entry, member, call)
        lease = member.begin(now)
        if ticket is not None:
            self.gate.dispatched(ticket, member, now)
        if not member.up:
            self.gate.health_changed(now)  # this is the probe of its breaker, and the only one
        if not record.dispatched_at:
            record.dispatched_at = now
        record.endpoint = member.id
        promises = record.promises = self._promises_of(member)
        outcome = Outcome.NEUTRAL

        # It must not see `attempt`, which holds it: the cycle would keep every request's body until the collector runs,
        # and made the collector run for a tenth of the road's time.
        def answered(at: float, streamed: bool) -> None:
            record.first_byte_at = at
            if lease.probe:
                lease.answered(at)
                self.gate.health_changed(at)  # it is back
            # An answer that comes in one piece proves nothing by its beginning; its end does
            # (`rules/admission/capacity`).
            if ticket is not None and streamed:
                self.gate.began(ticket, at)

        attempt = Try(call, body, self.upstreams[member.id], reply, promises, record.dispatched_at, answered)
        record.tally = attempt.tally
        if self.tracer is not None:
            attempt.trace = self.tracer.attempt(record, member.endpoint)
        end: Attempt | None = None
        held: ErrorAnswer | None = None
        try:
            # Where nothing is sent twice, an idle connection that is just being closed would lose the request.
            status = await attempt.run(now, fresh=fresh or not member.endpoint.retries)
            stream = attempt.stream
            if stream is not None and stream.error:
                # whose fault it was, the event says as an answer would have
                outcome = of_status(error_of_event(stream.error).status)
                record.outcome, record.code, record.reason = "failed", 502, "error_event"
            else:
                outcome = Outcome.SUCCESS
                record.outcome, record.code = "ok", status
        except ErrorAnswer as error:
            held = error
            end = Attempt(member.id, ANSWER, error.status, sent=True, answered=True)
        except FirstEventIsError as error:
            held = error_of_event(error.data)
            end = Attempt(member.id, ERROR_EVENT, held.status, sent=True, answered=True)
        except UpstreamFailed as failed:
            end = Attempt(
                member.id,
                failed.kind,
                sent=failed.sent,
                answered=failed.answered,
                reused=failed.reused,
                detail=failed.detail,
            )
        except DeadlinePassed as late:
            if late.name == "write_stall_s":
                self._note(record, Attempt(member.id, CLIENT_LEFT, sent=True, deadline=late.name))
                raise ClientLeft from None
            end = Attempt(member.id, DEADLINE, sent=attempt.sent, answered=attempt.passed_on, deadline=late.name)
        except (Left, ClientLeft):
            self._note(record, Attempt(member.id, CLIENT_LEFT, sent=attempt.sent, answered=attempt.passed_on))
            raise ClientLeft from None
        except Cancelled as cancelled:
            refusal = Refusal(503, "cancelled", str(cancelled), should_retry=False)
            record.refused(refusal, "cancelled")
            if not reply.started:
                raise refusal from None
            await attempt.tell(refusal)
            reply.give_up()
            return None, None
        except EndpointLost as lost:
            end = Attempt(member.id, "closed", sent=attempt.sent, answered=attempt.passed_on, detail=str(lost))
        finally:
            if end is not None:
                outcome = classify(end)
                self._note(record, end)
            if attempt.tally.answer_id:  # a stored response is found again where it was made
                self.table.responses.put(attempt.tally.answer_id, member.id)
            was_up, now = member.up, time.monotonic()
            lease.finish(outcome, now, self.rng)
            if not (was_up and member.up):
                self.gate.health_changed(now)  # its breaker opened: nobody is to wait for it; or it is back
        if end is not None and reply.started:
            step = next_step([end], passed_on=True, another=False)
            assert isinstance(step, GiveUp)
            await attempt.tell(held or step.refusal)
            reply.give_up()
        return end, held

    async def _pass_on(self, held: ErrorAnswer, call: Call, reply: Reply, record: Record) -> None:
        """The engine's own error is the answer."""
        status, answer_fields, body = shaped_error(held, anthropic=call.route.anthropic)
        if status in (429, 503) and not any(name == b"retry-after" for name, _ in answer_fields):
            answer_fields = [*answer_fields, (b"retry-after", b"1")]
        record.outcome, record.code, record.reason = "failed", status, "engine_error"
        if reply.started:  # by comments: the status is given away
            await tell_waiting(reply, error_event(held, anthropic=call.route.anthropic))
            reply.give_up()
            return
        reply.sleeper.disarm()
        reply.start(status, answer_fields, len(body))
        try:
            await reply.send(body)
            await reply.end()
        except Cut:
            raise ClientLeft from None

    # -- small steps -------------------------------------------------------------------------------------------------

    def _body_for(self, entry: Entry, member: Member, call: Call) -> bytes:
        """The call's body, with the name by which the member knows the model."""
        name = entry.upstream_name(member)
        if name == call.model or not call.body:
            return call.body
        return fields.renamed(call.body, call.headers.get(b"content-type", b""), name)

    def _promises_of(self, member: Member) -> Promises:
        """The deadlines of requests to it."""
        total_s = member.endpoint.total_s
        if not total_s:
            return self.promises
        known = self._other_promises.get(total_s)
        if known is None:
            known = self._other_promises[total_s] = attrs.evolve(self.promises, total_s=total_s)
        return known

    def _note(self, record: Record, attempt: Attempt) -> None:
        record.attempts.append(attempt)

    def _maker(self, entry: Entry, call: Call) -> str:
        """The endpoint that made the response which this one continues, since no other knows it; "" where there is
        none, or none that is known."""
        raw = bytes(call.ask.previous_response_id)
        if raw[:1] != b'"':
            return ""
        maker = self.table.responses.get(msgspec.json.decode(raw))
        return maker if maker and any(member.id == maker for member in entry.members) else ""

    def _count(self, choice: Choice) -> None:
        counts = self.meters.filter_drops
        for _, name in choice.drops:
            counts[name] = counts.get(name, 0) + 1
        prefix = choice.prefix
        if prefix != "off":
            self.meters.prefix[prefix] = self.meters.prefix.get(prefix, 0) + 1

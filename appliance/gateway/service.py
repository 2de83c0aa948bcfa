"""The service: a call goes in, an answer comes out through its reply, and the books know why.

    resolve the name -> choose a member -> one attempt -> what next?   (`rules/scheduling` decides each of them)
                              ^------------- another, or the same ---'

Whatever happens on the way, `settle` is called once, a lease is finished once, and the connection to the engine is gone
before the client's is: an engine never works for nobody.
"""

from __future__ import annotations

import random
import ssl
import time
from typing import Any

import msgspec

from ..facts.call import Call
from ..facts.choice import ANSWER, CLIENT_LEFT, DEADLINE, ERROR_EVENT, Attempt, Choice, Outcome
from ..facts.endpoint import Endpoint, Sample
from ..facts.errors import Refusal
from ..facts.settings import Settings
from ..nursery.sleeper import Cut, DeadlinePassed
from ..rules.engines.metrics import Contract
from ..rules.scheduling.member import Member
from ..rules.scheduling.outcomes import classify
from ..rules.scheduling.pipeline import Policy, choose, has_another, not_ready
from ..rules.scheduling.retry import GiveUp, PassOn, Retry, next_step
from ..rules.scheduling.table import Change, Entry, Table
from ..wire import fields
from ..wire.line import Poller
from .meters import Meters
from .record import CLIENT_LEFT as CLIENT_LEFT_CODE
from .record import Books, Record
from .relay import Attempt as Try
from .relay import ErrorAnswer, Promises, error_event, shaped_error
from .reply import Cancelled, ClientLeft, EndpointLost, Left, Reply
from .stream import FirstEventIsError
from .upstream import Upstream, UpstreamFailed

MOST_PROMPT_BYTES = 16384
"""How much of a prompt's head the prefix index looks at."""


class Gateway:
    """Everything between the door and the engines. `configure` may be called again at any time; `close` ends it."""

    def __init__(self, settings: Settings, poller: Poller, rng: random.Random | None = None) -> None:
        self.poller = poller
        self.rng = rng or random.Random()
        self.table = Table(settings.scheduling.prefix)
        self.meters = Meters()
        self.books = Books(self.meters)
        self.upstreams: dict[str, Upstream] = {}
        self.listed: dict[str, dict[str, dict[str, Any]]] = {}
        """By endpoint id, then by name: the entries of the endpoint's own list of models."""
        self.contracts: dict[str, Contract] = {}
        """By endpoint id: what it promised to publish about its load, and whether it does."""
        self._context: ssl.SSLContext | None = None
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
        )
        change = self.table.replace(settings.endpoints, settings.models)
        for member in (*change.removed, *change.changed):
            self.upstreams.pop(member.id).close()
        for member in change.removed:
            self.listed.pop(member.id, None)
            self.contracts.pop(member.id, None)
        for member in (*change.added, *change.changed):
            self.upstreams[member.id] = self._upstream(member.endpoint)
        self.meters.keep_models(set(self.table.entries))
        return change

    def close(self) -> None:
        for upstream in self.upstreams.values():
            upstream.close()

    # -- what is heard of endpoints ------------------------------------------------------------------------------------

    def heard(self, member: Member, entries: dict[str, dict[str, Any]]) -> tuple[str, ...]:
        """The endpoint's own list of models; answers with the names that it cannot have."""
        self.listed[member.id] = entries
        return self.table.learn_names(member, entries)

    def failing(self, member: Member, word: str) -> None:
        """Whether the endpoint answers its probes; "" is good news."""
        member.set_failing(word)

    def sampled(self, member: Member, sample: Sample, every_s: float) -> None:
        """Its metrics were read."""
        member.hear(sample, every_s)

    def silent(self, member: Member) -> None:
        """Its metrics could not be read."""

    def told_capacity(self, member: Member, slots: int) -> None:
        """The engine's own word on how many requests it runs at once."""
        member.tell_capacity(slots)

    def pressed(self, member: Member) -> bool:
        """Whether requests wait for this endpoint."""
        return False

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def drop_stale(self, now: float) -> None:
        """Close connections to engines that were idle for too long; called once a second."""
        for upstream in self.upstreams.values():
            upstream.drop_stale(now)

    def _upstream(self, endpoint: Endpoint) -> Upstream:
        if endpoint.tls and self._context is None:
            from ..wire.tls import client_context

            self._context = client_context()
        return Upstream(endpoint, self.poller, self._context)

    # -- the road ----------------------------------------------------------------------------------------------------

    async def serve(self, call: Call, reply: Reply, only: str = "") -> None:
        """Serve one call. `only` names the endpoint that must serve it, "" for any of its model.

        Raises Refusal while nothing was sent, ClientLeft when there is nobody left to answer; otherwise the reply has
        been ended or given up.
        """
        record = Record(call, reply.sleeper)
        self.books.open(record)
        try:
            entry = self.table.find(call.model) or self.table.resolve(call.model)
            record.model = entry.name
            ended = await self._with_retries(entry, call, reply, record, only, None)
            if ended is not None:
                await self._fall_back(entry, ended, call, reply, record, only)
        except Refusal as refusal:
            if record.outcome == "running":
                record.refused(refusal)
            raise
        except ClientLeft:
            record.outcome, record.code = "client left", CLIENT_LEFT_CODE
            raise
        finally:
            if record.outcome == "running":  # Trio's cancellation: the router stops now
                record.outcome, record.code = "cancelled", 503
            self.books.settle(record, len(call.body))

    async def _fall_back(
        self, entry: Entry, ended: ErrorAnswer | Refusal, call: Call, reply: Reply, record: Record, only: str
    ) -> None:
        """Its own model could not take the request; `ended` is what the client is told if no fallback can either."""
        before = list(record.attempts)
        for model in () if only else self.table.chain(entry):
            if await self._with_retries(model, call, reply, record, only, before) is None:
                return
            before = list(record.attempts)
        if isinstance(ended, Refusal):
            record.refused(ended, "failed" if record.attempts else "refused")
            raise ended
        await self._pass_on(ended, call, reply, record)

    async def _with_retries(
        self, entry: Entry, call: Call, reply: Reply, record: Record, only: str, before: list[Attempt] | None
    ) -> ErrorAnswer | Refusal | None:
        """All attempts at one model. None: the client has its answer. Otherwise what it would be told if no fallback
        could take the request. Raises Refusal where no fallback may."""
        text = prompt_head(call, self.policy.least_match)
        session = session_of(call)
        attempts: list[Attempt] = []
        tried: list[str] = []
        ended: ErrorAnswer | Refusal | None = None
        member: Member | None = None
        now = time.monotonic() if record.attempts else call.arrived
        while True:
            fresh = member is not None
            if member is None:
                member, choice = choose(entry, self.policy, now, self.rng, text, session, tried, only)
                record.choices.append(choice)
                if choice.drops or text:
                    self._count(choice)
                if member is None:
                    return ended or not_ready(entry, now)
            attempt, held = await self._try(entry, member, call, reply, record, fresh, now)
            if attempt is None:
                return None
            now = time.monotonic()
            attempts.append(attempt)
            tried.append(member.id)
            passed_on = reply.started
            another = not passed_on and not only and has_another(entry, now, tried)
            step = next_step(attempts, passed_on=passed_on, another=another, before=before or ())
            record.steps.append((now, step))
            match step:
                case Retry(same=same):
                    ended = held if held is not None else ended
                    if not same:
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
        self, entry: Entry, member: Member, call: Call, reply: Reply, record: Record, fresh: bool, now: float
    ) -> tuple[Attempt | None, ErrorAnswer | None]:
        """One attempt. (None, None): the client has its whole answer. Otherwise how it ended, and the engine's own
        error answer where it gave one. Raises ClientLeft, Refusal (an operator's cancellation).
        """
        lease = member.begin(now)
        if not record.dispatched_at:
            record.dispatched_at = now
        record.endpoint = member.id
        record.promises = self.promises
        outcome = Outcome.NEUTRAL

        def answered(at: float) -> None:
            record.first_byte_at = at
            lease.answered(at)

        body = self._body_for(entry, member, call)
        attempt = Try(call, body, self.upstreams[member.id], reply, self.promises, record.dispatched_at, answered)
        record.tally = attempt.tally
        end: Attempt | None = None
        held: ErrorAnswer | None = None
        try:
            status = await attempt.run(now, fresh=fresh)
            stream = attempt.stream
            if stream is not None and stream.error_seen:
                outcome = Outcome.FAILURE
                record.outcome, record.code, record.reason = "failed", 502, "error_event"
            else:
                outcome = Outcome.SUCCESS
                record.outcome, record.code = "ok", status
            self._remember(attempt, member)
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
            await self._break_off(attempt, call, reply, refusal)
            return None, None
        except EndpointLost as lost:
            end = Attempt(member.id, "closed", sent=attempt.sent, answered=attempt.passed_on, detail=str(lost))
        finally:
            if end is not None:
                outcome = classify(end)
                self._note(record, end)
            lease.finish(outcome, time.monotonic(), self.rng)
        if end is not None and reply.started:
            step = next_step([end], passed_on=True, another=False)
            assert isinstance(step, GiveUp)
            await self._break_off(attempt, call, reply, step.refusal)
        return end, held

    async def _break_off(self, attempt: Try, call: Call, reply: Reply, refusal: Refusal) -> None:
        """Something was passed on already: say why where that is possible, and let the body end improperly."""
        if attempt.stream is not None:
            event = error_event(refusal.status, refusal.code, refusal.message, anthropic=call.route.anthropic)
            await attempt.stream.tell(event)
        reply.give_up()

    async def _pass_on(self, held: ErrorAnswer, call: Call, reply: Reply, record: Record) -> None:
        """The engine's own error is the answer."""
        status, answer_fields, body = shaped_error(held, anthropic=call.route.anthropic)
        if status in (429, 503) and not any(name == b"retry-after" for name, _ in answer_fields):
            answer_fields = [*answer_fields, (b"retry-after", b"1")]
        record.outcome, record.code, record.reason = "failed", status, "engine_error"
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

    def _remember(self, attempt: Try, member: Member) -> None:
        """A stored response is found again where it was made."""
        if attempt.tally.answer_id:
            self.table.responses.put(attempt.tally.answer_id, member.id)

    def _note(self, record: Record, attempt: Attempt) -> None:
        record.attempts.append(attempt)

    def _count(self, choice: Choice) -> None:
        counts = self.meters.filter_drops
        for _, name in choice.drops:
            counts[name] = counts.get(name, 0) + 1
        prefix = choice.prefix
        if prefix != "off":
            self.meters.prefix[prefix] = self.meters.prefix.get(prefix, 0) + 1


def prompt_head(call: Call, least_bytes: int) -> bytes:
    """The raw JSON of the prompt's head, b"" where it is too short to be worth a look."""
    ask = call.ask
    for raw in (ask.messages, ask.prompt, ask.input):
        view = memoryview(raw)
        if len(view):
            return bytes(view[:MOST_PROMPT_BYTES]) if len(view) >= least_bytes else b""
    return b""


def session_of(call: Call) -> bytes:
    """What the client calls its session: a header, or `session_id` or `user` of the body; b"" without one."""
    named = call.headers.get(b"x-session-id", b"")
    if named:
        return named
    for raw in (call.ask.session_id, call.ask.user):
        value = bytes(raw)
        if len(value) > 2 and value[:1] == b'"':
            return value
    return b""


class _ErrorEvent(msgspec.Struct, gc=False):
    code: object = None
    status: object = None


class _ErrorData(msgspec.Struct, gc=False):
    error: _ErrorEvent | str | None = None


def error_of_event(data: bytes) -> ErrorAnswer:
    """A stream that began with an error, as the answer it should have been."""
    status = 0
    try:
        error = msgspec.json.decode(data, type=_ErrorData).error
        if isinstance(error, _ErrorEvent):
            for value in (error.code, error.status):
                if isinstance(value, int) and 400 <= value <= 599:
                    status = value
    except msgspec.MsgspecError:
        status = 0
    return ErrorAnswer(status or 502, [(b"content-type", b"application/json")], data)

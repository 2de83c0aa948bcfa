"""The service: a call goes in, an answer comes out through its reply, and the books know why.

    resolve the name -> all attempts at that model (`attempts`) -> its fallbacks -> settle

Whatever happens on the way, `settle` is called once.
"""

from __future__ import annotations

import random
import time

import attrs
import msgspec

from ..facts.call import Call
from ..facts.choice import REFUSED
from ..facts.errors import Refusal
from ..facts.settings import Settings
from ..rules.scheduling.pipeline import Policy
from ..rules.scheduling.table import Change, Entry
from ..wire.line import Poller
from ..wire.via import goes_round
from .attempts import Attempts, Ended
from .books import Books
from .errand import Errand
from .errors import error_event
from .promises import Promises
from .record import CLIENT_LEFT, Record
from .relay import ping_while_silent, tell_waiting
from .reply import ClientLeft, Reply
from .waking import worth_asking


class Gateway(Attempts):
    """Everything between the door and the engines. `configure` and `publish` may be called again at any time; `close`
    ends it."""

    def __init__(self, settings: Settings, poller: Poller, rng: random.Random | None = None) -> None:
        super().__init__(settings, poller)
        self.rng = rng or random.Random()
        self.books = Books(self.meters)
        self.tracer = None
        self.configure(settings)

    # -- settings ------------------------------------------------------------------------------------------------------

    def configure(self, settings: Settings) -> Change:
        """Take new settings. Members that survive keep their connections and live state; requests on removed ones
        run on.
        """
        self.policy = Policy.of(settings.scheduling)
        self.scrape_s = settings.scheduling.scrape_s
        self.promises = Promises.of(settings.deadlines)
        self._other_promises = {}
        self.admission = settings.admission
        return self._configure(settings)

    # -- the road ----------------------------------------------------------------------------------------------------

    async def serve(self, call: Call, reply: Reply, only: str = "") -> None:
        """Serve one call. `only` names the endpoint that must serve it, "" for any of its model.

        Raises Refusal while nothing was sent, ClientLeft when there is nobody left to answer; otherwise the reply has
        been ended or given up.
        """
        record = Record.of(call, reply.sleeper)
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
            errand = Errand(self.gate, call, reply, record, entry, only)
            if call.marks:
                self._ask_no_routers(errand)
            ended = await self.at_model(errand, call.arrived, None)
            known = 0
            while ended is not None and len(record.attempts) > known and self._waits_again(errand):
                known = len(record.attempts)
                ended = await self.at_model(errand, time.monotonic(), None)
            if ended is not None:
                await self._fall_back(errand, ended)
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
            record.outcome, record.code = "client left", CLIENT_LEFT
            raise
        finally:
            if record.outcome == "running":  # Trio's cancellation: the router stops now
                record.outcome, record.code = "cancelled", 503
            reply.sleeper.on_sweep = None
            self.books.settle(record, len(call.body))
            if self.tracer is not None:
                self.tracer.finish(record)

    async def _fall_back(self, errand: Errand, ended: Ended) -> None:
        """Its own model could not take the request; `ended` is what the client is told if no fallback can either."""
        record = errand.record
        fallbacks = () if errand.only else tuple(self.table.chain(errand.entry))
        for model in fallbacks:
            now = time.monotonic()
            if not worth_asking(model, fallbacks, record.tickets, now):
                continue
            errand.entry = model
            if await self.at_model(errand, now, record.attempts) is None:
                return
        await self.tell_end(ended, errand, "failed" if record.attempts else "refused")

    def _waits_again(self, errand: Errand) -> bool:
        """Whether its group refused the connection, so that nothing was sent, and requests wait for groups that are
        gone. The group counts as gone from here on, without waiting for a probe to find out."""
        attempts, wait_s = errand.record.attempts, self.gate.missed_wait_s
        member = self.table.members.get(attempts[-1].endpoint) if attempts else None
        if member is None or not member.endpoint.announced or attempts[-1].kind != REFUSED:
            return False
        self.refused(member.id)
        in_time = time.monotonic() - errand.call.arrived < wait_s
        return in_time and not errand.only and bool(errand.entry.waking)

    def _ask_no_routers(self, errand: Errand) -> None:
        """Another router asks: what only further routers have is not passed on to it. Raises Refusal."""
        entry, marks = errand.entry, errand.call.marks
        if goes_round(marks):
            why = "this request has come here before: routers that are each other's groups sent it round"
            raise Refusal(508, "loop_detected", why, should_retry=False)
        errand.barred = tuple([member.id for member in self.table.members.values() if member.endpoint.router])
        if entry.members and all(member.endpoint.router for member in entry.members):
            why = f"the model '{entry.name}' is served by other routers alone, which are not asked for a third one"
            raise Refusal(508, "loop_detected", why, should_retry=False)

    def _maker(self, entry: Entry, call: Call) -> str:
        """The endpoint that made the response which this one continues, since no other knows it; "" where there is
        none, or none that is known."""
        raw = bytes(call.ask.previous_response_id)
        if raw[:1] != b'"':
            return ""
        try:
            name = msgspec.json.decode(raw)
        except msgspec.DecodeError:
            return ""  # bytes that are no text: the engine's to refuse
        maker = self.table.responses.get(name)
        return maker if maker and any(member.id == maker for member in entry.members) else ""

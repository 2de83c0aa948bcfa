"""The engine behind all routes: models, the batch, the answers under way, and faults of the whole engine."""

from __future__ import annotations

import secrets
from collections import OrderedDict
from collections.abc import Callable

import attrs
import msgspec

from .answer import Answer, Outlet
from .asks import Ask, Rejected, read_ask
from .batch import Batch
from .settings import Settings
from .shapes import SHAPES

KEPT_RESPONSES = 1000
ENDLESS_PIECE_BYTES = 16_384
ENDLESS_PAUSE_S = 0.01
_ID_PREFIX = {"chat": "chatcmpl-", "completions": "cmpl-", "responses": "resp_", "messages": "msg_"}
_FAIL_STATUS = {
    "500": (500, "InternalServerError"),
    "503": (503, "ServiceUnavailable"),
    "429": (429, "TooManyRequests"),
}


class Engine:
    """One simulated engine. Synchronous; `now` is the time of the batch, `started_at` and `epoch_now` are wall time.

    `on_crash` is called when `--fail-after` says that the process dies; `on_due` after every order that may have
    changed when the batch has work next.
    """

    def __init__(self, settings: Settings, name: str, epoch_now: Callable[[], float]) -> None:
        self.settings = settings
        self.name = name
        self.epoch_now = epoch_now
        self.started_at = epoch_now()
        self.loading = False
        self.batch = Batch(settings.speeds, settings.sizes)
        self.answers: set[Answer] = set()
        self.responses: OrderedDict[str, bytes] = OrderedDict()
        self.on_crash: Callable[[], None] = lambda: None
        self.on_due: Callable[[], None] = lambda: None
        self._asked = 0
        self._endless: set[Answer] = set()

    def check_model(self, model: str | None) -> str:
        """The served name for what a request calls the model. Raises Rejected (404) in vLLM's words."""
        if model is None:
            return self.settings.models[0]
        if model not in self.settings.models:
            raise Rejected(404, "NotFoundError", f"The model `{model}` does not exist.", "model")
        return model

    def answer(self, route: str, body: bytes, fault_header: bytes | None, outlet: Outlet, now: float) -> Answer:
        """Begin to answer a generating request. Raises Rejected before anything has gone out."""
        ask = read_ask(route, body, fault_header)
        model = self.check_model(ask.model)
        if ask.faults.status:
            raise Rejected(
                ask.faults.status,
                "SimulatedError",
                "the request asked for this error",
                retry_after_s=ask.faults.retry_after_s,
            )
        ask = self._with_own_faults(ask)
        answer_id = _ID_PREFIX[route] + secrets.token_hex(12)
        shape = SHAPES[route](answer_id, ask.faults.model or model, int(self.epoch_now()), self.name)
        answer = Answer(ask, shape, self.batch, outlet)
        if self._fails_now(outlet):
            answer.over = True
            return answer
        self.answers.add(answer)
        answer.begin(now)
        if answer.endless:
            self._endless.add(answer)
        elif answer.over:
            self._put_away(answer)
        self.turn(now)
        self.on_due()
        return answer

    def _with_own_faults(self, ask: Ask) -> Ask:
        """A request's own faults, filled up with those that the command line asked of every request."""
        own, faults = self.settings.misbehaviour, ask.faults
        if own.stall_after is not None and faults.stall_after is None:
            faults = msgspec.structs.replace(faults, stall_after=own.stall_after)
        if own.cut_after is not None and faults.cut_after is None:
            faults = msgspec.structs.replace(faults, cut_after=own.cut_after)
        return ask if faults is ask.faults else attrs.evolve(ask, faults=faults)

    def _fails_now(self, outlet: Outlet) -> bool:
        """Whether this request is past `--fail-after`; then the outlet is ended, or Rejected raised."""
        own = self.settings.misbehaviour
        self._asked += 1
        if own.fail_after is None or self._asked <= own.fail_after:
            return False
        if own.fail_mode in _FAIL_STATUS:
            status, kind = _FAIL_STATUS[own.fail_mode]
            raise Rejected(status, kind, f"simulated failure after {own.fail_after} requests")
        outlet.reset()
        if own.fail_mode == "exit":
            self.on_crash()
        return True

    # -- the course of time -------------------------------------------------------------------------------------------

    def turn(self, now: float) -> None:
        """Let the batch come up to `now`, and hand what it made to the clients."""
        while made := self.batch.advance(now):
            for sequence in made:
                answer = sequence.owner
                assert isinstance(answer, Answer)
                answer.deliver(sequence, now)
                if answer.over:
                    self._put_away(answer)
                answer.outlet.flush()
        for answer in tuple(self._endless):
            if not answer.outlet.clogged:
                answer.feed_endless(ENDLESS_PIECE_BYTES)
                answer.outlet.flush()
            if answer.over:
                self._put_away(answer)

    def next_at(self, now: float) -> float | None:
        """When `turn` should be called next."""
        due = self.batch.next_at()
        if self._endless:
            due = now + ENDLESS_PAUSE_S if due is None else min(due, now + ENDLESS_PAUSE_S)
        return due

    def catch_up(self, answer: Answer, now: float) -> None:
        """The client of `answer`, whose outlet was clogged, reads again."""
        answer.catch_up(now)
        if answer.over:
            self._put_away(answer)

    def abandon(self, answer: Answer, now: float) -> None:
        """The client of `answer` has left."""
        answer.abandon(now)
        self._put_away(answer)
        self.turn(now)
        self.on_due()

    def fail_all(self, message: str, now: float) -> None:
        """End every answer as an engine does that is told to stop."""
        for answer in list(self.answers):
            answer.fail(message, now)
            answer.outlet.flush()
        self.answers.clear()
        self._endless.clear()

    def _put_away(self, answer: Answer) -> None:
        self.answers.discard(answer)
        self._endless.discard(answer)
        if answer.answer_body is not None and answer.ask.route == "responses":
            self.responses[answer.shape.id] = answer.answer_body
            while len(self.responses) > KEPT_RESPONSES:
                self.responses.popitem(last=False)

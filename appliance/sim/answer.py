"""One request being answered: words out of the batch, dressed by a shape, handed to an outlet, spoiled where asked.

Synchronous throughout. The engine calls `deliver` when the batch has made tokens; the connection calls `abandon` when
its client is gone. Whatever happens, the sequences end exactly once and the outlet is ended exactly once.
"""

from __future__ import annotations

from typing import Protocol

import msgspec

from .asks import Ask, Rejected
from .batch import Batch, Sequence
from .shapes import Shape, Usage
from .shapes.shape import Choice
from .words import answer_words, stretch

EVENT_STREAM = "text/event-stream; charset=utf-8"
JSON = "application/json"
ENDLESS_BYTES = 64 * 1024 * 1024
"""Where an endless head or body ends after all: a reader without a bound should fail its test, not fill the memory."""
WORDS_AT_ONCE = 1000
"""Words made into bytes before looking again whether the client takes them."""

_FAILED = "the simulated engine failed"
_GARBAGE = b"\x16\x03\x01 \xff\xfe this is no HTTP\r\n\r\n"
_GARBAGE_JSON = b'{"id": "garbage", "choices": [{"index": \xff\xfe'
_FILLER = {"endless_head": b"x-filler: " + b"o" * 1012 + b"\r\n", "endless_body": b"400\r\n" + b"o" * 1024 + b"\r\n"}


class Outlet(Protocol):
    """Where an answer goes: one HTTP response. After `end`, `cut` or `reset` only `flush` may be called.

    `clogged` tells that the client does not read and so much is waiting for it that no more should be made ready;
    whoever clears that calls `Answer.catch_up`.
    """

    @property
    def clogged(self) -> bool: ...

    def head(self, status: int, content_type: str, length: int | None = None, headers: bytes = b"") -> None:
        """Begin the response; `length` None means a body in chunks. `headers` are whole lines."""

    def pieces(self, pieces: list[bytes]) -> None:
        """Parts of a chunked body, each as a chunk of its own."""

    def raw(self, data: bytes) -> None:
        """Bytes as they are: a body of known length, or no HTTP at all."""

    def end(self) -> None:
        """The response is complete."""

    def cut(self) -> None:
        """Send what is there, then close, complete or not."""

    def reset(self) -> None:
        """Send what is there, then reset the connection."""

    def flush(self) -> None:
        """Hand to the kernel what it takes now."""


def error_body(status: int, kind: str, message: str, param: str | None = None) -> bytes:
    """An error as vLLM words it."""
    return msgspec.json.encode({"error": {"message": message, "type": kind, "param": param, "code": status}})


class Answer:
    """Raises Rejected for a request that can never fit.

    `over` tells that the outlet has been ended; `answer_body` is set once a whole answer has been given.
    """

    def __init__(self, ask: Ask, shape: Shape, batch: Batch, outlet: Outlet) -> None:
        self.ask = ask
        self.shape = shape
        self.batch = batch
        self.outlet = outlet
        self.over = False
        self.endless = 0
        self.answer_body: bytes | None = None
        self._opened = False
        self._events = 0
        self._break_at, self._break_how = _first_break(ask)
        self._headed = False
        self._words: list[list[str]] = []
        self._told: list[int] = []
        self.sequences: list[Sequence] = []
        for prompt in ask.prompts:
            words = answer_words(prompt.said)
            wanted, reason = _plan(ask, len(words))
            self._check_length(prompt.tokens, max(wanted, ask.max_tokens or 0))
            words = stretch(words, wanted)
            for _ in range(ask.n):
                sequence = Sequence(
                    prompt=prompt.text,
                    prompt_tokens=prompt.tokens,
                    output_tokens=len(words),
                    reason=reason,
                    delay_s=ask.faults.delay_s,
                    stall_after=ask.faults.stall_after,
                    owner=self,
                    index=len(self.sequences),
                )
                self.sequences.append(sequence)
                self._words.append(words)
                self._told.append(0)
        self._unmade = self._untold = len(self.sequences)

    def _check_length(self, prompt_tokens: int, output_tokens: int) -> None:
        room = self.batch.sizes.context_tokens
        if prompt_tokens + output_tokens > room:
            message = (
                f"the context of this model is {room} tokens: {prompt_tokens} of prompt and {output_tokens} do not fit"
            )
            raise Rejected(400, "BadRequestError", message, "max_tokens")

    # -- the course of an answer --------------------------------------------------------------------------------------

    def begin(self, now: float) -> None:
        """Queue the sequences and, for a stream, send the head: before any word, as engines do."""
        faults = self.ask.faults
        if faults.garbage is not None and faults.garbage != "body":
            self._begin_garbage(faults.garbage)
        elif self._break_at == -1:
            if self._break_how == "error":
                self._refuse(500, "InternalServerError", _FAILED)
            else:
                self._close(reset=self._break_how == "reset")
        else:
            if self.ask.stream and faults.stall_after != -1:
                self._headed = True
                self.outlet.head(200, EVENT_STREAM)
            for sequence in self.sequences:
                self.batch.submit(sequence, now)

    def deliver(self, sequence: Sequence, now: float) -> None:
        """Take the fresh tokens of one of our sequences."""
        sequence.fresh = 0
        if self.over:
            return
        if sequence.done:
            self._unmade -= 1
        if not self.ask.stream:
            if self._unmade == 0:
                self._give_whole()
        else:
            self._tell_all(sequence, now)

    def catch_up(self, now: float) -> None:
        """Tell what was made while the outlet was clogged."""
        if self.ask.stream:
            for sequence in self.sequences:
                self._tell_all(sequence, now)

    def abandon(self, now: float) -> None:
        """The client is gone, or the answer broke off: everything it holds is free at once."""
        self.over = True
        for sequence in self.sequences:
            self.batch.cancel(sequence, now)

    def fail(self, message: str, now: float) -> None:
        """The engine fails under this answer: an error event in a stream, status 500 where nothing has been sent."""
        if self.endless:
            self._close(reset=False)
        elif self._headed:
            self.outlet.pieces(self.shape.failure(message))
            self._end()
        else:
            self._refuse(500, "InternalServerError", message)
        self.abandon(now)

    # -- streams ------------------------------------------------------------------------------------------------------

    def _tell_all(self, sequence: Sequence, now: float) -> None:
        """Tell what was made and not told, in parts, as long as somebody takes it."""
        while not self.over and self._told[sequence.index] < sequence.produced and not self.outlet.clogged:
            self._tell(sequence, now)
            self.outlet.flush()

    def _tell(self, sequence: Sequence, now: float) -> None:
        if self._break_at == 0:
            self._break_off([], now)
            return
        pieces: list[bytes] = []
        if not self._opened:
            self._opened = True
            pieces = self.shape.opening(len(self.sequences), self._usage())
            if self.ask.faults.garbage == "body":
                pieces.insert(0, b"data: " + _GARBAGE_JSON + b"\n\n")
        index = sequence.index
        word = self.shape.word
        told = self._told[index]
        upto = min(sequence.produced, told + WORDS_AT_ONCE)
        for text in self._words[index][told:upto]:
            pieces.append(word(index, text))
            self._events += 1
            if self._events == self._break_at:
                self._break_off(pieces, now)
                return
        self._told[index] = upto
        if not sequence.done or upto < sequence.produced:
            self.outlet.pieces(pieces)
            return
        pieces += self.shape.closing(index, self._choice(index))
        self._untold -= 1
        if self._untold:
            self.outlet.pieces(pieces)
            return
        choices = [self._choice(at) for at in range(len(self.sequences))]
        usage = self._usage()
        terminated = not self.ask.faults.no_done
        pieces += self.shape.ending(choices, usage, include_usage=self.ask.include_usage, terminated=terminated)
        self.outlet.pieces(pieces)
        self.answer_body = self.shape.whole(choices, usage) if self.ask.route == "responses" else None
        self._end()

    def _break_off(self, pieces: list[bytes], now: float) -> None:
        if self._break_how == "error":
            pieces = pieces + self.shape.failure(_FAILED)
        if pieces:
            self.outlet.pieces(pieces)
        if self._break_how == "error":
            self._end()
        else:
            self._close(reset=self._break_how == "reset")
        self.abandon(now)

    # -- whole answers ------------------------------------------------------------------------------------------------

    def _give_whole(self) -> None:
        if self._break_how == "error":
            self._refuse(500, "InternalServerError", _FAILED)
            return
        choices = [self._choice(index) for index in range(len(self.sequences))]
        body = self.shape.whole(choices, self._usage())
        if self.ask.faults.garbage == "body":
            body = _GARBAGE_JSON
        self.outlet.head(200, JSON, len(body))
        if self._break_at is not None:
            self.outlet.raw(body[: len(body) // 2])
            self._close(reset=self._break_how == "reset")
            return
        self.outlet.raw(body)
        self.answer_body = body
        self._end()

    def _refuse(self, status: int, kind: str, message: str) -> None:
        body = error_body(status, kind, message)
        self.outlet.head(status, JSON, len(body))
        self.outlet.raw(body)
        self._end()

    # -- garbage ------------------------------------------------------------------------------------------------------

    def _begin_garbage(self, kind: str) -> None:
        """No HTTP, a chunk that is none, or something without end, which the engine then feeds (`feed_endless`)."""
        if kind == "head":
            self.outlet.raw(_GARBAGE)
            self._close(reset=False)
        elif kind == "chunk":
            self.outlet.head(200, EVENT_STREAM if self.ask.stream else JSON)
            self.outlet.raw(b"zz\r\nnot a chunk\r\n")
            self._close(reset=False)
        else:
            self.endless = ENDLESS_BYTES
            if kind == "endless_head":
                self.outlet.raw(b"HTTP/1.1 200 OK\r\n")
            else:
                self.outlet.head(200, EVENT_STREAM if self.ask.stream else JSON)

    def feed_endless(self, size: int) -> None:
        """Send about `size` more bytes of what does not end."""
        assert self.ask.faults.garbage is not None
        filler = _FILLER[self.ask.faults.garbage]
        self.outlet.raw(filler * (size // len(filler)))
        self.endless -= size
        if self.endless <= 0:
            self._close(reset=False)

    # -- ends ---------------------------------------------------------------------------------------------------------

    def _end(self) -> None:
        self.over = True
        self.outlet.end()

    def _close(self, *, reset: bool) -> None:
        self.over = True
        if reset:
            self.outlet.reset()
        else:
            self.outlet.cut()

    def _choice(self, index: int) -> Choice:
        return Choice("".join(self._words[index]), self.sequences[index].reason)

    def _usage(self) -> Usage:
        """vLLM's counting: a prompt counts once however many answers it gets, what was made counts each time."""
        firsts = self.sequences[:: self.ask.n]
        return Usage(
            prompt=sum(sequence.prompt_tokens for sequence in firsts),
            completion=sum(sequence.produced for sequence in self.sequences),
            cached=sum(sequence.cached_tokens for sequence in firsts),
        )


def _plan(ask: Ask, natural: int) -> tuple[int, str]:
    """How many words an answer of `natural` words will have, and why it will end there."""
    limit = ask.max_tokens
    if limit is not None and ask.ignore_eos:
        return limit, "length"
    wanted = max(natural, ask.min_tokens)
    return (wanted, "stop") if limit is None or wanted <= limit else (limit, "length")


def _first_break(ask: Ask) -> tuple[int | None, str]:
    """Which of the breaking faults strikes, and after how many words; the earliest where several are asked for."""
    faults = ask.faults
    asked = [
        (after, how) for how in ("cut", "reset", "error") if (after := getattr(faults, f"{how}_after")) is not None
    ]
    return min(asked) if asked else (None, "")

"""The batch: which sequences run, which wait, and when each gets its next token. No clock, no socket, no Trio.

The model, in the order a sequence meets it:

1. *Waiting*, first come first served. The head of the queue starts when a batch slot is free and the KV blocks of its
   whole life (prompt and answer; the length of the answer is known here) can be held at once. What does not fit waits,
   and so does everything behind it. Since all blocks are held from the start nothing ever has to be preempted.
2. *Prefill*. Prompts are computed one after the other at the shared prefill rate; tokens found in the prefix cache are
   skipped. The first token comes at the end of the prefill.
3. *Decode*, in lockstep: a step gives one token to each sequence that was decoding when it began, and takes
   `Speeds.step_s(batch)`. A sequence that becomes ready in the middle of a step takes part from the next one.
4. *Stalled*, only for sequences told to: silent for ever, and still holding slot and blocks, as a hung engine does.

Time is an argument. `next_at` says when something will happen, `advance(now)` lets everything up to `now` happen at the
moments at which it was due, however late it is called: a process that lags behind gives more tokens at once, not fewer.
"""

from __future__ import annotations

from bisect import insort
from collections import deque

import attrs

from .blocks import Blocks, PrefixCache
from .counters import Counters
from .settings import Sizes, Speeds


@attrs.define(eq=False)
class Sequence:
    """One answer being made. The first fields are the order, the rest belongs to the batch.

    `prompt` is what the prefix cache sees, `prompt_tokens` its length, `output_tokens` (at least 1) what will be made
    unless somebody cancels. `delay_s` holds the first token back by that much from its start; `stall_after` is the
    number of tokens after which it falls silent. `owner` and `index` are the submitter's. `fresh` tokens have been made
    and not yet taken by `advance`'s caller; `cached_tokens` is known from the start on.
    """

    prompt: bytes
    prompt_tokens: int
    output_tokens: int
    reason: str = "stop"
    delay_s: float = 0.0
    stall_after: int | None = None
    owner: object = None
    index: int = 0

    state: str = "new"
    cached_tokens: int = 0
    produced: int = 0
    fresh: int = 0
    queued_at: float = 0.0
    started_at: float = 0.0

    @property
    def done(self) -> bool:
        return self.state in ("finished", "cancelled")


class Batch:
    """All sequences of one engine. Plain calls with one owner; `now` never runs backwards."""

    def __init__(self, speeds: Speeds, sizes: Sizes) -> None:
        self.speeds = speeds
        self.sizes = sizes
        self.blocks = Blocks(sizes.kv_blocks)
        self.prefixes = PrefixCache(sizes.prefix_cache_blocks, sizes.block_tokens)
        self.counters = Counters()
        self._clock = 0.0
        self._waiting: deque[Sequence] = deque()
        self._prefilling: deque[Sequence] = deque()
        self._prefill_from = 0.0  # when the head of the prefill queue began
        self._delayed: list[tuple[float, int, Sequence]] = []  # in the order of their time
        self._delays = 0
        self._decoding: dict[Sequence, None] = {}
        self._stepping: list[Sequence] = []  # who takes part in the step that is under way
        self._step_began = 0.0
        self._step_ends: float | None = None
        self._running = 0
        self._fresh: list[Sequence] = []

    # -- what an operator may ask -------------------------------------------------------------------------------------

    @property
    def running(self) -> int:
        """Sequences that hold a slot."""
        return self._running

    @property
    def waiting(self) -> int:
        return len(self._waiting)

    @property
    def kv_usage(self) -> float:
        """Share of the KV blocks that are held, 0 to 1."""
        return self.blocks.held / self.blocks.capacity

    def blocks_for(self, prompt_tokens: int, output_tokens: int) -> int:
        """Blocks a sequence of these lengths holds while it runs."""
        return -(-(prompt_tokens + output_tokens) // self.sizes.block_tokens)

    # -- orders -------------------------------------------------------------------------------------------------------

    def submit(self, sequence: Sequence, now: float) -> None:
        """Queue a sequence. Raises ValueError for one that could never run: it would block the queue for ever."""
        if sequence.output_tokens < 1:
            raise ValueError("an answer has at least one token")
        if self.blocks_for(sequence.prompt_tokens, sequence.output_tokens) > self.blocks.capacity:
            raise ValueError("the sequence is longer than all KV blocks together")
        self._run(now)
        sequence.state = "waiting"
        sequence.queued_at = self._clock
        self._waiting.append(sequence)
        self._admit()
        self._run(now)

    def cancel(self, sequence: Sequence, now: float) -> bool:
        """Give up a sequence: slot and blocks are free at once. False when it had ended, or was never submitted."""
        self._run(now)
        if sequence.done or sequence.state == "new":
            return False
        match sequence.state:
            case "waiting":
                self._waiting.remove(sequence)
            case "prefilling":
                if self._prefilling[0] is sequence:  # what was computed is lost; the next begins now
                    self._prefill_from = self._clock
                self._prefilling.remove(sequence)
            case "delayed":
                self._delayed = [entry for entry in self._delayed if entry[2] is not sequence]
            case "decoding":
                del self._decoding[sequence]
                if not self._decoding:  # nobody is left to wait for: the next to come must not
                    self._step_ends = None
        self._leave(sequence, "cancelled", "abort")
        self._run(now)
        return True

    # -- time ---------------------------------------------------------------------------------------------------------

    def next_at(self) -> float | None:
        """When something happens next, in the clock of `advance`; None while nothing will without a new order."""
        due: float | None = self._step_ends
        if self._prefilling:
            ready = self._prefill_from + self._prefill_s(self._prefilling[0])
            due = ready if due is None else min(due, ready)
        if self._delayed:
            due = self._delayed[0][0] if due is None else min(due, self._delayed[0][0])
        return due

    def advance(self, now: float) -> list[Sequence]:
        """Let everything up to `now` happen; the sequences that have fresh tokens, in the order of their first one.

        The caller takes the tokens by setting `fresh` back to 0. A sequence is listed at most once.
        """
        self._run(now)
        fresh, self._fresh = self._fresh, []
        return fresh

    def _run(self, now: float) -> None:
        while (due := self.next_at()) is not None and due <= now:
            self._clock = max(self._clock, due)
            # At a tie the step ends last, so that whoever is ready at that moment takes part in the next one.
            if self._prefilling and self._prefill_from + self._prefill_s(self._prefilling[0]) <= due:
                self._end_prefill()
            elif self._delayed and self._delayed[0][0] <= due:
                self._start_decoding(self._delayed.pop(0)[2])
            else:
                self._end_step()
            if self._step_ends is None and self._decoding:
                self._begin_step()
        self._clock = max(self._clock, now)

    def _admit(self) -> None:
        while self._waiting and self._running < self.sizes.max_num_seqs:
            head = self._waiting[0]
            if not self.blocks.take(head, self.blocks_for(head.prompt_tokens, head.output_tokens)):
                return
            self._waiting.popleft()
            self._running += 1
            head.state = "prefilling"
            head.started_at = self._clock
            self._look_up(head)
            if not self._prefilling:
                self._prefill_from = self._clock
            self._prefilling.append(head)
            self.counters.queue_s.observe(self._clock - head.queued_at)

    def _look_up(self, sequence: Sequence) -> None:
        """Count what the prefix cache knows. The last token is always computed: it makes the first of the answer."""
        if self.sizes.prefix_cache_blocks == 0:
            return
        matched = self.prefixes.match(sequence.prompt)
        if matched * self.sizes.block_tokens >= sequence.prompt_tokens:
            matched -= 1
        sequence.cached_tokens = max(0, matched) * self.sizes.block_tokens
        self.counters.prefix_queries += sequence.prompt_tokens
        self.counters.prefix_hits += sequence.cached_tokens

    def _prefill_s(self, sequence: Sequence) -> float:
        return self.speeds.prefill_s(sequence.prompt_tokens - sequence.cached_tokens)

    def _end_prefill(self) -> None:
        sequence = self._prefilling.popleft()
        self._prefill_from = self._clock
        self.counters.prompt_tokens += sequence.prompt_tokens
        self.counters.cached_tokens += sequence.cached_tokens
        if self.sizes.prefix_cache_blocks:
            self.prefixes.remember(sequence.prompt)
        due = sequence.started_at + sequence.delay_s
        if due > self._clock:
            sequence.state = "delayed"
            self._delays += 1
            insort(self._delayed, (due, self._delays, sequence))
        else:
            self._start_decoding(sequence)

    def _start_decoding(self, sequence: Sequence) -> None:
        """The prompt is computed: the first token, and with an instant decoder all of them."""
        if sequence.stall_after is not None and sequence.stall_after <= 0:
            sequence.state = "stalled"
            return
        self.counters.first_token_s.observe(self._clock - sequence.queued_at)
        sequence.state = "decoding"
        self._decoding[sequence] = None
        self._give(sequence, 1)
        if sequence.state == "decoding" and self.speeds.decode_tokens_per_s <= 0:
            rest = sequence.output_tokens - 1
            if sequence.stall_after is not None:
                rest = min(rest, sequence.stall_after - 1)
            self.counters.inter_token_s.observe(0.0, rest)
            self._give(sequence, rest)

    def _begin_step(self) -> None:
        self._stepping = list(self._decoding)
        self._step_began = self._clock
        self._step_ends = self._clock + self.speeds.step_s(len(self._stepping))

    def _end_step(self) -> None:
        took = self._clock - self._step_began
        self._step_ends = None
        served = 0
        for sequence in self._stepping:
            if sequence.state == "decoding":
                self._give(sequence, 1)
                served += 1
        self._stepping = []
        self.counters.inter_token_s.observe(took, served)

    def _give(self, sequence: Sequence, tokens: int) -> None:
        if sequence.fresh == 0:
            self._fresh.append(sequence)
        sequence.fresh += tokens
        sequence.produced += tokens
        self.counters.generation_tokens += tokens
        if sequence.produced >= sequence.output_tokens:
            del self._decoding[sequence]
            self._leave(sequence, "finished", sequence.reason)
        elif sequence.produced == sequence.stall_after:
            del self._decoding[sequence]
            sequence.state = "stalled"

    def _leave(self, sequence: Sequence, state: str, reason: str) -> None:
        """End a sequence that has been taken out of its list."""
        if sequence.state != "waiting":
            self._running -= 1
            self.blocks.release(sequence)
        sequence.state = state
        self.counters.finished[reason] += 1
        if state == "finished":
            self.counters.request_s.observe(self._clock - sequence.queued_at)
        self._admit()

"""The sim's batch: its timing, its order, and that nothing is ever held by nobody."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from appliance.sim.batch import Batch, Sequence
from appliance.sim.settings import Sizes, Speeds


def sequence(prompt: int = 4, output: int = 3, text: bytes = b"", **more: object) -> Sequence:
    """A sequence of `prompt` tokens that nobody else shares, unless `text` is given."""
    sequence.made += 1  # type: ignore[attr-defined]
    text = text or b"%016d" % sequence.made * (prompt // 4 + 1)  # type: ignore[attr-defined]
    return Sequence(prompt=text[: prompt * 4], prompt_tokens=prompt, output_tokens=output, **more)  # type: ignore[arg-type]


sequence.made = 0  # type: ignore[attr-defined]


def play(batch: Batch, *arrivals: tuple[float, Sequence], until: float = 99.0) -> list[list[float]]:
    """Submit each sequence at its time, let time pass from one event to the next: when each one got its tokens."""
    watched = [one for _, one in arrivals]
    seen: list[list[float]] = [[] for _ in watched]

    def look(now: float) -> None:
        for made in batch.advance(now):
            if made in watched:
                seen[watched.index(made)] += [pytest.approx(now)] * made.fresh
            made.fresh = 0

    def pass_time(end: float) -> None:
        while (due := batch.next_at()) is not None and due <= end:
            look(due)

    for at, one in sorted(arrivals, key=lambda arrival: arrival[0]):
        pass_time(at)
        batch.submit(one, at)
        look(at)
    pass_time(until)
    return seen


# -- timing -----------------------------------------------------------------------------------------------------------


def test_prefill_then_a_token_per_step() -> None:
    batch = Batch(Speeds(prefill_tokens_per_s=1000, decode_tokens_per_s=20), Sizes())
    one = sequence(prompt=100, output=4)
    assert play(batch, (1.0, one)) == [[1.1, 1.15, 1.2, 1.25]]
    assert one.state == "finished"
    assert batch.next_at() is None


def test_prompts_share_the_prefill_rate_in_turn() -> None:
    batch = Batch(Speeds(prefill_tokens_per_s=1000, decode_tokens_per_s=1000), Sizes())
    assert play(batch, *((0.0, sequence(prompt=100, output=1)) for _ in range(3))) == [[0.1], [0.2], [0.3]]


def test_a_cancelled_prefill_makes_room_at_once() -> None:
    batch = Batch(Speeds(prefill_tokens_per_s=1000, decode_tokens_per_s=1000), Sizes())
    first, second, third, late = (sequence(prompt=100, output=1) for _ in range(4))
    play(batch, (0.0, first), (0.0, second), (0.0, third), until=0.0)
    assert batch.cancel(first, 0.04)  # what was computed of it is lost, what was to come is not waited for
    assert batch.cancel(second, 0.05)
    assert play(batch, (0.05, late)) == [[0.25]]


def test_sequences_decode_in_lockstep_and_a_newcomer_joins_the_next_step() -> None:
    batch = Batch(Speeds(prefill_tokens_per_s=0, decode_tokens_per_s=10), Sizes())
    first, second = sequence(output=4), sequence(output=3)
    # The step that began at 0.0 ends at 0.1 without the newcomer, whose first token came with its prefill.
    assert play(batch, (0.0, first), (0.05, second)) == [[0.0, 0.1, 0.2, 0.3], [0.05, 0.2, 0.3]]


@pytest.mark.parametrize(("slowdown", "of_four", "of_three"), [(0.0, 0.1, 0.1), (0.5, 0.25, 0.2), (1.0, 0.4, 0.3)])
def test_decode_slows_with_the_batch_as_asked(slowdown: float, of_four: float, of_three: float) -> None:
    batch = Batch(Speeds(0, 10, slowdown), Sizes())
    seen = play(batch, *((0.0, sequence(output=3)) for _ in range(4)))
    # The first of them had begun a step alone; the others wait for its end, then all four step together, then three.
    assert seen[0] == [0.0, 0.1, 0.1 + of_four]
    assert seen[1] == seen[2] == seen[3] == [0.0, 0.1 + of_four, 0.1 + of_four + of_three]


def test_nobody_waits_for_the_step_of_a_sequence_that_left() -> None:
    batch = Batch(Speeds(0, 1), Sizes())
    left = sequence()
    play(batch, (0.0, left), until=0.0)
    batch.cancel(left, 0.1)
    assert play(batch, (0.2, sequence(output=2))) == [[0.2, 1.2]]


def test_speed_zero_is_instant() -> None:
    batch = Batch(Speeds(0, 0), Sizes())
    one = sequence(prompt=1000, output=500)
    batch.submit(one, 5.0)
    assert batch.advance(5.0) == [one]
    assert (one.fresh, one.state) == (500, "finished")
    assert batch.kv_usage == 0


def test_a_delay_holds_the_first_token_back_and_nobody_else() -> None:
    batch = Batch(Speeds(0, 10), Sizes())
    slow, quick = sequence(output=2, delay_s=1.0), sequence(output=2)
    assert play(batch, (0.0, slow), (0.0, quick)) == [[1.0, 1.1], [0.0, 0.1]]


def test_a_delayed_sequence_that_is_cancelled_frees_what_it_holds() -> None:
    batch = Batch(Speeds(0, 10), Sizes())
    slow, slower = sequence(delay_s=1.0), sequence(output=1, delay_s=2.0)
    play(batch, (0.0, slow), (0.0, slower), until=0.0)
    assert batch.cancel(slow, 0.5)
    assert (batch.running, batch.next_at()) == (1, 2.0)
    batch.advance(2.0)
    assert (batch.running, batch.kv_usage) == (0, 0)


def test_a_late_call_gives_all_the_tokens_that_were_due() -> None:
    batch = Batch(Speeds(0, 10), Sizes())
    one = sequence(output=100)
    batch.submit(one, 0.0)
    assert batch.advance(3.05) == [one]
    assert one.fresh == 31  # the first, and one per tenth of a second


def test_the_prefix_cache_saves_prefill_and_is_counted() -> None:
    batch = Batch(Speeds(prefill_tokens_per_s=100, decode_tokens_per_s=0), Sizes(block_tokens=4))
    text = bytes(range(80))
    first, again = sequence(prompt=20, output=1, text=text), sequence(prompt=20, output=1, text=text)
    longer = sequence(prompt=30, output=1, text=text + bytes(40))
    # At the second time all five blocks are cached, but the last token is always computed, and with it its block.
    assert play(batch, (0.0, first), (10.0, again), (20.0, longer)) == [[0.2], [10.04], [20.1]]
    assert (batch.counters.prefix_queries, batch.counters.prefix_hits) == (70, 36)
    assert (batch.counters.prompt_tokens, batch.counters.cached_tokens) == (70, 36)


def test_a_cancelled_prefill_is_not_cached() -> None:
    batch = Batch(Speeds(prefill_tokens_per_s=100, decode_tokens_per_s=0), Sizes(block_tokens=4))
    one = sequence(prompt=20, output=1, text=bytes(80))
    batch.submit(one, 0.0)
    batch.cancel(one, 0.1)
    assert len(batch.prefixes) == 0


# -- room -------------------------------------------------------------------------------------------------------------


def test_slots_and_blocks_bound_what_runs_and_cancelling_frees_them_at_once() -> None:
    batch = Batch(Speeds(0, 1), Sizes(max_num_seqs=2, kv_blocks=10, block_tokens=4))
    small = [sequence(prompt=4, output=4) for _ in range(3)]  # two blocks each
    for one in small:
        batch.submit(one, 0.0)
    assert (batch.running, batch.waiting, batch.kv_usage) == (2, 1, 0.4)
    assert batch.cancel(small[0], 0.0)
    assert (batch.running, batch.waiting, batch.kv_usage) == (2, 0, 0.4)
    assert not batch.cancel(small[0], 0.0)
    assert small[2].state == "decoding"


def test_what_does_not_fit_waits_and_so_does_what_stands_behind_it() -> None:
    batch = Batch(Speeds(0, 1), Sizes(kv_blocks=4, block_tokens=4))
    first, large, small = sequence(4, 4), sequence(8, 8), sequence(1, 1)
    for one in (first, large, small):
        batch.submit(one, 0.0)
    assert [one.state for one in (first, large, small)] == ["decoding", "waiting", "waiting"]
    batch.cancel(large, 0.0)
    assert small.state == "finished"


def test_what_can_never_fit_is_refused() -> None:
    batch = Batch(Speeds(), Sizes(kv_blocks=4, block_tokens=4))
    with pytest.raises(ValueError, match="longer than all"):
        batch.submit(sequence(8, 9), 0.0)
    assert batch.waiting == 0


def test_a_stalled_sequence_is_silent_and_holds_what_it_has() -> None:
    batch = Batch(Speeds(0, 10), Sizes(kv_blocks=10))
    one = sequence(output=5, stall_after=2)
    batch.submit(one, 0.0)
    assert batch.advance(99.0) == [one]
    assert (one.fresh, one.state, batch.running, batch.kv_usage) == (2, "stalled", 1, 0.1)
    assert batch.next_at() is None
    assert batch.cancel(one, 99.0)
    assert (batch.running, batch.kv_usage) == (0, 0)


# -- whatever happens -------------------------------------------------------------------------------------------------

RUNNING = ("prefilling", "delayed", "decoding", "stalled")
SPEEDS = st.sampled_from([Speeds(0, 0), Speeds(100, 10), Speeds(0, 10, 0.5), Speeds(50, 0), Speeds(1000, 100, 1.0)])


class AnyBatch(RuleBasedStateMachine):
    """Orders in any sequence against small sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.batch = Batch(
            Speeds(40, 10, 0.25), Sizes(max_num_seqs=3, kv_blocks=12, block_tokens=4, prefix_cache_blocks=5)
        )
        self.now = 100.0
        self.all: list[Sequence] = []
        self.taken: dict[Sequence, int] = {}

    @rule(
        prompt=st.integers(1, 24),
        output=st.integers(1, 24),
        shared=st.booleans(),
        delay_s=st.sampled_from([0.0, 0.0, 2.0]),
        stall_after=st.sampled_from([None, None, 0, 1, 3]),
    )
    def submit(self, prompt: int, output: int, shared: bool, delay_s: float, stall_after: int | None) -> None:
        text = b"shared" * 20 if shared else b""
        one = sequence(prompt, output, text, delay_s=delay_s, stall_after=stall_after)
        self.batch.submit(one, self.now)
        self.all.append(one)

    @precondition(lambda self: self.all)
    @rule(data=st.data())
    def cancel(self, data: st.DataObject) -> None:
        one = data.draw(st.sampled_from(self.all))
        ended = one.done
        assert self.batch.cancel(one, self.now) == (not ended and one.state == "cancelled")
        assert one.done

    @rule(seconds=st.floats(0, 3))
    def wait(self, seconds: float) -> None:
        self.now += seconds
        self.take()

    def take(self) -> None:
        made = self.batch.advance(self.now)
        assert len(set(made)) == len(made)
        for one in made:
            assert one.fresh > 0
            self.taken[one] = self.taken.get(one, 0) + one.fresh
            one.fresh = 0

    @invariant()
    def room_is_kept(self) -> None:
        batch = self.batch
        running = [one for one in self.all if one.state in RUNNING]
        assert batch.running == len(running) <= batch.sizes.max_num_seqs
        held = sum(batch.blocks_for(one.prompt_tokens, one.output_tokens) for one in running)
        assert batch.blocks.held == held <= batch.sizes.kv_blocks
        assert batch.waiting == sum(one.state == "waiting" for one in self.all)
        assert len(batch.prefixes) <= batch.sizes.prefix_cache_blocks

    @invariant()
    def first_come_first_served(self) -> None:
        # Nobody who came later starts while somebody waits, and nobody waits while there is room for the head.
        waits = [one.state == "waiting" for one in self.all]
        if any(waits):
            first = waits.index(True)
            assert all(one.state in ("waiting", "cancelled") for one in self.all[first:])
            head = self.all[first]
            need = self.batch.blocks_for(head.prompt_tokens, head.output_tokens)
            full = self.batch.running == self.batch.sizes.max_num_seqs
            assert full or self.batch.blocks.held + need > self.batch.sizes.kv_blocks
        starts = [one.started_at for one in self.all if one.state in (*RUNNING, "finished")]
        assert starts == sorted(starts)

    def teardown(self) -> None:
        for one in self.all:
            if one.stall_after is not None:
                self.batch.cancel(one, self.now)
        self.now += 10_000
        self.take()
        assert (self.batch.running, self.batch.waiting, self.batch.blocks.held) == (0, 0, 0)
        assert self.batch.next_at() is None
        for one in self.all:
            assert one.done
            if one.state == "finished":
                assert self.taken[one] == one.produced == one.output_tokens
        assert sum(self.batch.counters.finished.values()) == len(self.all)


TestAnyBatch = AnyBatch.TestCase
TestAnyBatch.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


@given(
    speeds=SPEEDS,
    arrivals=st.lists(st.tuples(st.floats(0, 5), st.integers(1, 20), st.integers(1, 20)), min_size=1, max_size=12),
    looks=st.lists(st.floats(0, 8), max_size=30),
)
def test_it_does_not_matter_how_often_one_looks(
    speeds: Speeds, arrivals: list[tuple[float, int, int]], looks: list[float]
) -> None:
    """The same arrivals, watched seldom and often, take the same time and end in the same counters."""

    def totals(extra: list[float]) -> list[float]:
        batch = Batch(speeds, Sizes(max_num_seqs=3, kv_blocks=20, block_tokens=4))
        events = sorted([(at, 0, prompt, output) for at, prompt, output in arrivals] + [(at, 1, 0, 0) for at in extra])
        for at, look, prompt, output in events:
            if look:
                batch.advance(at)
            else:
                batch.submit(sequence(prompt, output), at)
        batch.advance(1e6)
        counters = batch.counters
        assert counters.finished["stop"] == len(arrivals)
        return [
            counters.first_token_s.total,
            counters.queue_s.total,
            counters.request_s.total,
            counters.generation_tokens,
        ]

    assert totals(looks) == pytest.approx(totals([]), abs=1e-6)


@given(SPEEDS, st.integers(1, 500))
def test_a_step_is_never_quicker_in_company(speeds: Speeds, batch: int) -> None:
    assert 0 <= speeds.step_s(batch) <= speeds.step_s(batch + 1) < math.inf

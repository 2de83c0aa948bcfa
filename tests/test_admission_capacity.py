"""The size of an engine's batch: known, learnt, unknown; against a toy engine that serves first come, first served."""

from __future__ import annotations

import heapq
from collections import deque
from itertools import pairwise
from random import Random

import pytest

from appliance.facts.bands import AdmissionSettings
from appliance.facts.endpoint import Endpoint, Sample
from appliance.rules.admission.capacity import DOUBT_S, Load, saturation
from appliance.rules.admission.queue import Admission
from appliance.rules.admission.ticket import Ticket


class Toy:
    """An engine of `slots` behind an `Admission`, in a time of its own.

    Each request takes a slot, gives its first content `first_s` after it started and its end after a length drawn
    from `lasts_s`, at a hundred tokens a second. It is scraped every `scrape_s` (0: never), which is the sooner the
    more impatient the router is. What happens is seen up to `late_s` later by the router. `most_waiting` is the longest
    its own queue ever was.
    """

    def __init__(
        self,
        slots: int,
        *,
        capacity: int = 0,
        told: int | None = None,
        scrape_s: float = 0.1,
        first_s: float = 0.05,
        lasts_s: tuple[float, float] = (0.5, 2.0),
        streams: bool = True,
        late_s: float = 0.0,
        seed: int = 0,
    ) -> None:
        self.slots = slots
        self.told = told
        self.first_s = first_s
        self.lasts_s = lasts_s
        self.streams = streams
        self.late_s = late_s
        self.rng = Random(seed)
        self.now = 0.0
        self.generation = 0
        self.scrape_s = scrape_s
        self.running: set[Ticket] = set()
        self.tokens: dict[Ticket, int] = {}
        self.queue: deque[Ticket] = deque()
        self.events: list[tuple[float, int, str, Ticket | None]] = []
        self.ids = 0
        self.most_waiting = 0
        self.most_running = 0
        self.done = 0
        self.admission = Admission(AdmissionSettings(queue_capacity_total=100_000, bands=AdmissionSettings().bands))
        self.admission.table({"m": [Endpoint("e", "h", 1, capacity=capacity)]}, 0.0)
        if scrape_s:
            self._at(0.0, "scrape", None)

    @property
    def load(self) -> Load:
        return self.admission.loads["e"]

    def burst(self, count: int, band: str = "silver") -> list[Ticket]:
        tickets = [Ticket("m", band, f"t{i % 3}") for i in range(count)]
        for ticket in tickets:
            self.admission.ask(ticket, self.now)
        for ticket in tickets:
            if ticket.state == "granted":
                self._send(ticket)
        return tickets

    def run(self, until: float) -> None:
        while self.events and self.events[0][0] <= until:
            self.now, _, what, ticket = heapq.heappop(self.events)
            if ticket is None:
                self._scrape()
            elif ticket.state == "running":
                match what:
                    case "content":
                        self._wake(self.admission.began(ticket, self.now))
                    case "end" if ticket in self.running:
                        self.running.discard(ticket)
                        self._start()  # the engine frees a slot before we read the end
                        self._at(self.now + self.late_s * self.rng.random(), "read", ticket)
                    case "read":
                        self.done += 1
                        self._wake(self.admission.finished(ticket, self.now, tokens=self.tokens.pop(ticket)))
        self.now = until

    def restart(self, slots: int) -> None:
        """The engine dies and comes back: what was there is reset, the counters begin again."""
        lost = [*self.running, *self.queue]
        self.running.clear()
        self.queue.clear()
        self.slots = slots
        self.generation += 1
        for ticket in lost:
            self._wake(self.admission.finished(ticket, self.now, answered=False))

    def _at(self, when: float, what: str, ticket: Ticket | None) -> None:
        self.ids += 1
        heapq.heappush(self.events, (when, self.ids, what, ticket))

    def _wake(self, tickets: object) -> None:
        for ticket in tickets:  # type: ignore[attr-defined]
            if ticket.state == "granted":
                self._send(ticket)

    def _send(self, ticket: Ticket) -> None:
        self.queue.append(ticket)
        self._start()
        self._wake(self.admission.dispatched(ticket, "e", self.now))

    def _start(self) -> None:
        while self.queue and len(self.running) < self.slots:
            ticket = self.queue.popleft()
            self.running.add(ticket)
            if self.streams:
                self._at(self.now + self.first_s, "content", ticket)
            lasts_s = self.rng.uniform(*self.lasts_s)
            self.tokens[ticket] = round(lasts_s * 100)
            self._at(self.now + self.first_s + lasts_s, "end", ticket)
        self.most_waiting = max(self.most_waiting, len(self.queue))
        self.most_running = max(self.most_running, len(self.running))

    def _scrape(self) -> None:
        sample = Sample(self.now, len(self.running), len(self.queue), capacity=self.told, generation=self.generation)
        self._wake(self.admission.sampled("e", sample, self.now))
        self._at(self.now + self.scrape_s, "scrape", None)


def learnt(slots: int, seed: int = 0) -> Toy:
    """A toy whose capacity has been learnt from load, and which is idle again."""
    toy = Toy(slots, seed=seed)
    toy.burst(slots * 6)
    toy.run(30.0)
    assert (toy.load.idle, toy.load.learnt, toy.load.capacity) == (True, True, slots)
    toy.most_running = 0
    return toy


# -- a burst of 300 on 8 slots ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    "how", ["configured", "told", "learnt", "cold", "unscraped", "unscraped, no streams", "no streams"]
)
def test_a_burst_of_300_never_leaves_more_than_2_waiting_in_the_engine(how: str, seed: int) -> None:
    match how:
        case "configured":
            toy = Toy(8, capacity=8, seed=seed)
        case "told":
            toy = Toy(8, told=8, seed=seed)
            toy.run(0.05)
        case "learnt":
            toy = learnt(8, seed)
        case "cold":
            toy = Toy(8, seed=seed)
        case "unscraped":
            toy = Toy(8, scrape_s=0, seed=seed)
        case "unscraped, no streams":
            toy = Toy(8, scrape_s=0, streams=False, seed=seed)
        case _:
            toy = Toy(8, streams=False, seed=seed)
    start = toy.now
    toy.done = 0
    tickets = toy.burst(300)
    while toy.done < 300:
        toy.run(toy.now + 1.0)
        assert toy.now - start < 300, "stuck"
    assert toy.most_waiting <= 2
    assert toy.most_running >= 7  # and it is not starved either
    assert {ticket.state for ticket in tickets} == {"ended"}
    load = toy.load
    assert (load.inflight, load.leased, load.proven, len(load.unproven), toy.admission.lines.count) == (0, 0, 0, 0, 0)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("late_s", [0.0, 0.02])
@pytest.mark.parametrize("lasts_s", [(1.0, 1.0), (0.9, 1.1), (0.2, 2.0)])
@pytest.mark.parametrize("slots", [1, 2, 8, 24])
def test_without_samples_and_streams_a_batch_is_told_from_a_queue(
    slots: int, lasts_s: tuple[float, float], late_s: float, seed: int
) -> None:
    """Answers of equal length come in the order of their requests, from a batch as from a queue."""
    toy = Toy(slots, scrape_s=0, streams=False, lasts_s=lasts_s, late_s=late_s, seed=seed)
    toy.burst(1000)
    toy.run(40.0)
    assert toy.most_waiting <= 2
    assert toy.most_running >= min(slots, 12)


@pytest.mark.parametrize("scrape_s", [0.1, 0.0])
def test_an_engine_of_256_slots_and_unknown_capacity_is_filled_within_seconds(scrape_s: float) -> None:
    toy = Toy(256, scrape_s=scrape_s, lasts_s=(30.0, 60.0))
    toy.burst(400, "gold")
    toy.burst(200)
    toy.run(10.0)
    assert toy.most_running == 256
    assert toy.most_waiting <= 2


def test_a_known_capacity_is_filled_at_once() -> None:
    toy = Toy(256, told=256)
    toy.run(0.01)
    toy.burst(300, "gold")
    assert (toy.most_running, toy.most_waiting) == (256, 0)


# -- learning --------------------------------------------------------------------------------------------------------


def test_what_is_learnt_holds_for_the_bands() -> None:
    toy = learnt(8)
    toy.burst(30, "bronze")
    assert toy.load.inflight == 5


def test_an_engine_that_starts_again_is_learnt_anew() -> None:
    toy = learnt(8)
    toy.burst(300)
    toy.run(toy.now + 1.0)
    toy.restart(slots=4)
    toy.most_waiting = 0
    toy.run(toy.now + 20.0)
    assert toy.load.capacity == 4
    # What was sent between the crash and the first sample was sent in the belief that there are 8 slots.
    assert toy.most_waiting <= 4
    toy.most_waiting = 0
    toy.run(toy.now + 20.0)
    assert toy.most_waiting <= 2
    while toy.admission.lines.count or not toy.load.idle:
        for ticket in toy.admission.expire(toy.now):
            assert ticket.state == "refused"
        toy.run(toy.now + 10.0)
        assert toy.now < 500, "stuck"
    assert (toy.load.leased, toy.load.proven, len(toy.load.unproven)) == (0, 0, 0)


def test_an_engine_that_came_back_larger_is_filled_again() -> None:
    toy = learnt(4)
    toy.restart(slots=32)
    toy.run(toy.now + 0.5)
    toy.burst(200)
    toy.run(toy.now + 3.0)
    assert toy.most_running >= 28


def test_a_long_prefill_is_not_taken_for_a_full_batch() -> None:
    load = Load("e")
    for i in range(50):  # nothing of ours ends meanwhile
        load.hear(Sample(i / 10, running=3, waiting=2), pressed=True)
    assert (load.capacity, load.mark) == (0, 3)


def test_one_sample_with_a_queue_is_not_taken_for_a_full_batch() -> None:
    load = Load("e")
    load.hear(Sample(0.0, running=3, waiting=0), pressed=True)
    for at in (1.0, 2.0, 4.0, 5.0):  # the queue is gone again at 3 and 6
        load.hear(Sample(at, running=3, waiting=1), pressed=True)
        ticket = Ticket("m", "silver")
        load.send(ticket, 0.0)
        load.end(ticket, 0.0, answered=True)
        if at in (2.0, 5.0):
            load.hear(Sample(at + 1.0, running=3, waiting=0), pressed=True)
    assert load.capacity == 0


def three_pins(load: Load, running: int, at: float) -> None:
    for i in range(3):
        load.hear(Sample(at + i / 10, running=running, waiting=1), pressed=True)
        ticket = Ticket("m", "silver")
        load.send(ticket, 0.0)
        load.end(ticket, 0.0, answered=True)


def test_a_figure_learnt_too_small_is_doubted_while_somebody_waits_and_ever_less_often() -> None:
    load = Load("e")
    load.hear(Sample(0.0, running=3, waiting=0), pressed=True)
    three_pins(load, 3, 1.0)
    assert load.capacity == 3
    load.hear(Sample(DOUBT_S * 10, running=2, waiting=0), pressed=False)
    assert load.capacity == 3  # nobody is held back by it
    load.hear(Sample(DOUBT_S * 10 + 1, running=2, waiting=0), pressed=True)
    assert (load.capacity, load.open) == (0, True)
    three_pins(load, 3, 1000.0)
    assert load.capacity == 3
    load.hear(Sample(1001.0 + DOUBT_S, running=2, waiting=0), pressed=True)
    assert load.capacity == 3  # twice as long this time
    load.hear(Sample(1001.0 + 2 * DOUBT_S, running=2, waiting=0), pressed=True)
    assert load.capacity == 0
    load.hear(Sample(1100.0, running=4, waiting=0), pressed=True)  # it was too small indeed
    three_pins(load, 4, 1101.0)
    assert load.capacity == 4


def test_what_is_known_is_not_learnt_over() -> None:
    load = Load("e", capacity=16)
    load.configure(16, False)
    load.hear(Sample(0.0, running=4, waiting=0), pressed=True)
    three_pins(load, 4, 1.0)
    assert (load.capacity, load.learnt) == (16, False)


def test_the_engines_own_word_counts_until_it_starts_again() -> None:
    load = Load("e")
    load.hear(Sample(0.0, running=0, waiting=0, capacity=4), pressed=False)
    load.hear(Sample(1.0, running=0, waiting=0), pressed=False)  # not published in every sample
    assert load.capacity == 4
    load.hear(Sample(2.0, running=0, waiting=0, generation=1), pressed=False)
    assert load.capacity == 0


def test_another_engine_under_the_same_name_is_learnt_anew() -> None:
    """A cache that was full at the old address must not hold up the new one for ever."""
    subject = Admission(AdmissionSettings())
    subject.table({"m": [Endpoint("e", "h", 1, engine="vllm")]}, 0.0)
    subject.sampled("e", Sample(0.0, running=9, waiting=7, kv=0.95, capacity=16, generation=4), 0.0)
    load = subject.loads["e"]
    assert (load.capacity, load.saturation > 1) == (16, True)
    subject.table({"m": [Endpoint("e", "h", 1, engine="vllm", pool="other")]}, 1.0)
    assert (load.capacity, load.saturation > 1) == (16, True)  # the same engine in another pool
    ticket = Ticket("m", "platinum")
    subject.ask(ticket, 1.0)
    assert ticket.state == "waiting"
    assert subject.table({"m": [Endpoint("e", "other", 1, engine="openai")]}, 2.0) == [ticket]
    assert (load.capacity, load.mark, load.foreign, load.kv, load.waiting, load.heard_at) == (0, 0, 0, 0.0, 0, None)


def test_the_engines_word_may_come_from_elsewhere() -> None:
    subject = Admission(AdmissionSettings())
    subject.table({"m": [Endpoint("e", "h", 1)]}, 0.0)
    tickets = [Ticket("m", "gold") for _ in range(9)]
    for ticket in tickets:
        subject.ask(ticket, 0.0)
    assert subject.told("e", 8, 1.0) == tickets[2:8]
    assert subject.told("gone", 8, 1.0) == ()


def test_what_others_run_there_counts() -> None:
    load = Load("e", capacity=8)
    load.hear(Sample(0.0, running=6, waiting=0), pressed=False)
    assert (load.foreign, load.saturation, load.idle) == (6, 6 / 8, True)
    mine = [Ticket("m", "silver") for _ in range(2)]
    for ticket in mine:
        load.send(ticket, 0.0)
    load.hear(Sample(1.0, running=8, waiting=3), pressed=False)
    assert (load.foreign, load.saturation) == (9, 11 / 8)
    load.fall_silent(2.0)
    assert (load.foreign, load.saturation) == (0, 2 / 8)


def test_what_ended_while_the_scrape_was_under_way_is_not_taken_for_somebody_elses() -> None:
    load = Load("e", capacity=8)
    mine = [Ticket("m", "silver") for _ in range(5)]
    for ticket in mine:
        load.send(ticket, 0.0)
    load.hear(Sample(0.0, running=5, waiting=0), pressed=False)
    for ticket in mine[:3]:
        load.end(ticket, 0.0, answered=True)
    load.hear(Sample(1.0, running=5, waiting=0), pressed=False)
    assert load.foreign == 0
    load.hear(Sample(2.0, running=5, waiting=0), pressed=False)  # a second later they are somebody's
    assert load.foreign == 3


def test_a_sample_older_than_the_last_changes_nothing() -> None:
    load = Load("e", capacity=8)
    load.hear(Sample(5.0, running=1, waiting=0), pressed=False)
    load.hear(Sample(4.0, running=8, waiting=9, generation=7), pressed=False)
    assert (load.waiting, load.generation) == (0, 0)


def test_an_engines_queue_shrinks_with_every_end_until_the_next_sample() -> None:
    load = Load("e")
    tickets = [Ticket("m", "silver") for _ in range(3)]
    for ticket in tickets:
        load.send(ticket, 0.0)
    load.hear(Sample(0.0, running=1, waiting=2), pressed=True)
    assert load.saturation == pytest.approx(0.4)
    for ticket in tickets:
        load.end(ticket, 0.0, answered=True)
    assert (load.waiting, load.saturation) == (0, 0.0)


# -- proofs ----------------------------------------------------------------------------------------------------------


def test_each_first_content_opens_one_place() -> None:
    subject = Admission(AdmissionSettings())
    subject.table({"m": [Endpoint("e", "h", 1)]}, 0.0)
    tickets = [Ticket("m", "silver") for _ in range(10)]
    for ticket in tickets:
        subject.ask(ticket, 0.0)
    assert [ticket.state for ticket in tickets].count("granted") == 2
    assert tickets[2].blocker == "unproven"
    subject.dispatched(tickets[0], "e", 0.0)
    subject.dispatched(tickets[1], "e", 0.0)
    assert subject.began(tickets[0], 1.0) == [tickets[2]]
    assert subject.began(tickets[0], 1.0) == []
    assert subject.began(tickets[1], 1.0) == [tickets[3]]
    assert subject.began(tickets[5], 1.0) == ()  # still waiting: nothing to prove


def test_without_samples_an_answer_proves_what_ran_beside_it() -> None:
    load = Load("e")
    first, second, third, fourth = (Ticket("m", "silver") for _ in range(4))
    load.send(first, 0.0)
    load.send(second, 0.1)
    assert not load.open
    load.end(second, 1.1, answered=True, tokens=10)  # sent after the first, which has not ended: both were running
    assert (load.mark, load.open) == (2, True)
    load.send(third, 1.2)
    load.send(fourth, 1.2)
    load.end(fourth, 2.2, answered=False, tokens=10)  # broke off: says nothing
    load.end(first, 2.2, answered=True, tokens=0)  # no length is known: nor does this
    assert load.mark == 2
    load.end(third, 2.2, answered=True, tokens=10)
    assert (load.mark, load.inflight, len(load.unproven)) == (2, 0, 0)


def test_without_samples_answers_that_end_together_ran_together() -> None:
    load = Load("e")
    tickets = [Ticket("m", "silver") for _ in range(4)]
    for ticket in tickets:
        load.send(ticket, 0.0)
    for ticket in tickets:
        load.end(ticket, 1.0, answered=True, tokens=10)
    assert load.mark == 4


@pytest.mark.parametrize("late_s", [0.0, 0.04])
def test_without_samples_answers_that_end_one_by_one_ran_one_by_one(late_s: float) -> None:
    load = Load("e")
    tickets = [Ticket("m", "silver") for _ in range(6)]
    for at, ticket in enumerate(tickets):
        load.send(ticket, max(0.0, at - 2.0))  # two wait behind the one that runs
    for at, ticket in enumerate(tickets, 1):
        load.end(ticket, at + late_s * (at % 2), answered=True, tokens=10)
    assert load.mark == 1


@pytest.mark.parametrize(("took_s", "tokens"), [(0.1, 10), (5.0, 0)])
def test_without_samples_what_proves_nothing_is_tried_one_at_a_time(took_s: float, tokens: int) -> None:
    """The ends of short answers are read in any order, and embeddings have no tokens to measure by."""
    load = Load("e")
    let_in = []
    for turn in range(1, 9):
        tickets = []
        while load.open:
            tickets.append(Ticket("m", "silver"))
            load.send(tickets[-1], turn * 10.0)
        let_in.append(len(tickets))
        for ticket in tickets:
            load.end(ticket, turn * 10.0 + took_s, answered=True, tokens=tokens)
    assert let_in[0] == 2
    assert all(later > earlier for earlier, later in pairwise(let_in))


def test_where_no_sample_comes_ends_have_to_tell() -> None:
    subject = Admission(AdmissionSettings())
    table = {"m": [Endpoint("e", "h", 1, engine="vllm")]}
    subject.table(table, 0.0)
    tickets = [Ticket("m", "gold") for _ in range(40)]
    for ticket in tickets:
        subject.ask(ticket, 0.0)
    subject.unheard("e")
    subject.unheard("gone")
    subject.table(table, 0.5)  # a change of something else
    for ticket in tickets[:2]:
        subject.dispatched(ticket, "e", 1.0)
    for ticket in tickets[:2]:
        subject.finished(ticket, 2.0, tokens=10)
    load = subject.loads["e"]
    assert (load.mark, load.leased) == (2, 4)


@pytest.mark.parametrize("took_s", [0.005, 0.5])
def test_before_the_first_sample_ends_say_nothing(took_s: float) -> None:
    """It comes in a moment, and then it is known. Until then a router that has just started reads everything late."""
    subject = Admission(AdmissionSettings())
    subject.table({"m": [Endpoint("e", "h", 1, engine="vllm")]}, 0.0)
    tickets = [Ticket("m", "gold") for _ in range(40)]
    for ticket in tickets:
        subject.ask(ticket, 0.0)
    load = subject.loads["e"]
    for at in range(20):
        ticket = next(each for each in tickets if each.state == "granted")
        subject.dispatched(ticket, "e", at / 100)
        subject.finished(ticket, at / 100 + took_s, tokens=4)
        assert load.inflight + load.leased == 2
    subject.table({"m": [Endpoint("e", "h", 1, engine="vllm")]}, 0.9)
    subject.sampled("e", Sample(1.0, 2, 0), 1.0)
    subject.silent("e", 2.0)
    subject.expire(20.0)  # it has been silent for so long that it is as if it had never been scraped
    running = [each for each in tickets if each.state == "granted"]
    assert len(running) == 4
    for ticket in running:
        subject.dispatched(ticket, "e", 20.0)
    subject.finished(running[0], 20.005, tokens=4)
    assert load.inflight + load.leased == 5  # 2 ran at once by the sample, one is tried, and 2 may be there unproven


@pytest.mark.parametrize(("seen_at", "mark"), [(0.1, 3), (0.9, 1)])
def test_without_samples_a_stream_counts_those_seen_running_while_it_ran_for_certain(seen_at: float, mark: int) -> None:
    """What came later may have taken its place: its end and their first content are read in any order."""
    load = Load("e")
    first, *others = (Ticket("m", "silver") for _ in range(3))
    load.send(first, 0.0)
    load.prove(first, 0.05)
    for ticket in others:
        load.send(ticket, 0.0)
        load.prove(ticket, seen_at)
    load.send(Ticket("m", "silver"), 0.0)
    load.end(first, 1.0, answered=True, tokens=10)
    assert load.mark == mark


def test_an_outside_provider_has_no_batch_to_overfill() -> None:
    subject = Admission(AdmissionSettings())
    subject.table({"m": [Endpoint("e", "h", 1)]}, 0.0, elastic={"e"})
    tickets = [Ticket("m", "bronze") for _ in range(500)]
    for ticket in tickets:
        subject.ask(ticket, 0.0)
    assert {ticket.state for ticket in tickets} == {"granted"}


@pytest.mark.parametrize(
    ("waiting", "kv", "running", "capacity", "figure"),
    [
        (0, 0.0, 4, 8, 0.5),
        (0, 0.0, 10, 8, 1.25),
        (0, 0.0, 13, 8, 13 / 8),
        (0, 0.0, 261, 256, 261 / 256),
        (0, 0.0, 266, 256, 2.0),
        (5, 0.0, 4, 8, 1.0),
        (0, 0.4, 1, 8, 0.5),
        (0, 0.4, 100, 0, 0.5),
        (1, 0.0, 100, 0, 0.2),
    ],
)
def test_saturation(waiting: int, kv: float, running: int, capacity: int, figure: float) -> None:
    assert saturation(waiting, kv, running, capacity) == pytest.approx(figure)

"""Prefix affinity against replicas whose caches are too small: a simulation of engines around the real choice.

Three replicas, each with a block cache that holds a third of all preambles, evicting the least recently used preamble
from its tail, as vLLM does. Closed-loop clients ask a fresh question under a random preamble; a missing block costs
prefill time, a full replica queues, and what it reports about itself is up to a second old.
"""

from __future__ import annotations

import heapq
from collections import Counter, OrderedDict
from random import Random

import pytest

from appliance.facts.choice import Outcome
from appliance.facts.endpoint import Endpoint, Sample
from appliance.facts.settings import Model, Prefix
from appliance.rules.scheduling.pipeline import Policy, choose
from appliance.rules.scheduling.table import Entry, Table

BLOCK = 64
PREAMBLE_BLOCKS = 64
AFFINITY = Policy()
BLIND = Policy(prefix=0.0)
LETTERS = b"abcdefghijklmnopqrstuvwxyz ,."


def preambles(count: int, rng: Random) -> list[bytes]:
    return [bytes(rng.choices(LETTERS, k=BLOCK * PREAMBLE_BLOCKS)) for _ in range(count)]


def prompt(preamble: bytes, rng: Random) -> bytes:
    question = bytes(rng.choices(LETTERS, k=100))
    return b'[{"role":"system","content":"' + preamble + b'"},{"role":"user","content":"' + question + b'"}]'


def fleet(replicas: int = 3, capacity: int = 0) -> Entry:
    table = Table(Prefix())
    table.replace(
        [
            Endpoint(f"e{index}", "10.0.0.1", 8000 + index, models=("m",), engine="vllm", capacity=capacity)
            for index in range(replicas)
        ],
        [Model("m")],
    )
    return table.resolve("m")


class Cache:
    """Leading blocks held per preamble; the least recently used loses its tail first."""

    def __init__(self, blocks: int) -> None:
        self.free = blocks
        self.held: OrderedDict[int, int] = OrderedDict()

    def use(self, preamble: int) -> int:
        """Blocks found; afterwards all of them are there."""
        found = self.held.pop(preamble, 0)
        need = PREAMBLE_BLOCKS - found
        while self.free < need and self.held:
            oldest = next(iter(self.held))
            taken = min(need - self.free, self.held[oldest])
            self.held[oldest] -= taken
            self.free += taken
            if not self.held[oldest]:
                del self.held[oldest]
        got = min(need, self.free)
        self.free -= got
        self.held[preamble] = found + got
        return found


class Run:
    """One simulation.

    `hits` is the share of preamble blocks found in caches after the warm-up. From the request number `slow_from` on,
    the replicas in `slow` take that many times as long; `before` and `after` count (preamble, replica) on either side.
    """

    def __init__(
        self,
        entry: Entry,
        kinds: int,
        *,
        policy: Policy = AFFINITY,
        oracle: bool = False,
        clients: int = 12,
        requests: int = 2500,
        slots: int = 16,
        seed: int = 1,
        popular: float = 0.0,
        slow: dict[str, float] | None = None,
        slow_from: int = 0,
    ) -> None:
        rng = Random(seed)
        texts = preambles(kinds, rng)
        weights = [1.0 / (index + 1) ** popular for index in range(kinds)]
        members = entry.members
        caches = {member.id: Cache(kinds * PREAMBLE_BLOCKS // len(members)) for member in members}
        running = {member.id: 0 for member in members}
        queues: dict[str, list[tuple]] = {member.id: [] for member in members}
        events: list[tuple] = []
        self.before: Counter[tuple[int, str]] = Counter()
        self.after: Counter[tuple[int, str]] = Counter()
        self.results: Counter[str] = Counter()
        found = asked = done = sequence = 0

        def later(at: float, what: str, payload: object) -> None:
            nonlocal sequence
            sequence += 1
            heapq.heappush(events, (at, sequence, what, payload))

        def start(now: float, lease, kind: int) -> None:
            nonlocal found, asked
            name = lease.member.id
            running[name] += 1
            hit = caches[name].use(kind)
            if done > requests // 5:
                found += hit
                asked += PREAMBLE_BLOCKS
            pace = (slow or {}).get(name, 1.0) if done >= slow_from else 1.0
            length = ((PREAMBLE_BLOCKS - hit) * 0.01 + 0.5 * (1 + 0.03 * running[name])) * pace * rng.uniform(0.7, 1.3)
            later(now + length, "end", lease)

        for _ in range(clients):
            later(rng.uniform(0.0, 1.0), "ask", None)
        later(1.0, "scrape", None)
        while done < requests:
            now, _, what, payload = heapq.heappop(events)
            if what == "scrape":
                for member in members:
                    kv = min(1.0, running[member.id] / 24)
                    member.hear(Sample(now, running[member.id], len(queues[member.id]), kv), 1.0)
                later(now + 1.0, "scrape", None)
            elif what == "ask":
                kind = rng.choices(range(kinds), weights)[0]
                if oracle:
                    member = members[kind % len(members)]
                else:
                    picked, choice = choose(entry, policy, now, rng, text=prompt(texts[kind], rng))
                    assert picked is not None
                    member = picked
                    self.results[choice.prefix] += 1
                (self.before if done < slow_from else self.after)[kind, member.id] += 1
                lease = member.begin(now)
                if running[member.id] < slots:
                    start(now, lease, kind)
                else:
                    queues[member.id].append((lease, kind))
            else:
                lease = payload
                lease.finish(Outcome.SUCCESS, now, rng)
                name = lease.member.id
                running[name] -= 1
                done += 1
                if queues[name]:
                    start(now, *queues[name].pop(0))
                later(now + rng.expovariate(20.0), "ask", None)
        self.hits = found / asked
        self.elapsed_s = now


@pytest.mark.parametrize("clients", [1, 6, 12, 24])
@pytest.mark.parametrize("kinds", [8, 24, 64])
def test_affinity_gets_nine_tenths_of_the_hits_of_pinning(kinds: int, clients: int) -> None:
    oracle = Run(fleet(), kinds, oracle=True, clients=clients).hits
    affinity = Run(fleet(), kinds, clients=clients).hits
    blind = Run(fleet(), kinds, policy=BLIND, clients=clients).hits
    print(f"{kinds} preambles, {clients} clients: pinned {oracle:.3f}, affinity {affinity:.3f}, without {blind:.3f}")
    assert affinity >= 0.9 * oracle
    assert 0.1 < blind < 0.4


@pytest.mark.parametrize("clients", [1, 3, 6, 24])
def test_a_system_prompt_for_everybody_does_not_send_everybody_to_one_replica(clients: int) -> None:
    run = Run(fleet(), 1, clients=clients, requests=600)
    shares = [run.after[0, name] / 600 for name in ("e0", "e1", "e2")]
    print(f"{clients} clients under one system prompt:", ", ".join(f"{share:.0%}" for share in shares))
    assert all(share >= 0.25 for share in shares)


def test_simultaneous_requests_under_one_system_prompt_find_the_idle_replicas() -> None:
    entry = fleet()
    rng = Random(1)
    text = preambles(1, rng)[0]
    for _ in range(20):
        choose(entry, AFFINITY, 0.0, rng, text=prompt(text, rng))
    busy = []
    for _ in range(3):
        member, _ = choose(entry, AFFINITY, 0.0, rng, text=prompt(text, rng))
        assert member is not None
        busy.append(member)
        member.begin(0.0)
    assert len(set(busy)) == 3


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_an_overloaded_replica_loses_its_affinity_traffic_and_the_others_keep_theirs(seed: int) -> None:
    run = Run(fleet(), 24, clients=24, requests=3000, seed=seed, slow={"e0": 10.0}, slow_from=1000)
    home = {kind: max(("e0", "e1", "e2"), key=lambda name: run.before[kind, name]) for kind in range(24)}
    lost = [kind for kind in home if home[kind] == "e0"]
    kept = [kind for kind in home if home[kind] != "e0"]

    def at_home(kinds: list[int], went: Counter[tuple[int, str]]) -> float:
        everywhere = sum(went[kind, name] for kind in kinds for name in ("e0", "e1", "e2"))
        return sum(went[kind, home[kind]] for kind in kinds) / everywhere

    print(
        f"e0 slows down: its preambles at home {at_home(lost, run.before):.2f} -> {at_home(lost, run.after):.2f}, "
        f"the others' {at_home(kept, run.before):.2f} -> {at_home(kept, run.after):.2f}"
    )
    assert len(lost) >= 5
    assert at_home(lost, run.before) > 0.85
    assert at_home(lost, run.after) < 0.6
    assert at_home(kept, run.after) > 0.85

"""The prefix tree: what it finds, whom it speaks for, and that it stays within its bounds."""

from __future__ import annotations

import sys
from collections import Counter
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.rules.scheduling.affinity import LONGEST_KEY, Remembered
from appliance.rules.scheduling.prefixes import FADE_VISITS, NODE_BYTES, TEXT_BYTES, Node, Prefixes

A, B, C = 1, 2, 3
EVERYBODY = (A, B, C)


def nodes(tree: Prefixes) -> list[Node]:
    found = []
    waiting = [tree._root]
    while waiting:
        node = waiting.pop()
        found.append(node)
        waiting.extend((node.children or {}).values())
    return found[1:]


def check(tree: Prefixes) -> None:
    """Everything that must hold after any history."""
    below = nodes(tree)
    assert len(below) == len(tree)
    assert set(below) == set(tree._recent)
    assert tree.size_bytes == sum(len(node.label) + NODE_BYTES for node in below)
    assert tree.size_bytes <= tree.max_bytes and len(tree) <= tree.max_nodes
    owned: Counter[int] = Counter()
    place = {node: index for index, node in enumerate(tree._recent)}
    for node in below:
        assert node.label
        assert node.parent is not None and node.parent.children is not None
        assert node.parent.children[node.label[0]] is node
        assert node.parent is tree._root or place[node.parent] > place[node], "a parent older than its child"
        for identity in node.counts:
            owned[identity] += len(node.label)
    assert tree.owned == dict(owned)


def common(one: bytes, other: bytes) -> int:
    length = 0
    while length < min(len(one), len(other)) and one[length] == other[length]:
        length += 1
    return length


def put(tree: Prefixes, text: bytes, identity: int) -> int:
    match = tree.match(text)
    matched = match.matched_bytes
    tree.record(match, identity)
    return matched


texts = st.lists(st.text("ab", max_size=12).map(str.encode), max_size=60)


@given(texts, texts)
def test_the_longest_match_is_that_of_brute_force(known: list[bytes], asked: list[bytes]) -> None:
    tree = Prefixes()
    for text in known:
        put(tree, text, A)
    check(tree)
    for text in asked:
        longest = max((common(text, other) for other in known), default=0)
        assert tree.match(text).matched_bytes == longest


@given(
    st.lists(st.tuples(st.text("abc", max_size=40).map(str.encode), st.integers(1, 4)), max_size=150),
    st.integers(1, 12),
    st.integers(NODE_BYTES, 20 * NODE_BYTES),
)
def test_the_bounds_hold_and_the_sums_agree_after_any_history(
    history: list[tuple[bytes, int]], max_nodes: int, max_bytes: int
) -> None:
    tree = Prefixes(max_bytes, max_nodes)
    for text, identity in history:
        put(tree, text, identity)
        check(tree)


@given(
    st.lists(st.tuples(st.text("ab", min_size=1, max_size=20).map(str.encode), st.integers(1, 3)), max_size=80),
    st.text("ab", max_size=20).map(str.encode),
    st.lists(st.integers(1, 5), min_size=1, max_size=4, unique=True),
)
def test_votes_are_bytes_of_the_matched_head_for_allowed_endpoints_that_saw_it(
    history: list[tuple[bytes, int]], text: bytes, allowed: list[int]
) -> None:
    tree = Prefixes()
    for known, identity in history:
        put(tree, known, identity)
    match = tree.match(text)
    votes = tree.votes(match, allowed, max(3, len(allowed)))
    assert len(votes) == len(allowed)
    for identity, vote in zip(allowed, votes, strict=True):
        seen = max((common(text, known) for known, who in history if who == identity), default=0)
        assert 0 <= vote <= seen


def test_the_least_recently_used_leaf_goes_first() -> None:
    tree = Prefixes(max_nodes=3)
    put(tree, b"alpha", A)
    put(tree, b"beta", A)
    put(tree, b"gamma", A)
    put(tree, b"alpha", A)
    put(tree, b"delta", A)
    assert tree.match(b"beta").matched_bytes == 0
    assert [tree.match(text).matched_bytes for text in (b"alpha", b"gamma", b"delta")] == [5, 5, 5]


def test_only_the_head_of_a_long_prompt_is_kept() -> None:
    tree = Prefixes()
    put(tree, b"x" * (TEXT_BYTES + 5000), A)
    assert tree.size_bytes == TEXT_BYTES + NODE_BYTES


def busy_tree() -> Prefixes:
    """A tree in which a hundred other prompts went round."""
    tree = Prefixes()
    for number in range(100):
        put(tree, b"%03d other" % number, 1 + number % 3)
    return tree


def test_it_prefers_the_endpoint_seen_most_and_not_last() -> None:
    tree = busy_tree()
    for _ in range(5):
        put(tree, b"preamble and question", A)
    put(tree, b"preamble and another", B)
    assert tree.votes(tree.match(b"preamble and third"), EVERYBODY, 3) == [13, 0, 0]


def test_where_the_first_may_not_win_the_second_does() -> None:
    tree = busy_tree()
    for identity in (A, A, A, B, B, C):
        put(tree, b"preamble", identity)
    assert tree.votes(tree.match(b"preamble"), (B, C), 3) == [8, 0]


def test_a_label_that_matches_in_part_counts_in_part() -> None:
    tree = busy_tree()
    put(tree, b"preamble one", A)
    match = tree.match(b"preamble two")
    assert (match.matched_bytes, match.inside) == (9, 9)
    assert tree.votes(match, EVERYBODY, 3) == [9, 0, 0]


def test_a_head_that_everybody_shares_speaks_for_nobody_until_everybody_knows_it() -> None:
    tree = Prefixes()
    for number in range(20):
        put(tree, b"shared %d" % number, A)
    assert tree.votes(tree.match(b"shared"), EVERYBODY, 3) == [0, 0, 0]
    for number in range(20, 40):
        put(tree, b"shared %d" % number, B if number % 2 else C)
    assert tree.votes(tree.match(b"shared"), EVERYBODY, 3) == [6, 6, 6]


def test_a_head_has_as_many_homes_as_its_share_of_the_traffic() -> None:
    tree = Prefixes()
    for number in range(300):
        put(tree, b"half" if number % 2 else b"%d" % number, 1 + number // 2 % 4)
    votes = tree.votes(tree.match(b"half"), (1, 2, 3, 4), 4)
    assert sorted(votes) == [0, 0, 4, 4]


def test_a_conversation_alone_in_the_house_stays_where_it_is() -> None:
    """Its early turns are the head of all traffic, but what the last turns added is not."""
    tree = Prefixes()
    rng = Random(1)
    talk = b""
    for _ in range(30):
        talk += bytes(rng.choices(b"abcdefgh ", k=400))
        votes = tree.votes(tree.match(talk), EVERYBODY, 3)
        assert votes[1] == votes[2] == 0
        put(tree, talk, A)
    assert tree.votes(tree.match(talk), EVERYBODY, 3)[0] > 0.25 * len(talk)


def test_counts_fade() -> None:
    tree = busy_tree()
    for _ in range(50):
        put(tree, b"preamble", A)
    for number in range(int(3 * FADE_VISITS)):
        put(tree, b"%d" % number, B)
    for _ in range(20):
        put(tree, b"preamble", C)
    assert tree.votes(tree.match(b"preamble"), EVERYBODY, 3) == [0, 0, 8]
    check(tree)


def test_old_counts_vanish_with_what_they_owned() -> None:
    tree = Prefixes()
    put(tree, b"preamble", A)
    for number in range(int(8 * FADE_VISITS)):
        put(tree, b"%d" % number, B)
    put(tree, b"preamble", B)
    assert A not in tree.owned
    check(tree)


def held_bytes(tree: Prefixes) -> int:
    """What the tree really takes, object by object."""
    total = sys.getsizeof(tree._recent)
    for node in nodes(tree):
        parts = (node, node.label, node.visits, node.counts, *node.counts.values())
        total += sum(sys.getsizeof(part) for part in parts)
        if node.children is not None:
            total += sys.getsizeof(node.children)
    return total


def test_a_hundred_thousand_distinct_prompts_stay_within_the_memory_they_were_given() -> None:
    limit = 4 << 20
    tree = Prefixes(max_bytes=limit)
    rng = Random(7)
    heads = [bytes(rng.choices(b"abcdefghijkl ", k=500)) for _ in range(50)]
    for number in range(100_000):
        put(tree, heads[number % 50] + b"%d" % (number * 7919) + heads[number % 49][:200], 1 + number % 3)
    held = held_bytes(tree)
    print(f"100,000 prompts: {len(tree)} nodes, {tree.size_bytes} bytes by its own count, {held} held")
    assert tree.size_bytes <= limit
    assert held <= limit
    assert len(tree) > 5000


@settings(max_examples=50)
@given(st.lists(st.tuples(st.binary(max_size=3), st.sampled_from(["a", "b"])), max_size=60), st.integers(1, 5))
def test_remembered_places_are_the_latest_of_the_last_keys_used(puts: list[tuple[bytes, str]], most: int) -> None:
    places = Remembered(most)
    model: dict[bytes, str] = {}
    for key, endpoint in puts:
        places.put(key, endpoint)
        model.pop(key, None)
        model[key] = endpoint
        if len(model) > most:
            del model[next(iter(model))]
    assert len(places) == len(model) <= most
    for key, endpoint in model.items():
        assert places.get(key) == endpoint
    places.forget("a")
    assert all(places.get(key) == ("" if endpoint == "a" else endpoint) for key, endpoint in model.items())


def test_asking_for_a_place_keeps_it() -> None:
    places = Remembered(2)
    places.put("one", "a")
    places.put("two", "b")
    assert places.get("one") == "a"
    places.put("three", "c")
    assert (places.get("one"), places.get("two")) == ("a", "")


def test_a_key_without_end_is_not_remembered() -> None:
    places = Remembered()
    places.put("x" * (LONGEST_KEY + 1), "a")
    assert len(places) == 0

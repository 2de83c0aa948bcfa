"""The sim's KV blocks and prefix cache."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.sim.blocks import TOKEN_BYTES, Blocks, PrefixCache

BLOCK_TOKENS = 2
BLOCK = BLOCK_TOKENS * TOKEN_BYTES


def prompt_of(letters: str, tail: bytes = b"") -> bytes:
    """A prompt of one block per letter, and perhaps an incomplete one behind."""
    return b"".join(letter.encode() * BLOCK for letter in letters) + tail


def common(one: str, other: str) -> int:
    """Leading letters that two prompts share."""
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def test_blocks_are_held_and_released_once() -> None:
    blocks = Blocks(capacity=10)
    assert blocks.take("a", 6)
    assert not blocks.take("b", 5)
    assert blocks.held == 6
    assert blocks.take("b", 4)
    with pytest.raises(ValueError, match="already"):
        blocks.take("b", 0)
    blocks.release("a")
    assert blocks.held == 4
    with pytest.raises(KeyError):
        blocks.release("a")
    assert blocks.held == 4


def test_a_prompt_is_found_up_to_its_first_difference() -> None:
    cache = PrefixCache(10, BLOCK_TOKENS)
    cache.remember(prompt_of("abcd"))
    assert cache.match(prompt_of("abcd")) == 4
    assert cache.match(prompt_of("abxd")) == 2
    assert cache.match(prompt_of("xbcd")) == 0
    # only full blocks count, of the prompt remembered as well as of the one looked up
    assert cache.match(prompt_of("ab", tail=b"c" * (BLOCK - 1))) == 2
    cache.remember(prompt_of("y", tail=b"z" * (BLOCK - 1)))
    assert cache.match(prompt_of("yz")) == 1


def test_the_least_recently_used_chain_goes_first_and_from_its_end() -> None:
    cache = PrefixCache(6, BLOCK_TOKENS)
    cache.remember(prompt_of("abc"))
    cache.remember(prompt_of("def"))
    assert cache.match(prompt_of("abc")) == 3  # used: now "def" is the older one
    cache.remember(prompt_of("gh"))
    assert cache.match(prompt_of("def")) == 1
    assert cache.match(prompt_of("abc")) == 3
    assert cache.match(prompt_of("gh")) == 2


def test_a_prompt_larger_than_the_cache_leaves_its_beginning() -> None:
    cache = PrefixCache(3, BLOCK_TOKENS)
    cache.remember(prompt_of("abcdefgh"))
    assert len(cache) == 3
    assert cache.match(prompt_of("abcdefgh")) == 3


@given(st.lists(st.tuples(st.booleans(), st.text("ab", max_size=6))), st.integers(0, 8))
def test_whatever_happens_what_is_cached_is_reachable(steps: list[tuple[bool, str]], capacity: int) -> None:
    cache = PrefixCache(capacity, BLOCK_TOKENS)
    remembered: list[str] = []
    for remember, letters in steps:
        if remember:
            cache.remember(prompt_of(letters))
            remembered.append(letters)
            assert cache.match(prompt_of(letters)) == min(len(letters), capacity)
        else:
            longest = max((common(letters, other) for other in remembered), default=0)
            assert cache.match(prompt_of(letters)) <= min(longest, capacity)
        assert len(cache) <= capacity
        # Each cached block lies on a chain that is cached from its start: no capacity is wasted on orphans.
        every = {
            link
            for other in remembered
            for link in list(cache.chain(prompt_of(other)))[: cache.match(prompt_of(other))]
        }
        assert len(every) == len(cache)

"""KV memory in blocks: what running sequences hold, and what the prefix cache remembers.

Two stores, each with its own capacity. A real engine keeps both in one pool, where cached blocks are lent until
somebody needs the room; here a test wants to set the size of the cache alone, so a running sequence never takes from it
and always holds blocks for its whole prompt, cached or not.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Iterator

import attrs

TOKEN_BYTES = 4
"""A token of prompt is this many bytes of it: near what tokenizers make of English, and nothing to download."""


@attrs.define
class Blocks:
    """The blocks that sequences hold. Each owner holds once and releases once; anything else is a bug and raises."""

    capacity: int
    held: int = 0
    _owners: dict[Hashable, int] = attrs.field(factory=dict)

    def take(self, owner: Hashable, count: int) -> bool:
        """Hold `count` blocks for `owner`; False, and nothing held, when they are not free. Raises on a second hold."""
        if owner in self._owners:
            raise ValueError("this owner holds blocks already")
        if self.held + count > self.capacity:
            return False
        self._owners[owner] = count
        self.held += count
        return True

    def release(self, owner: Hashable) -> None:
        """Free what `owner` holds. Raises KeyError when it holds nothing."""
        self.held -= self._owners.pop(owner)


class PrefixCache:
    """Which prompt blocks were computed lately: a set of chain hashes, the least recently used dropped first.

    A block's hash covers everything before it, so finding block i implies that the whole prompt up to it is the same.
    Chains are touched from their end to their start: a block is then never older than its children, the ends go first,
    and what is left of a chain is always usable from its start. Touching in reading order would drop the start first
    and leave blocks that nothing can reach.
    """

    def __init__(self, capacity_blocks: int, block_tokens: int) -> None:
        self.capacity_blocks = capacity_blocks
        self.block_tokens = block_tokens
        self._blocks: OrderedDict[bytes, None] = OrderedDict()

    def __len__(self) -> int:
        return len(self._blocks)

    def chain(self, prompt: bytes) -> Iterator[bytes]:
        """The hash of each full block of `prompt`, in order."""
        size = self.block_tokens * TOKEN_BYTES
        link = b""
        for start in range(0, len(prompt) - size + 1, size):
            link = hashlib.blake2b(link + prompt[start : start + size], digest_size=12).digest()
            yield link

    def match(self, prompt: bytes) -> int:
        """How many leading blocks of `prompt` are cached; they count as used now."""
        found: list[bytes] = []
        for link in self.chain(prompt):
            if link not in self._blocks:
                break
            found.append(link)
        for link in reversed(found):
            self._blocks.move_to_end(link)
        return len(found)

    def remember(self, prompt: bytes) -> None:
        """Cache the leading blocks of `prompt`, as many as the cache can hold."""
        chain: list[bytes] = []
        for link in self.chain(prompt):
            if len(chain) >= self.capacity_blocks:
                break
            chain.append(link)
        for link in reversed(chain):
            self._blocks[link] = None
            self._blocks.move_to_end(link)
        while len(self._blocks) > self.capacity_blocks:
            self._blocks.popitem(last=False)

    def clear(self) -> None:
        self._blocks.clear()

"""What the sim says, so that a test can know the text beforehand, and how it counts.

An answer is "You said:" and the words of the last thing the user said; "You said: nothing." when that was nothing. One
word is one token. Left alone it ends there, at the latest after `LONGEST_ECHO` words. Asked to go on (`ignore_eos`,
`min_tokens`, as vLLM spells it) it repeats the same words, each round after the first without "You said:".
"""

from __future__ import annotations

import hashlib
import struct
from itertools import cycle, islice

from .blocks import TOKEN_BYTES

LONGEST_ECHO = 64
"""Words of an answer that nobody asked to be longer: a pasted book is not read back."""


def count_tokens(text: bytes) -> int:
    """Tokens of a prompt: one per four bytes, at least one."""
    return max(1, -(-len(text) // TOKEN_BYTES))


def answer_words(said: str) -> list[str]:
    """The words of the answer to `said`; all but the first carry the space before them, so joining gives the text."""
    words = said.split(None, LONGEST_ECHO)[:LONGEST_ECHO] or ["nothing."]
    return ["You", " said:", *(" " + word for word in words)]


def stretch(words: list[str], tokens: int) -> list[str]:
    """Exactly `tokens` words: cut, or repeated from the third word on."""
    if tokens <= len(words):
        return words[:tokens]
    return [*words, *islice(cycle(words[2:]), tokens - len(words))]


def answer_text(said: str, tokens: int | None = None) -> str:
    """The whole text of an answer; `tokens` words of it where given, repeated as `ignore_eos` does."""
    words = answer_words(said)
    return "".join(words if tokens is None else stretch(words, tokens))


def token_ids(text: bytes) -> list[int]:
    """A number per token, from which `token_bytes` makes the text again: its bytes behind a leading 1."""
    return [int.from_bytes(b"\x01" + text[at : at + TOKEN_BYTES], "big") for at in range(0, len(text), TOKEN_BYTES)]


def token_bytes(ids: list[int]) -> bytes:
    """The text of `token_ids`. Raises OverflowError or ValueError for a number that is no token of ours."""
    parts = []
    for number in ids:
        raw = number.to_bytes((number.bit_length() + 7) // 8, "big")
        if not 1 < len(raw) <= TOKEN_BYTES + 1 or raw[0] != 1:
            raise ValueError(f"{number} is not a token of this model")
        parts.append(raw[1:])
    return b"".join(parts)


def embed(text: bytes, dimensions: int) -> list[float]:
    """A vector of length 1 that depends on every byte of `text`; equal texts have equal vectors, and that is all."""
    raw = b"".join(hashlib.sha256(bytes([part]) + text).digest() for part in range(-(-dimensions * 2 // 32)))
    values = [value / 32768.0 + 1 / 65536.0 for value in struct.unpack(f">{dimensions}h", raw[: dimensions * 2])]
    norm = sum(value * value for value in values) ** 0.5
    return [value / norm for value in values]

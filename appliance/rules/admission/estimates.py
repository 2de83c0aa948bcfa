"""Work: what a request costs an engine, in tokens it has to compute. Guessed before, counted after.

Prompt tokens found in a cache are free; one token of prompt and one of answer count the same. That undercharges
answers (a decode step costs more than a token of prefill) but needs no figure that differs from engine to engine.
"""

from __future__ import annotations

BYTES_PER_TOKEN = 4.0
OUTPUT_TOKENS = 256.0
"""What a model is believed to write, and a token to be long, until it has answered a few times."""
WEIGHT = 1 / 16
"""Of a new answer against all earlier ones."""


class Typical:
    """What a model's requests look like: bytes of JSON per prompt token, tokens per answer. One for each model.

    Means that forget, kept as plain floats: they need no bounds and no locks, and being off by half costs a
    tenant half a turn until its request is settled.
    """

    __slots__ = ("bytes_per_token", "output_tokens")

    def __init__(self) -> None:
        self.bytes_per_token = BYTES_PER_TOKEN
        self.output_tokens = OUTPUT_TOKENS

    def learn(self, prompt_bytes: int, prompt_tokens: int, output_tokens: int) -> None:
        """Take the figures of one complete answer; `output_tokens` of a single choice."""
        if prompt_tokens > 0 and prompt_bytes > 0:
            self.bytes_per_token += WEIGHT * (prompt_bytes / prompt_tokens - self.bytes_per_token)
        self.output_tokens += WEIGHT * (output_tokens - self.output_tokens)


def estimate(
    prompt_bytes: int, typical: Typical, *, cached_bytes: int = 0, max_tokens: int | None = None, choices: int = 1
) -> int:
    """Work of a request that has not run, at least 1.

    `prompt_bytes` is the length of the raw messages, prompt or input, `cached_bytes` the part of it that some endpoint
    of the model is believed to hold, `max_tokens` the caller's own bound (None: none given), `choices` the `n` asked
    for. A bound far above what the model writes says nothing, so the smaller of the two counts.
    """
    prompt = max(0, prompt_bytes - cached_bytes) / typical.bytes_per_token
    answer = typical.output_tokens if max_tokens is None else min(max(0, max_tokens), typical.output_tokens)
    return max(1, round(prompt + answer * max(1, choices)))


def spent(prompt_tokens: int, cached_tokens: int, output_tokens: int) -> int:
    """Work of a request that has run, from its usage, at least 1."""
    return max(1, prompt_tokens - cached_tokens + output_tokens)

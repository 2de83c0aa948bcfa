"""What one sim is told at its start: names, speeds, sizes, and how it is to misbehave."""

from __future__ import annotations

import attrs

FAIL_MODES = ("exit", "500", "503", "429", "reset")
"""What `--fail-after` may do to the requests after the first N: end the process, answer an error, or reset."""

LOADING_ANSWERS = ("refused", "503")
"""How the port behaves while `--load-s` passes: no listener, as vLLM, or 503 to everything, as llama.cpp."""


@attrs.frozen
class Speeds:
    """Tokens per second; 0 means instantly. `slowdown` is S in: step time = base * (1 + S * (batch - 1))."""

    prefill_tokens_per_s: float = 50_000.0
    decode_tokens_per_s: float = 1_000.0
    slowdown: float = 0.0

    def step_s(self, batch: int) -> float:
        """Seconds of one decode step of `batch` sequences, in which each of them gets one token.

        Decoding one sequence is bound by reading the weights, which a batch shares: S = 0. A large batch, or a small
        device, is bound by arithmetic, which grows with every member: S near 1 makes them wait for each other fully.
        """
        if self.decode_tokens_per_s <= 0:
            return 0.0
        return (1.0 + self.slowdown * max(0, batch - 1)) / self.decode_tokens_per_s

    def prefill_s(self, tokens: int) -> float:
        """Seconds of computing `tokens` of prompt, when nothing else is being prefilled."""
        return tokens / self.prefill_tokens_per_s if self.prefill_tokens_per_s > 0 else 0.0


@attrs.frozen
class Sizes:
    """Room: sequences in the batch, KV blocks of running sequences, tokens per block, blocks of the prefix cache."""

    max_num_seqs: int = 256
    kv_blocks: int = 16_384
    block_tokens: int = 16
    prefix_cache_blocks: int = 4_096

    @property
    def context_tokens(self) -> int:
        """The longest sequence, prompt and answer together, that can ever run: all blocks there are."""
        return self.kv_blocks * self.block_tokens


@attrs.frozen
class Ranks:
    """The place of this process among those that together are one engine. Rank 0 leads and alone serves HTTP."""

    nnodes: int = 1
    node_rank: int = 0
    master_addr: str = "127.0.0.1"
    master_port: int = 29_501

    @property
    def leads(self) -> bool:
        return self.node_rank == 0


@attrs.frozen
class Misbehaviour:
    """Faults of the whole engine. `fail_after` and `stall_after` and `cut_after` None: never."""

    load_s: float = 0.0
    while_loading: str = "refused"
    fail_after: int | None = None
    fail_mode: str = "exit"
    stall_after: int | None = None
    cut_after: int | None = None


@attrs.frozen
class Settings:
    """Everything `appliance sim` was told. `models` are the served names, the first is the one metrics carry.

    `name` is what answers carry in `x-sim-id` and `system_fingerprint`; "" means `sim-PORT`. `keepalive_s` is how long
    an idle connection is kept (vLLM's server: 5), 0 for ever.
    """

    models: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 0
    name: str = ""
    api_key: str = ""
    keepalive_s: float = 5.0
    speeds: Speeds = Speeds()
    sizes: Sizes = Sizes()
    ranks: Ranks = Ranks()
    misbehaviour: Misbehaviour = Misbehaviour()

"""How long an engine may load.

Loading is not slow failing: 70 billion parameters from a cold disk take minutes and say something every few seconds.
So the allowance grows with the weights, and even when it is over the engine is given up only once it has fallen silent.
"""

from __future__ import annotations

import attrs


@attrs.frozen
class Patience:
    """`base_s` is allowed for any model: importing torch, compiling kernels, capturing graphs. On top of it come the
    weights at `bytes_per_s` (a slow disk or a shared file system). `silence_s` without a line of output is silence.
    `probe_every_s` is how often readiness is asked for."""

    base_s: float = 600.0
    bytes_per_s: float = 100e6
    silence_s: float = 300.0
    probe_every_s: float = 0.5

    def allowed_s(self, weight_bytes: int) -> float:
        """Seconds from the start of loading; 0 bytes are weights of unknown size (fetched by the engine itself)."""
        return self.base_s + weight_bytes / self.bytes_per_s

    def why_over(self, now: float, since: float, last_output: float, weight_bytes: int) -> str:
        """Why loading has failed, "" while it may go on. All times in seconds on one clock; `last_output` may lie
        before `since` when nothing was written yet."""
        allowed, silent = self.allowed_s(weight_bytes), now - max(since, last_output)
        if now - since <= allowed or silent <= self.silence_s:
            return ""
        return f"not ready after {now - since:.0f} s (allowed: {allowed:.0f} s), and silent for {silent:.0f} s"

"""The wait for the memory of GPUs after a stop.

The driver gives it back when the last process that held it is gone, and some time after that. A next engine that is
started before fails for want of memory, and the failure looks like its own.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence

import trio

from appliance.agent.discovery.reading import HELD_BYTES
from appliance.facts.hardware import MIB, Gpu

LOOK_S = 0.5


def still_held(gpus: Sequence[Gpu], wanted: Sequence[str], before: Mapping[str, int]) -> list[str]:
    """A sentence for each of the `wanted` GPUs (UUIDs) whose memory is not back.

    `before` is what was in use before the shard, in bytes. A GPU that is gone, or does not tell, is not waited for.
    """
    found = []
    for gpu in gpus:
        if gpu.uuid not in wanted or gpu.used_bytes is None:
            continue
        if gpu.used_bytes <= max(HELD_BYTES, before.get(gpu.uuid, 0)):
            continue
        holders = ", ".join(f"pid {holder.pid}" for holder in gpu.holders or ())
        who = f"held by {holders}" if holders else "by processes that cannot be seen"
        found.append(f"GPU {gpu.index}: {gpu.used_bytes // MIB} MiB still in use, {who}")
    return found


async def wait_until_back(
    read: Callable[[], Awaitable[tuple[Gpu, ...]]], wanted: Sequence[str], before: Mapping[str, int], within_s: float
) -> list[str]:
    """Return as soon as the memory is back, or after `within_s` with who holds it; `read` has a bound of its own."""
    held: list[str] = []
    with trio.move_on_after(within_s):
        while True:
            held = still_held(await read(), wanted, before)
            if not held:
                break
            await trio.sleep(LOOK_S)
    return held

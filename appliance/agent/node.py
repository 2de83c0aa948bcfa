"""What one agent gives to all its shards."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping

import attrs
import trio

from appliance.agent.unanswered import Questions
from appliance.facts.hardware import Gpu, Inventory
from appliance.rules.engines.patience import Patience
from appliance.rules.engines.ports import PortPool


@attrs.define
class Node:
    """`Shards` says what each of these is. `scope` goes before commands,
    `trying` is held while ports are tried."""

    run_dir: str
    agent_id: str
    executables: Mapping[str, str]
    own_argv: tuple[str, ...]
    log_bytes: int
    memory_wait_s: float
    inventory: Callable[[], Inventory]
    ports: PortPool
    environment: Mapping[str, str]
    read_gpus: Callable[[], Awaitable[tuple[Gpu, ...]]] | None
    bundle: str
    llamacpp_threads: int
    patience: Patience
    now: Callable[[], float]
    which: Callable[[str], str | None]
    scope: tuple[str, ...] = ()
    trying: trio.Lock = attrs.field(factory=trio.Lock)
    questions: Questions = attrs.field(factory=Questions)

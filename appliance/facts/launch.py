"""How one shard is started, judged and stopped: a sequence of commands, not processes."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Literal

import attrs

Signal = Literal["SIGTERM", "SIGINT", "SIGKILL"]
Target = Literal["leader", "group"]


@attrs.frozen
class Listening:
    """Something must accept TCP connections on `host`:`port` within `within_s`, or the shard fails.

    It is tried by connecting and closing at once; everything planned here bears that.
    """

    host: str
    port: int
    within_s: float


@attrs.frozen
class StopStep:
    """Send `signal` to the process itself (`leader`) or to its whole process group, then give it `grace_s` to end."""

    signal: Signal
    target: Target
    grace_s: float


@attrs.frozen
class Command:
    """One process. `env` is the whole environment: nothing else is inherited, nothing of it belongs in a log.

    `until` must hold before the next command starts (None: start it at once). `stop` is tried in order and ends with a
    SIGKILL to the group; after that, survivors are found by the marker in their environment.
    """

    name: str
    argv: tuple[str, ...]
    env: Mapping[str, str] = attrs.field(repr=False)
    stop: tuple[StopStep, ...]
    until: Listening | None = None


@attrs.frozen
class PlanFile:
    """A file that must exist, with this text and mode, before the first command starts. It may hold keys."""

    path: str
    text: str = attrs.field(repr=False)
    mode: int = 0o600


@attrs.frozen
class PortUse:
    """`count` ports from `port` on that this shard uses, and what for. All are free to bind before the start."""

    name: str
    port: int
    count: int = 1

    @property
    def numbers(self) -> range:
        return range(self.port, self.port + self.count)


@attrs.frozen
class HttpReady:
    """Ready: `health` answers 200 *and* `models` lists `name`; either alone lies for some engine.

    Connection refused and 503 mean loading. `timeout_s` is for one probe: SGLang's `/health` takes 1.0 s even when
    idle, and a slow answer is busy, not dead. `key` is shown as a bearer token, "" for none.
    """

    host: str
    port: int
    name: str
    health: str = "/health"
    models: str = "/v1/models"
    timeout_s: float = 5.0
    key: str = attrs.field(default="", repr=False)


@attrs.frozen
class LaunchPlan:
    """Everything needed to run one shard on this node.

    First `files` are written and `directories` made (mode 0700), then `awaits` is waited for (a worker: the leader's
    rendezvous), then the commands start in order. All but the last are sidecars: kept alive for the shard's life and
    torn down after it, last first. The last one's exit is the shard's. `ready` None: this rank serves nothing and is
    judged by staying alive. `secrets` must be taken out of whatever is shown of the processes' output: SGLang prints
    its key among its settings.
    """

    engine: str
    commands: tuple[Command, ...]
    ports: tuple[PortUse, ...] = ()
    files: tuple[PlanFile, ...] = ()
    directories: tuple[str, ...] = ()
    awaits: Listening | None = None
    ready: HttpReady | None = None
    secrets: tuple[str, ...] = attrs.field(default=(), repr=False)

    @property
    def serves(self) -> bool:
        """Whether this rank answers HTTP requests for the model."""
        return self.ready is not None

    @property
    def main(self) -> Command:
        """The command whose exit is the shard's."""
        return self.commands[-1]

    @property
    def sidecars(self) -> tuple[Command, ...]:
        return self.commands[:-1]

"""What an agent says about one shard: the only answer there is to a command."""

from __future__ import annotations

from typing import Literal

import attrs

from appliance.facts.replica import Shard

State = Literal["fetching", "starting", "loading", "ready", "draining", "stopping", "stopped", "failed"]
"""In this order, but for `failed`, which may follow on any of them. `starting` is everything before the engine's own
process runs (waiting for the rendezvous, sidecars), `loading` everything until it serves."""

ENDED: frozenset[State] = frozenset({"stopped", "failed"})


@attrs.frozen
class Report:
    """One shard as it is now.

    `since` is when it entered the state, in seconds since 1970. `reason` is one sentence: why it failed, or what it
    waits for; "" when there is nothing to say. `exit` tells how the engine's own process ended (`exit status 3`,
    `signal SIGKILL`, `unknown (adopted)` for one that was not our child), "" while it runs. `tail` are the last lines
    of its log, set when it failed, without keys. `pid` is the engine's own process (0: none yet), `port` where it
    serves HTTP and `url` the same without a trailing slash and without `/v1` (0 and "" for a rank that serves nothing).
    `ports` are all it holds, inner ones too. `adopted`: it was started by an earlier run of the agent. `log` is the
    file with its output. `refused_port` is the rendezvous port, where somebody else has it and nothing was started for
    that reason; 0 in every other case.
    """

    shard: Shard
    state: State
    since: float
    reason: str = ""
    exit: str = ""
    tail: tuple[str, ...] = ()
    pid: int = 0
    port: int = 0
    url: str = ""
    ports: tuple[int, ...] = ()
    adopted: bool = False
    log: str = ""
    refused_port: int = 0

    @property
    def ended(self) -> bool:
        """Whether nothing of the shard is left but this report."""
        return self.state in ENDED

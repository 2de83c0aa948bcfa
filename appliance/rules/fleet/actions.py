"""What one pass over the fleet says: commands to send, changes to log, and why something wanted is not there."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Literal

import attrs

from appliance.facts.link import Forget, Start, Stop
from appliance.rules.placement.spots import Rejection

Command = Start | Stop | Forget

Level = Literal["info", "warning", "error"]


@attrs.frozen
class Event:
    """A change worth a line in the log. `name` is a stable word, `fields` name the things involved."""

    level: Level
    name: str
    fields: Mapping[str, object] = attrs.field(factory=dict)


@attrs.frozen
class Actions:
    """What to do now: each command to the agent of its node, in this order. A command is said once per connection.

    `again_at` is when the next pass is due at the latest, by the clock of `now`; infinity: at the next change.
    """

    commands: tuple[tuple[str, Command], ...] = ()
    events: tuple[Event, ...] = ()
    again_at: float = math.inf


@attrs.frozen
class Failure:
    """One replica that failed by itself. `line` is the last line of the shard's log, "" when it left none; `tail` are
    the last ones, for operators who come after the node has forgotten it. `refused_port` as in its report."""

    at: float
    replica: str
    profile: str
    node: str
    rank: int
    reason: str
    exit: str = ""
    line: str = ""
    tail: tuple[str, ...] = ()
    refused_port: int = 0

    @property
    def sentence(self) -> str:
        told = f"{self.reason or 'it failed without saying why'} on {self.node}"
        return f"{told} ({self.line})" if self.line and self.line not in told else told


@attrs.frozen
class Why:
    """Where a model stands, and why replicas that are wanted of it are not there.

    `wanted` is how many are to run now, `because` why so many; `serving` how many can take requests. `missing` says
    what keeps the rest away, "" when none is missing. `retry_in_s` counts until the model is tried again after
    a failure (0: no wait is running). `rejections` are those that one more replica would meet: every profile with every
    candidate. `failures` are the last ones, the latest first.
    """

    model: str
    wanted: int
    because: str
    serving: int
    starting: int
    leaving: int
    missing: str = ""
    retry_in_s: float = 0.0
    rejections: tuple[Rejection, ...] = ()
    failures: tuple[Failure, ...] = ()

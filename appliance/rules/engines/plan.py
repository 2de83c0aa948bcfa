"""From a shard and a node to a launch plan, or to every reason why there is none."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from appliance.facts.launch import LaunchPlan
from appliance.facts.replica import Shard
from appliance.rules.engines import llamacpp, sglang, sim, vllm
from appliance.rules.engines.engine import Engine, Site
from appliance.rules.engines.ports import NoPort, PortLease
from appliance.rules.engines.refuse import refusals

ENGINES: Mapping[str, Engine] = {
    engine.name: engine for engine in (vllm.ENGINE, sglang.ENGINE, llamacpp.ENGINE, sim.ENGINE)
}
"""Every engine an agent can start: a new one is a file and an entry here."""


class CannotLaunch(Exception):
    """The shard is not started. `reasons` are sentences for operators, all that were found."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__("; ".join(reasons))
        self.reasons = tuple(reasons)


def plan(shard: Shard, site: Site) -> LaunchPlan:
    """How to run `shard` on `site`. Raises CannotLaunch with every reason against it.

    Takes ports from `site.ports` and says which; the caller keeps them (`site.ports.without(...)`) as long as the shard
    lives, and plans again with those taken that it cannot bind.
    """
    engine = ENGINES.get(shard.profile.engine)
    if engine is None:
        raise CannotLaunch([f"engine: expected one of {', '.join(ENGINES)}"])
    reasons = refusals(shard, site, engine) + engine.refuse(shard, site)
    if reasons:
        raise CannotLaunch(reasons)
    try:
        made = engine.plan(shard, site, PortLease(site.ports))
    except NoPort as none_left:
        raise CannotLaunch([str(none_left)]) from none_left
    return attrs.evolve(made, secrets=(shard.key,)) if shard.key else made

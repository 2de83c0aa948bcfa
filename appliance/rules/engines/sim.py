"""The built-in engine: this very program as a stand-in for a real one, with a rendezvous like theirs."""

from __future__ import annotations

from appliance.facts.launch import Command, HttpReady, LaunchPlan, Listening, StopStep
from appliance.facts.replica import Shard
from appliance.rules.engines import environment
from appliance.rules.engines.engine import Engine, Program, Site
from appliance.rules.engines.ports import PortLease

SIM = Program("sim", "", before=("sim",))
KEY = "APPLIANCE_SIM_API_KEY"

RENDEZVOUS_S = 60.0
STOP = (StopStep("SIGTERM", "leader", 5.0), StopStep("SIGKILL", "group", 5.0))

OWNED = {
    "--host": "agent.address",
    "--port": "agent.port_range",
    "--model": "the model's name",
    "--api-key": "",
    "--nnodes": "nodes",
    "--node-rank": "",
    "--master-addr": "",
    "--master-port": "",
}


def programs(shard: Shard) -> tuple[Program, ...]:
    return (SIM,)


def reasons(shard: Shard, site: Site) -> list[str]:
    """Reasons of the sim's own: what it would not heed."""
    found = [
        f"{name}: the sim has none; leave it empty"
        for name in ("dtype", "quantization")
        if getattr(shard.profile, name)
    ]
    if shard.adapters:
        found.append("the sim has no adapters")
    return found


def plan(shard: Shard, site: Site, ports: PortLease) -> LaunchPlan:
    """One command. Workers listen nowhere, so they get no port; the flag that says one must be there all the same."""
    profile = shard.profile
    several = profile.nodes > 1
    if several and shard.leads:
        ports.hold("rendezvous", shard.rendezvous_port)
    port = ports.take("http") if shard.leads else 0
    argv = [*site.own_argv, *SIM.before, "--host", shard.address, "--port", str(port), "--model", shard.model]
    if several:
        argv += ["--nnodes", str(profile.nodes), "--node-rank", str(shard.rank)]
        argv += ["--master-addr", shard.leader, "--master-port", str(shard.rendezvous_port)]
    argv += profile.args
    own = {KEY: shard.key} if shard.key and shard.leads else {}
    return LaunchPlan(
        engine="sim",
        commands=(Command("sim", tuple(argv), environment.build(shard, site, site.own_argv[0], own), STOP),),
        ports=ports.uses,
        awaits=None if shard.leads else Listening(shard.leader, shard.rendezvous_port, RENDEZVOUS_S),
        ready=HttpReady(shard.address, port, shard.model, key=shard.key) if shard.leads else None,
    )


ENGINE = Engine(name="sim", owned=OWNED, owned_env=(KEY,), programs=programs, refuse=reasons, plan=plan)

"""vLLM: `vllm serve`, on several nodes by its own multiprocessing or over Ray.

What it does that shapes this: it listens only once it is ready; its key covers `/v1` alone; its EngineCore and workers
outlive a killed API server; above rank 0 it serves nothing.
"""

from __future__ import annotations

import json

from appliance.facts.launch import Command, HttpReady, LaunchPlan, Listening, StopStep
from appliance.facts.replica import Shard
from appliance.rules.engines import environment, refuse
from appliance.rules.engines.engine import Engine, Program, Site
from appliance.rules.engines.ports import PortLease

VLLM = Program(
    "vllm", "vllm", before=("serve",), help=("--help=all",), help_env={"VLLM_TARGET_DEVICE": "cpu", "COLUMNS": "200"}
)
RAY = Program("ray", "ray", before=("start",), beside="vllm")

INNER_PORTS = 16
"""Ports for what its processes say to each other. It takes them from `VLLM_PORT` upwards, past those in use. What it
does not ask that variable for (queues between nodes, Gloo) it lets the kernel choose, which is above 32767."""

RAY_WORKER_PORTS = 100
RAY_CPUS = 16
"""Ray starts a process for each CPU it is told of, each with a port of its own; ours do all their work on GPUs."""

RAY_OBJECT_BYTES = 1 << 30
"""vLLM passes little through Ray's object store, which would otherwise claim 30% of the machine's memory."""

MAX_SOCKET_FOLDER = 40
"""Ray's sockets lie 66 characters below its folder, and the kernel takes 107 in all."""

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)

RENDEZVOUS_S = 600.0
"""Before the leader listens for its peers it imports torch and, from a cold disk, that alone takes minutes."""
RAY_UP_S = 120.0

STOP = (StopStep("SIGTERM", "leader", 20.0), StopStep("SIGKILL", "group", 5.0))
"""Idle it ends in half a second; whoever drains does so before. The group, because the workers stay behind."""

RAY_STOP = (StopStep("SIGTERM", "leader", 35.0), StopStep("SIGKILL", "group", 5.0))
"""It drains for up to 30 s; with the engine gone before it, one or two, with status 1."""

OWNED = {
    "--host": "agent.address",
    "--port": "agent.port_range",
    "--api-key": "",
    "--served-model-name": "the model's name",
    "--tensor-parallel-size": "tensor_parallel",
    "-tp": "tensor_parallel",
    "--pipeline-parallel-size": "pipeline_parallel",
    "-pp": "pipeline_parallel",
    "--max-model-len": "context_tokens",
    "--dtype": "dtype",
    "--quantization": "quantization",
    "-q": "quantization",
    "--nnodes": "nodes",
    "-n": "nodes",
    "--node-rank": "",
    "-r": "",
    "--master-addr": "",
    "--master-port": "",
    "--headless": "",
    "--distributed-executor-backend": "launch_mode",
    "--device-ids": "",
    "--lora-modules": "models.adapters",
    "--config": "args",
    "--model": "source",
    "--uds": "",
}


def programs(shard: Shard) -> tuple[Program, ...]:
    """Ray's workers need only Ray on the command line, but the same environment has to have vLLM too."""
    return (VLLM, RAY) if shard.profile.launch_mode == "ray" else (VLLM,)


def reasons(shard: Shard, site: Site) -> list[str]:
    """Reasons of vLLM's own."""
    profile, found = shard.profile, []
    copies = refuse.data_parallel(shard, "--data-parallel-size", "-dp")
    if copies > 1 and profile.launch_mode == "ray" and profile.nodes > 1:
        found.append("args: data parallelism of vLLM over Ray on several nodes hangs for ten minutes and fails")
    elif copies > 1:
        needed = copies * profile.tensor_parallel * profile.pipeline_parallel
        found.append(f"args: --data-parallel-size {copies} needs {needed} GPUs, the replica has {profile.gpus}")
    if profile.launch_mode == "ray":
        if shard.address.startswith("127.") or shard.address == "::1":
            found.append(f"Ray replaces {shard.address} by the host's address, where nobody looks; set agent.address")
        if len(_ray_folder(site, 65535)) > MAX_SOCKET_FOLDER:
            found.append(f"{site.run_folder} is too long for Ray's sockets (at most {MAX_SOCKET_FOLDER} characters)")
    widest = max((adapter.rank for adapter in shard.adapters), default=0)
    if widest > LORA_RANKS[-1]:
        found.append(f"an adapter has rank {widest}, vLLM takes {LORA_RANKS[-1]} at most")
    return found


def plan(shard: Shard, site: Site, ports: PortLease) -> LaunchPlan:
    """One command; over Ray a node of Ray's cluster first, and on workers nothing but that."""
    if shard.profile.nodes > 1 and shard.leads:
        ports.hold("rendezvous", shard.rendezvous_port)
    if shard.profile.launch_mode == "ray":
        return _over_ray(shard, site, ports)
    port = ports.take("http") if shard.leads else 0
    awaits = None if shard.leads else Listening(shard.leader, shard.rendezvous_port, RENDEZVOUS_S)
    return LaunchPlan(
        engine="vllm",
        commands=(_serve(shard, site, port, _inner_env(shard, ports)),),
        ports=ports.uses,
        awaits=awaits,
        ready=_ready(shard, port) if shard.leads else None,
    )


def _over_ray(shard: Shard, site: Site, ports: PortLease) -> LaunchPlan:
    inner = _inner_env(shard, ports)
    meeting = shard.rendezvous_port
    if shard.leads and not meeting:
        meeting = ports.take("rendezvous")
    folder = _ray_folder(site, meeting)
    node = _ray_node(shard, site, ports, inner, meeting, folder)
    if not shard.leads:
        awaits = Listening(shard.leader, meeting, RENDEZVOUS_S)
        return LaunchPlan("vllm", (node,), ports=ports.uses, directories=(folder,), awaits=awaits)
    port = ports.take("http")
    inner["RAY_ADDRESS"] = _at(shard.address, meeting)
    return LaunchPlan(
        engine="vllm",
        commands=(node, _serve(shard, site, port, inner)),
        ports=ports.uses,
        directories=(folder,),
        ready=_ready(shard, port),
    )


def _serve(shard: Shard, site: Site, port: int, own: dict[str, str]) -> Command:
    profile = shard.profile
    path = site.path_of(VLLM) or VLLM.executable
    argv = [*VLLM.prefix(path), shard.weights, "--served-model-name", shard.model]
    argv += ["--tensor-parallel-size", str(profile.tensor_parallel)]
    argv += ["--pipeline-parallel-size", str(profile.pipeline_parallel)]
    if shard.context:
        argv += ["--max-model-len", str(shard.context)]
    if profile.dtype:
        argv += ["--dtype", profile.dtype]
    if profile.quantization:
        argv += ["--quantization", profile.quantization]
    if shard.adapters:
        argv += _adapters(shard)
    if profile.launch_mode == "ray":
        argv += ["--distributed-executor-backend", "ray"]
    elif profile.nodes > 1:
        argv += ["--distributed-executor-backend", "mp", "--nnodes", str(profile.nodes)]
        argv += ["--node-rank", str(shard.rank), "--master-addr", shard.leader]
        argv += ["--master-port", str(shard.rendezvous_port)]
    if shard.leads:
        # Counts of cached tokens in the answers, for usage and for the router's prefix index.
        argv += ["--host", shard.address, "--port", str(port), "--enable-prompt-tokens-details"]
        own = {**own, "VLLM_API_KEY": shard.key} if shard.key else own
    else:
        argv += ["--headless"]
    argv += profile.args
    return Command("vllm", tuple(argv), environment.build(shard, site, path, own), STOP)


def _adapters(shard: Shard) -> list[str]:
    # JSON and not `name=path`, so that no name and no path can be misread.
    modules = [json.dumps({"name": each.name, "path": each.path}) for each in shard.adapters]
    argv = ["--enable-lora", "--max-loras", str(len(modules)), "--lora-modules", *modules]
    rank = max(each.rank for each in shard.adapters)
    if rank:
        argv += ["--max-lora-rank", str(next(step for step in LORA_RANKS if step >= rank))]
    return argv


def _ray_node(shard: Shard, site: Site, ports: PortLease, inner: dict[str, str], meeting: int, folder: str) -> Command:
    """A node of Ray's cluster with every port it opens given, so that two of them fit on one machine.

    All but the port of Ray's client server, which a plain installation does not have and then refuses to be given.
    """
    path = site.path_of(RAY) or RAY.executable
    argv = [*RAY.prefix(path)]
    argv += ["--head", "--port", str(meeting)] if shard.leads else ["--address", _at(shard.leader, meeting)]
    argv += ["--node-ip-address", shard.address, "--num-gpus", str(shard.profile.gpus_per_node)]
    argv += ["--num-cpus", str(RAY_CPUS), "--object-store-memory", str(RAY_OBJECT_BYTES), "--block"]
    argv += ["--disable-usage-stats", "--temp-dir", folder]
    if shard.leads:
        argv += ["--include-dashboard=false"]
    for flag in (
        "node-manager-port",
        "object-manager-port",
        "dashboard-agent-listen-port",
        "dashboard-agent-grpc-port",
        "runtime-env-agent-port",
        "metrics-export-port",
    ):
        argv += [f"--{flag}", str(ports.take(f"ray-{flag.removesuffix('-port')}"))]
    first = ports.take("ray-workers", RAY_WORKER_PORTS)
    argv += ["--min-worker-port", str(first), "--max-worker-port", str(first + RAY_WORKER_PORTS - 1)]
    until = Listening(shard.address, meeting, RAY_UP_S) if shard.leads else None
    return Command("ray", tuple(argv), environment.build(shard, site, path, inner), RAY_STOP, until)


def _inner_env(shard: Shard, ports: PortLease) -> dict[str, str]:
    return {
        "VLLM_HOST_IP": shard.address,
        "VLLM_PORT": str(ports.take("inner", INNER_PORTS)),
        # A private service tells nobody that it exists.
        "VLLM_NO_USAGE_STATS": "1",
    }


def _ready(shard: Shard, port: int) -> HttpReady:
    return HttpReady(shard.address, port, shard.model, key=shard.key)


def _ray_folder(site: Site, port: int) -> str:
    return f"{site.run_folder}/ray-{port}"


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


ENGINE = Engine(
    name="vllm",
    owned=OWNED,
    owned_env=("VLLM_HOST_IP", "VLLM_PORT", "VLLM_API_KEY", "RAY_ADDRESS"),
    programs=programs,
    refuse=reasons,
    plan=plan,
)

"""SGLang: `sglang serve`, on several nodes by its own launcher.

What it does that shapes this: a SIGTERM to its whole group it takes for a crash of its scheduler, and spends five
seconds on diagnostics instead of draining; above rank 0 it answers every health check with 200, on a port of its own;
a served name is cut at the first colon, because what follows names an adapter.
"""

from __future__ import annotations

import json

from appliance.facts.launch import Command, HttpReady, LaunchPlan, Listening, PlanFile, StopStep
from appliance.facts.replica import Shard
from appliance.rules.engines import environment, refuse
from appliance.rules.engines.engine import Engine, Program, Site
from appliance.rules.engines.flags import flag_values
from appliance.rules.engines.ports import PortLease

SGLANG = Program("sglang", "sglang", before=("serve",), module="sglang.launch_server", help_env={"COLUMNS": "200"})

RENDEZVOUS_S = 600.0
"""As for vLLM: the leader imports torch and reads the model's configuration before it listens for its peers."""

STOP = (StopStep("SIGTERM", "leader", 40.0), StopStep("SIGKILL", "group", 5.0))
"""Idle it ends in 3 to 5 s, and drains what runs. Never a SIGTERM to the group."""

MAX_LORAS_PER_BATCH = 8
"""The engine's own default, the base model counted in; more is given only as more memory."""

OWNED = {
    "--host": "agent.address",
    "--port": "agent.port_range",
    "--api-key": "",
    "--admin-api-key": "",
    "--config": "args",
    "--model-path": "source",
    "--model": "source",
    "--served-model-name": "the model's name",
    "--tp-size": "tensor_parallel",
    "--tp": "tensor_parallel",
    "--tensor-parallel-size": "tensor_parallel",
    "--pp-size": "pipeline_parallel",
    "--pp": "pipeline_parallel",
    "--pipeline-parallel-size": "pipeline_parallel",
    "--context-length": "context_tokens",
    "--dtype": "dtype",
    "--quantization": "quantization",
    "--nnodes": "nodes",
    "--node-rank": "",
    "--dist-init-addr": "",
    "--nccl-init-addr": "",
    "--nccl-port": "agent.port_range",
    "--base-gpu-id": "",
    "--lora-paths": "models.adapters",
    "--enable-metrics": "",
}


def programs(shard: Shard) -> tuple[Program, ...]:
    return (SGLANG,)


def reasons(shard: Shard, site: Site) -> list[str]:
    """Reasons of SGLang's own."""
    profile, found = shard.profile, []
    if ":" in shard.model:
        found.append(f"served name {shard.model!r}: SGLang takes what follows a colon for an adapter")
    values = flag_values(profile.args)
    copies = refuse.data_parallel(shard, "--dp-size", "--dp", "--data-parallel-size")
    if copies > 1 and "--enable-dp-attention" not in values and "--attn-dp-size" not in values:
        needed = copies * profile.tensor_parallel * profile.pipeline_parallel
        found.append(f"args: --dp-size {copies} needs {needed} GPUs, the replica has {profile.gpus}")
    return found


def plan(shard: Shard, site: Site, ports: PortLease) -> LaunchPlan:
    """One command. The key goes into a file, which the engine reads as if it had been given on the command line."""
    profile = shard.profile
    if profile.nodes > 1 and shard.leads:
        ports.hold("rendezvous", shard.rendezvous_port)
    # Workers listen too, with answers that mean nothing; two ranks on one host would collide without this.
    port = ports.take("http" if shard.leads else "dummy")
    nccl = ports.take("nccl")
    path = site.path_of(SGLANG) or SGLANG.executable
    argv = [*SGLANG.prefix(path), "--model-path", shard.weights, "--served-model-name", shard.model]
    argv += ["--host", shard.address, "--port", str(port), "--nccl-port", str(nccl)]
    argv += ["--tp-size", str(profile.tensor_parallel), "--pp-size", str(profile.pipeline_parallel)]
    argv += ["--enable-metrics", "--enable-cache-report"]
    if shard.context:
        argv += ["--context-length", str(shard.context)]
    if profile.dtype:
        argv += ["--dtype", profile.dtype]
    if profile.quantization:
        argv += ["--quantization", profile.quantization]
    if not shard.gpus and "--device" not in flag_values(profile.args):
        argv += ["--device", "cpu"]
    if profile.nodes > 1:
        argv += ["--nnodes", str(profile.nodes), "--node-rank", str(shard.rank)]
        argv += ["--dist-init-addr", _at(shard.leader, shard.rendezvous_port)]
    if shard.adapters:
        argv += _adapters(shard)
    files: tuple[PlanFile, ...] = ()
    if shard.key and shard.leads:
        # A file of YAML, which any JSON is; the suffix is checked by the engine, and so is that the flag and its value
        # are two words.
        file = PlanFile(f"{site.folder}/engine.yaml", json.dumps({"api-key": shard.key}) + "\n")
        files, argv = (file,), [*argv, "--config", file.path]
    argv += profile.args
    return LaunchPlan(
        engine="sglang",
        commands=(Command("sglang", tuple(argv), environment.build(shard, site, path, {}), STOP),),
        ports=ports.uses,
        files=files,
        awaits=None if shard.leads else Listening(shard.leader, shard.rendezvous_port, RENDEZVOUS_S),
        ready=HttpReady(shard.address, port, shard.model, key=shard.key) if shard.leads else None,
    )


def _adapters(shard: Shard) -> list[str]:
    # JSON and not `name=path`, so that no name and no path can be misread.
    paths = [json.dumps({"lora_name": each.name, "lora_path": each.path, "pinned": False}) for each in shard.adapters]
    argv = ["--enable-lora", "--lora-paths", *paths]
    # One place in the batch is the base model's.
    argv += ["--max-loras-per-batch", str(min(len(paths) + 1, MAX_LORAS_PER_BATCH))]
    if not shard.gpus and "--lora-backend" not in flag_values(shard.profile.args):
        # The default one asks a GPU for its name, and the engine dies of there being none.
        argv += ["--lora-backend", "torch_native"]
    rank = max(each.rank for each in shard.adapters)
    return [*argv, "--max-lora-rank", str(rank)] if rank else argv


def _at(host: str, port: int) -> str:
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


ENGINE = Engine(name="sglang", owned=OWNED, owned_env=(), programs=programs, refuse=reasons, plan=plan)

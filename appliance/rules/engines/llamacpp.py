"""llama.cpp's `llama-server`: one node, GGUF files.

What it does that shapes this: a SIGTERM while a request runs makes it stop listening and wait for the client to hang
up, and only a second one ends it; while loading it answers 503 everywhere; two servers that spin on all processors
starve each other; `--lora-init-without-apply` does nothing, so adapters start at scale 0 instead.
"""

from __future__ import annotations

from appliance.facts.launch import Command, HttpReady, LaunchPlan, PlanFile, StopStep
from appliance.facts.replica import Shard
from appliance.rules.engines import environment
from appliance.rules.engines.engine import Engine, Program, Site
from appliance.rules.engines.flags import count, flag_values
from appliance.rules.engines.ports import PortLease

LLAMA_SERVER = Program("llamacpp", "llama-server")

STOP = (
    StopStep("SIGTERM", "leader", 5.0),
    StopStep("SIGTERM", "leader", 5.0),
    StopStep("SIGKILL", "group", 5.0),
)

OWNED = {
    "--host": "agent.address",
    "--port": "agent.port_range",
    "--reuse-port": "",
    "--api-key": "",
    "--api-key-file": "",
    "--model": "source",
    "-m": "source",
    "--alias": "the model's name",
    "-a": "the model's name",
    "--ctx-size": "context_tokens",
    "-c": "context_tokens",
    "--lora": "models.adapters",
    "--lora-scaled": "models.adapters",
    "--metrics": "",
    "--models-dir": "source",
    "--models-preset": "source",
    "-hf": "source",
    "-hfr": "source",
    "--hf-repo": "source",
    "--model-url": "source",
    "-mu": "source",
}


def programs(shard: Shard) -> tuple[Program, ...]:
    return (LLAMA_SERVER,)


def reasons(shard: Shard, site: Site) -> list[str]:
    """Reasons of llama.cpp's own."""
    found = []
    if not shard.weights.startswith("/"):
        found.append(f"source {shard.weights!r}: llama.cpp needs a GGUF file on the node (an absolute path)")
    if "," in shard.model:
        found.append(f"served name {shard.model!r}: llama.cpp takes a comma for the start of another name")
    for adapter in shard.adapters:
        if "," in adapter.path or ":" in adapter.path:
            found.append(f"adapter {adapter.name}: llama.cpp misreads a comma or colon in {adapter.path}")
    if shard.profile.dtype:
        found.append("dtype: a GGUF file has its own; leave it empty for llamacpp")
    if shard.profile.quantization:
        found.append("quantization: a GGUF file has its own; leave it empty for llamacpp")
    return found


def plan(shard: Shard, site: Site, ports: PortLease) -> LaunchPlan:
    """One command."""
    values = flag_values(shard.profile.args)
    port = ports.take("http")
    path = site.path_of(LLAMA_SERVER) or LLAMA_SERVER.executable
    argv = [*LLAMA_SERVER.prefix(path), "--model", shard.weights, "--alias", shard.model]
    # The port always, since its default is about to change; metrics, since they are off by default.
    argv += ["--host", shard.address, "--port", str(port), "--metrics"]
    if shard.context:
        argv += ["--ctx-size", str(shard.context * _slots(values))]
    if "-t" not in values and "--threads" not in values:
        argv += ["--threads", str(site.llamacpp_threads or max(1, site.inventory.cpus.count // 2))]
    if not shard.gpus and not {"-ngl", "--gpu-layers", "--n-gpu-layers"} & set(values):
        argv += ["--n-gpu-layers", "0"]
    if shard.adapters:
        argv += ["--lora-scaled", ",".join(f"{each.path}:0" for each in shard.adapters)]
    files: tuple[PlanFile, ...] = ()
    if shard.key:
        # Ours begin with letters or digits; a line that began with a hash would be a comment.
        file = PlanFile(f"{site.folder}/engine.key", shard.key + "\n")
        files, argv = (file,), [*argv, "--api-key-file", file.path]
    argv += shard.profile.args
    return LaunchPlan(
        engine="llamacpp",
        commands=(Command("llama-server", tuple(argv), environment.build(shard, site, path, {}), STOP),),
        ports=ports.uses,
        files=files,
        ready=HttpReady(shard.address, port, shard.model, key=shard.key),
    )


def _slots(values: dict[str, str]) -> int:
    """Slots that share the context between them: it is divided by their number, unless they share one pool."""
    if {"-kvu", "--kv-unified"} & set(values):
        return 1
    return max(1, count(values, "-np", "--parallel"))


ENGINE = Engine(
    name="llamacpp",
    owned=OWNED,
    owned_env=("LLAMA_API_KEY", "LLAMA_ARG_PORT", "LLAMA_ARG_HOST", "LLAMA_ARG_API_KEY_FILE"),
    programs=programs,
    refuse=reasons,
    plan=plan,
)

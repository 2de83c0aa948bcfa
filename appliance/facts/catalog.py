"""Models as an operator writes them down: names, ways to run them, adapters, limits of scaling."""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs import field

from appliance.facts.keys import about

LAUNCHABLE = ("vllm", "sglang", "llamacpp", "sim")
"""Engines an agent can start. An `openai` endpoint is somebody else's process."""

LAUNCH_MODES = ("mp", "ray")
"""How vLLM spreads over nodes: its own multiprocessing, or Ray. Other engines have one way only, called `mp`."""


@attrs.frozen
class Profile:
    """One way to run a model (`[[models.profiles]]`). Higher `priority` is tried first.

    `source` is a path on the node (absolute) or a hub id (`org/name`). `gpus_per_node` 0 runs on CPUs.
    `tensor_parallel` x `pipeline_parallel` must equal `nodes` x `gpus_per_node`; on CPUs it must be a multiple of
    `nodes`. `gpu_class` "" takes any one class. `dtype`, `quantization` "" and `context_tokens` 0 leave it to the
    engine. `args` go to the engine as they are, `env` is added to its environment.
    """

    name: str = field(metadata=about("Its name in reports; unique within the model.", form="name", example="small"))
    engine: str = field(metadata=about("What runs the model.", choices=LAUNCHABLE, example="sim"))
    source: str = field(
        default="",
        metadata=about(
            "Weights: an absolute path on the node or a hub id (org/name); the sim needs none.",
            example="/models/llama.gguf",
        ),
    )
    priority: int = field(default=0, metadata=about("The profile with the highest number that fits is taken."))
    nodes: int = field(default=1, metadata=about("Nodes of one replica.", minimum=1))
    gpus_per_node: int = field(default=1, metadata=about("GPUs on each node; 0: it runs on CPUs.", minimum=0))
    tensor_parallel: int = field(default=1, metadata=about("Parts each layer is cut into.", minimum=1))
    pipeline_parallel: int = field(default=1, metadata=about("Parts the layers are dealt out to.", minimum=1))
    gpu_class: str = field(default="", metadata=about("Class of GPU, such as l40s-45g; empty: any one class."))
    dtype: str = field(default="", metadata=about("Type of the numbers; empty: the engine decides."))
    quantization: str = field(default="", metadata=about("How weights are quantized; empty: the engine decides."))
    launch_mode: str = field(
        default="mp", metadata=about("How vLLM spreads over nodes; all else knows mp only.", choices=LAUNCH_MODES)
    )
    context_tokens: int = field(
        default=0, metadata=about("Longest prompt plus answer, in tokens; 0: the model's.", minimum=0)
    )
    args: tuple[str, ...] = field(default=(), metadata=about("Further arguments of the engine.", example=["--seed=1"]))
    env: Mapping[str, str] = field(
        factory=dict, metadata=about("Further variables of its environment.", example={"OMP_NUM_THREADS": "4"})
    )

    @property
    def gpus(self) -> int:
        """GPUs of the whole replica."""
        return self.nodes * self.gpus_per_node


@attrs.frozen
class Adapter:
    """A LoRA adapter of a model (`[[models.adapters]]`). `rank` 0 is unknown: the engine's own default must do."""

    name: str
    source: str
    rank: int = 0


@attrs.frozen
class Scaling:
    """How many replicas (`[models.scaling]`). An agent in local mode knows no load: it keeps `min_replicas`."""

    min_replicas: int = field(
        default=1, metadata=about("Replicas that are kept running; 0: none is started.", minimum=0)
    )
    max_replicas: int = field(
        default=0, metadata=about("Most replicas the load may ask for; 0: min_replicas, and at least 1.", minimum=0)
    )
    idle_s: float = field(
        default=0.0,
        metadata=about(
            "With min_replicas = 0: stopped after so long without a request, in seconds; 0: never.", minimum=0
        ),
    )

    @property
    def most(self) -> int:
        """The upper bound that holds."""
        return self.max_replicas or max(1, self.min_replicas)


@attrs.frozen
class External:
    """A provider that serves the model instead of us (`[models.external]`); its key is read from the file each time."""

    url: str
    model: str = ""
    api_key_file: str = ""


@attrs.frozen
class Model:
    """A name clients ask for. `context_tokens` 0 is unknown; it holds for profiles that set none of their own."""

    name: str = field(metadata=about("The name clients ask for; unique.", form="name", example="llama"))
    aliases: tuple[str, ...] = field(
        default=(), metadata=about("Further names for the same model.", form="name", example=["chat"])
    )
    fallbacks: tuple[str, ...] = field(
        default=(),
        metadata=about("Models that take its requests, in this order, while it has no endpoint that can.", form="name"),
    )
    context_tokens: int = field(
        default=0, metadata=about("Longest prompt plus answer, in tokens; 0: unknown.", minimum=0)
    )
    groups: bool = field(default=False, metadata=about("Announced groups that serve this name take its requests too."))
    scaling: Scaling = field(factory=Scaling, metadata=about("How many replicas of it run."))
    external: External | None = None
    adapters: tuple[Adapter, ...] = ()
    profiles: tuple[Profile, ...] = field(
        default=(), metadata=about("Ways to run it on a node, one table each; without one nothing is started.")
    )

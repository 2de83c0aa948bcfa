"""Models as an operator writes them down: names, ways to run them, adapters, limits of scaling."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

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

    name: str
    engine: str
    source: str = ""
    priority: int = 0
    nodes: int = 1
    gpus_per_node: int = 1
    tensor_parallel: int = 1
    pipeline_parallel: int = 1
    gpu_class: str = ""
    dtype: str = ""
    quantization: str = ""
    launch_mode: str = "mp"
    context_tokens: int = 0
    args: tuple[str, ...] = ()
    env: Mapping[str, str] = attrs.field(factory=dict)

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
    """How many replicas (`[models.scaling]`). `idle_s` 0: never scaled to zero."""

    min_replicas: int = 1
    max_replicas: int = 1
    idle_s: float = 0.0


@attrs.frozen
class External:
    """A provider that serves the model instead of us (`[models.external]`); its key is read from the file each time."""

    url: str
    model: str = ""
    api_key_file: str = ""


@attrs.frozen
class Model:
    """A name clients ask for. `context_tokens` 0 is unknown; it holds for profiles that set none of their own."""

    name: str
    aliases: tuple[str, ...] = ()
    fallbacks: tuple[str, ...] = ()
    context_tokens: int = 0
    scaling: Scaling = Scaling()
    external: External | None = None
    adapters: tuple[Adapter, ...] = ()
    profiles: tuple[Profile, ...] = ()

"""The `[agent]` section: what an operator may set about one node and the engines on it."""

from __future__ import annotations

from collections.abc import Mapping

from attrs import field, frozen

from appliance.facts.address import Address
from appliance.facts.keys import about

GPU_BACKENDS = ("auto", "nvml", "nvidia-smi", "none")
"""How GPUs are found; `auto` asks NVML and, where that does not work, `nvidia-smi`."""

PROGRAMS = ("vllm", "ray", "sglang", "llamacpp")
"""Engines' programs that may lie anywhere; the sim is this very program."""


@frozen
class LlamacppSettings:
    threads: int = field(
        default=0,
        metadata=about("Threads of each llama.cpp server; 0: half of the processors.", minimum=0, live=False),
    )


@frozen
class GpuSettings:
    backend: str = field(
        default="auto",
        metadata=about("How GPUs are found; none: there are none for us.", choices=GPU_BACKENDS, live=False),
    )


@frozen
class AgentSettings:
    """What holds for this node. `port_range` is the first and the last port engines may use."""

    control_url: str = field(
        default="",
        metadata=about(
            "Control plane to call (wss://host:port), once 'agent join' was run; empty: local mode.",
            form="control_url",
            live=False,
            example="wss://box:6384",
        ),
    )
    node: str = field(
        default="", metadata=about("The node's name; empty: the name of the host.", form="word", live=False)
    )
    address: str = field(
        default="",
        metadata=about(
            "Address of this node that the others and the routers reach; empty: the first that is not loopback.",
            form="ip",
            live=False,
        ),
    )
    labels: Mapping[str, str] = field(
        factory=dict,
        metadata=about("What else tells nodes apart.", live=False, example={"rack": "a"}),
    )
    fabric: str = field(
        default="",
        metadata=about("Name of the node's fastest fabric; empty: from its subnet prefix.", form="word", live=False),
    )
    listen: tuple[Address, ...] = field(
        default=(Address("0.0.0.0", 6380),),
        metadata=about("Addresses of /status, /events, /metrics and /healthz.", minimum=1, live=False),
    )
    port_range: tuple[int, ...] = field(
        default=(20000, 24999),
        metadata=about("First and last port that engines may use.", minimum=2, live=False),
    )
    log_bytes: int = field(
        default=16 << 20,
        metadata=about("Most that is kept of what one engine writes.", minimum=1 << 16, live=False),
    )
    executables: Mapping[str, str] = field(
        factory=dict,
        metadata=about(
            "Programs of the engines; others are looked for on the search path.",
            choices=PROGRAMS,
            form="program",
            live=False,
            example={"vllm": "/opt/vllm/bin/vllm"},
        ),
    )
    memory_wait_s: float = field(
        default=60.0,
        metadata=about("How long a stop waits for the GPU's memory to be free again.", minimum=0, live=False),
    )
    inventory_file: str = field(
        default="",
        metadata=about("File that stands in for the hardware, for rehearsals; empty: look.", form="file", live=False),
    )
    llamacpp: LlamacppSettings = field(factory=LlamacppSettings, metadata=about("llama.cpp on this node."))
    gpus: GpuSettings = field(factory=GpuSettings, metadata=about("GPUs of this node."))

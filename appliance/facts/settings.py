"""What an operator may set: one frozen class per section of the configuration file, one field per key.

These classes are the only list of keys there is. `appliance/cli/config` reads, checks, shows and documents whatever
carries a `Key` here, so a new key is a new field and a new section is a class plus a field of `Settings`. What later
versions will understand stands in `NOT_YET`, and is refused by name until its row there becomes a class.

Times are floats in seconds and end in `_s`; sizes are whole numbers of bytes and end in `_bytes`.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs import field

from appliance.facts.address import Address as Address
from appliance.facts.agent import AgentSettings
from appliance.facts.bands import AdmissionSettings
from appliance.facts.catalog import Model as Model
from appliance.facts.control import ControlSettings, Store
from appliance.facts.endpoint import ENGINES, Endpoint
from appliance.facts.groups import GroupsSettings
from appliance.facts.keys import about

NOT_YET: Mapping[str, str] = {
    "auth": "keys for the door",
    "server.admin_listen": "the management API on a loopback TCP address",
    "server.public_url": "links in web pages",
    "models.external": "models of outside providers",
    "models.adapters": "LoRA adapters under names of their own",
}
"""Sections and keys of the interface whose feature is not built, with what they will be for. Using one is a fault,
since an option that is accepted and does nothing is a lie. Whoever builds the feature deletes the row and adds the
class."""


@attrs.frozen
class Server:
    """The door and the listeners beside it. `admin_socket` is never "" once loaded."""

    listen: tuple[Address, ...] = field(
        default=(Address("0.0.0.0", 6381),),
        metadata=about("Addresses of the door, one or a list; port 0 lets the kernel choose.", minimum=1, live=False),
    )
    metrics_listen: tuple[Address, ...] = field(
        default=(Address("127.0.0.1", 6390),),
        metadata=about("Addresses of /metrics, /healthz and /readyz for Prometheus; [] turns them off.", live=False),
    )
    admin_socket: str = field(
        default="",
        metadata=about(
            "Unix socket of the management API; empty: admin.sock in the runtime folder.", form="socket", live=False
        ),
    )
    tls_cert: str = field(
        default="",
        metadata=about("PEM file with the door's certificate and its chain; empty: plain HTTP.", form="file"),
    )
    tls_key: str = field(default="", metadata=about("PEM file with the key of tls_cert.", form="file"))
    drain_s: float = field(
        default=30.0, metadata=about("How long a stop waits for running requests, in seconds.", minimum=0)
    )
    max_body_bytes: int = field(
        default=128 << 20, metadata=about("Largest request body, also when expanded; above it: 413.", minimum=1)
    )
    max_buffered_bytes: int = field(
        default=1 << 30, metadata=about("All request bodies held at one time; above it: 503 buffers_full.", minimum=1)
    )
    trusted_proxies: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "Addresses or networks of proxies whose X-Forwarded-For tells the client's address.",
            form="network",
            example=["10.0.0.0/24"],
        ),
    )
    cors_origins: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "Web origins whose pages may call /v1 from a browser.", form="origin", example=["https://chat.example.org"]
        ),
    )
    access_log: bool = field(default=False, metadata=about("One log line per request."))


@attrs.frozen
class Deadlines:
    """How long each step of a request may take, running from its dispatch to an endpoint."""

    dial_s: float = field(default=5.0, metadata=about("Connecting to an endpoint.", above=0))
    first_token_s: float = field(default=600.0, metadata=about("A stream's first event, from dispatch.", above=0))
    idle_s: float = field(default=120.0, metadata=about("Silence between two events of a stream.", above=0))
    total_s: float = field(
        default=1800.0,
        metadata=about("A whole answer that is not streamed: its head comes when it is complete.", above=0),
    )
    stream_total_s: float = field(
        default=0.0, metadata=about("A whole stream; 0: no limit, silence decides.", minimum=0)
    )
    write_stall_s: float = field(default=30.0, metadata=about("A client that takes no bytes of its answer.", above=0))
    keepalive_s: float = field(
        default=75.0, metadata=about("An idle client connection waiting for its next request.", above=0)
    )
    head_s: float = field(default=15.0, metadata=about("A client sending the head of its request.", above=0))
    sse_ping_s: float = field(
        default=15.0, metadata=about("Silence in a stream that has begun after which a comment is sent.", above=0)
    )
    sse_ping_before_first_token: bool = field(
        default=False,
        metadata=about("Send comments before the first event too; a failure then has no status of its own."),
    )


@attrs.frozen
class EngineUrl:
    """Where an engine answers: `base` is the path in front of its `/v1`, without a trailing slash, "" at the root."""

    tls: bool
    host: str
    port: int
    base: str


@attrs.frozen
class EndpointEntry:
    """One [[endpoints]] as it is written; `build` gives the value everybody else works with."""

    id: str = field(metadata=about("Its name in metrics, logs and ctl; unique.", form="name", example="a"))
    url: EngineUrl = field(
        metadata=about("Where it answers, with or without the /v1.", example="http://10.0.0.5:8000/v1")
    )
    models: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "Names it answers for; left out: taken from its own /v1/models.", minimum=1, form="name", example=["llama"]
        ),
    )
    engine: str = field(
        default="openai",
        metadata=about(
            "What runs there; openai is any other compatible server, and is never scraped.", choices=ENGINES
        ),
    )
    pool: str = field(default="main", metadata=about("The endpoints of a model that share a priority.", form="name"))
    pool_priority: int = field(
        default=0, metadata=about("The pool with the highest number is filled first; lower ones take what it cannot.")
    )
    capacity: int = field(
        default=0, metadata=about("Requests it can run at one time; 0: told by it, or learnt.", minimum=0)
    )
    api_key_file: str = field(
        default="",
        metadata=about("File with the key it wants, read each time it is used; empty: it wants none.", form="key_file"),
    )

    def build(self) -> Endpoint:
        return Endpoint(
            self.id,
            self.url.host,
            self.url.port,
            self.url.tls,
            self.url.base,
            self.models,
            self.engine,
            self.pool,
            self.pool_priority,
            self.capacity,
            self.api_key_file,
        )


@attrs.frozen
class Weights:
    """How much each scorer counts in the choice of an endpoint; each scorer gives 0 to 1, and 0 here silences it."""

    queue: float = field(default=1.0, metadata=about("Few requests waiting.", minimum=0))
    kv: float = field(default=1.0, metadata=about("Much KV cache free.", minimum=0))
    inflight: float = field(default=1.0, metadata=about("Few requests of ours running.", minimum=0))
    prefix: float = field(default=2.0, metadata=about("Has seen the head of this prompt.", minimum=0))
    session: float = field(default=1.0, metadata=about("Answered this session before.", minimum=0))


@attrs.frozen
class Prefix:
    """The index of prompt heads, one per model; what is used least recently goes first."""

    max_bytes: int = field(
        default=32 << 20, metadata=about("Memory for the prompt heads of one model.", minimum=1 << 16, live=False)
    )
    max_nodes: int = field(default=100_000, metadata=about("Nodes in the tree of one model.", minimum=100, live=False))
    min_match_bytes: int = field(
        default=256, metadata=about("Shortest shared head that counts as one.", minimum=1, live=False)
    )


@attrs.frozen
class Scheduling:
    """How an endpoint is chosen among those that can serve a request."""

    picker: str = field(
        default="best",
        metadata=about(
            "best: the highest score, ties by chance; weighted: by chance, in proportion.", choices=("best", "weighted")
        ),
    )
    scrape_s: float = field(
        default=1.0,
        metadata=about(
            "Time between two readings of an engine's metrics, in seconds; at least 2.5 for llama.cpp.", minimum=0.05
        ),
    )
    weights: Weights = field(factory=Weights, metadata=about("How much each scorer counts; 0 silences it."))
    prefix: Prefix = field(factory=Prefix, metadata=about("The index of prompt heads."))


@attrs.frozen
class Tracing:
    """Spans over OTLP/HTTP; `endpoint` "" means off."""

    endpoint: str = field(
        default="",
        metadata=about("Base URL of an OTLP/HTTP collector; empty: no tracing.", form="collector", live=False),
    )
    sample_ratio: float = field(
        default=1.0, metadata=about("Share of requests that are traced, 0 to 1.", minimum=0, maximum=1, live=False)
    )


@attrs.frozen
class Logging:
    level: str = field(
        default="info", metadata=about("Least severe lines to write.", choices=("debug", "info", "warning", "error"))
    )
    format: str = field(
        default="logfmt", metadata=about("How a line is written.", choices=("logfmt", "json"), live=False)
    )


@attrs.frozen
class Settings:
    """All that is set. `state_dir` and `runtime_dir` follow from the user and the environment, never from the file."""

    server: Server = field(factory=Server, metadata=about("The door and the listeners beside it."))
    deadlines: Deadlines = field(factory=Deadlines, metadata=about("How long each step may take, in seconds."))
    endpoints: tuple[Endpoint, ...] = field(
        default=(), metadata=about("Engines that run already, one table each.", entry=EndpointEntry)
    )
    models: tuple[Model, ...] = field(
        default=(), metadata=about("Names with aliases and fallbacks, and ways to run them.")
    )
    admission: AdmissionSettings = field(
        factory=AdmissionSettings, metadata=about("Who may proceed now: bands, queues, fairness.")
    )
    scheduling: Scheduling = field(factory=Scheduling, metadata=about("How an endpoint is chosen."))
    control: ControlSettings = field(
        factory=ControlSettings, metadata=about("Placing models on nodes, and watching them.")
    )
    store: Store = field(factory=Store, metadata=about("What operators decided, kept over restarts."))
    agent: AgentSettings = field(factory=AgentSettings, metadata=about("One node with hardware, and its engines."))
    groups: GroupsSettings = field(
        factory=GroupsSettings, metadata=about("Groups that announce themselves on the network.")
    )
    tracing: Tracing = field(factory=Tracing, metadata=about("Spans over OTLP/HTTP."))
    logging: Logging = field(factory=Logging, metadata=about("Log lines on standard error."))
    state_dir: str = "/var/lib/appliance"
    runtime_dir: str = "/run/appliance"

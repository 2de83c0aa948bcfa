"""Endpoints: addresses that answer for models, and what was last heard about their load."""

from __future__ import annotations

import attrs

ENGINES = ("vllm", "sglang", "llamacpp", "sim", "openai")
"""Engine kinds an endpoint may name; `openai` is any other OpenAI-compatible server and is never scraped."""


@attrs.frozen
class Endpoint:
    """An address that answers for one or more models.

    `host` is a numeric address or a DNS name, `base` the path in front of the engine's routes without a trailing slash
    and without `/v1` ("" for an engine at the root). `models` None means: taken from the endpoint's own `/v1/models`.
    `capacity` is the number of requests it can run at once, 0 when unknown. `api_key_file` is read each time it is
    used, so that a rotated key needs no restart; "" means the endpoint takes none. `api_key` is the key itself, for a
    replica whose key came over the control link; it is never written anywhere. `announced` tells that a group on the
    network named itself: names of the file are not given to it unless they allow that. `retries` False: a request is
    sent to it once, whatever becomes of it. `total_s` 0: the deadline of all others holds. `router`: it is another
    router of this kind, which is asked nothing on behalf of a third one.
    """

    id: str
    host: str
    port: int
    tls: bool = False
    base: str = ""
    models: tuple[str, ...] | None = None
    engine: str = "openai"
    pool: str = "main"
    pool_priority: int = 0
    capacity: int = 0
    api_key_file: str = ""
    api_key: str = attrs.field(default="", repr=False)
    announced: bool = False
    retries: bool = True
    total_s: float = 0.0
    router: bool = False

    @property
    def url(self) -> str:
        """The address as an operator writes it, without a trailing slash."""
        scheme = "https" if self.tls else "http"
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{scheme}://{host}:{self.port}{self.base}"


@attrs.frozen
class Sample:
    """One scrape of an engine's metrics. None means that the engine does not publish the figure: unknown, never zero.

    `running` and `waiting` count requests, `kv` is the share of KV-cache blocks in use (0..1), `capacity` the number of
    requests the engine says it can run at once, `generation` changes when the engine's counters started again.
    """

    at: float
    running: int
    waiting: int
    kv: float | None = None
    prefix_hits: float | None = None
    prefix_queries: float | None = None
    capacity: int | None = None
    generation: int = 0

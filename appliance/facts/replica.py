"""A running instance of a model as it was decided: which node takes which part, and how they find each other."""

from __future__ import annotations

import attrs

from appliance.facts.catalog import Profile


@attrs.frozen
class AdapterFiles:
    """A LoRA adapter whose files lie on the node. `path` is a folder, or a GGUF file for llama.cpp."""

    name: str
    path: str
    rank: int = 0


@attrs.frozen
class Shard:
    """The part of a replica on one node. Rank 0 leads: it is where the others meet, and it alone serves HTTP.

    `address` is the node's cluster address, on which the engine listens; `leader` is that of rank 0, and
    `rendezvous_port` the port there on which the ranks meet, 0 for a replica on one node. It is chosen by whoever made
    the replica, because workers must know it before the leader has started. `gpus` are UUIDs, empty on CPUs, and of
    `gpu_class` on every node of the replica ("": not agreed). `fabric` "" means none is used. `key` is what the router
    must show the engine, "" for none. `source` overrides the profile's (a folder fetched meanwhile). `context_tokens` 0
    leaves it to the engine.
    """

    replica: str
    model: str
    profile: Profile
    rank: int = 0
    node: str = ""
    address: str = "127.0.0.1"
    leader: str = ""
    rendezvous_port: int = 0
    gpus: tuple[str, ...] = ()
    gpu_class: str = ""
    fabric: str = ""
    key: str = attrs.field(default="", repr=False)
    source: str = ""
    context_tokens: int = 0
    adapters: tuple[AdapterFiles, ...] = ()

    @property
    def leads(self) -> bool:
        return self.rank == 0

    @property
    def id(self) -> str:
        """Unique among shards: `REPLICA/RANK`."""
        return f"{self.replica}/{self.rank}"

    @property
    def weights(self) -> str:
        """Where the engine finds the weights: fetched ones first."""
        return self.source or self.profile.source

    @property
    def context(self) -> int:
        """Tokens a request may use, prompt and answer together; 0 leaves it to the engine."""
        return self.profile.context_tokens or self.context_tokens


@attrs.frozen
class Replica:
    """All shards of one instance, by rank. It is placed, fails and is released as a whole."""

    id: str
    model: str
    shards: tuple[Shard, ...]

    @property
    def leader(self) -> Shard:
        return self.shards[0]

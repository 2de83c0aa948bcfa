"""Announced groups: what an operator may set about them, and what daemons say of them.

A group is one deployment of a model. Daemons on the nodes announce themselves over UDP and hold documents of what runs
there; the router reads these, and nothing that a datagram says changes where a request goes.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
from attrs import field, frozen

from appliance.facts.keys import about
from appliance.facts.mcp import NAMINGS

DEFAULT_UNIVERSE = "default"
OWN_UNIVERSE = "appliance"
"""Where our own agents announce: daemons of other make must not take them for one of theirs."""

ANNOUNCE_PORT = 6382
DAEMON_PORT = 6380
SHORTEST_S = 0.05
"""Of what is done again and again: less would be done without a pause, and fill the network or a core."""
LOCAL_DAEMON = f"127.0.0.1:{DAEMON_PORT}"


@frozen
class GroupsSettings:
    """The `[groups]` section. Times are seconds; a time of 0 that is "derived" follows from the others."""

    enabled: bool = field(
        default=True, metadata=about("Find announced groups and route to them; false: neither.", live=False)
    )
    daemons: tuple[str, ...] = field(
        default=(LOCAL_DAEMON,),
        metadata=about(
            "Daemons that are watched from the start; []: only those that announce.", form="daemon", live=False
        ),
    )
    announce_port: int = field(
        default=ANNOUNCE_PORT,
        metadata=about("UDP port of announcements; 0: none are heard or sent.", minimum=0, maximum=65535, live=False),
    )
    announce_interval_s: float = field(
        default=5.0, metadata=about("Time between two announcements of an agent.", minimum=SHORTEST_S, live=False)
    )
    announce_addrs: tuple[str, ...] = field(
        default=(),
        metadata=about(
            "Where an agent announces besides the broadcast addresses.",
            form="announce_addr",
            live=False,
            example=["10.0.1.5:6382"],
        ),
    )
    universe: str = field(
        default="",
        metadata=about(
            "Cluster that announcements must name; empty: default and appliance (agents: appliance).",
            form="universe",
            live=False,
        ),
    )
    secret: str = field(
        default="",
        repr=False,
        metadata=about("Key that signs announcements; empty: unsigned ones count.", form="secret", live=False),
    )
    secret_file: str = field(
        default="", metadata=about("File with that key; wins over secret.", form="secret_file", live=False)
    )
    allowed_sources: tuple[str, ...] = field(
        default=("local", "172.16.0.0/12"),
        metadata=about(
            "Who may announce: local (the networks of this machine), networks, addresses, beginnings of addresses.",
            form="source",
            minimum=1,
        ),
    )
    discover_peers: bool = field(
        default=True, metadata=about("Watch the daemons that watched ones name, too.", live=False)
    )
    poll_interval_s: float = field(
        default=10.0, metadata=about("Time between two readings of a daemon where no event comes.", minimum=SHORTEST_S)
    )
    probe_interval_s: float = field(
        default=5.0, metadata=about("Time between two probes of a group's endpoint.", minimum=SHORTEST_S)
    )
    probe_timeout_s: float = field(default=3.0, metadata=about("What one probe may take.", above=0))
    probe_fresh_s: float = field(
        default=0.0,
        metadata=about("Age at which a good probe counts no more; 0: three intervals and a timeout.", minimum=0),
    )
    probe_promote_s: float = field(
        default=0.0,
        metadata=about("Time after which a better address is tried again; 0: six intervals.", minimum=0),
    )
    serving_timeout_s: float = field(
        default=1800.0, metadata=about("total_s of requests to announced groups.", above=0)
    )
    model_wait_s: float = field(
        default=0.0,
        metadata=about("How long a request waits for a model that a group served before and does not now.", minimum=0),
    )
    model_ttl_s: float = field(
        default=3600.0,
        metadata=about("Time after which a group that cannot serve, or a silent daemon, is not shown.", above=0),
    )
    mcp_timeout_s: float = field(default=180.0, metadata=about("What one call of a tool may take.", above=0))
    tools_ttl_s: float = field(default=60.0, metadata=about("How long a group's list of tools is believed.", above=0))
    mcp_naming: str = field(
        default="prefix",
        metadata=about(
            "Names of tools: prefix is group__tool, flat each name once with an argument __group.",
            choices=NAMINGS,
        ),
    )

    @property
    def fresh_s(self) -> float:
        """The age at which a good probe is stale."""
        return self.probe_fresh_s or 3 * self.probe_interval_s + self.probe_timeout_s

    @property
    def promote_s(self) -> float:
        return self.probe_promote_s or 6 * self.probe_interval_s

    @property
    def universes(self) -> tuple[str, ...]:
        """What a router listens to."""
        return (self.universe,) if self.universe else (DEFAULT_UNIVERSE, OWN_UNIVERSE)


# -- a datagram --------------------------------------------------------------------------------------------------------


@frozen
class Claim:
    """A datagram as it came, before anything of it is believed.

    `payload` is None where the bytes are no announcement at all; `signature` is None where there is none ("" for one of
    a wrong shape); `universe` None where none is named.
    """

    payload: Mapping[str, object] | None
    signature: str | None = None
    universe: str | None = None


# -- a daemon's document -----------------------------------------------------------------------------------------------


@frozen
class Service:
    """Where an agent's group answers: a whole `url`, or a `port` and `path` on whichever address of the node reaches
    it. `provider` and `note` are "" where nothing is said."""

    url: str = ""
    port: int = 0
    path: str = ""
    provider: str = ""
    note: str = ""


@frozen
class AgentRow:
    id: str
    alive: bool
    node_ip: str
    openai: Service | None = None
    mcp: Service | None = None


@frozen
class GroupRow:
    """One group of one daemon. `actors` are their states; `list_shaped` tells that the document is of the older form,
    which leaves out actors of groups that run none in a different sense (see `rules/groups/gate.py`)."""

    name: str
    agents: tuple[AgentRow, ...] = ()
    actors: tuple[str, ...] = ()
    gpus_total: int = 0
    list_shaped: bool = False


@frozen
class PeerRow:
    """Another daemon, as this one knows it. `http_port` 0: it cannot be asked."""

    node_id: str
    node_ip: str = ""
    link_ip: str = ""
    addrs: tuple[str, ...] = ()
    http_port: int = 0
    alive: bool = True


@frozen
class View:
    """What one daemon's `/status` says, as far as a router reads it. `ours`: it is an agent of this program, which
    tells of itself alone, so that the ranks of one group are spread over several documents."""

    node_id: str = ""
    node_ip: str = ""
    addrs: tuple[str, ...] = ()
    peers: tuple[PeerRow, ...] = ()
    groups: Mapping[str, GroupRow] = field(factory=dict)
    ours: bool = False


# -- what follows from it ----------------------------------------------------------------------------------------------


@frozen
class Announced:
    """A group as all daemons together tell it.

    `daemon` is the address whose document counts. `candidates` are base URLs to try, best first; `unreachable` says why
    there is none although an endpoint is announced. `mcp` is the address of its tool server, "" without one.
    """

    name: str
    daemon: str
    agents_alive: int = 0
    actors_running: int = 0
    actors: int = 0
    gpus_total: int = 0
    list_shaped: bool = False
    announces: bool = False
    candidates: tuple[str, ...] = ()
    unreachable: str = ""
    provider: str = ""
    note: str = ""
    mcp: str = ""


@frozen
class Registered:
    """What `MENTAT_GROUP` and its companions say of an engine that somebody else started: published as it is."""

    group: str
    openai: Mapping[str, object] | None = None
    mcp: Mapping[str, object] | None = None


@frozen
class Told:
    """Something worth one log line: an event's name, its level and its fields."""

    event: str
    level: str = "warning"
    fields: Mapping[str, object] = attrs.field(factory=dict)

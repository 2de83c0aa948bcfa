"""What one node is made of, as far as it is known. None means unknown everywhere: never zero, never a guess."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

GIB = 1 << 30
MIB = 1 << 20

_LOOPBACK = "127."


@attrs.frozen
class Hindrance:
    """One reason why a GPU is not free to be placed on. `code` is a stable word, `message` says it to an operator.

    Codes: `ecc` (uncorrected memory errors), `remap` (the card has run out of spare memory rows), `reset` and `reboot`
    (the driver asks for one), `lost` (fell off the bus), `unseen` (known, but the last probe could not see it), `held`
    (somebody else's memory is on it), `mig` (split into instances), `memory` (how much memory it has is unknown),
    `twice` (another node announced it first, as the control plane knows).
    """

    code: str
    message: str


@attrs.frozen
class Holder:
    """A process that holds memory of a GPU. `used_bytes` None: the driver does not say how much."""

    pid: int
    used_bytes: int | None = None


@attrs.frozen
class Gpu:
    """One GPU as its driver describes it.

    `uuid` is its identity; `index` is its place in PCI order and changes when a card disappears. `gpu_class` is the
    word profiles name (`h100-80g`). `memory_bytes` is the driver's figure, or the system's memory where the part has
    none of its own (`unified`). `utilization` is 0..1. GPUs with the same `nvlink_domain` reach each other over NVLink;
    None means that the topology is unknown. `holders` None: who uses it is unknown.
    """

    uuid: str
    index: int
    name: str
    gpu_class: str = ""
    memory_bytes: int | None = None
    used_bytes: int | None = None
    utilization: float | None = None
    compute_cap: tuple[int, int] | None = None
    bus_id: str = ""
    numa_node: int | None = None
    nvlink_domain: int | None = None
    ecc_uncorrected: int | None = None
    mig: bool | None = None
    virtual: bool = False
    unified: bool = False
    holders: tuple[Holder, ...] | None = None
    hindrances: tuple[Hindrance, ...] = ()

    @property
    def placeable(self) -> bool:
        """Whether a shard may be put on it, as far as the GPU itself is concerned (allocations are not known here)."""
        return not self.hindrances


@attrs.frozen
class Gid:
    """One entry of an RDMA port's address table. `address` is an IPv6 address in its short form.

    `kind` is `ib`, `v1`, `v2` (RoCE versions) or "" when unknown; `netdev` the network interface it belongs to, or "".
    """

    index: int
    address: str
    kind: str = ""
    netdev: str = ""


@attrs.frozen
class Port:
    """One port of an RDMA adapter. `state` and `phys_state` are the kernel's words in lower case, "" when unknown.

    `link_layer` is `infiniband`, `ethernet` or ""; `why_not` says why no job may use it, "" when one may.
    """

    number: int
    state: str = ""
    phys_state: str = ""
    link_layer: str = ""
    rate_gbps: float | None = None
    gids: tuple[Gid, ...] = ()
    why_not: str = ""


@attrs.frozen
class RdmaAdapter:
    """One RDMA device. `node_type` is the kernel's word in lower case (`ca`; `rnic` is iWARP), "" when unknown."""

    name: str
    node_type: str = ""
    numa_node: int | None = None
    ports: tuple[Port, ...] = ()


@attrs.frozen
class Rail:
    """A usable port on a fabric. `only_port` False: the adapter has others, so the port must be named too."""

    adapter: str
    port: int = 1
    only_port: bool = True
    rate_gbps: float | None = None
    numa_node: int | None = None
    netdev: str = ""


@attrs.frozen
class Fabric:
    """The ports of this node that reach the same peers.

    `name` "" means that nothing tells which peers these are, so the node is an island: single-node work only.
    `transport` is `ib` or `roce`. `gid_index` is set for RoCE only: the entry that is RoCE v2 on every rail.
    """

    name: str
    transport: str
    rails: tuple[Rail, ...]
    gid_index: int | None = None
    subnet: str = ""

    @property
    def rate_gbps(self) -> float:
        """Rates of all rails together; rails of unknown rate count as nothing."""
        return sum(rail.rate_gbps or 0.0 for rail in self.rails)


@attrs.frozen
class Interface:
    """A network interface and the addresses it carries, without prefix lengths and scopes."""

    name: str
    addresses: tuple[str, ...] = ()


@attrs.frozen
class Cpus:
    """Processors this process may use (affinity and control group counted in), and what they are."""

    count: int = 1
    model: str = ""
    arch: str = ""
    numa_nodes: int = 1


@attrs.frozen
class Memory:
    """System memory. `total_bytes` is the smaller of the machine's and the control group's."""

    total_bytes: int | None = None
    available_bytes: int | None = None


@attrs.frozen
class Disk:
    """The file system under a directory. `free_bytes` is what an ordinary user may still write."""

    path: str
    total_bytes: int | None = None
    free_bytes: int | None = None


@attrs.frozen
class Inventory:
    """Everything the scheduler sees of one node.

    `gpu_backend` is where the GPUs came from: `nvml`, `nvidia-smi`, `file` or `none`. `partial` means that something
    was there and could not be read: what is listed is true, but there may be more; `notes` say what, for operators.
    """

    node: str = ""
    address: str = ""
    labels: Mapping[str, str] = attrs.field(factory=dict)
    cpus: Cpus = Cpus()
    memory: Memory = Memory()
    disk: Disk | None = None
    gpus: tuple[Gpu, ...] = ()
    gpu_backend: str = "none"
    adapters: tuple[RdmaAdapter, ...] = ()
    fabrics: tuple[Fabric, ...] = ()
    interfaces: tuple[Interface, ...] = ()
    notes: tuple[str, ...] = ()
    partial: bool = False

    def gpu(self, uuid: str) -> Gpu | None:
        """The GPU of that identity, or None."""
        return next((gpu for gpu in self.gpus if gpu.uuid == uuid), None)

    def fabric(self, name: str) -> Fabric | None:
        """The fabric of that name, or None. An unnamed one is never found: nobody else is known to be on it."""
        return next((fabric for fabric in self.fabrics if name and fabric.name == name), None)

    def interface_of(self, address: str) -> str:
        """The interface that carries `address`, or "". The one with a loopback address carries all of 127.0.0.0/8."""
        for each in self.interfaces:
            if address in each.addresses:
                return each.name
            if address.startswith(_LOOPBACK) and any(own.startswith(_LOOPBACK) for own in each.addresses):
                return each.name
        return ""

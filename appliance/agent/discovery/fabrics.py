"""RDMA adapters of this node, and which of their ports reach the same peers.

What is read is `/sys/class/infiniband`; what is understood is a mapping from path to content, so that the reading and
the understanding can be tried apart. A job that is given a port it cannot use, or one on another fabric than its
peers', does not fail: it hangs. So a port is usable only if everything known of it says so, and a fabric has a name
only if somebody gave it one, or the subnet manager did.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

import attrs

from appliance.agent.wording import plain
from appliance.facts.hardware import Fabric, Gid, Port, Rail, RdmaAdapter

Tree = Mapping[str, str | None]
"""Path under the root -> content without the final newline; None when the file is there and cannot be read."""

_LINK_LOCAL = ipaddress.ip_network("fe80::/10")
_DEFAULT_PREFIX = "fe80000000000000"
_FILES = ("node_type", "device/numa_node")
_PORT_FILES = ("state", "phys_state", "link_layer", "rate")


def read_tree(root: Path) -> dict[str, str | None]:
    """The files below `root` that `parse` understands. Blocks; a root that is not there is an empty tree."""
    tree: dict[str, str | None] = {}
    for device in _list(root):
        wanted = [device / name for name in _FILES]
        for port in _list(device / "ports"):
            wanted += [port / name for name in _PORT_FILES]
            for folder in ("gids", "gid_attrs/types", "gid_attrs/ndevs"):
                wanted += _list(port / folder)
        for path in wanted:
            try:
                tree[plain(str(path.relative_to(root)))] = path.read_text("utf-8", "replace").strip()
            except FileNotFoundError:
                continue
            except OSError:
                # The kernel answers EINVAL for table entries that are not in use.
                tree[plain(str(path.relative_to(root)))] = None
    return tree


def parse(tree: Tree) -> tuple[RdmaAdapter, ...]:
    """The adapters in their natural order (`mlx5_2` before `mlx5_10`), every unusable port with its reason."""
    names = {path.split("/", 1)[0] for path in tree if "/" in path}
    adapters = [_adapter(name, tree) for name in sorted(names, key=_natural)]
    return _without_odd_gids(adapters)


def fabrics(adapters: Iterable[RdmaAdapter], configured: str = "") -> tuple[Fabric, ...]:
    """The usable ports grouped by the peers they reach, fastest first, native InfiniBand before RoCE.

    Native ports are told apart by subnet prefix; RoCE ports form one group, since nothing in them names a fabric.
    `configured` names the first group. Without it only a subnet prefix that somebody chose gives a name: `fe80::/64` is
    what every fabric has by default, so it tells nothing, and neither does RoCE's.
    """
    adapters = tuple(adapters)
    index = _roce_index(adapters)
    groups: dict[tuple[str, str], list[Rail]] = {}
    for adapter in adapters:
        for port in adapter.ports:
            if port.why_not:
                continue
            native = port.link_layer == "infiniband"
            gid = None if native else _gid(port, index)
            rail = Rail(
                adapter=adapter.name,
                port=port.number,
                only_port=len(adapter.ports) == 1,
                rate_gbps=port.rate_gbps,
                numa_node=adapter.numa_node,
                netdev=gid.netdev if gid else "",
            )
            groups.setdefault(("ib", _subnet(port)) if native else ("roce", ""), []).append(rail)
    found = [
        Fabric(
            name=f"ib-{subnet}" if subnet else "",
            transport=transport,
            rails=tuple(rails),
            gid_index=index if transport == "roce" else None,
            subnet=subnet,
        )
        for (transport, subnet), rails in groups.items()
    ]
    found.sort(key=lambda fabric: (fabric.transport != "ib", -fabric.rate_gbps, _natural(fabric.rails[0].adapter)))
    if configured and found:
        found[0] = attrs.evolve(found[0], name=configured)
    return tuple(found)


def _adapter(name: str, tree: Tree) -> RdmaAdapter:
    node_type = _word(tree.get(f"{name}/node_type"))
    numa = tree.get(f"{name}/device/numa_node") or ""
    numbers = {
        int(path.split("/")[2])
        for path in tree
        if path.startswith(f"{name}/ports/") and re.fullmatch(r"[0-9]{1,3}", path.split("/")[2])
    }
    ports = (_port(name, number, node_type, tree) for number in sorted(numbers))
    return RdmaAdapter(name, node_type, int(numa) if re.fullmatch(r"[0-9]{1,4}", numa) else None, tuple(ports))


def _port(name: str, number: int, node_type: str, tree: Tree) -> Port:
    at = f"{name}/ports/{number}/"
    rate = re.match(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) Gb/sec", tree.get(at + "rate") or "")
    link_layer = (tree.get(at + "link_layer") or "").lower()
    port = Port(
        number=number,
        state=_word(tree.get(at + "state")),
        # Not every driver has this file; where it is there, it has to say that the link is up.
        phys_state=_word(tree[at + "phys_state"]) or "unreadable" if at + "phys_state" in tree else "",
        link_layer=link_layer,
        rate_gbps=float(rate[1]) if rate else None,
        gids=tuple(_gids(at, native=link_layer == "infiniband", tree=tree)),
    )
    return attrs.evolve(port, why_not=_why_not(port, node_type))


def _gids(at: str, *, native: bool, tree: Tree) -> list[Gid]:
    found = []
    for path, text in tree.items():
        index = re.fullmatch(re.escape(at) + r"gids/([0-9]{1,4})", path)
        address = _address(text) if index else None
        if index is None or address is None:
            continue
        kind = tree.get(f"{at}gid_attrs/types/{index[1]}") or ""
        known = {"IB/RoCE v1": "ib" if native else "v1", "RoCE v2": "v2"}.get(kind, "ib" if native else "")
        netdev = tree.get(f"{at}gid_attrs/ndevs/{index[1]}") or ""
        found.append(Gid(int(index[1]), address, known, netdev))
    return sorted(found, key=lambda gid: gid.index)


def _why_not(port: Port, node_type: str) -> str:
    if node_type == "rnic":
        return "iWARP, which engines do not use"
    if port.state != "active":
        return f"state is {port.state or 'unknown'}, not active"
    if port.phys_state not in ("", "linkup"):
        return f"physical state is {port.phys_state}, not linkup"
    if port.link_layer == "infiniband":
        return ""
    if port.link_layer != "ethernet":
        return f"link layer is {port.link_layer or 'unknown'}"
    return "" if _candidates(port) else "Ethernet without a RoCE v2 address of its own"


def _without_odd_gids(adapters: list[RdmaAdapter]) -> tuple[RdmaAdapter, ...]:
    """Leave out the RoCE ports where the entry that serves most of them is no RoCE v2 address.

    NCCL takes one index for all adapters, and the index of the RoCE v2 entry differs between nodes, and even between
    the ports of one. A port where that entry is something else would send to nowhere.
    """
    index = _roce_index(adapters)
    why_not = f"GID {index}, which the other ports use, is no RoCE v2 address here"

    def settle(port: Port) -> Port:
        odd = not port.why_not and port.link_layer == "ethernet" and _gid(port, index) is None
        return attrs.evolve(port, why_not=why_not) if odd else port

    return tuple(attrs.evolve(each, ports=tuple(settle(port) for port in each.ports)) for each in adapters)


def _roce_index(adapters: Iterable[RdmaAdapter]) -> int | None:
    """The entry of the address tables that serves most usable RoCE ports; among equals the lowest. None without one.

    IPv6 entries are looked at only where no port has an IPv4 one.
    """
    votes: dict[tuple[int, int], int] = {}
    for port in (port for each in adapters for port in each.ports if not port.why_not):
        for rank, gid in _candidates(port):
            votes[rank, gid.index] = votes.get((rank, gid.index), 0) + 1
    if not votes:
        return None
    best = min(rank for rank, _ in votes)
    return min((-count, index) for (rank, index), count in votes.items() if rank == best)[1]


def _candidates(port: Port) -> list[tuple[int, Gid]]:
    """RoCE v2 entries that reach beyond the cable, each with its rank: 0 for IPv4, 1 for IPv6."""
    found = []
    for gid in port.gids if port.link_layer == "ethernet" else ():
        address = ipaddress.IPv6Address(gid.address)
        if gid.kind == "v2" and address not in _LINK_LOCAL:
            found.append((0 if address.ipv4_mapped else 1, gid))
    return found


def _gid(port: Port, index: int | None) -> Gid | None:
    return next((gid for _, gid in _candidates(port) if gid.index == index), None)


def _subnet(port: Port) -> str:
    """The subnet prefix of a native port in 16 hex digits; "" when it is the default, or none is known."""
    if not port.gids or port.gids[0].index != 0:
        return ""
    prefix = ipaddress.IPv6Address(port.gids[0].address).exploded.replace(":", "")[:16]
    return "" if prefix == _DEFAULT_PREFIX else prefix


def _address(text: str | None) -> str | None:
    """The entry as an IPv6 address; None for one that is not in use, or not understood."""
    try:
        address = ipaddress.IPv6Address(text or "")
    except ValueError:
        return None
    return None if int(address) == 0 else str(address)


def _word(text: str | None) -> str:
    """The word of a numbered state: `4: ACTIVE` is `active`; "" when unknown."""
    found = re.fullmatch(r"[0-9]+:\s*([A-Za-z_ ]+)", text or "")
    return found[1].strip().lower() if found else ""


def _natural(name: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"([0-9]+)", name)]


def _list(folder: Path) -> list[Path]:
    try:
        return sorted(folder.iterdir())
    except OSError:
        return []

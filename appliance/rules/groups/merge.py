"""Many daemons' documents as one list of groups, each with the addresses at which it may answer."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from ...facts.groups import AgentRow, Announced, GroupRow, Service, View
from .sources import Network, Sources, host_of, host_port, ip_of, is_loopback, ranked

RUNNING = "running"
MOST_CANDIDATES = 8
"""Addresses of one group that are tried."""


def merge(views: Mapping[str, View], sources: Sources, own: Sequence[Network]) -> dict[str, Announced]:
    """All groups by name. `views` are by the daemon's address, and hold no stale ones."""
    best: dict[str, tuple[tuple[int, int], str, GroupRow]] = {}
    others = {daemon: view.groups for daemon, view in views.items() if not view.ours}
    for daemon, rows in sorted({**_united(views), **others}.items()):  # of equals the lexically smaller address counts
        for name, row in rows.items():
            weight = (_running(row), sum(agent.alive for agent in row.agents))
            if name not in best or weight > best[name][0]:
                best[name] = (weight, daemon, row)
    nodes = addresses_of_nodes(views)
    return {name: _announced(row, daemon, nodes, sources, own) for name, (_, daemon, row) in sorted(best.items())}


def _united(views: Mapping[str, View]) -> dict[str, Mapping[str, GroupRow]]:
    """The groups of our own agents, each as one: every agent tells of its own rank alone."""
    parts: dict[str, list[tuple[str, GroupRow]]] = {}
    for daemon in sorted(daemon for daemon in views if views[daemon].ours):
        for name, row in views[daemon].groups.items():
            parts.setdefault(name, []).append((daemon, row))
    united: dict[str, dict[str, GroupRow]] = {}
    for name, rows in parts.items():
        whole = GroupRow(
            name,
            tuple(agent for _, row in rows for agent in row.agents),
            tuple(state for _, row in rows for state in row.actors),
            sum(row.gpus_total for _, row in rows),
        )
        united.setdefault(rows[0][0], {})[name] = whole
    return dict(united)


def addresses_of_nodes(views: Mapping[str, View]) -> dict[str, tuple[str, ...]]:
    """All addresses of a node by each name it goes by: the longest list that anybody tells. The loopback of a machine
    that is not this one leads nowhere, or to somebody else's engine here."""
    found: dict[str, tuple[str, ...]] = {}

    def note(names: Sequence[str], addrs: tuple[str, ...], near: bool) -> None:
        addrs = tuple(addr for addr in addrs if near or not is_loopback(addr))
        for name in names:
            if name and len(addrs) > len(found.get(name, ())):
                found[name] = addrs

    for daemon, view in views.items():
        near = is_loopback(host_of(daemon))
        note((view.node_ip, *view.addrs), view.addrs, near)
        for peer in view.peers:
            note((peer.node_ip, peer.link_ip, *peer.addrs), peer.addrs, near)
    return found


def _announced(
    row: GroupRow, daemon: str, nodes: Mapping[str, tuple[str, ...]], sources: Sources, own: Sequence[Network]
) -> Announced:
    alive = [agent for agent in row.agents if agent.alive]
    near = is_loopback(host_of(daemon))
    offers = [
        (tuple(url.rstrip("/") for url in _candidates(agent, agent.openai, nodes, sources, own, near)), agent)
        for agent in alive
        if agent.openai is not None
    ]
    # Of several ranks the lexically first address; who has none at all comes last.
    offers.sort(key=lambda offer: (not offer[0], offer[0][:1], offer[1].id))
    candidates: tuple[str, ...] = ()
    unreachable = provider = note = ""
    if offers:
        candidates, agent = offers[0]
        service = agent.openai
        assert service is not None
        provider, note = service.provider, service.note
        if not candidates and service.url:
            unreachable = f"announced {service.url} on node {agent.node_ip}, and no other machine reaches that address"
        elif not candidates:
            unreachable = (
                f"announced port {service.port}{service.path} on node {agent.node_ip},"
                " and no address of that node passes ALLOWED_SOURCES"
            )
    return Announced(
        row.name,
        daemon,
        len(alive),
        _running(row),
        len(row.actors),
        row.gpus_total,
        row.list_shaped,
        bool(offers),
        candidates,
        unreachable,
        provider,
        note,
        _tool_server(alive, nodes, sources, own, near),
    )


def _tool_server(
    alive: Sequence[AgentRow],
    nodes: Mapping[str, tuple[str, ...]],
    sources: Sources,
    own: Sequence[Network],
    near: bool,
) -> str:
    """The address of the group's tool server: of the agent that serves the model first, then the smallest."""
    offers = [
        (agent.openai is None, found[0])
        for agent in alive
        if agent.mcp is not None and (found := _candidates(agent, agent.mcp, nodes, sources, own, near))
    ]
    return min(offers)[1] if offers else ""


def _candidates(
    agent: AgentRow,
    service: Service,
    nodes: Mapping[str, tuple[str, ...]],
    sources: Sources,
    own: Sequence[Network],
    near: bool,
) -> tuple[str, ...]:
    """Base URLs, the best first. A URL that names its host needs not pass the allowlist: it may be a name. `near`: the
    daemon that tells of it was asked over our own loopback, so that its loopback is ours."""
    if service.url:
        return (service.url,) if _leads_there(urlsplit(service.url).hostname or "", sources, own, near) else ()
    hosts = nodes.get(agent.node_ip) or (agent.node_ip,)
    passed = ranked((host for host in hosts if near or not is_loopback(host)), sources, own, loopback_last=True)
    return tuple(f"http://{host_port(host, service.port)}{service.path}" for host in passed[:MOST_CANDIDATES])


def _leads_there(host: str, sources: Sources, own: Sequence[Network], near: bool) -> bool:
    """Whether a host that a document names can be where its engine is. Loopback of another machine is not, nor are
    link-local addresses of no network of ours: among them are those at which clouds give out credentials."""
    if is_loopback(host):
        return near
    ip = ip_of(host)
    if ip is None:
        return True
    return sources.allow(host, own) if ip.is_link_local else not (ip.is_multicast or ip.is_unspecified)


def _running(row: GroupRow) -> int:
    return row.actors.count(RUNNING)

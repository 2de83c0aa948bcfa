"""Many daemons' documents as one list of groups, each with the addresses at which it may answer."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from ...facts.groups import AgentRow, Announced, GroupRow, Service, View
from .sources import Network, Sources, host_port, ranked

RUNNING = "running"


def merge(views: Mapping[str, View], sources: Sources, own: Sequence[Network]) -> dict[str, Announced]:
    """All groups by name. `views` are by the daemon's address, and hold no stale ones."""
    best: dict[str, tuple[tuple[int, int], str, GroupRow]] = {}
    others = {daemon: view.groups for daemon, view in views.items() if not view.ours}
    for daemon, rows in sorted({**_united(views), **others}.items()):  # of equals the lexically smaller address counts
        for name, row in rows.items():
            weight = (_running(row), sum(agent.alive for agent in row.agents))
            if name not in best or weight > best[name][0]:
                best[name] = (weight, daemon, row)
    nodes = addresses_of_nodes(views.values())
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


def addresses_of_nodes(views: Iterable[View]) -> dict[str, tuple[str, ...]]:
    """All addresses of a node by each name it goes by: the longest list that anybody tells."""
    found: dict[str, tuple[str, ...]] = {}

    def note(names: Sequence[str], addrs: tuple[str, ...]) -> None:
        for name in names:
            if name and len(addrs) > len(found.get(name, ())):
                found[name] = addrs

    for view in views:
        note((view.node_ip, *view.addrs), view.addrs)
        for peer in view.peers:
            note((peer.node_ip, peer.link_ip, *peer.addrs), peer.addrs)
    return found


def _announced(
    row: GroupRow, daemon: str, nodes: Mapping[str, tuple[str, ...]], sources: Sources, own: Sequence[Network]
) -> Announced:
    alive = [agent for agent in row.agents if agent.alive]
    offers = [
        (tuple(url.rstrip("/") for url in _candidates(agent, agent.openai, nodes, sources, own)), agent)
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
        if not candidates:
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
        _tool_server(alive, nodes, sources, own),
    )


def _tool_server(
    alive: Sequence[AgentRow], nodes: Mapping[str, tuple[str, ...]], sources: Sources, own: Sequence[Network]
) -> str:
    """The address of the group's tool server: of the agent that serves the model first, then the smallest."""
    offers = [
        (agent.openai is None, found[0])
        for agent in alive
        if agent.mcp is not None and (found := _candidates(agent, agent.mcp, nodes, sources, own))
    ]
    return min(offers)[1] if offers else ""


def _candidates(
    agent: AgentRow,
    service: Service,
    nodes: Mapping[str, tuple[str, ...]],
    sources: Sources,
    own: Sequence[Network],
) -> tuple[str, ...]:
    """Base URLs, the best first. A URL that names its host needs not pass the allowlist: it may be a name."""
    if service.url:
        return (service.url,)
    hosts = ranked(nodes.get(agent.node_ip) or (agent.node_ip,), sources, own, loopback_last=True)
    return tuple(f"http://{host_port(host, service.port)}{service.path}" for host in hosts)


def _running(row: GroupRow) -> int:
    return row.actors.count(RUNNING)

"""What the reports of its shards say about a replica."""

from __future__ import annotations

from collections.abc import Iterator
from urllib.parse import urlsplit

import attrs

from appliance.facts.endpoint import Endpoint
from appliance.facts.report import Report
from appliance.rules.fleet.actions import Failure
from appliance.rules.fleet.members import Placed
from appliance.rules.fleet.world import World

_PROGRESS = ("starting", "fetching", "loading", "ready")


@attrs.frozen
class Trouble:
    """Why a replica cannot go on. `fault`: its model is to blame, not a node. `failures` are what its shards said."""

    reason: str
    fault: bool = False
    failures: tuple[Failure, ...] = ()


def reports_of(world: World, placed: Placed) -> Iterator[tuple[int, str, Report | None]]:
    """Rank, node and report of each shard that is known, in the order of ranks."""
    for rank, shard in sorted(placed.shards.items()):
        node = world.nodes.get(shard.node)
        yield rank, shard.node, node.reports.get(shard.id) if node is not None else None


def serves(world: World, placed: Placed) -> bool:
    """Whether it takes requests and is wanted. The leader alone decides, as long as no other rank is on its way out:
    after a restart of the control plane it serves before the nodes of the others have called."""
    if placed.stage != "running" or placed.broken:
        return False
    ready = False
    for rank, _, report in reports_of(world, placed):
        if rank == 0:
            ready = report is not None and report.state == "ready" and report.url != ""
        elif report is not None and (report.ended or report.state == "stopping"):
            return False
    return ready


def trouble(world: World, placed: Placed, now: float) -> Trouble | None:
    """Why a running replica must be given up, None while it need not."""
    found = [(rank, node, report) for rank, node, report in reports_of(world, placed) if report and report.ended]
    # The first to fail is the cause; the others lost their peer.
    found.sort(key=lambda each: placed.states[each[0]][1] if each[0] in placed.states else now)
    failed = tuple(
        Failure(
            now,
            placed.id,
            placed.profile.name,
            node,
            rank,
            report.reason,
            report.exit,
            last_line(report),
            report.tail,
            # What an agent says of another port is no reason to draw a new one, again and again.
            report.refused_port if report.refused_port == placed.shards[rank].rendezvous_port else 0,
        )
        for rank, node, report in found
        if report.state == "failed"
    )
    if failed:
        return Trouble(failed[0].sentence, True, failed)
    if found:
        return Trouble(f"its shard on {found[0][1]} was stopped")
    if placed.broken:
        return Trouble(placed.broken, placed.fault)
    return None


def drains(world: World, placed: Placed) -> bool:
    """Whether its leader has been told to finish, by whoever was in charge before."""
    return any(rank == 0 and report and report.state == "draining" for rank, _, report in reports_of(world, placed))


def is_cut(world: World, placed: Placed) -> bool:
    """Whether a part of a replica that drains is gone, so that the rest of it has nothing to wait for."""
    nodes = [world.nodes.get(name) for name in placed.nodes]
    if any(node is None or node.state == "lost" for node in nodes):
        return True
    return any(report is not None and report.state == "failed" for _, _, report in reports_of(world, placed))


def last_line(report: Report) -> str:
    """The last line of the log that says anything."""
    return next((line.strip() for line in reversed(report.tail) if line.strip()), "")


def phase(world: World, placed: Placed) -> str:
    """One word for operators: starting, fetching, loading, ready, draining, stopping, or incomplete."""
    if placed.stage == "over":
        return "stopping"
    states = [report.state if report is not None else "starting" for _, _, report in reports_of(world, placed)]
    if placed.stage == "stopping":
        finishing = placed.stop_by > placed.stage_at and states[:1] in (["ready"], ["draining"])
        return "draining" if finishing else "stopping"
    if any(state not in _PROGRESS for state in states):
        return "stopping"
    if not placed.complete:
        return "incomplete"
    return min(states, key=_PROGRESS.index)


def since(placed: Placed) -> float:
    """When it last went on: the latest change of state of any shard, by our clock."""
    return max((at for _, at in placed.states.values()), default=placed.made_at)


def endpoint(world: World, placed: Placed) -> Endpoint | None:
    """Where it takes requests, None when it takes none."""
    if not serves(world, placed):
        return None
    leader = placed.shards[0]
    url = urlsplit(world.nodes[leader.node].reports[leader.id].url)
    if not url.hostname or not url.port:
        return None
    return Endpoint(
        placed.id,
        url.hostname,
        url.port,
        tls=url.scheme == "https",
        base=url.path.rstrip("/"),
        models=(placed.model,),
        engine=placed.profile.engine,
        api_key=leader.key,
    )

"""The documents about nodes and replicas, made from the world that the control plane acts on.

As in `documents.py`: plain dictionaries, times of day in seconds since the epoch, what is not known is null. No keys of
engines and no environment are in them.
"""

from __future__ import annotations

import difflib
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, get_args

import attrs
import trio

from ..facts.errors import Refusal
from ..facts.hardware import Inventory
from ..facts.replica import Shard
from ..facts.report import Report
from ..rules.fleet.actions import Why
from ..rules.fleet.members import Node, NodeState, Placed
from ..rules.fleet.reports import phase, since
from ..rules.fleet.rooming import shards_on, spot_of
from ..rules.fleet.world import World
from ..rules.placement import fit
from ..store.failed import StoreFailed
from ..store.rows import Cordon
from .span import span

if TYPE_CHECKING:
    from ..control.plane import Plane

Document = dict[str, Any]
NODE_STATES = get_args(NodeState)
CLOCK_OFF_S = 5.0
"""A clock that is off by more makes certificates and log times hard to trust, so it is told."""
MOST_NAMES = 20


# -- nodes -------------------------------------------------------------------------------------------------------------


async def nodes(plane: Plane, now: float) -> Document:
    """`/nodes`. `now` is `time.monotonic`, here and below."""
    cordons = await _cordons(plane)
    found = []
    for _, node in sorted(plane.world.nodes.items()):
        found.append(_node(plane, node, cordons, now))
        await trio.lowlevel.checkpoint()  # a whole inventory takes a third of a millisecond, and streams must go on
    return {"nodes": found, "settling_s": settling_s(plane, now)}


async def node(plane: Plane, name: str, now: float) -> Document:
    """`/nodes/{name}`. Raises Refusal."""
    known_node(plane, name)
    cordons = await _cordons(plane)
    return _node(plane, known_node(plane, name), cordons, now)


async def _cordons(plane: Plane) -> Mapping[str, Cordon]:
    """Who cordoned which node, and when; whether it is cordoned the world knows. An operator must see the nodes when
    the database fails, so nothing is known then: the attempt to change anything says why."""
    try:
        return await plane.store.cordons()
    except StoreFailed:
        return {}  # the control plane, which looks every few seconds, has told of it


def _node(plane: Plane, node: Node, cordons: Mapping[str, Cordon], now: float) -> Document:
    inventory, taken, cordon = node.inventory, spot_of(node).taken, cordons.get(node.name)
    shards = list(shards_on(node))
    grace_s = plane.fleet.settings.drain_grace_s
    draining = node.draining_since is not None
    return {
        "name": node.name,
        "state": node.state,
        "since": _wall(node.since, now),
        "why": _why_node(plane, node, now),
        "connected": node.connected,
        "heard_s": max(0.0, now - node.heard_at) if node.boot_id else None,
        "cordoned": node.cordoned or draining,
        "cordoned_by": cordon.by if cordon else None,
        "cordoned_at": cordon.at if cordon else None,
        "draining": draining,
        "drain_left_s": max(0.0, node.draining_since + grace_s - now) if node.draining_since is not None else None,
        "address": inventory.address,
        "version": node.version,
        "clock_off_s": node.clock_off_s,
        "gpus": _classes(inventory, taken),
        "not_free": list(_not_free(inventory, taken)),
        "cpus": inventory.cpus.count,
        "memory_bytes": inventory.memory.total_bytes,
        "memory_available_bytes": inventory.memory.available_bytes,
        "fabrics": [
            {"name": fabric.name, "transport": fabric.transport, "rate_gbps": fabric.rate_gbps or None}
            for fabric in inventory.fabrics
        ],
        "replicas": sorted({shard.replica for shard in shards}),
        "shards": len(shards),
        "ports": list(node.port_range),
        "troubles": list(_node_troubles(plane, node, now)),
        "inventory": attrs.asdict(inventory),
    }


def _classes(inventory: Inventory, taken: Mapping[str, str]) -> list[Document]:
    total = Counter(gpu.gpu_class or "unknown" for gpu in inventory.gpus)
    free = {kind: len(gpus) for kind, gpus in fit.free_gpus(inventory.gpus, taken).items()}
    return [{"class": kind, "total": count, "free": free.get(kind, 0)} for kind, count in sorted(total.items())]


def _not_free(inventory: Inventory, taken: Mapping[str, str]) -> Iterator[Document]:
    """The GPUs that nothing new may have, each with the sentence by which placement passes it over."""
    for gpu in inventory.gpus:
        why = fit.why_not_free(gpu, taken)
        if why:
            yield {
                "index": gpu.index,
                "uuid": gpu.uuid,
                "class": gpu.gpu_class or "unknown",
                "replica": taken.get(gpu.uuid),
                "why": why,
            }


def _why_node(plane: Plane, node: Node, now: float) -> str:
    """Why it is not ready, and what comes next; "" when it is."""
    silent_s = now - node.heard_at
    lost_in_s = plane.fleet.settings.lost_after_s - silent_s
    then = f"what ran there is started elsewhere in {span(lost_in_s)}" if lost_in_s > 0 else ""
    match node.state:
        case "expected":
            told = "it has a certificate and has not called since this router started"
        case "unreachable":
            told = f"{'silent' if node.connected else 'not connected'} for {span(silent_s)}"
        case "lost":
            return f"nothing was heard of it for {span(silent_s)}; what ran there is started elsewhere"
        case _:
            return ""
    return f"{told}; {then}" if then else told


def _node_troubles(plane: Plane, node: Node, now: float) -> Iterator[str]:
    """What an operator should know of it, a sentence each."""
    why = _why_node(plane, node, now)
    if why:
        yield f"{node.state}: {why}"
    if abs(node.clock_off_s) > CLOCK_OFF_S:
        ahead = "ahead of" if node.clock_off_s > 0 else "behind"
        yield f"its clock is {span(abs(node.clock_off_s))} {ahead} this machine's: set both by NTP"
    if node.inventory.partial:
        yield f"its hardware could not be read as a whole: {'; '.join(node.inventory.notes) or 'its log says why'}"


def known_node(plane: Plane, name: str) -> Node:
    """Raises Refusal, which names those that there are."""
    node = plane.world.nodes.get(name)
    if node is None:
        raise Refusal(404, "node_not_found", unknown("node", name, plane.world.nodes))
    return node


async def changed(plane: Plane, name: str, verb: str, done: bool, now: float) -> Document:
    """The answer to a cordon, an uncordon or a drain: what is so now, and what follows."""
    document = await node(plane, name, now)
    return {"changed": done, "told": list(_follows(document, verb)), "node": document}


def _follows(node: Document, verb: str) -> Iterator[str]:
    there = node["replicas"]
    names = ", ".join(there)
    count, go = (f"{len(there)} replicas", "go") if len(there) != 1 else ("1 replica", "goes")
    match verb:
        case "cordon":
            yield f"nothing new is placed there; {f'{count} there {go} on: {names}' if there else 'nothing runs there'}"
        case "uncordon":
            yield "replicas may be placed there again"
        case "drain" if not there:
            yield "nothing new is placed there, and nothing runs there"
        case "drain":
            left = span(node["drain_left_s"])
            yield f"{count} must go: {names}"
            yield f"each goes on until its replacement serves elsewhere, and is stopped without one in {left}"
            if not node["connected"]:
                yield "the node is not connected, so nothing can be stopped there before it calls"


# -- replicas ----------------------------------------------------------------------------------------------------------


async def replicas(plane: Plane, now: float) -> Document:
    """`/replicas`: those that exist, and how many are missing of which model, and why."""
    found = []
    for _, placed in sorted(plane.world.replicas.items()):
        found.append(_replica(plane.world, placed, now))
        await trio.lowlevel.checkpoint()  # as for nodes: a tenth of a millisecond each, and streams must go on
    return {"replicas": found, "missing": list(missing(plane, now)), "settling_s": settling_s(plane, now)}


def replicas_of(plane: Plane, model: str, now: float) -> list[Document]:
    """Those of one model."""
    mine = [placed for placed in plane.world.replicas.values() if placed.model == model]
    return [_replica(plane.world, placed, now) for placed in sorted(mine, key=lambda placed: placed.id)]


def missing(plane: Plane, now: float, model: str = "") -> Iterator[Document]:
    """What is wanted and neither serves nor starts."""
    for name in [model] if model else sorted(plane.fleet.models):
        why = plane.fleet.stand(name, now)
        count = why.wanted - why.serving - why.starting
        if why.missing and count > 0:
            yield {
                "model": name,
                "count": count,
                "reason": why.missing,
                "again_s": why.retry_in_s or None,
                "failures": failures(why, now),
            }


def last_words(plane: Plane, replica: str, rank: int) -> tuple[str, ...] | None:
    """The last lines of a part of a replica that failed and is gone, as its report had them; None when nothing is known
    of it."""
    for failed in plane.fleet.history.failures.values():
        for each in failed:
            if (each.replica, each.rank) == (replica, rank):
                return each.tail
    return None


def failures(why: Why, now: float) -> list[Document]:
    """The model's last failures, the latest first."""
    return [
        {
            "replica": each.replica,
            "profile": each.profile,
            "node": each.node,
            "rank": each.rank,
            "reason": each.reason,
            "exit": each.exit,
            "line": each.line,
            "tail": list(each.tail),
            "ago_s": now - each.at,
            "told": each.sentence,
        }
        for each in why.failures
    ]


def _replica(world: World, placed: Placed, now: float) -> Document:
    shards = [_shard(world, placed, rank, shard, now) for rank, shard in sorted(placed.shards.items())]
    leader = placed.shards.get(0)
    first = next(iter(placed.shards.values()), None)
    report = _report(world, leader) if leader else None
    return {
        "id": placed.id,
        "model": placed.model,
        "profile": placed.profile.name,
        "engine": placed.profile.engine,
        "state": phase(world, placed),
        "why": _why_replica(world, placed, now),
        "since": _wall(since(placed), now),
        "url": report.url if report else "",
        "nodes": list(placed.nodes),
        "gpu_class": first.gpu_class if first else "",
        "fabric": first.fabric if first else "",
        "wanted": placed.stage == "running",
        "adopted": placed.adopted,
        "shards": shards,
    }


def _shard(world: World, placed: Placed, rank: int, shard: Shard, now: float) -> Document:
    report = _report(world, shard)
    _, at = placed.states.get(rank, ("starting", placed.made_at))
    coming = placed.stage == "running"  # of one that ends, what its node has forgotten has ended
    node = world.nodes.get(shard.node)
    return {
        "rank": rank,
        "node": shard.node,
        "state": report.state if report else "starting" if coming else "stopped",
        "reason": report.reason if report else "its node has not reported it yet" if coming else "",
        "exit": report.exit if report else "",
        "since": _wall(at, now),
        "pid": report.pid or None if report else None,
        "port": report.port or None if report else None,
        "url": report.url if report else "",
        "gpus": [_index(node.inventory, uuid) if node else uuid for uuid in shard.gpus],
        "adopted": report.adopted if report else False,
        "log": report.log if report else "",
        "tail": list(report.tail) if report else [],
    }


def _index(inventory: Inventory, uuid: str) -> int | str:
    """A GPU as its node's operator counts; by its UUID where it is not there any more."""
    gpu = inventory.gpu(uuid)
    return uuid if gpu is None else gpu.index


def _why_replica(world: World, placed: Placed, now: float) -> str:
    told = []
    if placed.stage != "running":
        told.append(placed.reason)
        if placed.stage == "stopping" and placed.stop_by > now:
            told.append(f"it may finish its requests for {span(placed.stop_by - now)}")
    elif not placed.complete:
        ranks = [str(rank) for rank in range(placed.profile.nodes) if rank not in placed.shards]
        told.append(f"nothing was heard of rank {', '.join(ranks)} since this router started")
    for name in dict.fromkeys(placed.nodes):
        node = world.nodes.get(name)
        if node is not None and node.state != "ready":
            told.append(f"{name} is {node.state}")
    return "; ".join(each for each in told if each)


def _report(world: World, shard: Shard) -> Report | None:
    node = world.nodes.get(shard.node)
    return node.reports.get(shard.id) if node else None


# -- both --------------------------------------------------------------------------------------------------------------


def node_states(world: World) -> dict[str, int]:
    """How many nodes are in which state; every state is there."""
    counts = Counter(node.state for node in world.nodes.values())
    return {state: counts[state] for state in NODE_STATES}


def replica_states(plane: Plane) -> dict[str, dict[str, int]]:
    """Of each model that is placed: how many replicas are in which state. `ready` is always there."""
    found: dict[str, dict[str, int]] = {name: {"ready": 0} for name in sorted(plane.fleet.models)}
    for placed in plane.world.replicas.values():
        _count(plane.world, placed, found.setdefault(placed.model, {"ready": 0}))
    return found


def states_of(plane: Plane, model: str) -> dict[str, int]:
    """The same of one model."""
    found = {"ready": 0}
    for placed in plane.world.replicas.values():
        if placed.model == model:
            _count(plane.world, placed, found)
    return found


def _count(world: World, placed: Placed, states: dict[str, int]) -> None:
    state = phase(world, placed)
    states[state] = states.get(state, 0) + 1


def troubles(plane: Plane, now: float) -> list[str]:
    """What is wrong with nodes and with models that are placed, a sentence each."""
    told = [
        f"node {node.name}: {each}"
        for _, node in sorted(plane.world.nodes.items())
        for each in _node_troubles(plane, node, now)
    ]
    return told + [f"{name}: {why}" for name, why in sorted(plane.fleet.troubles(now).items())]


def summary(plane: Plane, now: float) -> Document:
    """`fleet` of `/status`."""
    replicas: Counter[str] = Counter()
    for states in replica_states(plane).values():
        replicas.update(states)
    drains = {
        name: any(shards_on(node))
        for name, node in sorted(plane.world.nodes.items())
        if node.draining_since is not None
    }
    return {
        "nodes": node_states(plane.world),
        "replicas": dict(replicas),
        "cordoned": sorted(node.name for node in plane.world.nodes.values() if node.cordoned),
        "draining": [name for name, left in drains.items() if left],
        "drained": [name for name, left in drains.items() if not left],
        "settling_s": settling_s(plane, now),
    }


async def audit(plane: Plane, lines: int) -> Document:
    """`/audit`, the newest last."""
    entries = await plane.store.entries(lines)
    return {
        "audit": [
            {"at": each.at, "by": each.by, "action": each.action, "target": each.target, "detail": each.detail}
            for each in reversed(entries)
        ]
    }


def settling_s(plane: Plane, now: float) -> float | None:
    """For how long nothing is started or stopped yet; null once everything may be."""
    fleet = plane.fleet
    return None if fleet.settled else max(0.0, fleet.started_at + fleet.settings.settle_s - now)


def unknown(kind: str, name: str, known: Iterable[str]) -> str:
    """The sentence for a name that nobody knows: the nearest one, or those that there are."""
    names = sorted(known)
    told = f"no {kind} '{name[:100]}' is known"
    if not names:
        return f"{told}: there is none at all"
    near = difflib.get_close_matches(name, names, 1)
    if near:
        return f"{told}: did you mean {near[0]}?"
    more = f" and {len(names) - MOST_NAMES} more" if len(names) > MOST_NAMES else ""
    return f"{told}; there are: {', '.join(names[:MOST_NAMES])}{more}"


def _wall(at: float, now: float) -> float:
    """A moment of our own clock as a time of day."""
    return time.time() - (now - at)

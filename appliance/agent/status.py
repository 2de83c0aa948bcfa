"""The document of `/status`: what runs here, in the form in which announced groups are read by routers.

A replica is one group, named like it. Its shards are the group's agents and actors: an actor is `running` when its
shard is ready, and the one that serves HTTP announces `openai`. Everything that form has no place for stands under
`appliance`. No key, no variable of an engine's environment and no command line is in it, since anybody who reaches the
port can read it; the last lines of a log (which may hold anything) are given to this machine alone.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Mapping
from typing import Any

import attrs
import msgspec

from appliance import __version__
from appliance.facts.groups import Registered
from appliance.facts.hardware import Inventory
from appliance.facts.report import Report
from appliance.rules.fleet.alone import Waiting

PROTO = "0.99"
"""The version of the form."""

ACTOR_STATES: Mapping[str, str] = {
    "fetching": "spawning",
    "starting": "spawning",
    "loading": "spawning",
    "ready": "running",
    "draining": "draining",
    "stopping": "stopping",
    "stopped": "dead",
    "failed": "dead",
}
"""Routers send requests to `running` alone, so a shard that drains gets no new ones."""


@attrs.frozen
class Identity:
    """Who this agent is. `boot_id` is new at each start, `started_at` in seconds since 1970."""

    node: str
    address: str
    boot_id: str
    started_at: float
    hostname: str = attrs.field(factory=socket.gethostname)

    @property
    def node_id(self) -> str:
        """56 hex digits that stay the same over restarts, and are not those of another daemon on this address."""
        return hashlib.sha256(f"appliance:{self.node}:{self.address}".encode()).hexdigest()[:56]


@attrs.frozen
class Control:
    """How things stand with the control plane at `url`. `since` is in seconds since 1970, `reason` says why it is not
    `connected`."""

    url: str
    connected: bool
    since: float
    reason: str = ""


@attrs.frozen
class Seen:
    """Everything the document is made of, at one moment. `failures` counts by model since the start, `control` is None
    in local mode, `registered` is an engine beside this agent that somebody else started."""

    identity: Identity
    inventory: Inventory
    reports: Mapping[str, Report]
    waiting: tuple[Waiting, ...] = ()
    failures: Mapping[str, int] = attrs.field(factory=dict)
    control: Control | None = None
    registered: Registered | None = None

    @property
    def address(self) -> str:
        """Where the node is now: its address may have changed since the start."""
        return self.inventory.address or self.identity.address


def document(seen: Seen) -> dict[str, Any]:
    """The whole document but for `seq`, which belongs to whoever counts the events. Logs' tails are in it."""
    identity, inventory = seen.identity, seen.inventory
    return {
        "proto": PROTO,
        "node_id": identity.node_id,
        "node_ip": seen.address,
        "hostname": identity.hostname,
        "boot_id": identity.boot_id,
        "addrs": _addresses(seen.address, inventory),
        "addr_tags": {},
        "peers": {},
        "groups": _groups(seen),
        "clients": {},
        "counters": {},
        "appliance": {
            "version": __version__,
            "node": identity.node,
            "started_at": identity.started_at,
            "inventory": msgspec.to_builtins(inventory),
            "shards": {shard_id: _shard(report) for shard_id, report in seen.reports.items()},
            "waiting": {each.replica: _waiting(each) for each in seen.waiting},
            "failures": dict(seen.failures),
            "control": attrs.asdict(seen.control) if seen.control is not None else None,
        },
    }


def without_tails(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The document for others than this machine."""
    own = whole["appliance"]
    shards = {shard_id: row | {"tail": None} for shard_id, row in own["shards"].items()}
    return {**whole, "appliance": {**own, "shards": shards}}


def one_group(whole: Mapping[str, Any], name: str) -> dict[str, Any]:
    """The document with the group `name` alone, with none if there is no such group."""
    groups = whole["groups"]
    return {**whole, "groups": {name: groups[name]} if name in groups else {}}


def _addresses(address: str, inventory: Inventory) -> list[str]:
    """The preferred one first. Loopback and link-local ones mean nothing to others."""
    found = [address]
    for interface in inventory.interfaces:
        found += [each for each in interface.addresses if not each.startswith(("127.", "::1", "fe80:", "169.254."))]
    return list(dict.fromkeys(each for each in found if each))


def _groups(seen: Seen) -> dict[str, Any]:
    by_replica: dict[str, list[Report]] = {}
    for report in seen.reports.values():
        if report.state != "stopped":
            by_replica.setdefault(report.shard.replica, []).append(report)
    groups: dict[str, Any] = {
        replica: {
            "agents": {_agent_id(report, seen.identity): _agent(report, seen.address) for report in reports},
            "actors": {_actor_id(report): _actor(report, seen) for report in reports},
            "placement_groups": {},
            "gpus_total": sum(len(report.shard.gpus) for report in reports),
            "gpus_used": sum(len(report.shard.gpus) for report in reports if not report.ended),
        }
        for replica, reports in sorted(by_replica.items())
    }
    if seen.registered is not None:
        empty: dict[str, Any] = {"agents": {}, "actors": {}, "placement_groups": {}, "gpus_total": 0, "gpus_used": 0}
        group = groups.setdefault(seen.registered.group, empty)
        group["agents"][f"{seen.registered.group}@{seen.identity.node}"] = _registered(seen.registered, seen.address)
    return groups


def _registered(registered: Registered, address: str) -> dict[str, Any]:
    """An agent without actors: routers go by their probes alone."""
    said = {"openai": registered.openai, "mcp": registered.mcp}
    services = {name: dict(service) for name, service in said.items() if service is not None}
    return {"node_ip": address, "pid": os.getpid(), "alive": True, "services": services}


def _agent_id(report: Report, identity: Identity) -> str:
    return f"{report.shard.id}@{identity.node}"


def _agent(report: Report, node_ip: str) -> dict[str, Any]:
    services: dict[str, Any] = {}
    address = report.shard.address
    if report.port and not report.ended:
        # With the host: the engine listens on this address alone, and others of the node would only be refused.
        services["openai"] = {
            "host": f"[{address}]" if ":" in address else address,
            "port": report.port,
            "path": "/v1",
            "provider": report.shard.profile.engine,
            "note": report.reason,
        }
    return {"node_ip": node_ip, "pid": report.pid, "alive": True, "services": services}


def _actor_id(report: Report) -> str:
    return "a:" + hashlib.sha256(report.shard.id.encode()).hexdigest()[:32]


def _actor(report: Report, seen: Seen) -> dict[str, Any]:
    found = [seen.inventory.gpu(uuid) for uuid in report.shard.gpus]
    return {
        "name": f"rank{report.shard.rank}",
        "node_id": seen.identity.node_id,
        "gpu_ids": [gpu.index for gpu in found if gpu is not None],
        "state": ACTOR_STATES[report.state],
        "reason": report.reason,
        "pid": report.pid,
    }


def _shard(report: Report) -> dict[str, Any]:
    shard = report.shard
    return {
        "replica": shard.replica,
        "model": shard.model,
        "rank": shard.rank,
        "profile": shard.profile.name,
        "engine": shard.profile.engine,
        "gpus": list(shard.gpus),
        "state": report.state,
        "since": report.since,
        "reason": report.reason,
        "exit": report.exit,
        "pid": report.pid,
        "url": report.url,
        "ports": list(report.ports),
        "adopted": report.adopted,
        "log": report.log,
        "tail": list(report.tail),
    }


def _waiting(each: Waiting) -> dict[str, Any]:
    return {"model": each.model, "reason": each.reason, "again_at": each.again_at or None}


Look = Callable[[], Seen]

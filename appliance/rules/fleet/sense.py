"""What no sound agent says. Every decision is made from the words of all nodes together, so a word that cannot be
reckoned with would stop what is decided for all of them, or have a list made that is longer than the memory.

Only such words are named here. What merely is not true stays with the node that says it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from urllib.parse import urlsplit

from appliance.facts.hardware import Inventory
from appliance.facts.link import Look, Message, News, Register
from appliance.facts.report import Report

MOST_RANKS = 4096
MOST_SHARDS = 4096
"""Most nodes of one replica, and most shards on one node. The largest node there is has 16 GPUs."""

MOST_GPUS = 1024
NAME_CHARACTERS = 256
TAIL_CHARACTERS = 64 << 10
"""Most that a name and a report's log tail may have. The agent of this version sends at most 16 KiB of tail."""


def nonsense(message: Message, known: Mapping[str, Report]) -> str:
    """What cannot be in a message, as a sentence that names it; "" for one that can be taken in. `known` are the
    reports the node has made before, by shard."""
    match message:
        case Register():
            first, last = message.port_range
            if not 0 < first <= last <= 65535:
                return f"its ports are {first} to {last}"
            return _inventory(message.inventory) or _reports(message.reports, {})
        case Look(inventory):
            return _inventory(inventory)
        case News(reports):
            return _reports(reports, known)
    return ""


def _inventory(inventory: Inventory) -> str:
    uuids = [gpu.uuid for gpu in inventory.gpus]
    if len(uuids) > MOST_GPUS:
        return f"it has {len(uuids)} GPUs"
    if "" in uuids:
        return "it has a GPU without UUID"
    if len(set(uuids)) < len(uuids):
        twice = next(uuid for uuid in uuids if uuids.count(uuid) > 1)
        return f"it has GPU {twice[:NAME_CHARACTERS]} twice"
    return "" if inventory.cpus.count > 0 else f"it has {inventory.cpus.count} CPUs"


def _reports(reports: Iterable[Report], known: Mapping[str, Report]) -> str:
    ids = set(known)
    for report in reports:
        if why := _report(report):
            return f"{report.shard.id[:NAME_CHARACTERS]}: {why}"
        ids.add(report.shard.id)
    return f"it has {len(ids)} shards" if len(ids) > MOST_SHARDS else ""


def _report(report: Report) -> str:
    shard = report.shard
    if not shard.replica or "/" in shard.replica or len(shard.replica) > NAME_CHARACTERS:
        return "that is no name of a replica"
    if not 0 < shard.profile.nodes <= MOST_RANKS:
        return f"its profile spans {shard.profile.nodes} nodes"
    if not 0 <= shard.rank < shard.profile.nodes:
        return f"there is no rank {shard.rank} on {shard.profile.nodes} nodes"
    if sum(map(len, report.tail)) > TAIL_CHARACTERS:
        return "the tail of its log has more than any agent sends"
    return "" if report.url == "" or _is_address(report.url) else f"it serves at {report.url[:NAME_CHARACTERS]!r}"


def _is_address(url: str) -> bool:
    """Whether requests could be sent there."""
    try:
        parts = urlsplit(url)
        return parts.scheme in ("http", "https") and bool(parts.hostname) and bool(parts.port)
    except ValueError:
        return False

"""`appliance ctl replicas`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from rich.text import Text

from .asking import ask, reads
from .screen import Column, ago, console, print_json, print_lines, print_table, whole_seconds

COLUMNS = (
    Column("REPLICA", long=True),
    Column("STATE"),
    Column("SINCE", right=True),
    Column("NODES", long=True),
    Column("GPUS", long=True, spare=1),
    Column("PROFILE", long=True, spare=2),
    Column("ENGINE", spare=3),
    Column("FABRIC", spare=4),
    Column("URL", spare=5),
)
FAILURES = 3
LOG_LINES = 5
"""Of a shard that failed, so many of the last lines it wrote are shown; `ctl logs` has more."""


@click.command()
@reads
def replicas(as_json: bool) -> None:
    """Running instances of models: where, in which state, what failed on which node, and which ones are missing.

    A replica is ready when its leader serves. Parts on several nodes are listed below the table where they are not all
    ready. --json holds every part with its process, its port and its log's last lines.
    """
    document = ask("replicas")
    if as_json:
        print_json(document)
        return
    found, missing = document["replicas"], document["missing"]
    if not found and not missing:
        console().print("no replicas, and none is wanted")
    if found:
        print_table(COLUMNS, [_row(replica) for replica in found])
    told = [line for replica in found for line in _troubles(replica)]
    for number, blocks in enumerate(filter(None, (told, list(_missing(missing))))):
        if found or number:
            console().print()
        print_lines(blocks)


def _row(replica: dict[str, Any]) -> tuple[str, ...]:
    gpus = [gpu for shard in replica["shards"] for gpu in shard["gpus"]]
    return (
        replica["id"],
        replica["state"],
        ago(replica["since"]) if replica["since"] is not None else "",
        ", ".join(replica["nodes"]),
        f"{len(gpus)} {replica['gpu_class']}".strip() if gpus else "",
        replica["profile"],
        replica["engine"],
        replica["fabric"],
        replica["url"],
    )


def _troubles(replica: dict[str, Any]) -> Iterator[Text]:
    """Why it is not ready, and what its parts say of themselves. One part alone stands for the whole."""
    parts = replica["shards"]
    several = len(parts) > 1 and replica["state"] != "ready"
    said = [shard for shard in parts if several or shard["state"] == "failed" or _adds(shard, replica)]
    alone = len(parts) == 1 and not replica["why"]
    if replica["why"]:
        yield Text(f"{replica['id']}: {replica['why']}", style="yellow")
    elif said and not alone:
        yield Text(f"{replica['id']}: {replica['state']}", style="yellow")
    for shard in said:
        who = f"{replica['id']}" if alone else f"   rank {shard['rank']}"
        told = [f"{who} on {shard['node']}", shard["state"], ", ".join(filter(None, (shard["reason"], shard["exit"])))]
        yield Text(": ".join(filter(None, told)), style="red" if shard["state"] == "failed" else "yellow")
        for line in shard["tail"][-LOG_LINES:]:
            yield Text(f"      | {line}", style="dim")


def _adds(shard: dict[str, Any], replica: dict[str, Any]) -> bool:
    """Whether a part has a reason that the whole has not told already."""
    return bool(shard["reason"]) and shard["reason"] not in replica["why"]


def _missing(missing: list[dict[str, Any]]) -> Iterator[Text]:
    for each in missing:
        yield Text(f"{each['model']}: {each['count']} missing: {each['reason']}", style="yellow")
        for number, failure in enumerate(each["failures"][:FAILURES]):
            told = ", ".join(said for said in (failure["reason"], failure["exit"]) if said)
            when, where = whole_seconds(failure["ago_s"]), f"rank {failure['rank']} on {failure['node']}"
            yield Text(f"   {failure['replica']} failed {when} ago: {where}: {told}", style="red")
            for line in failure["tail"][-LOG_LINES:] if number == 0 else ():
                yield Text(f"      | {line}", style="dim")

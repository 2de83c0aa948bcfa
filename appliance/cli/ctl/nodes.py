"""`appliance ctl nodes`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click
from rich.text import Text

from .asking import ask, reads
from .screen import Column, console, count, gibibytes, print_json, print_lines, print_table, whole_seconds

COLUMNS = (
    Column("NODE", long=True),
    Column("STATE"),
    Column("REPLICAS", right=True),
    Column("FREE GPUS", long=True),
    Column("CPUS", right=True, spare=3),
    Column("MEMORY", right=True, spare=2),
    Column("FABRICS", long=True, spare=1),
    Column("ADDRESS", spare=4),
    Column("HEARD", right=True, spare=5),
    Column("VERSION", spare=6),
)


@click.command()
@reads
def nodes(as_json: bool) -> None:
    """Machines with hardware: their state, what is free on them, and why a GPU is not.

    FREE GPUS are those that a replica could get now, of all, by class. MEMORY is what is available, of all. HEARD is
    how long ago the node said something. --json holds each node's whole inventory.
    """
    document = ask("nodes")
    if as_json:
        print_json(document)
        return
    found = document["nodes"]
    if not found:
        console().print("no nodes: no agent has called yet (ctl node add NAME says how one joins)")
        return
    print_table(
        COLUMNS,
        [
            (
                node["name"],
                shown_state(node),
                count(len(node["replicas"])),
                _free(node),
                count(node["cpus"]) if node["version"] else "",  # of one that has not called nothing is known
                _memory(node),
                ", ".join(_fabric(fabric) for fabric in node["fabrics"]),
                node["address"],
                "" if node["heard_s"] is None else whole_seconds(node["heard_s"]),
                node["version"],
            )
            for node in found
        ],
    )
    told = [line for node in found for line in _told(node)]
    if told:
        console().print()
        print_lines(told)


def shown_state(node: dict[str, Any]) -> str:
    """Its state, and that nothing new is placed there, where an operator said so."""
    if node["draining"]:
        return f"{node['state']}, {'draining' if node['replicas'] else 'drained'}"
    return node["state"] + (", cordoned" if node["cordoned"] else "")


def _free(node: dict[str, Any]) -> str:
    """What is free by class; nothing is to be had from a node that is away."""
    if node["state"] != "ready":
        return ""
    return ", ".join(f"{each['free']} of {each['total']} {each['class']}" for each in node["gpus"])


def _memory(node: dict[str, Any]) -> str:
    if node["memory_bytes"] is None:
        return ""
    if node["memory_available_bytes"] is None:
        return f"{gibibytes(node['memory_bytes'])} GiB"
    return f"{gibibytes(node['memory_available_bytes'])} of {gibibytes(node['memory_bytes'])} GiB"


def _fabric(fabric: dict[str, Any]) -> str:
    rate = f" {fabric['rate_gbps']:g} Gb/s" if fabric["rate_gbps"] else ""
    return f"{fabric['name'] or '(island)'} {fabric['transport']}{rate}"


def _told(node: dict[str, Any]) -> Iterator[Text]:
    for trouble in node["troubles"]:
        yield Text(f"{node['name']}: {trouble}", style="yellow")
    for gpu in node["not_free"]:
        if gpu["replica"] is None:
            yield Text(f"{node['name']}: not free: {gpu['why']}", style="yellow")

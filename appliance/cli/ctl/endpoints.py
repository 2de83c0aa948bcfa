"""`appliance ctl endpoints`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
from rich.text import Text

from .asking import ask, reads
from .screen import Column, console, count, print_json, print_lines, print_table, share

COLUMNS = (
    Column("ENDPOINT", long=True),
    Column("STATE"),
    Column("MODELS", long=True),
    Column("RUNNING", right=True),
    Column("WAITING", right=True),
    Column("KV", right=True, spare=2),
    Column("FULL", right=True),
    Column("POOL", spare=3),
    Column("ENGINE", spare=4),
    Column("URL", spare=5),
)


@click.command()
@reads
def endpoints(as_json: bool) -> None:
    """Engines: their state and load, and why one gets no requests.

    RUNNING are this router's own requests there. WAITING and KV are what the engine's metrics say. FULL is how full it
    is as the router sees it: 100% is its healthy limit.
    """
    document = ask("endpoints")
    if as_json:
        print_json(document)
        return
    found = document["endpoints"]
    if not found:
        console().print(
            "no endpoints: add [[endpoints]] to the configuration; 'ctl status' says why announced groups are none"
        )
        return
    print_endpoints(found)
    troubles = [f"{entry['id']}: {told}" for entry in found for told in (entry["why"], *entry["violations"]) if told]
    if troubles:
        console().print()
        print_lines([Text(trouble, style="yellow") for trouble in troubles])


def print_endpoints(found: Iterable[dict[str, Any]]) -> None:
    """A row for each."""
    print_table(
        COLUMNS,
        [
            (
                entry["id"],
                entry["state"],
                ", ".join(entry["models"]),
                count(entry["in_flight"]),
                count(entry["waiting"]),
                share(entry["kv"]),
                share(entry["saturation"]),
                entry["pool"],
                entry["engine"],
                entry["url"],
            )
            for entry in found
        ],
    )

"""`appliance ctl models`."""

from __future__ import annotations

import click
from rich.text import Text

from .asking import ask, reads
from .screen import Column, console, count, print_json, print_lines, print_table, share

COLUMNS = (
    Column("MODEL", long=True),
    Column("STATE"),
    Column("ENDPOINTS", right=True),
    Column("RUNNING", right=True),
    Column("WAITING", right=True),
    Column("FULL", right=True),
    Column("ALIASES", long=True, spare=1),
    Column("FALLBACKS", long=True, spare=2),
)


@click.command()
@reads
def models(as_json: bool) -> None:
    """Names that clients may ask for, and who serves them.

    ENDPOINTS are those that may get requests, of all. WAITING are requests that wait for a place. FULL is the fullest
    of its pools: 100% is the healthy limit.
    """
    document = ask("models")
    if as_json:
        print_json(document)
        return
    found = document["models"]
    if not found:
        console().print("no models: no endpoint has said yet what it serves (ctl endpoints)")
        return
    print_table(
        COLUMNS,
        [
            (
                entry["name"],
                "ready" if entry["ready"] else "not ready",
                f"{entry['endpoints_up']} of {entry['endpoints']}",
                count(entry["in_flight"]),
                count(entry["waiting"]),
                share(max((pool["saturation"] or 0.0 for pool in entry["pools"]), default=None)),
                ", ".join(entry["aliases"]),
                ", ".join(entry["fallbacks"]),
            )
            for entry in found
        ],
    )
    troubles = [entry["why"] for entry in found if entry["why"]]
    if troubles:
        console().print()
        print_lines([Text(trouble, style="yellow") for trouble in troubles])

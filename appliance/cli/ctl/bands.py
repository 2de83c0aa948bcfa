"""`appliance ctl bands`."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from .asking import ask, reads
from .screen import Column, count, print_json, print_table, seconds, share

COLUMNS = (
    Column("BAND"),
    Column("WAITING", right=True),
    Column("OF", right=True),
    Column("OLDEST", right=True),
    Column("LIMIT", right=True, spare=1),
    Column("CEILING", right=True),
    Column("ENDED", right=True, spare=3),
    Column("WAITED", right=True, spare=4),
    Column("REFUSED", right=True, spare=2),
    Column("WAITING FOR", long=True, spare=5),
)


@click.command()
@reads
def bands(as_json: bool) -> None:
    """Who waits for a place, by priority, the highest band first.

    OF is how many may wait, OLDEST the longest wait among them, LIMIT the longest allowed. CEILING: a band is let in
    while its pool is less full than that, the request counted. ENDED are its requests since the router started, WAITED
    those that had to wait, REFUSED those that found the queue full, were displaced, or waited too long.
    """
    document = ask("bands")
    if as_json:
        print_json(document)
        return
    print_bands(document["bands"])


def print_bands(found: Iterable[dict[str, Any]]) -> None:
    """A row for each."""
    print_table(
        COLUMNS,
        [
            (
                band["name"],
                count(band["waiting"]),
                count(band["capacity"]),
                seconds(band["oldest_s"]) if band["waiting"] else "",
                seconds(band["ttl_s"]),
                share(band["ceiling"]),
                count(band["ended"]),
                count(band["waited"]),
                count(band["refused"]),
                ", ".join(f"{name} {number:,}" for name, number in sorted(band["models"].items())),
            )
            for band in found
        ],
    )

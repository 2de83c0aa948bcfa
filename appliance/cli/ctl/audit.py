"""`appliance ctl audit`."""

from __future__ import annotations

import time

import click

from .asking import ask, reads
from .screen import Column, console, print_json, print_table

COLUMNS = (
    Column("WHEN"),
    Column("WHO", long=True),
    Column("DID"),
    Column("TO", long=True),
    Column("DETAIL", long=True, spare=1),
)


@click.command()
@click.option("--lines", type=click.IntRange(1, 10_000), default=50, show_default=True, help="How many at most.")
@reads
def audit(lines: int, as_json: bool) -> None:
    """Who changed what, the newest last: cordons, drains, scaling, join tokens, revocations.

    WHO is the user of whoever ran ctl, as the kernel names them.
    """
    document = ask("audit", lines=lines)
    if as_json:
        print_json(document)
        return
    rows = document["audit"]
    if not rows:
        console().print("nobody has changed anything yet")
        return
    print_table(COLUMNS, [(_when(row["at"]), row["by"], row["action"], row["target"], row["detail"]) for row in rows])


def _when(at: float) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(at))

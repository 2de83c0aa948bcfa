"""`appliance agent`: what runs on every node with hardware."""

from __future__ import annotations

import click
import trio

from ..agent.discovery.gpus import GpuProbe
from ..agent.discovery.inventory import Place, gather
from ..agent.discovery.writing import BadInventory, to_json, to_lines


@click.group()
def agent() -> None:
    """Find the hardware of this node and run engines on it."""


@agent.command()
@click.option("--json", "as_json", is_flag=True, help="Print JSON, in the form that agent.inventory_file takes.")
def inventory(as_json: bool) -> None:
    """Print what the scheduler would see of this node."""
    try:
        found = trio.run(gather, Place(), GpuProbe())
    except BadInventory as wrong:
        raise click.ClickException(str(wrong)) from None
    click.echo(to_json(found) if as_json else "\n".join(to_lines(found)), nl=not as_json)

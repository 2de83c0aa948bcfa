"""`appliance version`."""

from __future__ import annotations

import click

from .. import __version__


@click.command()
def version() -> None:
    """Print the version."""
    click.echo(f"appliance {__version__}")

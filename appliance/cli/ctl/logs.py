"""`appliance ctl logs`."""

from __future__ import annotations

import json

import click

from .asking import reads, stream


@click.command()
@click.argument("replica", metavar="REPLICA")
@click.option("--rank", type=click.IntRange(0), default=0, show_default=True, help="Which part of it.")
@click.option("--lines", type=click.IntRange(0, 10_000), default=200, show_default=True, help="How many at most.")
@click.option("-f", "--follow", is_flag=True, help="Go on with what is written from now on, until Ctrl-C.")
@reads
def logs(replica: str, rank: int, lines: int, follow: bool, as_json: bool) -> int:
    """Print the last lines that an engine of REPLICA wrote. Keys in them are blotted out.

    The node keeps the log for a while after the replica is gone. With --json, a line of JSON for each line of it.
    """
    try:
        for event in stream("logs", replica, rank=rank, lines=lines, follow=int(follow)):
            if "ended" in event:
                if event["ended"]:
                    raise click.ClickException(event["ended"])
                return 0
            for line in event.get("lines", ()):
                click.echo(json.dumps({"line": line}, ensure_ascii=False) if as_json else line)
    except KeyboardInterrupt:
        if not follow:
            raise
        return 0  # it is how a follow ends
    raise click.ClickException("the log broke off: the router ended, or lost the node; 'ctl nodes' says which")

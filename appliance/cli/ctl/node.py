"""`appliance ctl node`: who may be a node of this cluster."""

from __future__ import annotations

import time

import click

from .asking import admin_option, ask, reads
from .screen import Column, console, print_json, print_table, whole_seconds

COLUMNS = (
    Column("NODE", long=True),
    Column("STATE"),
    Column("CERTIFICATE ENDS"),
    Column("TOKEN", spare=2),
    Column("SERIAL", spare=3),
)


@click.group()
def node() -> None:
    """Let machines join, see who has, and throw one out."""


@node.command()
@click.argument("name", metavar="NAME")
@click.option("--host", default="", metavar="HOST", help="Name or address under which the node reaches this machine.")
@admin_option()
def add(name: str, host: str) -> None:
    """Print the one line to run on the machine that becomes NAME. It is good once, for an hour."""
    document = ask("nodes", method="POST", name=name, host=host)
    click.echo(document["command"])
    told = f"run this line on {name}, within {whole_seconds(document['expires'] - time.time())}; it is good once"
    if document["known"]:
        told += f". A machine has joined as {name} before: 'appliance ctl node revoke {name}' first, if it is lost"
    click.echo(told, err=True)


@node.command("list")
@reads
def list_(as_json: bool) -> None:
    """Names that have a certificate, or may get one. What runs there is in 'ctl nodes'."""
    document = ask("node-certificates")
    if as_json:
        print_json(document)
        return
    found = document["nodes"]
    if not found:
        console().print("no node has joined: 'appliance ctl node add NAME' prints what to run on a machine")
        return
    now = time.time()
    print_table(
        COLUMNS,
        [
            (
                each["name"],
                each["state"],
                _day(each["not_after"]),
                f"open for {whole_seconds(each['token_expires_at'] - now)}" if each["token_expires_at"] else "",
                each["serial"] or "",
            )
            for each in found
        ],
    )


@node.command()
@click.argument("name", metavar="NAME")
@admin_option()
def revoke(name: str) -> None:
    """Take every certificate of NAME back, and its open tokens. Its link ends at once; engines there go on."""
    document = ask("node-certificates", name, "revoke", method="POST")
    serials = document["revoked"]
    what = f"certificate {', '.join(serials)}" if serials else "no certificate that was still good"
    console().print(f"{name}: revoked {what}")
    console().print(
        f"what runs there is started elsewhere; stop the agent and its engines on that machine, or let it back in with"
        f" 'appliance ctl node add {name}'"
    )


def _day(moment: float | None) -> str:
    return time.strftime("%Y-%m-%d %H:%M", time.localtime(moment)) if moment else ""

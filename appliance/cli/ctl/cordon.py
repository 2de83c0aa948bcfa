"""`appliance ctl cordon` and `uncordon`."""

from __future__ import annotations

import click

from .asking import admin_option, ask
from .screen import console, print_lines


@click.command()
@click.argument("node", metavar="NODE")
@admin_option()
def cordon(node: str) -> None:
    """Place nothing new on NODE; what runs there goes on. Holds over restarts, until uncordon."""
    _change(node, "cordon")


@click.command()
@click.argument("node", metavar="NODE")
@admin_option()
def uncordon(node: str) -> None:
    """Let replicas be placed on NODE again; a drain that is under way ends."""
    _change(node, "uncordon")


def _change(node: str, verb: str) -> None:
    document = ask("nodes", node, verb, method="POST")
    already = {"cordon": "was cordoned already", "uncordon": "was not cordoned"}[verb]
    console().print(f"{node} {f'{verb}ed' if document['changed'] else already}")
    print_lines(document["told"])

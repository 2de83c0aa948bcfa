"""`appliance ctl models`, and start, stop and scale under it."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from .asking import admin_option, ask, reads
from .screen import Column, console, count, print_json, print_lines, print_table, share

COLUMNS = (
    Column("MODEL", long=True),
    Column("STATE"),
    Column("ENDPOINTS", right=True),
    Column("REPLICAS", right=True),
    Column("RUNNING", right=True),
    Column("WAITING", right=True),
    Column("FULL", right=True),
    Column("ALIASES", long=True, spare=1),
    Column("FALLBACKS", long=True, spare=2),
)


@click.group(invoke_without_command=True)
@reads
@click.pass_context
def models(ctx: click.Context, as_json: bool) -> None:
    """Names that clients may ask for, and who serves them.

    ENDPOINTS are those that may get requests, of all. REPLICAS are those that serve, of those that are wanted, where
    the model has a profile. WAITING are requests that wait for a place. FULL is the fullest of its pools: 100% is the
    healthy limit.
    """
    if ctx.invoked_subcommand is not None:
        return
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
                _state(entry),
                f"{entry['endpoints_up']} of {entry['endpoints']}",
                _replicas(entry["replicas"]),
                count(entry["in_flight"]),
                count(entry["waiting"]),
                share(max((pool["saturation"] or 0.0 for pool in entry["pools"]), default=None)),
                ", ".join(entry["aliases"]),
                ", ".join(entry["fallbacks"]),
            )
            for entry in found
        ],
    )
    troubles = [told for entry in found for told in _troubles(entry)]
    if troubles:
        console().print()
        print_lines([Text(trouble, style="yellow") for trouble in troubles])


@models.command(short_help="Have a model run that was stopped, or is at zero.")
@click.argument("name", metavar="NAME")
@admin_option()
def start(name: str) -> None:
    """Have NAME run: what `stop` and `scale` said is over, and at least one replica is started now."""
    print_lines(ask("models", name, "start", method="POST")["told"])


@models.command(short_help="Stop every replica of a model.")
@click.argument("name", metavar="NAME")
@admin_option()
def stop(name: str) -> None:
    """Stop every replica of NAME, and start none, whatever is asked for, until `start` or `scale`."""
    print_lines(ask("models", name, "stop", method="POST")["told"])


@models.command(short_help="Have so many replicas of a model run.")
@click.argument("name", metavar="NAME")
@click.argument("replicas", metavar="N|auto")
@admin_option()
def scale(name: str, replicas: str) -> None:
    """Have N replicas of NAME run, whatever is asked for. auto: as many as [models.scaling] and the load want."""
    if replicas != "auto" and not (replicas.isascii() and replicas.isdigit()):
        raise click.BadParameter("expected a number or 'auto'", param_hint="'N|auto'")
    print_lines(ask("models", name, "scale", method="POST", replicas=replicas)["told"])


def _state(entry: dict[str, Any]) -> str:
    placed = entry["replicas"]
    if placed is not None and placed["at_zero"] and not entry["ready"]:
        return "at zero"
    return "ready" if entry["ready"] else "not ready"


def _replicas(placed: dict[str, Any] | None) -> str:
    return "" if placed is None else f"{placed['ready']} of {placed['wanted']}"


def _troubles(entry: dict[str, Any]) -> list[str]:
    """Why it is not ready, or has fewer replicas than are wanted: who places it knows better than who calls it."""
    placed = entry["replicas"]
    if placed is not None and placed["why"]:
        return [f"{entry['name']}: {placed['why']}"]
    return [entry["why"]] if entry["why"] and _state(entry) != "at zero" else []

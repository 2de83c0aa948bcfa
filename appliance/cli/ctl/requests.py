"""`appliance ctl requests`, and `cancel` under it."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click

from .asking import admin_option, ask, reads
from .screen import Column, ago, console, print_json, print_table, seconds

COLUMNS = (
    Column("ID", long=True),
    Column("AGO", right=True),
    Column("MODEL", long=True),
    Column("ENDPOINT", long=True, spare=1),
    Column("OUTCOME"),
    Column("CODE", right=True),
    Column("FIRST", right=True, spare=3),
    Column("TOOK", right=True),
    Column("TOKENS", right=True, spare=4),
    Column("TRIES", right=True, spare=5),
    Column("BAND", spare=6),
)


@click.group(invoke_without_command=True)
@click.option("--limit", type=click.IntRange(1, 4000), default=20, show_default=True, help="How many at most.")
@reads
@click.pass_context
def requests(ctx: click.Context, limit: int, as_json: bool) -> None:
    """Running and recent requests, newest first; running ones come before all others.

    FIRST is the time to the first token, TOKENS are prompt + completion ("~": estimated), TRIES how often it was sent
    to an engine. `ctl explain request ID` tells the whole story of one.
    """
    if ctx.invoked_subcommand is not None:
        return
    document = ask("requests", limit=limit)
    if as_json:
        print_json(document)
        return
    if not document["requests"]:
        console().print("no requests yet")
        return
    print_requests(document["requests"])


def print_requests(found: Iterable[dict[str, Any]]) -> None:
    """A row for each."""
    print_table(
        COLUMNS,
        [
            (
                entry["id"],
                ago(entry["began_at"]),
                entry["model"] or f"{entry['asked_for']} (unknown)",
                entry["endpoint"],
                entry["outcome"],
                str(entry["code"] or ""),
                seconds(entry["first_token_s"]) if entry["stream"] else "",
                seconds(entry["duration_s"]),
                _tokens(entry["tokens"]),
                str(entry["attempts"]),
                entry["band"],
            )
            for entry in found
        ],
    )


@requests.command()
@click.argument("request_id", metavar="ID")
@admin_option()
def cancel(request_id: str) -> None:
    """End a running request. Its client gets an error, its engine is told at once."""
    ask("requests", request_id, "cancel", method="POST")
    console().print(f"cancelled {request_id}")


def _tokens(figures: dict[str, Any] | None) -> str:
    if figures is None or not figures["prompt"] + figures["completion"]:
        return ""
    mark = "~" if figures["estimated"] else ""
    prompt = f"{figures['prompt']:,}" if figures["prompt"] else ""  # not known before the end
    return f"{mark}{prompt}+{figures['completion']:,}"

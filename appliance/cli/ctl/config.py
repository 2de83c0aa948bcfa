"""`appliance ctl config`: needs no running router, except to reload it."""

from __future__ import annotations

import os
from typing import Any

import click

from ..config import ConfigError, Loaded, advice, example, load, places, show, toml_value
from .asking import Refused, admin_option, ask, reads
from .screen import Column, console, counted, print_json, print_table


@click.group()
def config() -> None:
    """Check, show, write an example of, or reload the configuration."""


@config.command(short_help="Name every fault of a file.")
@click.argument("file", required=False, type=click.Path())
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def check(file: str | None, as_json: bool) -> int:
    """Check FILE (default: the one that serve would read) with the environment laid over it. Starts nothing."""
    try:
        loaded = load(file, os.environ)
    except ConfigError as error:
        if as_json:
            faults = [{"path": fault.path, "message": fault.message} for fault in error.faults]
            print_json({"ok": False, "file": file, "faults": faults})
        else:
            for fault in error.faults:
                click.echo(str(fault), err=True)
        return 1
    if as_json:
        print_json({"ok": True, "file": loaded.file, "faults": [], "advice": list(advice(loaded))})
    else:
        for text in advice(loaded):
            click.echo(f"advice: {text}", err=True)
        console().print(_summary(loaded))
    return 0


@config.command("show", short_help="Print effective values and where they came from.")
@click.option("--config", "file", metavar="FILE", help="Configuration file (default: as for serve).")
@click.option("--running", is_flag=True, help="Ask the running router instead of reading the file.")
@reads
def show_(file: str | None, running: bool, as_json: bool) -> int:
    """Print every key with its effective value, and where each came from. Secrets are masked."""
    if running:
        document = ask("config")
    else:
        try:
            loaded = load(file, os.environ)
        except ConfigError as error:
            for fault in error.faults:
                click.echo(str(fault), err=True)
            return 1
        values = [row._asdict() for row in show(loaded)]
        document = {"file": loaded.file, "values": values, "needs_restart": []}
    if as_json:
        print_json(document)
    else:
        _print_values(document)
    return 0


@config.command("example", short_help="Write a commented file with every key.")
def example_() -> None:
    """Write a commented file with every key to standard output."""
    click.echo(example(), nl=False)


@config.command(short_help="Have the running router read its file again.")
@admin_option()
def reload() -> int:
    """Have the running router read its configuration again, as SIGHUP does. A bad file leaves the old one serving."""
    try:
        document = ask("reload", method="POST")
    except Refused as refused:
        faults = refused.document.get("faults") if isinstance(refused.document, dict) else None
        if not faults:
            raise
        for fault in faults:
            click.echo(fault, err=True)
        return 1
    console().print("reloaded")
    if document["needs_restart"]:
        console().print(f"only a restart takes over: {', '.join(document['needs_restart'])}")
    return 0


def _summary(loaded: Loaded) -> str:
    settings = loaded.settings
    holds = f"{counted(len(settings.endpoints), 'endpoint')}, {counted(len(settings.models), 'named model')}"
    if loaded.file is None:
        tried = " and ".join(places(os.environ).config_files)
        return f"ok: no file (looked for {tried}), so defaults and environment; {holds}"
    return f"ok: {loaded.file}; {holds}"


def _print_values(document: dict[str, Any]) -> None:
    print_table(
        [Column("KEY"), Column("VALUE", long=True), Column("FROM")],
        [
            (row["path"], "" if row["value"] is None else toml_value(row["value"]), row["origin"])
            for row in document["values"]
        ],
    )
    console().print()
    console().print(f"file: {document['file'] or 'none'}")
    if document["needs_restart"]:
        console().print(f"changed in the file, but only a restart takes it: {', '.join(document['needs_restart'])}")

"""`appliance ctl engine-check`: whether the engines that are installed here take the flags we would give them."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator

import attrs
import click
import trio

from ...agent.enginecheck import Checked, examine
from ...facts.catalog import LAUNCHABLE
from ..config import ConfigError, load
from ..program import own_argv
from .screen import Column, counted, print_json, print_table

COLUMNS = (Column("ENGINE"), Column("PROGRAM", long=True), Column("VERDICT"), Column("WHAT", long=True, spare=2))


@click.command("engine-check")
@click.argument("engine", required=False, type=click.Choice(LAUNCHABLE))
@click.option("--config", "file", metavar="FILE", help="Configuration file (default: as for serve).")
@click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
def engine_check(engine: str | None, file: str | None, as_json: bool) -> int:
    """Check every flag that an agent could give ENGINE (default: each of them) against the engine's own help.

    Needs no GPU and starts no model. Programs that are not installed are skipped; a flag that is not offered makes the
    exit status 1. Programs are found as an agent finds them (agent.executables).
    """
    try:
        executables = load(file, os.environ).settings.agent.executables
    except ConfigError as error:
        for fault in error.faults:
            click.echo(str(fault), err=True)
        return 1
    found: list[tuple[str, Checked]] = []
    for name in (engine,) if engine else LAUNCHABLE:
        with _patience(name):
            found += [(name, checked) for checked in trio.run(examine, name, executables, own_argv())]
    failed = any(checked.failed for _, checked in found)
    if as_json:
        programs = [{"engine": name, "verdict": _verdict(checked), **attrs.asdict(checked)} for name, checked in found]
        print_json({"ok": not failed, "programs": programs})
    else:
        print_table(COLUMNS, [row for name, checked in found for row in _rows(name, checked)])
    return 1 if failed else 0


def _verdict(checked: Checked) -> str:
    if checked.skipped:
        return "skipped"
    return "failed" if checked.failed else "warning" if checked.findings else "ok"


def _rows(engine: str, checked: Checked) -> Iterator[tuple[str, ...]]:
    """One line for the program, and one for each finding."""
    told = checked.skipped or f"{counted(checked.flags, 'flag')} looked up"
    yield engine, checked.path, _verdict(checked), told
    for finding in checked.findings:
        level = "failed" if finding.level == "error" else finding.level
        yield engine, checked.path, level, f"{finding.flag} {finding.message}".strip()


@contextlib.contextmanager
def _patience(engine: str) -> Iterator[None]:
    """Tell a person at a terminal what is waited for: some engines take a minute to print their help."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    with Console(stderr=True).status(f"Asking {engine} for its help ..."):
        yield

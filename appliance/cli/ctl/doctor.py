"""`appliance ctl doctor`: looks at everything that commonly goes wrong, and says what to do."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import Any

import attrs
import click
from rich.text import Text

from ..config import ConfigError, load
from .asking import Refused, ask, reads
from .screen import counted, print_json, print_pairs

OPEN_FILES = 8192
"""A stream takes two: the default limit of 1,024 ends at some five hundred streams."""


@attrs.frozen
class Finding:
    """`verdict` is "ok", "warning" or "failed"; the last makes the exit status 1."""

    check: str
    verdict: str
    text: str


@click.command()
@reads
def doctor(as_json: bool) -> int:
    """Look for what is wrong, and say what to do. Changes nothing."""
    findings = list(_findings())
    failed = any(finding.verdict == "failed" for finding in findings)
    if as_json:
        print_json({"ok": not failed, "findings": [attrs.asdict(finding) for finding in findings]})
    else:
        marks = {"ok": ("ok", "green"), "warning": ("look", "yellow"), "failed": ("FAIL", "red")}
        print_pairs((finding.check, Text.assemble(marks[finding.verdict], f"  {finding.text}")) for finding in findings)
    return 1 if failed else 0


def _findings() -> Iterator[Finding]:
    file: str | None = None
    status: dict[str, Any] | None = None
    try:
        status = ask("status")
        file = status["config_file"]
        yield Finding("router", "ok", f"appliance {status['version']}, {status['state']}, pid {status['pid']}")
    except click.ClickException as error:
        yield Finding("router", "failed", error.message)
    yield from _configuration(file)
    if status is not None:
        if status["needs_restart"]:
            yield Finding("restart", "warning", f"only a restart takes over: {', '.join(status['needs_restart'])}")
        yield from _door(status)
        yield from _endpoints(placed=status["fleet"] is not None, announced=status["groups"]["known"] > 0)
        yield from _groups(status["groups"]["why_not"])
        if status["fleet"] is not None:
            yield from _nodes()
            yield from _database()
        yield from _models()


def _configuration(file: str | None) -> Iterator[Finding]:
    """The router's file where one answered, else the one that serve would read; under this environment."""
    try:
        loaded = load(file, os.environ)
    except ConfigError as error:
        more = f" (and {len(error.faults) - 1} more: ctl config check)" if len(error.faults) > 1 else ""
        yield Finding("configuration", "failed", f"{error.faults[0]}{more}")
        return
    yield Finding("configuration", "ok", loaded.file or "no file: defaults and environment")


def _door(status: dict[str, Any]) -> Iterator[Finding]:
    public = [address for address in status["listen"] if not status["loopback"]]
    if public and not status["keys"]:
        yield Finding(
            "door", "warning", f"anybody who can reach {', '.join(public)} can use every model: the door has no keys"
        )
    else:
        yield Finding("door", "ok", ", ".join(status["listen"]))
    limit = status["open_files_limit"]
    if limit < OPEN_FILES:
        yield Finding(
            "open files",
            "warning",
            f"at most {limit:,}, a stream takes two: raise it (LimitNOFILE= in the unit, ulimit -n)",
        )
    else:
        yield Finding("open files", "ok", f"at most {limit:,}")


def _endpoints(*, placed: bool, announced: bool) -> Iterator[Finding]:
    """`placed`: the router has replicas started, so that it needs no endpoint of its own before one serves.
    `announced`: there are groups, of which each that serves is one."""
    found = ask("endpoints")["endpoints"]
    if not found and placed:
        yield Finding("endpoints", "ok", "none now: no replica serves")
    elif not found and announced:
        yield Finding("endpoints", "failed", "none: no announced group can serve, and the configuration has no others")
    elif not found:
        yield Finding("endpoints", "failed", "none: add [[endpoints]] to the configuration")
    for entry in found:
        if entry["why"]:
            told = f"{entry['id']} ({entry['url']}) is {entry['state']}: {entry['why']}"
            yield Finding("endpoint", "warning", told)
        elif entry["engine"] == "openai" and not entry["capacity"]:
            told = f"nothing tells how many requests {entry['id']} can run at once ({entry['limit']} for now)"
            yield Finding("capacity", "warning", f"{told}: name its engine, or set its capacity")
    if found and not any(entry["why"] for entry in found):
        yield Finding("endpoints", "ok", f"{counted(len(found), 'endpoint')}, all ready")
    elif found and not any(entry["state"] in ("ready", "probing") for entry in found):
        yield Finding("endpoints", "failed", f"{counted(len(found), 'endpoint')}, none takes requests")


def _groups(gated: dict[str, str]) -> Iterator[Finding]:
    for name, why in gated.items():
        yield Finding("group", "warning", f"{name}: {why}")


def _nodes() -> Iterator[Finding]:
    document = ask("nodes")
    found = document["nodes"]
    if not found:
        yield Finding("nodes", "failed", "none: 'ctl node add NAME' says how one joins")
    for node in found:
        verdict = "failed" if node["state"] == "lost" else "warning"
        gone = "; if it is gone for good: ctl node revoke" if node["state"] == "lost" else ""
        for trouble in node["troubles"]:
            yield Finding("node", verdict, f"{node['name']}: {trouble}{gone}")
        for gpu in node["not_free"]:
            if gpu["replica"] is None:
                yield Finding("gpu", "warning", f"{node['name']}: {gpu['why']}")
        if node["draining"]:
            word = "is being drained" if node["replicas"] else "is drained"
            yield Finding("node", "warning", f"{node['name']} {word} (ctl uncordon ends it)")
        elif node["cordoned"]:
            yield Finding("node", "warning", f"{node['name']} is cordoned, by {node['cordoned_by'] or 'somebody'}")
    if found and all(node["state"] == "ready" and not node["cordoned"] and not node["troubles"] for node in found):
        yield Finding("nodes", "ok", f"{counted(len(found), 'node')}, all ready")


def _database() -> Iterator[Finding]:
    """Whether it can be read. That it cannot be written, only a change would tell."""
    try:
        ask("audit", lines=1)
    except Refused as refused:
        yield Finding("database", "failed", refused.message)
    else:
        yield Finding("database", "ok", "it can be read")


def _models() -> Iterator[Finding]:
    found = ask("models")["models"]
    fine = True
    for entry in found:
        placed = entry["replicas"] or {"at_zero": False, "why": "", "starting": 0}
        if placed["why"]:
            fine = False
            serious = not entry["ready"] and not placed["at_zero"] and not placed["starting"]
            yield Finding("model", "failed" if serious else "warning", f"{entry['name']}: {placed['why']}")
        elif not entry["ready"] and not placed["at_zero"]:
            fine = False
            yield Finding("model", "failed", entry["why"])
    if found and fine:
        at_zero = sum(not entry["ready"] for entry in found)
        told = "all ready"
        if at_zero:
            told = f"{at_zero} at zero, the others ready" if at_zero < len(found) else "all at zero until asked for"
        yield Finding("models", "ok", f"{counted(len(found), 'model')}, {told}")

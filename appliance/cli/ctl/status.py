"""`appliance ctl status`."""

from __future__ import annotations

from typing import Any

import click
from rich.text import Text

from .asking import ask, reads
from .screen import console, counted, print_json, print_lines, print_pairs, size, styled, whole_seconds


@click.command()
@reads
def status(as_json: bool) -> None:
    """The router at a glance."""
    document = ask("status")
    if as_json:
        print_json(document)
        return
    console().print(head_line(document))
    fleet = document["fleet"]
    print_pairs(
        [
            ("door", ", ".join(document["listen"]) + ("" if document["keys"] else "  (no keys)")),
            ("metrics", ", ".join(document["metrics_listen"]) or "off"),
            ("config", document["config_file"] or "no file: defaults and environment"),
            ("memory", size(document["rss_bytes"])),
            ("endpoints", f"{document['endpoints']['up']} of {document['endpoints']['known']} up"),
            ("models", f"{document['models']['ready']} of {document['models']['known']} ready"),
            *([] if not document["groups"]["known"] else [("groups", groups_line(document["groups"]))]),
            *([] if fleet is None else [("nodes", nodes_line(fleet)), ("replicas", states_line(fleet["replicas"]))]),
            ("requests", requests_line(document["requests"])),
            ("waiting", waiting_line(document["waiting"])),
            ("clients", counted(document["connections"], "connection")),
        ]
    )
    troubles = list(document["troubles"])
    if document["needs_restart"]:
        troubles.append(f"changed in the file, but only a restart takes it: {', '.join(document['needs_restart'])}")
    if troubles:
        console().print()
        print_lines([Text(trouble, style="yellow") for trouble in troubles])


def head_line(document: dict[str, Any]) -> Text:
    """Who answers, in which state, since when."""
    up = whole_seconds(document["uptime_s"])
    return Text.assemble(
        f"appliance {document['version']}  ", styled(document["state"]), f"  up {up}  pid {document['pid']}"
    )


def groups_line(groups: dict[str, Any]) -> str:
    """Announced groups, and how many of them get requests."""
    return f"{groups['healthy']:,} of {groups['known']:,} healthy"


def nodes_line(fleet: dict[str, Any]) -> str:
    """Nodes by state, and what an operator has said about them."""
    told = [states_line(fleet["nodes"])]
    told += [f"{word}: {', '.join(fleet[word])}" for word in ("cordoned", "draining", "drained") if fleet[word]]
    if fleet["settling_s"] is not None:
        rest = whole_seconds(fleet["settling_s"])
        until = f"for {rest}, so that all can call" if fleet["settling_s"] > 0 else "until they have called or are lost"
        told.append(f"nothing is started or stopped yet, {until}")
    return "; ".join(told)


def states_line(states: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {state}" for state, number in states.items() if number) or "none"


def waiting_line(bands: dict[str, int]) -> str:
    return ", ".join(f"{number:,} {name}" for name, number in bands.items() if number) or "none"


def requests_line(figures: dict[str, Any]) -> str:
    """Running ones, and how the ended ones ended."""
    classes = {"answered": 0, "client errors": 0, "failed": 0, "left by the client": 0}
    for code, number in figures["by_code"].items():
        if code == "499":
            classes["left by the client"] += number
        elif code < "400":
            classes["answered"] += number
        else:
            classes["client errors" if code < "500" else "failed"] += number
    told = ", ".join(f"{number:,} {name}" for name, number in classes.items() if number)
    return f"{figures['running']:,} running; {told or 'none so far'}"

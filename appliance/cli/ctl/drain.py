"""`appliance ctl drain`: what runs on a node goes elsewhere, and ctl waits for it."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import click

from .asking import admin_option, ask
from .screen import console, counted, print_lines, whole_seconds

LOOK_S = 0.5
"""Seconds between two looks at a node that is being drained."""
AFTER_GRACE_S = 90.0
"""Once the grace is over, replicas are stopped without a replacement; engines may take this long to end."""

BAR_WIDTH = 16
"""Columns of the bar at a terminal: beside it there is the sentence to read."""


@click.command()
@click.argument("node", metavar="NODE")
@click.option("--no-wait", is_flag=True, help="Return at once; the drain goes on.")
@admin_option()
def drain(node: str, no_wait: bool) -> int:
    """Move all that runs on NODE elsewhere, and place nothing new on it.

    Each replica goes on until its replacement serves, or until control.drain_grace_s is over: then it is stopped
    without one. Waits until nothing runs on NODE; interrupting ctl does not end the drain, `ctl uncordon` does.
    """
    # Looked at first: what has no other place and serves nobody has left when the answer is made.
    there = ask("nodes", node)["replicas"]
    models = {replica["id"]: replica["model"] for replica in ask("replicas")["replicas"]}
    document = ask("nodes", node, "drain", method="POST")
    print_lines([f"{node} {'drains' if document['changed'] else 'drains already'}", *document["told"]])
    if no_wait:
        return 0
    moving = {name: models.get(name, name) for name in (*there, *document["node"]["replicas"])}
    try:
        left = _wait(node, set(moving)) if moving else []
    except KeyboardInterrupt:
        raise click.ClickException(
            f"interrupted; the drain goes on: 'ctl nodes' says when {node} is drained, 'ctl uncordon {node}' ends it"
        ) from None
    if left:
        raise click.ClickException(
            f"the grace is over and {counted(len(left), 'replica')} still on {node}: {', '.join(left)}; "
            "'ctl replicas' says in which state"
        )
    gone = set(moving.values())
    missing = [each for each in ask("replicas")["missing"] if each["model"] in gone]
    told = f"{node} is drained" if moving else f"{node} is drained: nothing ran there"
    if missing and not ask("nodes", node)["drain_left_s"]:
        told += ", not everything with a replacement, since the grace was over"
    console().print(told)
    print_lines(f"{each['model']}: {each['count']} missing: {each['reason']}" for each in missing)
    return 0


def _wait(node: str, moving: set[str]) -> list[str]:
    """Until nothing of `moving` is on the node; what is still there long after the grace."""
    over_at: float | None = None
    with _progress(node) as show:
        while True:
            now = ask("nodes", node)
            if not now["draining"]:
                raise click.ClickException(f"{node} drains no more: somebody has uncordoned it (ctl audit says who)")
            left = [name for name in now["replicas"] if name in moving]
            grace_s = now["drain_left_s"]
            if not left:
                return []
            if grace_s:
                over_at = None
            elif over_at is None:
                over_at = time.monotonic()
            elif time.monotonic() - over_at > AFTER_GRACE_S:
                return left
            show(len(moving) - len(left), len(moving), grace_s or 0.0, left)
            time.sleep(LOOK_S)


Show = Callable[[int, int, float, list[str]], None]


@contextmanager
def _progress(node: str) -> Iterator[Show]:
    """A bar at a terminal; into a pipe a line for each replica that has gone."""
    if not sys.stderr.isatty():
        seen = -1

        def tell(done: int, total: int, grace_s: float, left: list[str]) -> None:
            nonlocal seen
            if done != seen:
                seen = done
                console().print(_sentence(done, total, grace_s, left))

        yield tell
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn
    from rich.table import Column

    # Whatever is longer than the rest of the line is cut at its end, not the name and the bar.
    rest = TextColumn("{task.description}", table_column=Column(no_wrap=True, ratio=1))
    columns = TextColumn(node), BarColumn(BAR_WIDTH), rest
    bar = Progress(*columns, console=Console(stderr=True), expand=True, transient=True)
    with bar:
        task: Any = bar.add_task("")

        def draw(done: int, total: int, grace_s: float, left: list[str]) -> None:
            bar.update(task, completed=done, total=total, description=_sentence(done, total, grace_s, left))

        yield draw


def _sentence(done: int, total: int, grace_s: float, left: list[str]) -> str:
    grace = f"{whole_seconds(grace_s)} of grace left" if grace_s else "the grace is over"
    return f"{done} of {counted(total, 'replica')} gone, {grace}; waiting for {', '.join(left)}"

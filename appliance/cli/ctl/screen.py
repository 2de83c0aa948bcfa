"""What ctl writes: tables without borders, sentences, and figures as people say them.

At a terminal, a table takes the width there is: it first leaves out columns that can be missed, then shortens what is
long. Into a pipe everything is written whole and without colour, one row a line, as grep and awk want it.

Much of it was named by others: models by clients and engines, sessions by clients. So whatever could move the cursor,
colour or retitle a terminal, or turn the direction of reading, is shown as a "?", and a name takes no line of its own.
"""

from __future__ import annotations

import functools
import json
import os
import re
import time
from collections.abc import Iterable, Sequence
from typing import Any

import attrs
import click
from rich.console import Console, JustifyMethod
from rich.table import Table
from rich.text import Text

NO_WIDTH = 100_000
GAP = 2
SHORTEST = 16
"""What is left of a long cell at least."""
STYLES = {
    "ready": "green", "serving": "green", "ok": "green", "running": "cyan",
    "probing": "yellow", "draining": "yellow", "loading": "yellow", "warning": "yellow", "client left": "yellow",
    "cancelled": "yellow", "refused": "yellow", "fetching": "yellow", "starting": "yellow", "stopping": "yellow",
    "expected": "yellow", "ready, cordoned": "yellow", "ready, draining": "yellow", "ready, drained": "yellow",
    "at zero": "cyan",
    "stopped": "red", "unreachable": "red", "silent": "red", "failed": "red", "cut": "red", "not ready": "red",
    "lost": "red", "missing": "red",
}  # fmt: skip
"""Words that have a colour wherever they stand alone in a cell."""


@attrs.frozen
class Column:
    """`spare` above 0: may be left out where it is narrow, the highest number first. `long`: may be shortened."""

    title: str
    right: bool = False
    spare: int = 0
    long: bool = False


class _Letters(dict[int, int]):
    """What stands for each character."""

    def __missing__(self, code: int) -> int:
        self[code] = code if chr(code).isprintable() or code == ord("\n") else ord("?")
        return self[code]


_letters = _Letters()
_HIDDEN = re.compile("[\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]")
"""What JSON may hold as it is, and a terminal or an eye takes for more than a character."""


def visible(text: str | Text) -> str | Text:
    """The same letters, without any that are more than a letter; a Text keeps its colours."""
    if isinstance(text, Text):
        text.plain = text.plain.translate(_letters)
        return text
    return text.translate(_letters)


class _Screen(Console):
    def print(self, *objects: Any, **how: Any) -> None:
        super().print(*(visible(each) if isinstance(each, str | Text) else each for each in objects), **how)


@functools.cache
def console() -> Console:
    """Standard output. A pipe has no width of its own, unless COLUMNS gives one; that of the terminal behind the other
    streams is none of its business."""
    made = _Screen(highlight=False, markup=False, emoji=False)
    if not made.is_terminal and not os.environ.get("COLUMNS", "").isdigit():
        made.width = NO_WIDTH
    return made


def print_json(document: Any) -> None:
    text = json.dumps(document, indent=2, ensure_ascii=False)
    click.echo(_HIDDEN.sub(lambda found: f"\\u{ord(found[0]):04x}", text))


def print_table(columns: Sequence[Column], rows: Iterable[Sequence[str]], *, indent: int = 0) -> None:
    """Rows of plain text under their titles; an empty cell is shown as "-"."""
    cells = [[cell.translate(_letters).replace("\n", "?") or "-" for cell in row] for row in rows]
    widths = _widths(columns, cells, console().width - indent)
    table = Table(box=None, show_edge=False, pad_edge=False, padding=(0, GAP, 0, 0), header_style="bold")
    for index, width in widths.items():
        side: JustifyMethod = "right" if columns[index].right else "left"
        table.add_column(columns[index].title, justify=side, no_wrap=True, overflow="ellipsis", width=width)
    for row in cells:
        table.add_row(*(Text(row[index], style=STYLES.get(row[index], "")) for index in widths))
    _print_indented(table, indent)


def print_pairs(pairs: Iterable[tuple[str, str | Text]], *, indent: int = 0) -> None:
    """A label and a sentence a row; long sentences go on under themselves."""
    grid = Table.grid(padding=(0, GAP, 0, 0))
    grid.add_column(style="bold", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, text in pairs:
        grid.add_row(visible(label), visible(text))
    _print_indented(grid, indent)


def print_lines(lines: Iterable[str | Text], *, indent: int = 0) -> None:
    """Sentences, each wrapped with its indent kept."""
    grid = Table.grid()
    grid.add_column(overflow="fold")
    for line in lines:
        grid.add_row(visible(line))
    _print_indented(grid, indent)


def styled(word: str) -> Text:
    """A word in its colour."""
    return Text(word, style=STYLES.get(word, ""))


def _print_indented(table: Table, indent: int) -> None:
    """Lines without trailing blanks: they would wrap at the edge, and show in every diff of two outputs."""
    if not table.rows:
        return
    out = console()
    lines = out.render_lines(table, out.options.update(width=out.width - indent), pad=False)
    for line in lines:
        text = Text.assemble(" " * indent, *((segment.text, segment.style or "") for segment in line))
        text.rstrip()
        out.print(text, soft_wrap=True)


def _widths(columns: Sequence[Column], cells: list[list[str]], width: int) -> dict[int, int]:
    """The columns to show, by index, and how wide each is."""
    widths = {
        index: max([len(column.title), *(len(row[index]) for row in cells)]) for index, column in enumerate(columns)
    }

    def excess() -> int:
        return sum(widths.values()) + GAP * (len(widths) - 1) - width

    def shrinkable() -> int:
        return sum(max(0, wide - SHORTEST) for index, wide in widths.items() if columns[index].long)

    while excess() > shrinkable() and any(columns[index].spare for index in widths):
        del widths[max(widths, key=lambda index: columns[index].spare)]
    while excess() > 0 and shrinkable():
        widest = max((index for index in widths if columns[index].long), key=lambda index: widths[index])
        widths[widest] -= 1
    return widths


# -- figures -----------------------------------------------------------------------------------------------------------


def seconds(value: float | None) -> str:
    """A duration with the digits that matter: <1 ms, 12 ms, 0.31 s, 1.4 s, 75 s, 12 min, 3 h, 4 d."""
    if value is None:
        return ""
    if value < 0.0995:
        return f"{value * 1000:.0f} ms" if value >= 0.0005 else "<1 ms"
    for limit, form in ((0.995, "{:.2f} s"), (9.95, "{:.1f} s")):
        if value < limit:
            return form.format(value)
    return whole_seconds(value)


def whole_seconds(value: float) -> str:
    """The same for what need not be exact: 4 s, 75 s, 12 min."""
    for limit, divisor, unit in ((119.5, 1, "s"), (7170, 60, "min"), (171000, 3600, "h")):
        if value < limit:
            return f"{value / divisor:.0f} {unit}"
    return f"{value / 86400:.0f} d"


def ago(moment: float) -> str:
    """How long ago a time of day was."""
    return whole_seconds(max(0.0, time.time() - moment))


def size(value: int | None) -> str:
    return "" if value is None else f"{value / 1048576:.0f} MiB"


def gibibytes(value: int) -> str:
    """A number of GiB, without its unit: 7.6, 251."""
    return f"{value / 1073741824:.1f}" if value < 10 << 30 else f"{value / 1073741824:.0f}"


def share(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def count(value: int | None) -> str:
    return "" if value is None else f"{value:,}"


def counted(number: int, thing: str) -> str:
    """1 endpoint, 2 endpoints, 3 retries."""
    if number == 1:
        return f"1 {thing}"
    return f"{number:,} {thing[:-1]}ies" if thing.endswith("y") else f"{number:,} {thing}s"

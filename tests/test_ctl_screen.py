"""Figures and tables as ctl writes them."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import termios
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.text import Text

from appliance.cli.ctl import screen
from appliance.cli.ctl.screen import GAP, Column, counted, seconds, share, size, whole_seconds


@pytest.fixture
def width(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """Sets COLUMNS for a console made afresh."""
    screen.console.cache_clear()
    yield monkeypatch
    screen.console.cache_clear()


@pytest.mark.parametrize(
    ("value", "told"),
    [
        (None, ""),
        (0.0, "<1 ms"),
        (0.0123, "12 ms"),
        (0.0994, "99 ms"),
        (0.0996, "0.10 s"),
        (0.312, "0.31 s"),
        (0.996, "1.0 s"),
        (9.94, "9.9 s"),
        (9.96, "10 s"),
        (75.4, "75 s"),
        (119.6, "2 min"),
        (3600.0, "60 min"),
        (7200.0, "2 h"),
        (172800.0, "2 d"),
    ],
)
def test_durations(value: float | None, told: str) -> None:
    assert seconds(value) == told


@given(st.floats(0, 1e9))
def test_durations_are_short(value: float) -> None:
    assert 0 < len(seconds(value)) <= 9 and len(whole_seconds(value)) <= 9


def test_other_figures() -> None:
    assert (size(None), size(44 << 20), share(0.456), share(None)) == ("", "44 MiB", "46%", "")
    assert [counted(number, "endpoint") for number in (0, 1, 1200)] == ["0 endpoints", "1 endpoint", "1,200 endpoints"]


TEXT = st.text("abcdefgh", max_size=30)


@given(st.lists(st.tuples(TEXT, TEXT, TEXT, TEXT), min_size=1, max_size=5), st.integers(60, 140))
def test_a_table_fits_and_keeps_the_columns_that_matter(rows: list[tuple[str, str, str, str]], width: int) -> None:
    columns = (Column("ID", long=True), Column("FIGURE"), Column("SPARE", spare=1), Column("LESS", spare=2))
    cells = [[cell or "-" for cell in row] for row in rows]
    widths = screen._widths(columns, cells, width)
    assert {0, 1} <= set(widths), "what cannot be missed is there"
    assert 2 in widths or 3 not in widths, "the least important goes first"
    assert sum(widths.values()) + GAP * (len(widths) - 1) <= width
    natural = [max([len(column.title), *(len(row[i]) for row in cells)]) for i, column in enumerate(columns)]
    if sum(natural) + GAP * 3 <= width:
        assert widths == dict(enumerate(natural)), "nothing is shortened without need"


def test_a_terminal_gets_shortened_cells(width: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    width.setenv("COLUMNS", "40")
    screen.print_table([Column("NAME", long=True), Column("N", right=True)], [("x" * 60, "1"), ("y", "")])
    head, first, second = capsys.readouterr().out.splitlines()
    assert head.startswith("NAME ") and head.endswith(" N")
    assert first == "x" * 36 + "…  1" and len(first) == 40
    assert second.split() == ["y", "-"]


def test_a_pipe_gets_everything_and_no_trailing_blanks(
    width: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    width.delenv("COLUMNS", raising=False)
    screen.print_table([Column("NAME", long=True), Column("LAST")], [("x" * 300, "a"), ("y", "bb")])
    lines = capsys.readouterr().out.splitlines()
    assert "x" * 300 in lines[1] and all(line == line.rstrip() for line in lines)


def test_text_of_others_is_no_markup(width: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    width.setenv("COLUMNS", "80")
    screen.print_table([Column("NAME")], [("[red]model[/red] :smile:",)])
    screen.print_pairs([("label", "[bold]x[/bold]")])
    screen.print_lines(["[link]y[/link]"])
    assert capsys.readouterr().out.splitlines()[1:] == [
        "[red]model[/red] :smile:",
        "label  [bold]x[/bold]",
        "[link]y[/link]",
    ]


NASTY = "a\x1b[31mb\x07c\x9b1md\x7fe\u202ef\u2028g"


def test_text_of_others_steers_no_terminal(width: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Clients name models and sessions, and operators read them."""
    screen.print_table([Column("A"), Column("B")], [(NASTY + "\nx", "y")])
    screen.print_pairs([("label", NASTY), (NASTY, Text(NASTY, style="red"))])
    screen.print_lines([NASTY, Text(NASTY)])
    screen.console().print(NASTY, Text.assemble((NASTY, "bold")))
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.split("\n")), printed
    assert "31mb" in printed and "\n?x" not in printed
    assert len(printed.splitlines()) == 2 + 2 + 2 + 1


def test_json_for_a_terminal_says_the_same(capsys: pytest.CaptureFixture[str]) -> None:
    screen.print_json({"a": NASTY, "b": "häuser ☃"})
    printed = capsys.readouterr().out
    assert all(line.isprintable() for line in printed.split("\n")) and "häuser ☃" in printed
    assert json.loads(printed) == {"a": NASTY, "b": "häuser ☃"}


def test_a_long_sentence_goes_on_under_itself(width: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    width.setenv("COLUMNS", "30")
    screen.print_pairs([("label", "word " * 8)], indent=2)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("  label  word") and all(line.startswith("         word") for line in lines[1:])


def test_a_pipe_is_whole_at_a_narrow_terminal_too(tmp_path: Path) -> None:
    """`ctl ... | grep` is typed at one: standard input and error are the terminal, and standard output is not."""
    near, far = pty.openpty()
    try:
        termios.tcsetwinsize(far, (24, 40))
        env = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "LINES")}
        command = [sys.executable, "-m", "appliance", "ctl", "config", "show"]
        done = subprocess.run(
            command, stdin=far, stdout=subprocess.PIPE, stderr=far, text=True, env={**env, "HOME": str(tmp_path)}
        )
    finally:
        os.close(near)
        os.close(far)
    assert done.returncode == 0
    assert "\u2026" not in done.stdout
    assert any(
        line.split() == ["server.metrics_listen", '["127.0.0.1:6390"]', "default"] for line in done.stdout.splitlines()
    )

"""The command that finds the other commands."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import click
import pytest

from appliance import __version__
from appliance.cli.main import COMMANDS, run


@pytest.mark.parametrize("name", COMMANDS)
def test_each_row_of_the_table_is_a_command_with_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    module, _, attribute = COMMANDS[name][0].partition(":")
    assert isinstance(getattr(import_module(module), attribute), click.Command)
    assert run([name, "--help"]) == 0
    assert f"Usage: appliance {name}" in capsys.readouterr().out


def test_help_lists_the_commands_and_no_command_is_wrong_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"  {name} " in listed for name in COMMANDS)
    assert run([]) == 2
    assert run(["nothing"]) == 2
    assert capsys.readouterr().err.splitlines()[-1] == "appliance: No such command 'nothing'; see 'appliance --help'"


def test_commands_of_the_agent_are_listed_with_whole_sentences(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["agent", "--help"]) == 0
    assert "..." not in capsys.readouterr().out.partition("Commands:")[2]


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="there is no /dev/full here")
@pytest.mark.parametrize("arguments", [["version"], ["ctl", "config", "example"], ["ctl", "config", "show"]])
def test_a_full_disk_under_the_output_is_one_line(arguments: list[str], tmp_path: Path) -> None:
    env = {**os.environ, "HOME": str(tmp_path)}
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "appliance", *arguments]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=env)
    (line,) = done.stderr.splitlines()
    assert line == "appliance: cannot write the output: No space left on device; make room, then try again"
    assert done.returncode == 1


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["version"]) == 0
    assert capsys.readouterr().out == f"appliance {__version__}\n"


@pytest.mark.parametrize("arguments", ["--help", "version"])
def test_a_command_imports_only_what_it_needs(arguments: str) -> None:
    code = "import sys; from appliance.cli.main import run; run(sys.argv[1:]); print(*sorted(sys.modules))"
    done = subprocess.run([sys.executable, "-c", code, arguments], capture_output=True, text=True, check=True)
    imported = set(done.stdout.splitlines()[-1].split())
    assert not imported & {"trio", "msgspec", "quart", "rich", "cryptography"}


def test_a_closed_standard_file_is_nobody_elses() -> None:
    """Else the first connection would be what libraries take for standard error."""
    code = (
        "import os, sys; from appliance.cli import main;"
        "seen = lambda: {os.readlink(f'/proc/self/fd/{number}') for number in range(3)};"
        "main.run = lambda arguments: sys.exit(len(seen() - {'/dev/null'}));"
        "main.main()"
    )
    for closed in ("<&- >&- 2>&-", "<&- >/dev/null 2>&-", "</dev/null >&- 2>/dev/null"):
        done = subprocess.run(["sh", "-c", f'"$0" -c "$1" {closed}', sys.executable, code], check=False)
        assert done.returncode == 0, closed

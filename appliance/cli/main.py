"""`appliance`: the command that finds the other commands.

Each mode imports only what it needs, so the table below names modules instead of importing them, and holds the one line
that `appliance --help` shows for each: listing the commands must not import all of them.
"""

from __future__ import annotations

import errno
import os
import sys
from importlib import import_module
from typing import Any

import click

from .firstprocess import split

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("appliance.cli.serve:serve", "Run the router: one endpoint in front of all engines."),
    "agent": ("appliance.cli.agent:agent", "Find the hardware of this node and run engines on it."),
    "ctl": ("appliance.cli.ctl.commands:ctl", "See and change a running router, and ask it why."),
    "sim": ("appliance.cli.sim:sim", "Run the built-in engine: vLLM's interface and timing, without a model."),
    "version": ("appliance.cli.version:version", "Print the version."),
}
"""Name -> module:attribute of a click command, and its line in the list of commands."""

FULL = (errno.ENOSPC, errno.EDQUOT)
"""What a write says where no room is left, most often one to a file that the shell opened for our output."""


class LazyGroup(click.Group):
    """A group whose commands are imported when they are called; `table` as above."""

    def __init__(self, *args: Any, table: dict[str, tuple[str, str]], **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._table = table

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(self._table)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in self._table:
            return None
        module, _, attribute = self._table[cmd_name][0].partition(":")
        command = getattr(import_module(module), attribute)
        assert isinstance(command, click.Command)
        return command

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in self._table.items()])


@click.group(cls=LazyGroup, table=COMMANDS)
def appliance() -> None:
    """Turn a few machines into a private LLM service."""


def main() -> None:
    """Run one command and exit: 0 done, 1 refused or failed, 2 wrong usage. Errors are one line on stderr."""
    _have_standard_files()
    if sys.argv[1:2] in (["serve"], ["agent"]):
        split()
    sys.exit(run(sys.argv[1:]))


def _have_standard_files() -> None:
    """Where whoever started us has closed one of the three, have it lead nowhere: the next file or connection that is
    opened would have its number, and get what libraries and children write there."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # it gets the lowest number that is free


def run(arguments: list[str]) -> int:
    """Run one command; its exit status. A command may return a status of its own."""
    try:
        status = appliance.main(arguments, prog_name="appliance", standalone_mode=False)
    except click.exceptions.NoArgsIsHelpError as error:
        error.show()
        return error.exit_code
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx else "appliance"
        _complain(f"{path}: {error.format_message().rstrip('.')}; see '{path} --help'")
        return error.exit_code
    except click.ClickException as error:
        _complain(f"appliance: {error.format_message()}")
        return error.exit_code
    except click.Abort:
        _complain("appliance: interrupted")
        return 1
    except OSError as error:
        if error.errno not in FULL:
            raise
        where = error.filename or "the output"
        _complain(f"appliance: cannot write {where}: {error.strerror}; make room, then try again")
        return 1
    return status if isinstance(status, int) else 0


def _complain(text: str) -> None:
    click.echo(" ".join(text.split()), err=True)


if __name__ == "__main__":
    main()

"""What every engine's file provides, and what a node offers it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs

from appliance.facts.hardware import Inventory
from appliance.facts.launch import LaunchPlan
from appliance.facts.replica import Shard
from appliance.rules.engines.ports import PortLease, PortPool

MARKER = "APPLIANCE_SHARD"
"""Environment variable by which an engine's processes are known, children that outlive their parent included."""


@attrs.frozen
class Program:
    """A program we start: `name` is its key in `agent.executables`, `executable` what is run without one there.

    `before` are the words between it and its flags. Where the executable is a Python interpreter and `module` is given,
    it is run as `python -m MODULE` instead. `beside` names another program in whose folder it is looked for first,
    since both must come from one installation. `help` are the words (and `help_env` the environment) that make it list
    every flag it has. `executable` "" is this very program.
    """

    name: str
    executable: str
    before: tuple[str, ...] = ()
    module: str = ""
    beside: str = ""
    help: tuple[str, ...] = ("--help",)
    help_env: Mapping[str, str] = attrs.field(factory=dict)

    def prefix(self, path: str) -> tuple[str, ...]:
        """The command line up to the first flag."""
        if self.module and path.rpartition("/")[2].startswith("python"):
            return (path, "-m", self.module)
        return (path, *self.before)


@attrs.frozen
class Site:
    """What one node offers a shard. Everything the rules may want to know and cannot look up themselves.

    `folder` is the shard's own folder and `run_folder` a short one for sockets, both absolute. `executables` are the
    configured ones, `which` gives a program's absolute path or None, `exists` says whether a file or folder is there.
    `environment` is the agent's own; `bundle` the folder a frozen executable unpacked itself into, "" otherwise;
    `own_argv` starts this program again. `marker` goes into the environment of every process. `llamacpp_threads` 0
    takes half of the processors.
    """

    inventory: Inventory
    ports: PortPool
    folder: str
    run_folder: str
    marker: str
    which: Callable[[str], str | None]
    exists: Callable[[str], bool]
    executables: Mapping[str, str] = attrs.field(factory=dict)
    environment: Mapping[str, str] = attrs.field(factory=dict)
    bundle: str = ""
    own_argv: tuple[str, ...] = ("appliance",)
    llamacpp_threads: int = 0

    def path_of(self, program: Program) -> str | None:
        """The program's absolute path, None when it is not there."""
        return locate(program, self.executables, self.own_argv, self.which, self.exists)


def locate(
    program: Program,
    executables: Mapping[str, str],
    own_argv: Sequence[str],
    which: Callable[[str], str | None],
    exists: Callable[[str], bool],
) -> str | None:
    """Where a program is: as configured, beside the one it belongs to, or on the search path; None when nowhere."""
    if not program.executable:
        return own_argv[0]
    configured = executables.get(program.name)
    if not configured and program.beside:
        neighbour = which(executables.get(program.beside) or program.beside) or ""
        beside = f"{neighbour.rpartition('/')[0]}/{program.executable}"
        if neighbour and exists(beside):
            return beside
    return which(configured or program.executable)


@attrs.frozen
class Engine:
    """One engine. `owned` are the flags the planner sets itself, each with what an operator sets instead ("" for
    nothing); `owned_env` the same for variables. `programs` lists those that a shard needs. `refuse` gives every reason
    of this engine's own against a shard, `plan` the plan when there is none."""

    name: str
    owned: Mapping[str, str]
    owned_env: tuple[str, ...]
    programs: Callable[[Shard], tuple[Program, ...]]
    refuse: Callable[[Shard, Site], list[str]]
    plan: Callable[[Shard, Site, PortLease], LaunchPlan]

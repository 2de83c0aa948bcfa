"""A scope of systemd's for each engine, where systemd runs this machine.

Without one all engines live in the agent's own unit: the kernel's or systemd's answer to one that eats the memory may
be to end all of it, and stopping the unit would stop them too. `systemd-run --scope` makes the scope and then turns
itself into the engine, so the pid stays the same.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping

import structlog
import trio

from appliance.agent.discovery.asking import ask

PROBE_S = 5.0
log = structlog.get_logger("scopes")

_BUS = ("XDG_RUNTIME_DIR", "DBUS_SESSION_BUS_ADDRESS")


async def find_scope(booted: str) -> tuple[str, ...]:
    """The words to put in front of a command; none where there is no systemd, or it does not give scopes to us.

    Tried with a command that does nothing. `booted` is a folder that is there where systemd runs the machine.
    """
    program = shutil.which("systemd-run")
    if program is None or not await trio.Path(booted).is_dir():
        return ()
    user = () if os.geteuid() == 0 else ("--user",)
    prefix = (program, "--scope", "--quiet", "--collect", *user, "--")
    return prefix if await _gives(prefix) else ()


async def still(prefix: tuple[str, ...]) -> tuple[str, ...]:
    """The words once more, asked before each start; none while systemd gives no scopes (its bus is gone, it is being
    updated): an engine in the agent's own unit is worth more than none."""
    if not prefix or await _gives(prefix):
        return prefix
    log.warning("systemd gives no scope now, an engine starts in the agent's own unit", program=prefix[0])
    return ()


async def _gives(prefix: tuple[str, ...]) -> bool:
    return (await ask([*prefix, "true"], limit_s=PROBE_S)).status == 0


def bus(environment: Mapping[str, str], prefix: tuple[str, ...]) -> dict[str, str]:
    """What `systemd-run` itself must find in its environment, which is the engine's too."""
    return {name: environment[name] for name in _BUS if name in environment} if "--user" in prefix else {}

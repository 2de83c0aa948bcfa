"""Where the configuration, the state and the sockets lie for the user who asks."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import attrs

FILE_NAME = "appliance.toml"
MACHINE_FILE = f"/etc/appliance/{FILE_NAME}"


@attrs.frozen
class Places:
    """`config_files` in the order in which they are tried; `state_dir` is "" when the environment names no home."""

    config_files: tuple[str, ...]
    state_dir: str
    runtime_dir: str


def places(environ: Mapping[str, str], uid: int | None = None) -> Places:
    """The folders of the user `uid` (default: the effective user), without looking at the disk.

    Root owns the machine's folders, everybody else the XDG ones. `STATE_DIRECTORY` and `RUNTIME_DIRECTORY` win for
    both: systemd sets them, and a unit with DynamicUser= has neither root's rights nor a home. No look-up in the user
    database, which an empty root file system does not have.
    """
    uid = os.geteuid() if uid is None else uid
    if uid == 0:
        config_files: tuple[str, ...] = (MACHINE_FILE,)
        state, runtime = "/var/lib/appliance", "/run/appliance"
    else:
        config = _xdg(environ, "XDG_CONFIG_HOME", ".config")
        config_files = (f"{config}/appliance/{FILE_NAME}", MACHINE_FILE) if config else (MACHINE_FILE,)
        home = _xdg(environ, "XDG_STATE_HOME", ".local/state")
        state = f"{home}/appliance" if home else ""
        run = _absolute(environ, "XDG_RUNTIME_DIR")
        runtime = f"{run}/appliance" if run else ""
    state = _from_systemd(environ, "STATE_DIRECTORY") or state
    runtime = _from_systemd(environ, "RUNTIME_DIRECTORY") or runtime or (f"{state}/run" if state else "")
    return Places(config_files, state, runtime)


def _absolute(environ: Mapping[str, str], name: str) -> str:
    """A folder named by a variable, "" when it is unset or relative (XDG says to ignore those)."""
    value = environ.get(name, "")
    return value.rstrip("/") if value.startswith("/") else ""


def _xdg(environ: Mapping[str, str], name: str, below_home: str) -> str:
    home = _absolute(environ, "HOME")
    return _absolute(environ, name) or (f"{home}/{below_home}" if home else "")


def _from_systemd(environ: Mapping[str, str], name: str) -> str:
    """The first folder of a systemd list. A child of somebody else's unit inherits that unit's folder: it gets one of
    its own below it, instead of mixing its database into theirs."""
    first = environ.get(name, "").split(":")[0].rstrip("/")
    if not first.startswith("/"):
        return ""
    return first if Path(first).name.startswith("appliance") else f"{first}/appliance"

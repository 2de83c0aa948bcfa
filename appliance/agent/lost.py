"""Engines of this state directory of which nothing is written down any more, not even the word that they are known by.

Whoever empties or removes a state directory leaves its engines running, and the next agent has another word: to it they
are strangers that hold GPUs and ports. But each runs in a folder of its own below the directory, and the kernel goes on
saying which that was after it has been removed. So a process is lost here when all of this is true of it:

    it is of our own user
    its marker has the form of an agent's, with another word than ours
    it, or one with the very same marker, is in a folder STATE/shards/NAME that was removed, or lies there now
    and the name of that folder means the same to it as to us: one mount namespace, one root
    and no process of our user watches it: a directory that was copied and then removed has an agent elsewhere

What another agent started is in that one's folder; what was moved along with its directory says so; in a container the
same path is another folder. All of these are left alone, and so is an engine that has gone to another folder by itself:
better a stranger that an operator must end than somebody's engine ended.

The price: who copies a directory to another disk, removes the first, and begins anew at its place while no agent runs
on the second, loses the engines of that one.

An agent may still run on a directory that was removed under it. Its lock was removed along, so it does not keep the
next one out; what it has started is not lost.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from appliance.agent import procfs
from appliance.agent.ownership import StateInUse

_REMOVED = " (deleted)"
_PIDFD = "anon_inode:[pidfd]"
_MARKER = re.compile(r"[0-9a-f]{16}\.[0-9a-f]{16}\..+", re.DOTALL)


def lost(shards: Path, word: str) -> dict[str, str]:
    """Marker -> shard id of the engines that are lost here. Reads `/proc` once. `shards` is STATE/shards.

    Raises StateInUse where an agent still runs that they belong to, and OSError where processes cannot be looked at.
    """
    there = Path(os.path.realpath(shards))
    strange = procfs.marked(lambda marker: bool(_MARKER.fullmatch(marker)) and not marker.startswith(f"{word}."))
    found = {marker for pid, marker in strange.items() if _is_ours(pid) and _is_in(pid, there)}
    if not found:
        return {}
    owner, watched = _elsewhere(f"{there}/lock{_REMOVED}")
    if owner:
        raise StateInUse(
            f"the state directory {shards.parent} was removed while another agent (pid {owner}) ran on it, which still"
            " does and has engines"
        )
    return {marker: marker.split(".", 2)[2] for marker in found - {strange.get(pid) for pid in watched}}


def _is_ours(pid: int) -> bool:
    try:
        return os.stat(f"/proc/{pid}").st_uid == os.geteuid()
    except (FileNotFoundError, ProcessLookupError):
        return False


def _is_in(pid: int, shards: Path) -> bool:
    """Whether the process is in a folder of a shard below `shards`, as far as that can be said for certain."""
    try:
        name = os.readlink(f"/proc/{pid}/cwd")
        removed = name.endswith(_REMOVED)
        if Path(name.removesuffix(_REMOVED)).parent != shards or not _same_names(pid):
            return False
        # Not so where another disk was mounted over the folder that it is in.
        return removed or os.path.samestat(os.stat(f"/proc/{pid}/cwd"), os.stat(name))
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return False


def _same_names(pid: int) -> bool:
    """Whether a path means the same to the process as to us."""
    return all(
        os.path.samestat(os.stat(f"/proc/{pid}/{each}"), os.stat(f"/proc/self/{each}")) for each in ("ns/mnt", "root")
    )


def _elsewhere(lock: str) -> tuple[int, set[int]]:
    """Another process that has the file open which the kernel calls so, 0 for none; and all that are watched through a
    pidfd by others."""
    owner, watched = 0, set()
    for pid in procfs.everybody():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError, PermissionError):
            for number in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(FileNotFoundError):
                    name = os.readlink(f"/proc/{pid}/fd/{number}")
                    if name == lock:
                        owner = pid
                    elif name == _PIDFD:
                        watched.add(_pid_of(Path(f"/proc/{pid}/fdinfo/{number}").read_text()))
    return owner, watched


def _pid_of(text: str) -> int:
    return next((int(line.split()[1]) for line in text.splitlines() if line.startswith("Pid:")), -1)

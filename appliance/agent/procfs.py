"""What the kernel says about processes, and how one is told from another that has its number.

A pid alone means nothing: the kernel gives it out again. A process is known by its pid together with the time it
started at (in clock ticks since the machine started) and, since that clock starts again with the machine, the id of
the boot. Whether it is *ours* is told by a marker in the environment it was started with, which its children inherit
and which nobody else can have by chance (it holds two random words).

Everything here looks at `/proc` once and may be out of date when it returns. Whoever sends a signal opens a pidfd
first and looks afterwards: then what was looked at is what is hit.

A process that cannot be looked at (there are no descriptors left, or no memory) is not gone: everything here raises
OSError then, because an engine that is taken for gone is ended, or left to itself.
"""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import attrs

from appliance.rules.engines.engine import MARKER

_ENVIRON_BYTES = 1 << 20
_GONE = (FileNotFoundError, ProcessLookupError)


@attrs.frozen
class Seen:
    """One process at one moment. `ended`: nothing is left of it but its exit status, which nobody has fetched yet."""

    pid: int
    started: int
    parent: int
    group: int
    session: int
    ended: bool


def boot_id() -> str:
    """The id of this boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def see(pid: int) -> Seen | None:
    """The process now, None when there is none."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes()
    except _GONE:
        return None
    # The name stands in parentheses and may hold anything, closing ones too.
    words = text[text.rindex(b")") + 2 :].split()
    return Seen(
        pid=pid,
        parent=int(words[1]),
        group=int(words[2]),
        session=int(words[3]),
        started=int(words[19]),
        ended=words[0] in (b"Z", b"X", b"x"),
    )


def command_line(pid: int) -> tuple[str, ...]:
    """Its command line now; empty for one that is gone, has ended, or is none of ours to look at."""
    try:
        text = Path(f"/proc/{pid}/cmdline").read_bytes()
    except (*_GONE, PermissionError):
        return ()
    words = text.split(b"\0")
    if words and not words[-1]:
        words.pop()
    return tuple(word.decode("utf-8", "replace") for word in words)


def marker_of(pid: int) -> str | None:
    """The marker in the environment it was started with, "" without one. None when that is not for us to see: it
    belongs to another user, or has rights that we have not."""
    try:
        with open(f"/proc/{pid}/environ", "rb") as file:
            text = file.read(_ENVIRON_BYTES)
    except PermissionError:
        return None
    except _GONE:
        return ""
    wanted = MARKER.encode() + b"="
    marker = next((each for each in text.split(b"\0") if each.startswith(wanted)), wanted)
    return marker[len(wanted) :].decode("utf-8", "replace")


def everybody() -> Iterator[int]:
    """The pids of all processes that can be seen, but for our own."""
    own = os.getpid()
    with os.scandir("/proc") as entries:
        for entry in entries:
            if entry.name.isdecimal() and int(entry.name) != own:
                yield int(entry.name)


def marked(belongs: Callable[[str], bool]) -> dict[int, str]:
    """Pid -> marker of every process that is alive and whose marker `belongs`."""
    found = {}
    for pid in everybody():
        marker = marker_of(pid)
        if marker and belongs(marker):
            seen = see(pid)
            if seen is not None and not seen.ended:
                found[pid] = marker
    return found


def members(group: int) -> list[Seen]:
    """Every process of a process group that is alive, its leader included."""
    found = (see(pid) for pid in everybody())
    return [seen for seen in found if seen is not None and seen.group == group and not seen.ended]


def kill_if(pid: int, holds: Callable[[], bool]) -> bool:
    """Send SIGKILL to `pid` if `holds` is true of it, asked when the pid can no longer become another process's; False
    where nothing was sent, also since it could not be looked at."""
    try:
        pidfd = os.pidfd_open(pid)
    except OSError:
        return False
    try:
        if not holds():
            return False
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
    except OSError:
        return False
    finally:
        os.close(pidfd)
    return True

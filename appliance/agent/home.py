"""Where a state directory belongs: to which machine, and to which place on it.

Whoever clones a machine, or copies the directory, copies who it is along: the agent on the copy would call itself by
the same name, and, on one machine, take over or kill engines that are the other's. So the directory says where it was
made, and an agent that finds itself elsewhere refuses.

    STATE/shards/home       JSON: boot, board and machine of the host; path, device and inode of STATE/shards

A copy on another machine is known by the host. One boot is one machine, whatever else has changed (a container that
was made anew has another `machine-id`). Otherwise the board's number decides, which hypervisors give anew to each
clone, and only where it is not known (it is root's alone to read) the `machine-id`, which is cloned along as often as
not. Where nothing is known on one of the sides, nothing is refused.

A copy on the same machine is known by the inode, which moves with a directory and not into a copy of it; but it is
refused only while the directory that it was copied from is still there, since a restored backup or a move to another
disk looks the same.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import re
from pathlib import Path

import attrs
import msgspec

from appliance.agent import procfs
from appliance.agent.private import replace
from appliance.agent.wording import to_json

BOARD = Path("/sys/class/dmi/id/product_uuid")
MACHINE = Path("/etc/machine-id")
NOBODY = Path("/proc/sys/kernel/overflowuid")

_MACHINE = re.compile(r"[0-9a-f]{32}")
_BOARD = re.compile(r"[0-9a-f-]{36}")
_NO_BOARDS = ("03000200-0400-0500-0006-000700080009", "00020003-0004-0005-0006-000700080009")
"""What makers of boards have left in, for thousands of them."""


class NotOurs(Exception):
    """The state directory belongs to somebody else, or is a copy; the text is one line with what to do."""


@attrs.frozen
class Host:
    """What tells one machine from another; "" for what is not known."""

    boot: str
    board: str = ""
    machine: str = ""

    def differs(self, other: Host) -> bool:
        """Whether they are surely not the same."""
        if self.boot == other.boot:
            return False
        if self.board and other.board:
            return self.board != other.board
        return bool(self.machine and other.machine) and self.machine != other.machine


@attrs.frozen
class Home:
    host: Host
    path: str
    device: int
    inode: int


def this_host() -> Host:
    """Raises OSError where not even the boot can be told."""
    board, machine = _text(BOARD), _text(MACHINE)
    # Nulls, effs and other single digits are no numbers.
    known = _BOARD.fullmatch(board) and board not in _NO_BOARDS and len(set(board)) > 3
    return Host(procfs.boot_id(), board if known else "", machine if _MACHINE.fullmatch(machine) else "")


def belongs(folder: Path) -> None:
    """See that a folder of the agent's is its own user's. What it writes there is for that user alone, so that an agent
    of another one could read no record, and one that is root's would leave the user's none to read. Raises NotOurs, and
    OSError where it cannot be looked at."""
    owner, ours = folder.stat().st_uid, os.geteuid()
    # Where our own number means another one (a file server, a container), what we have made is nobody's.
    if owner not in (ours, _number(NOBODY)):
        raise NotOurs(
            f"{folder} belongs to {_name(owner)}, and this is {_name(ours)}: run the agent as that user, or give it the"
            f" whole directory (chown -R {ours} {folder.parent}) while no agent runs"
        )


def check(shards: Path) -> None:
    """See that the directory, where there is one, is where it belongs; nothing is changed. Raises NotOurs, OSError."""
    with contextlib.suppress(FileNotFoundError):
        _compared(shards)


def settle(shards: Path) -> None:
    """See that the directory is where it belongs, and write down where that is. Raises NotOurs, and OSError where it
    cannot be looked at; a disk that takes nothing costs the note alone. Only for whoever owns the directory."""
    before, now = _compared(shards)
    if before is not None:
        # What this user cannot read, another one could.
        board, machine = now.host.board or before.host.board, now.host.machine or before.host.machine
        now = attrs.evolve(now, host=Host(now.host.boot, board, machine))
    if now != before:
        with contextlib.suppress(OSError):
            replace(shards / "home", to_json(now))


def _compared(shards: Path) -> tuple[Home | None, Home]:
    """What was written down and what is so."""
    before, stat = _read(shards / "home"), shards.stat()
    now = Home(this_host(), os.path.realpath(shards), stat.st_dev, stat.st_ino)
    if before is not None:
        _judge(before, now, shards.parent)
    return before, now


def _judge(before: Home, now: Home, state: Path) -> None:
    alone = f"remove {state}/shards and {state}/pki/node.*, and join anew"
    if before.host.differs(now.host):
        raise NotOurs(
            f"the state directory {state} is another machine's, with its name and records: where it is shared with that"
            f" one, set STATE_DIRECTORY to a folder that is not; where it is a copy, {alone}; where this machine takes"
            f" that one's place for good, remove {state}/shards/home"
        )
    if (before.device, before.inode) == (now.device, now.inode):
        return
    with contextlib.suppress(OSError):
        there = os.stat(before.path)
        if (there.st_dev, there.st_ino) == (before.device, before.inode):
            raise NotOurs(
                f"the state directory {state} is a copy of {Path(before.path).parent}, which is still there and whose"
                f" engines are not this one's: to make it an agent of its own, {alone}; if the copy is to go on in its"
                " place, remove that one"
            )


def _read(note: Path) -> Home | None:
    """What was written down; None where nothing usable was. Raises OSError where it cannot be read."""
    try:
        return msgspec.json.decode(note.read_bytes(), type=Home)
    except FileNotFoundError:
        return None
    except (ValueError, RecursionError):
        return None


def _name(uid: int) -> str:
    try:
        return f"the user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"the user {uid}"


def _number(path: Path) -> int:
    text = _text(path)
    return int(text) if text.isdecimal() else -1


def _text(path: Path) -> str:
    with contextlib.suppress(OSError, UnicodeDecodeError):
        return path.read_text().strip().lower()
    return ""

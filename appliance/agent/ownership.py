"""Whose a state directory is: a lock that the kernel gives back however its owner ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable
from pathlib import Path

from appliance.agent import procfs

_HALF_BORN_S = 5.0
"""How long a child may take from its fork to being another program: a slow disk that has to bring it."""


class StateInUse(Exception):
    """Another agent owns the state directory; the text names its pid."""


def own(path: Path, check: Callable[[], None] = lambda: None) -> int:
    """Hold the lock for as long as the descriptor is open. Raises StateInUse, and OSError; `check` is called while it
    waits, and may raise.

    A child of an agent that was killed has the descriptor too, from its fork until it becomes the engine; it is waited
    for. That it must have let go has another use: from then on no process of ours is without its marker.
    """
    descriptor = _open(path)
    until = time.monotonic() + _HALF_BORN_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            break
        except OSError:
            pid = os.pread(descriptor, 32, 0).decode("ascii", "replace").strip()
            owner = procfs.see(int(pid)) if pid.isdecimal() else None
            if time.monotonic() > until or (owner is not None and not owner.ended):
                os.close(descriptor)
                where = path.parent.parent
                raise StateInUse(f"the state directory {where} is in use by another agent (pid {pid})") from None
            try:
                check()
            except BaseException:
                os.close(descriptor)
                raise
            time.sleep(0.01)
    # A full disk, or one that went read-only, costs the name and not the lock.
    with contextlib.suppress(OSError):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, b"%d\n" % os.getpid(), 0)
    return descriptor


def removed(descriptor: int, path: Path) -> bool:
    """Whether the lock that is held is not what lies at `path` any more: somebody has removed or moved the directory,
    and another agent would own what it finds there. Blocks on the disk; False where nothing can be said."""
    try:
        return not os.path.samestat(os.fstat(descriptor), os.stat(path))
    except FileNotFoundError:
        return True
    except OSError:
        return False


def _open(path: Path) -> int:
    try:
        return os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as refused:
        # The disk is broken and was turned read-only: engines that run can be looked after all the same.
        if refused.errno != errno.EROFS or not path.exists():
            raise
        return os.open(path, os.O_RDONLY | os.O_CLOEXEC)

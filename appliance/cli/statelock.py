"""The lock of a state directory: one router owns it, and a file in it says which process that is.

`flock` on an open file, since the kernel releases it however the process ends: a file left behind means nothing, only
the lock does. It belongs to the open file, not to the process, so a takeover passes it on with the descriptor and the
directory is owned without a gap. The file is never removed: whoever had opened it a moment before would hold a lock on
a file that nobody else can find.
"""

from __future__ import annotations

import contextlib
import fcntl
import os

from .startfailed import StartFailed

_NAME = "serve.lock"
_SET = "set STATE_DIRECTORY (or XDG_STATE_HOME) to a folder that this user can write"


class StateLock:
    """A held lock. `close` releases it, unless another process holds the same open file; then it is not `ours`, and
    what it says is left alone."""

    def __init__(self, descriptor: int, *, ours: bool = True) -> None:
        self.descriptor = descriptor
        self.ours = ours

    def claim(self) -> None:
        """Name this process as the owner. A full disk costs the name, not the lock."""
        self.ours = True
        self._write(b"%d\n" % os.getpid())

    def close(self) -> None:
        """Release it. Once only."""
        if self.ours:
            self._write(b"")
        os.close(self.descriptor)

    def _write(self, text: bytes) -> None:
        with contextlib.suppress(OSError):
            os.ftruncate(self.descriptor, 0)
            os.pwrite(self.descriptor, text, 0)


def take(folder: str) -> StateLock:
    """Own the state directory `folder`, which is made if it is not there. Raises StartFailed."""
    descriptor = _open(folder)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = _named(descriptor)
        os.close(descriptor)
        raise StartFailed(
            f"the state directory {folder} is in use by another appliance serve (pid {pid}): stop that one, take over"
            " from it with --takeover, or set STATE_DIRECTORY to another folder"
        ) from None
    except OSError as error:
        os.close(descriptor)
        raise StartFailed(f"the state directory {folder} cannot be locked: {error.strerror}; {_SET}") from None
    lock = StateLock(descriptor)
    lock.claim()
    return lock


def adopt(descriptor: int, folder: str) -> StateLock:
    """The lock that came with `descriptor` where it is the one of `folder`, not `ours` before it is claimed; otherwise
    a new one. Raises StartFailed."""
    with contextlib.suppress(OSError):
        theirs, ours = os.fstat(descriptor), os.stat(f"{folder}/{_NAME}")
        if (theirs.st_dev, theirs.st_ino) == (ours.st_dev, ours.st_ino):
            return StateLock(descriptor, ours=False)
    os.close(descriptor)
    return take(folder)


def owner(folder: str) -> str:
    """The pid of the process that owns `folder`, "" when none does. Takes nothing and makes nothing."""
    try:
        descriptor = os.open(f"{folder}/{_NAME}", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return ""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return _named(descriptor)
    except OSError:
        return ""
    else:
        return ""
    finally:
        os.close(descriptor)


def _open(folder: str) -> int:
    if not folder:
        raise StartFailed(f"there is no state directory, since neither HOME nor XDG_STATE_HOME is set; {_SET}")
    try:
        os.makedirs(folder, mode=0o750, exist_ok=True)
    except OSError as error:
        raise StartFailed(f"the state directory {folder} cannot be made: {error.strerror}; {_SET}") from None
    try:
        return os.open(f"{folder}/{_NAME}", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o640)
    except OSError as error:
        raise StartFailed(f"the state directory {folder} cannot be written: {error.strerror}; {_SET}") from None


def _named(descriptor: int) -> str:
    """The pid in the file. Empty for a moment while its owner writes it."""
    try:
        return os.pread(descriptor, 32, 0).decode("ascii", "replace").strip() or "unknown"
    except OSError:
        return "unknown"

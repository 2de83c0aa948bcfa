"""Unix sockets with a mode, made where a dead process may have left one of the same name.

A socket file outlives its process, so finding one says nothing: only a connection tells whether somebody listens there.
Two processes that start at the same moment could both find it dead, and the second would unlink the first one's new
socket; a lock on the folder, held for the few calls from the look to the listen, prevents that and leaves no file.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import socket
import stat
import struct
from collections.abc import Iterator

import attrs

BACKLOG = 128
LONGEST_NAME_BYTES = 107
_CREDENTIALS = struct.Struct("3i")


class CannotListen(Exception):
    """A socket cannot be made; the message says why, and what to do."""


@attrs.frozen
class Peer:
    """Who is at the other end of a Unix socket, as the kernel says: the process that connected (or listens), and the
    user and group it ran as at that moment. 0 where the process lives in another namespace."""

    pid: int
    uid: int
    gid: int


def peer_of(sock: socket.socket) -> Peer:
    """The credentials of the other end. Raises OSError."""
    return Peer(*_CREDENTIALS.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)))


class UnixSocket:
    """A listening socket and its file. `close` removes the file where it is `ours`, unless somebody has put another in
    its place."""

    def __init__(self, path: str, sock: socket.socket, *, ours: bool = True) -> None:
        self.path = path
        self.sock = sock
        self.ours = ours
        self._identity = _identity(path)

    def claim(self) -> None:
        """Take it over from the process that made it: the kernel names whoever called `listen` last to those who
        connect."""
        self.sock.listen(BACKLOG)
        self.ours = True

    def close(self) -> None:
        self.sock.close()
        with contextlib.suppress(OSError):
            if self.ours and _identity(self.path) == self._identity:
                os.unlink(self.path)


def listen(path: str, mode: int) -> UnixSocket:
    """Listen at `path`, whose folder is made if it is not there. Raises CannotListen; a live socket is left alone."""
    folder = os.path.dirname(path) or "."
    try:
        os.makedirs(folder, mode=0o750, exist_ok=True)
        with _locked(folder) as descriptor:
            short = _short(path, descriptor)
            _clear(short, path)
            sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
            try:
                sock.bind(short)
                os.chmod(short, mode)  # nobody can connect before `listen`, so no moment passes with another mode
                sock.listen(BACKLOG)
            except BaseException:
                sock.close()
                raise
    except OSError as error:
        raise CannotListen(f"cannot listen on {path}: {error.strerror}; name another path") from None
    return UnixSocket(path, sock)


def connect(path: str) -> socket.socket:
    """A non-blocking connection to `path`. Raises OSError; BlockingIOError when too many wait to be accepted."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        folder = os.open(os.path.dirname(path) or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            sock.connect(_short(path, folder))
        finally:
            os.close(folder)
    except BaseException:
        sock.close()
        raise
    return sock


def remove_dead(folder: str, pattern: str) -> None:
    """Remove sockets that processes killed without warning left in `folder`; `{}` in `pattern` stands for anything."""
    prefix, _, suffix = pattern.partition("{}")
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            if name.startswith(prefix) and name.endswith(suffix):
                with contextlib.suppress(CannotListen, OSError):
                    _clear(f"{folder}/{name}", f"{folder}/{name}")


@contextlib.contextmanager
def _locked(folder: str) -> Iterator[int]:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CannotListen(f"another process is starting in {folder} at this moment; try again") from None
        yield descriptor
    finally:
        os.close(descriptor)  # releases the lock


def _clear(short: str, path: str) -> None:
    """Remove what a dead process left. Raises CannotListen where something else is in the way."""
    try:
        found = os.lstat(short)
    except FileNotFoundError:
        return
    if not stat.S_ISSOCK(found.st_mode):
        raise CannotListen(f"{path} exists and is no socket; remove it or name another path")
    try:
        sock = connect(path)
    except BlockingIOError:
        raise CannotListen(f"another appliance serve runs here: {path} is in use") from None
    except OSError as error:
        if error.errno != errno.ECONNREFUSED:
            raise
        os.unlink(short)
        return
    with sock:
        pid = peer_of(sock).pid
    raise CannotListen(
        f"another appliance serve runs here (pid {pid}): stop it, or give this one another socket than {path}"
    )


def _short(path: str, folder: int) -> str:
    """A name for `path` that the kernel takes: by way of the folder's descriptor where its own is too long."""
    if len(os.fsencode(path)) <= LONGEST_NAME_BYTES:
        return path
    return f"/proc/self/fd/{folder}/{os.path.basename(path)}"


def _identity(path: str) -> tuple[int, int]:
    status = os.lstat(path)
    return status.st_dev, status.st_ino

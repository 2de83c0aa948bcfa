"""Output of engines: one bounded file per shard, and its last lines without keys.

The engine holds the file open for appending, and outlives us, so it cannot be given another one. When it has grown to
a quarter of what is allowed, its last lines are copied beside it and the file is cut to nothing; the next write starts
at its new end. What is written between the copy and the cut is lost, which is a line or two in a great many.

The file is held open here too, by what the engine writes to and not by its name: it may delete or move it. And it may
open it anew without appending: then its next write goes to where it was, and what lies before that is a hole. Such a
file is measured by what it takes of the disk, or it would be cut at every look.

The price is that the bound is kept by looking. The kernel tells of the first write (inotify), and then the file is
looked at every millisecond. An eighth of what is allowed is kept of what was, and the rest is there for what is written
before we come: 10 MiB of the usual 16, which at 500 MB/s are 20 ms.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import stat
import struct
from collections.abc import Iterable, Sequence
from typing import NoReturn

import trio

from appliance.agent.wording import visible

LOOK_S = 0.001
"""Seconds between two looks at a file that grows. An engine that writes a line now and then costs as many looks."""

_IN_MODIFY = 0x2
_IN_CLOEXEC, _IN_NONBLOCK = 0o2000000, 0o4000
_TAIL_BYTES = 64 << 10
LINE_CHARS = 8_000
"""Most of a line in a tail: an engine may write without ever ending one."""

_SECRET_NAME = re.compile(r"(?:^|_)(?:TOKEN|KEY|SECRET|PASSWORD|PASSWD|CREDENTIALS)$", re.IGNORECASE)
_SHORTEST_SECRET = 6


def begin(log: str) -> None:
    """An empty file for a new start; the end of what the one before left is kept beside it, under a name of its own,
    or it would be taken for the beginning of this one's. Raises OSError."""
    with contextlib.suppress(FileNotFoundError):
        os.replace(log, f"{log}.before")
    with contextlib.suppress(FileNotFoundError):
        os.unlink(f"{log}.1")
    os.close(os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600))


async def keep_bounded(log: str, log_bytes: int, written: Sequence[str] = ()) -> NoReturn:
    """Keep `log` and what was cut off it within `log_bytes` together. Its owner cancels it.

    `written` are paths of what engines that run already write to (`/proc/PID/fd/1`), for a log that has lost its name.
    """
    path = next((each for each in written if _is_log(each, log)), log)
    with _Watch(path) as watch, _Held(path) as held:
        while True:
            if held.bytes() >= log_bytes // 4:
                # Whatever is wrong with the disk, the shard goes on; a full one is full of something else.
                with contextlib.suppress(OSError):
                    await trio.to_thread.run_sync(held.cut, log, log_bytes // 8)
            await trio.sleep(LOOK_S)
            await watch.written()


def last_output(log: str) -> float:
    """When something was written last, in seconds since 1970; 0.0 when that cannot be known."""
    try:
        return os.stat(log).st_mtime
    except OSError:
        return 0.0


def tail(log: str, n: int, secrets: Iterable[str] = (), *, end: int | None = None) -> list[str]:
    """The last `n` lines, at most 64 KiB of them, with `secrets` taken out; those before the byte `end`, where it is
    given. Never raises for what the file is like."""
    hidden = [secret for secret in secrets if secret]
    margin = max((len(secret.encode()) for secret in hidden), default=0)
    content, whole = _end_of(log, _TAIL_BYTES + margin, end)
    if not whole or len(content) < _TAIL_BYTES:
        before, _ = _end_of(f"{log}.1", _TAIL_BYTES + margin - len(content)) if whole else (b"", True)
        # The older file may end in the middle of a line.
        joint = b"\n" if before and not before.endswith(b"\n") else b""
        content, whole = before + joint + content, whole and not before
    text = content.decode("utf-8", "replace")
    for secret in hidden:
        text = text.replace(secret, "***")
    if not whole:
        # The first line began before this, and might with the second half of a key.
        text = text.partition("\n")[2] or text[margin:]
    return [line[:LINE_CHARS] for line in lines_of(text)[-n:]] if n > 0 else []


def lines_of(text: str) -> list[str]:
    """The lines of a text that are not empty, without what colours them or does worse to a terminal."""
    lines = (visible(line).rstrip() for line in re.split(r"[\r\n]+", text))
    return [line for line in lines if line]


def secrets_of(environment: Iterable[tuple[str, str]]) -> set[str]:
    """Values of variables that are keys by their name: tokens of hubs, passwords of proxies' users and so on."""
    return {text for name, text in environment if _SECRET_NAME.search(name) and len(text) >= _SHORTEST_SECRET}


def _is_log(path: str, log: str) -> bool:
    """Whether `path` (in `/proc`) leads to our log, be it deleted meanwhile, and not to a file of the engine's own."""
    try:
        return os.readlink(path) in (log, f"{log} (deleted)")
    except OSError:
        return False


class _Held:
    """A log that is open for measuring and cutting; nothing to do where it cannot be opened."""

    def __init__(self, path: str) -> None:
        self._descriptor = -1
        self._cut_at = 0
        with contextlib.suppress(OSError):
            self._descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            if not stat.S_ISREG(os.fstat(self._descriptor).st_mode):
                self.close()

    def bytes(self) -> int:
        """What has been written since the last cut, holes left out."""
        try:
            seen = os.fstat(self._descriptor)
        except OSError:
            return 0
        # As long as before, though it was emptied: it was not appended to.
        return min(seen.st_size, seen.st_blocks * 512) if 0 < self._cut_at <= seen.st_size else seen.st_size

    def cut(self, log: str, keep: int) -> None:
        """Copy the last `keep` bytes beside `log`, and empty what is held. Raises OSError."""
        size = os.fstat(self._descriptor).st_size
        beside = os.open(f"{log}.1", os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC, 0o600)
        with os.fdopen(beside, "wb") as old:
            at, left = max(0, size - keep), keep
            while left > 0 and (sent := os.sendfile(old.fileno(), self._descriptor, at, left)):
                at, left = at + sent, left - sent
        os.ftruncate(self._descriptor, 0)
        self._cut_at = size

    def close(self) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> _Held:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _end_of(path: str, most: int, end: int | None = None) -> tuple[bytes, bool]:
    """The last `most` bytes of a file, or of what stands before the byte `end`, and whether that is all of it."""
    try:
        with open(path, "rb") as file:
            size = os.fstat(file.fileno()).st_size if end is None else end
            file.seek(max(0, size - most))
            return file.read(min(most, size)), size <= most
    except OSError:
        return b"", True


class _Watch:
    """Tells when a file is written to. Where the kernel has no watch to give, it is looked at every half second."""

    def __init__(self, path: str) -> None:
        libc = ctypes.CDLL(None, use_errno=True)
        self._descriptor: int = libc.inotify_init1(_IN_CLOEXEC | _IN_NONBLOCK)
        if self._descriptor >= 0 and libc.inotify_add_watch(self._descriptor, os.fsencode(path), _IN_MODIFY) < 0:
            os.close(self._descriptor)
            self._descriptor = -1

    async def written(self) -> None:
        """Return when something was written since the last call, be it before this one."""
        if self._descriptor < 0:
            await trio.sleep(0.5)
            return
        await trio.lowlevel.wait_readable(self._descriptor)
        with contextlib.suppress(BlockingIOError):
            os.read(self._descriptor, 64 * struct.calcsize("iIII"))

    def __enter__(self) -> _Watch:
        return self

    def __exit__(self, *_: object) -> None:
        if self._descriptor >= 0:
            os.close(self._descriptor)

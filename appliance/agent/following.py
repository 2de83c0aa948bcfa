"""The later lines of an engine's log, for somebody who reads along.

The file is read when the reader has taken what came before, so a slow one costs no memory; what it cannot follow is
left out, and that is said in its place. All methods block on the disk.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable
from pathlib import Path

from appliance.agent import logs

READ_BYTES = 64 << 10
"""Most that one call gives."""

BEHIND_BYTES = 1 << 20
"""How far a reader may be behind the end of the file."""

LINE_CHARS = 8_000


class Following:
    """One reader of one log. `secrets` gives what must not be shown, as it is known by then."""

    def __init__(self, log: str, secrets: Callable[[], Iterable[str]]) -> None:
        self._log = log
        self._secrets = secrets
        self._at = 0
        self._file = 0
        self._cut = _when_cut(log)
        self._inside = False

    def last(self, n: int) -> list[str]:
        """The last `n` whole lines as they are now; `more` goes on behind them."""
        self._cut = _when_cut(self._log)
        try:
            with open(self._log, "rb") as file:
                seen = os.fstat(file.fileno())
                start = max(0, seen.st_size - READ_BYTES)
                file.seek(start)
                content = file.read(seen.st_size - start)
        except OSError:
            return []
        self._file = seen.st_ino
        self._at = start + _end_of_lines(content)
        return logs.tail(self._log, n, self._secrets(), end=self._at)

    def more(self) -> list[str]:
        """Whole lines that were written since the last call; the file may have been cut, or begun anew."""
        try:
            with open(self._log, "rb") as file:
                told = self._place(os.fstat(file.fileno()))
                file.seek(self._at)
                content = file.read(READ_BYTES)
        except OSError:
            return []
        end = _end_of_lines(content)
        if not end and len(content) == READ_BYTES:
            # Half a line might show half a key, so what is longer than all we read is not shown.
            told += [] if self._inside else ["[a very long line is left out]"]
            self._inside = True
            self._at += len(content)
            return told
        if not end:
            return told
        self._at += end
        text = content[:end].decode("utf-8", "replace")
        for secret in filter(None, self._secrets()):
            text = text.replace(secret, "***")
        if self._inside:
            text = text[min((at for at in (text.find("\n"), text.find("\r")) if at >= 0), default=0) :]
            self._inside = False
        return told + [line[:LINE_CHARS] for line in logs.lines_of(text)]

    def _place(self, seen: os.stat_result) -> list[str]:
        """Where to read on, and what to say where something is missing before that."""
        cut = _when_cut(self._log)
        told = []
        if seen.st_ino != self._file:
            self._at, self._inside = 0, False
        elif cut != self._cut or seen.st_size < self._at:
            self._at, self._inside = 0, True  # it may begin in the middle of a line
            told = ["[the log was cut here; some lines may be missing]"]
        self._file, self._cut = seen.st_ino, cut
        if seen.st_size - self._at > BEHIND_BYTES:
            told = [f"[{seen.st_size - READ_BYTES - self._at} bytes are left out: the log grows too fast]"]
            self._at = seen.st_size - READ_BYTES
            self._inside = True
        return told


def _end_of_lines(content: bytes) -> int:
    """Where the last whole line ends; a progress bar that is drawn again and again ends its lines with a return."""
    return max(content.rfind(b"\n"), content.rfind(b"\r")) + 1


def _when_cut(log: str) -> int:
    """Changes each time the log is cut: what is cut off is written beside it then."""
    try:
        return Path(f"{log}.1").stat().st_mtime_ns
    except OSError:
        return 0

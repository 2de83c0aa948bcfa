"""Processes of the demonstration: started in sessions of their own, ended one after the other."""

from __future__ import annotations

import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Sequence
from pathlib import Path

import attrs

_LOG_LINES = 15
_POLL_S = 0.05


class DidNotStart(Exception):
    """A process ended, or did not answer in time; the text says which, and what its log ends with."""


@attrs.define
class Child:
    """A running process and the file that takes what it writes. `stop` must be called, once or more often."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def wait_for(self, url: str, limit_s: float) -> None:
        """Return when a GET of `url` answers 200. Raises DidNotStart when the process ends or `limit_s` passes."""
        due = time.monotonic() + limit_s
        while time.monotonic() < due:
            if (status := self.process.poll()) is not None:
                raise DidNotStart(f"{self.name} ended ({ending(status)})\n{self.last_lines()}")
            try:
                with urllib.request.urlopen(url, timeout=limit_s):
                    return
            except (urllib.error.URLError, ConnectionError, TimeoutError):
                time.sleep(_POLL_S)
        raise DidNotStart(f"{self.name} did not answer {url} within {limit_s:.0f} s\n{self.last_lines()}")

    def stop(self, limit_s: float) -> None:
        """End it with SIGTERM, with SIGKILL after `limit_s` or at a second Ctrl-C. Returns when it is gone."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(limit_s)
            except (subprocess.TimeoutExpired, KeyboardInterrupt):
                self.process.kill()
                self.process.wait()

    def last_lines(self) -> str:
        """The end of its log, indented."""
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-_LOG_LINES:]
        return "\n".join(f"    {line}" for line in lines)


def start(name: str, command: Sequence[str], folder: Path, env: dict[str, str] | None = None) -> Child:
    """Run `command` with its output in `folder`.

    A session of its own, because Ctrl-C goes to every process of the terminal's group at once: engine and router would
    end together, and clients would see the engine fail instead of the router drain.
    """
    log = folder / f"{name.replace(' ', '-')}.log"
    with log.open("wb") as out:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=out, stderr=out, env=env, start_new_session=True
        )
    return Child(name, process, log)


def ending(status: int) -> str:
    """An exit status in words: `status 1`, or `signal 4` for a process that a signal ended."""
    return f"signal {-status}" if status < 0 else f"status {status}"

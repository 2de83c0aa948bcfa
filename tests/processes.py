"""Programs of ours as processes that a test starts, reads the log of, stops and kills, whatever the program is.

All waiting is Trio's, so a load in the same loop goes on.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import attrs
import trio

APPLIANCE = (sys.executable, "-m", "appliance")
WITHIN_S = 30.0
"""Ends a test that would fail anyway."""


@attrs.frozen(eq=False)
class Process:
    """A running program, with its log in a file of its own."""

    popen: subprocess.Popen[bytes]
    log_file: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def log(self) -> list[str]:
        return self.log_file.read_text().splitlines()

    @property
    def alive(self) -> bool:
        return self.popen.poll() is None

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def logged(self, wanted: str, times: int = 1, within_s: float = WITHIN_S) -> str:
        """Wait until `times` lines hold `wanted`; the last of them."""
        return await logged(self.popen, lambda: self.log, wanted, times, within_s)

    async def ended(self) -> int:
        """Wait until it has ended; its exit status."""
        await until(lambda: not self.alive, "the process has ended")
        return self.popen.returncode

    async def stop(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.send(number)
        return await self.ended()

    def kill(self) -> None:
        """As a crash would, without a last word; nothing when it has ended."""
        if self.alive:
            self.popen.kill()
        self.popen.wait()


def port_in(lines: Sequence[str], wanted: str, name: str = "listen") -> int:
    """The port that the first line with `wanted` in it names, on 127.0.0.1."""
    line = next(line for line in lines if wanted in line)
    found = re.search(rf"\b{name}=(?:https?://)?127\.0\.0\.1:(\d+)", line)
    assert found is not None, line
    return int(found[1])


def spawn(
    command: Sequence[str], log_file: Path, env: Mapping[str, str], passed: Sequence[int] = ()
) -> subprocess.Popen[bytes]:
    """Start a command that goes on, all it says in `log_file`; `passed` are descriptors it inherits."""
    with log_file.open("wb") as log:
        return subprocess.Popen(
            command,
            stdout=log,
            stderr=log,
            stdin=subprocess.DEVNULL,
            env=env,
            pass_fds=passed,
            start_new_session=True,
        )


def environment(folder: Path) -> dict[str, str]:
    """Ours without what it says of `appliance`; configuration, state and sockets in `folder` instead."""
    own = {name: value for name, value in os.environ.items() if not name.startswith(("APPLIANCE_", "LISTEN_"))}
    return own | {
        "APPLIANCE_CONFIG": str(folder / "appliance.toml"),
        "STATE_DIRECTORY": str(folder / "appliance-state"),
        "RUNTIME_DIRECTORY": str(folder / "appliance-run"),
    }


async def logged(
    popen: subprocess.Popen[bytes], log: Callable[[], list[str]], wanted: str, times: int, within_s: float = WITHIN_S
) -> str:
    """Wait until `times` lines of a process's log hold `wanted`; the last of them."""
    lines: list[str] = []

    def there() -> bool:
        ended = popen.poll() is not None  # asked before reading: what it says last counts
        lines[:] = [line for line in log() if wanted in line]
        return len(lines) >= times or ended

    await until(there, f"logged: {wanted}", within_s)
    assert len(lines) >= times, log()
    return lines[-1]


async def until(condition: Callable[[], object], what: str, within_s: float = WITHIN_S) -> None:
    """Wait until `condition` holds; `what` is the sentence that the test fails with."""
    with trio.move_on_after(within_s):
        while not condition():  # noqa: ASYNC110 - another process brings it about
            await trio.sleep(0.01)
        return
    raise AssertionError(f"never true: {what}")

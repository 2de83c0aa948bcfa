"""`appliance serve` as a process that is stopped, replaced and killed, beside whatever else the test's loop does.

    router = await start(folder, "--takeover")      # returns once it serves
    await router.ended()

All waiting is Trio's, so a load in the same loop goes on. Whatever is still alive when the block of `processes` ends is
killed.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Callable, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import trio

WITHIN_S = 30.0
"""Ends a test that would fail anyway."""
_APPLIANCE = (sys.executable, "-m", "appliance")
_PASSING = """
import fcntl, os, sys
count = int(sys.argv[1])
high = [fcntl.fcntl(int(number), fcntl.F_DUPFD, 100) for number in sys.argv[2 : 2 + count]]
for place, number in enumerate(high):
    os.dup2(number, 3 + place, inheritable=True)
    os.close(number)
os.environ.update(LISTEN_FDS=str(count), LISTEN_PID=str(os.getpid()))
os.execv(sys.argv[2 + count], sys.argv[2 + count :])
"""
"""What systemd does between fork and exec: the sockets as descriptors from 3 on, and whose they are."""


@attrs.frozen(eq=False)
class Process:
    """A router, its state and its configuration in `folder`, its log in a file of its own."""

    popen: subprocess.Popen[bytes]
    folder: Path
    log_file: Path

    @property
    def pid(self) -> int:
        return self.popen.pid

    @property
    def log(self) -> list[str]:
        return self.log_file.read_text().splitlines()

    @property
    def admin(self) -> Path:
        return self.folder / "appliance-run" / "admin.sock"

    @property
    def door(self) -> int:
        return self._port("listen")

    @property
    def metrics(self) -> int:
        return self._port("metrics")

    def signal(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    async def logged(self, wanted: str, times: int = 1) -> str:
        """Wait until `times` lines hold `wanted`; the last of them."""
        return await logged(self.popen, lambda: self.log, wanted, times)

    async def ended(self) -> int:
        """Wait until it has ended; its exit status."""
        await until(lambda: self.popen.poll() is not None, "the router has ended")
        return self.popen.returncode

    async def stop(self) -> int:
        self.signal(signal.SIGTERM)
        return await self.ended()

    def _port(self, name: str) -> int:
        line = next(line for line in self.log if "event=serving" in line)
        found = re.search(rf"\b{name}=(?:https?://)?127\.0\.0\.1:(\d+)", line)
        assert found is not None, line
        return int(found[1])


class Processes:
    """The routers of one test; `folder` is where all of them have their state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[Process] = []

    @property
    def config(self) -> Path:
        return self.folder / "appliance.toml"

    @property
    def lock(self) -> Path:
        return self.folder / "appliance-state" / "serve.lock"

    def configure(self, rest: str, **server: object) -> None:
        """Write the configuration: ports of the kernel's choice, and what the test says."""
        values = {"listen": "127.0.0.1:0", "metrics_listen": "127.0.0.1:0", "drain_s": 10, **server}
        lines = [f"{key} = {_toml(value)}" for key, value in values.items()]
        self.config.write_text("\n".join(["[server]", *lines, rest]))

    def begin(
        self, *flags: str, passed: Sequence[int] = (), env: Mapping[str, str] | None = None, limit: int = 0
    ) -> Process:
        """Start one without waiting. `passed` are listening sockets, handed over as systemd does; `limit` is its soft
        limit of open files."""
        command: list[str] = [*_APPLIANCE, "serve", *flags]
        if passed:
            command = [sys.executable, "-c", _PASSING, str(len(passed)), *map(str, passed), *command]
        if limit:
            command = ["sh", "-c", f'ulimit -S -n {limit}; exec "$@"', "sh", *command]
        log_file = self.folder / f"serve-{len(self._all)}.log"
        with log_file.open("wb") as log:
            popen = subprocess.Popen(
                command,
                stderr=log,
                stdin=subprocess.DEVNULL,
                env=self._environment() | dict(env or {}),
                pass_fds=passed,
                start_new_session=True,
            )
        process = Process(popen, self.folder, log_file)
        self._all.append(process)
        return process

    async def start(self, *flags: str, **how: object) -> Process:
        """Start one and wait until it serves."""
        process = self.begin(*flags, **how)  # type: ignore[arg-type]
        await process.logged("event=serving")
        return process

    async def refused(self, *flags: str, **how: object) -> list[str]:
        """Start one that must not come up: what it says, after exit status 1."""
        process = self.begin(*flags, **how)  # type: ignore[arg-type]
        assert await process.ended() == 1, process.log
        return process.log

    def kill(self) -> None:
        for process in self._all:
            if process.popen.poll() is None:
                process.popen.kill()
            process.popen.wait()

    def _environment(self) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("APPLIANCE_", "LISTEN_"))}
        return env | {
            "APPLIANCE_CONFIG": str(self.config),
            "STATE_DIRECTORY": str(self.folder / "appliance-state"),
            "RUNTIME_DIRECTORY": str(self.folder / "appliance-run"),
        }


@asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[Processes]:
    made = Processes(folder)
    try:
        yield made
    finally:
        made.kill()


async def logged(
    popen: subprocess.Popen[bytes], log: Callable[[], list[str]], wanted: str, times: int, within_s: float = WITHIN_S
) -> str:
    """Wait until `times` lines of a process's log hold `wanted`; the last of them."""
    lines: list[str] = []

    def there() -> bool:
        lines[:] = [line for line in log() if wanted in line]
        return len(lines) >= times or popen.poll() is not None

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


def endpoint(identity: str, url: str, models: Iterable[str] | None = ("m",)) -> str:
    """The table of one sim; with `models` None it is asked for them."""
    named = "" if models is None else f"models = {_toml(list(models))}\n"
    return f'[[endpoints]]\nid = "{identity}"\nurl = "{url}"\nengine = "sim"\n{named}'


def _toml(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value) if isinstance(value, int | float) else f'"{value}"'

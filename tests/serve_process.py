"""`appliance serve` as a process that is stopped, replaced and killed, beside whatever else the test's loop does.

    router = await start(folder, "--takeover")      # returns once it serves
    await router.ended()

Whatever is still alive when the block of `processes` ends is killed.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import attrs

from tests.processes import APPLIANCE, Process, environment, port_in, spawn

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
class Router(Process):
    """A router, its state and its configuration in `folder`, its log in a file of its own."""

    folder: Path

    @property
    def admin(self) -> Path:
        return self.folder / "appliance-run" / "admin.sock"

    @property
    def door(self) -> int:
        return port_in(self.log, "event=serving")

    @property
    def metrics(self) -> int:
        return port_in(self.log, "event=serving", "metrics")


class Processes:
    """The routers of one test; `folder` is where all of them have their state."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._all: list[Router] = []

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
    ) -> Router:
        """Start one without waiting. `passed` are listening sockets, handed over as systemd does; `limit` is its soft
        limit of open files."""
        command: list[str] = [*APPLIANCE, "serve", *flags]
        if passed:
            command = [sys.executable, "-c", _PASSING, str(len(passed)), *map(str, passed), *command]
        if limit:
            command = ["sh", "-c", f'ulimit -S -n {limit}; exec "$@"', "sh", *command]
        log_file = self.folder / f"serve-{len(self._all)}.log"
        env = environment(self.folder) | dict(env or {})
        process = Router(spawn(command, log_file, env, passed), log_file, self.folder)
        self._all.append(process)
        return process

    async def start(self, *flags: str, **how: object) -> Router:
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
            process.kill()


@asynccontextmanager
async def processes(folder: Path) -> AsyncIterator[Processes]:
    made = Processes(folder)
    try:
        yield made
    finally:
        made.kill()


def endpoint(identity: str, url: str, models: Iterable[str] | None = ("m",)) -> str:
    """The table of one sim; with `models` None it is asked for them."""
    named = "" if models is None else f"models = {_toml(list(models))}\n"
    return f'[[endpoints]]\nid = "{identity}"\nurl = "{url}"\nengine = "sim"\n{named}'


def _toml(value: object) -> str:
    if isinstance(value, list | tuple):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return str(value) if isinstance(value, int | float) else f'"{value}"'

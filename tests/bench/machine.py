"""What the kernel knows: which cores, how much CPU a process tree used, how much memory it holds."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
import resource
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

import attrs

_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_PR_SET_PDEATHSIG = 1
REPOSITORY = Path(__file__).resolve().parents[2]


@attrs.frozen
class Cores:
    """The router has one core to itself as far as this bench goes; everything else shares another.

    With a single core both are the same, and requests per second then say nothing; CPU per request still does.
    """

    router: int
    rest: int

    @classmethod
    def of_this_machine(cls) -> Cores:
        allowed = sorted(os.sched_getaffinity(0))
        return cls(router=allowed[0], rest=allowed[-1])


_libc = ctypes.CDLL(None, use_errno=True)


def _before_exec(core: int | None) -> Callable[[], None]:
    """Pin the child, lift its file limit, and let it die with the bench: a killed bench leaves no router behind."""

    def prepare() -> None:
        if core is not None:
            os.sched_setaffinity(0, {core})
        hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
        _libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)

    return prepare


def spawn(
    command: Sequence[str | Path],
    *,
    core: int | None,
    log: IO[bytes] | int,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    stdin: int = subprocess.DEVNULL,
    stdout: IO[bytes] | int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command in a session of its own, pinned to `core`. The caller ends it with `end`."""
    return subprocess.Popen(
        [str(word) for word in command],
        stdin=stdin,
        stdout=log if stdout is None else stdout,
        stderr=log,
        env=dict(env) if env is not None else None,
        cwd=cwd,
        start_new_session=True,
        preexec_fn=_before_exec(core),
    )


def end(process: subprocess.Popen[bytes], *, patience_s: float = 3.0) -> None:
    """SIGTERM, then SIGKILL to what is left of the process and its children."""
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(patience_s)
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def free_port() -> int:
    """A TCP port nobody uses now. Peers want theirs on the command line, so a small race remains."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    return text[text.rindex(")") + 2 :].split()  # the name in brackets may hold spaces


def tree(pid: int) -> list[int]:
    """The process and its descendants, as they are now."""
    children: dict[int, list[int]] = {}
    for entry in os.listdir("/proc"):
        if entry.isdigit() and (fields := _stat(int(entry))):
            children.setdefault(int(fields[1]), []).append(int(entry))
    found, queue = [], [pid]
    while queue:
        one = queue.pop()
        found.append(one)
        queue += children.get(one, [])
    return found


def cpu_s(pid: int) -> float:
    """User and system seconds of a process tree: all threads, and children that were waited for.

    The kernel hands these out in ticks (10 ms as a rule), so a difference is good to two of them.
    """
    ticks = sum(sum(map(int, fields[11:15])) for each in tree(pid) if (fields := _stat(each)))
    return ticks / _TICKS_PER_S


def rss_bytes(pid: int) -> int:
    """Resident memory of a process tree (shared pages counted once per process, as `ps` does)."""
    total = 0
    for each in tree(pid):
        try:
            total += int(Path(f"/proc/{each}/statm").read_text().split()[1]) * _PAGE_BYTES
        except OSError:
            continue
    return total


def core_busy_s(core: int) -> float:
    """Seconds that a core spent on anything, by anybody, the hypervisor's share included."""
    for line in Path("/proc/stat").read_text().splitlines():
        if line.startswith(f"cpu{core} "):
            user, nice, system, _idle, _wait, irq, softirq, steal = map(int, line.split()[1:9])
            return (user + nice + system + irq + softirq + steal) / _TICKS_PER_S
    return 0.0


def _output(command: Sequence[str]) -> str:
    try:
        done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=20, check=False)
    except OSError:
        return ""
    return (done.stdout or done.stderr).strip()


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith(("model name", "Model")):
            return line.partition(":")[2].strip()
    return platform.machine()


def conditions(cores: Cores) -> dict[str, object]:
    """What a reader must know of the machine to judge a figure."""
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "router_core": cores.router,
        "engine_and_load_core": cores.rest,
        "kernel": platform.release(),
        "python": platform.python_version(),
        "compiler": _output(["gcc", "-dumpfullversion"]),
        "commit": _output(["git", "rev-parse", "--short=12", "HEAD"]),
        "modified": bool(_output(["git", "status", "--porcelain", "--", "appliance"])),
        "load_average": os.getloadavg()[0],
        "command": " ".join(sys.argv[1:]),
    }

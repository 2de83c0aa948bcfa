"""The two C programs: compile them when their source is newer, start the engine, run a load."""

from __future__ import annotations

import contextlib
import json
import subprocess
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import attrs

from tests.bench import machine

_SOURCES = Path(__file__).resolve().parent
_BUILT = machine.REPOSITORY / "build" / "bench"
MODEL = "bench"

PLAIN_BODY = {
    "model": MODEL,
    "messages": [
        {"role": "system", "content": "You are a helpful assistant. Answer briefly and to the point."},
        {"role": "user", "content": "Say four words about routers."},
    ],
    "max_tokens": 16,
    "temperature": 0.7,
}


def stream_body(words: int) -> dict[str, Any]:
    """A request for a stream of so many words, with usage."""
    return PLAIN_BODY | {"max_tokens": words, "stream": True, "stream_options": {"include_usage": True}}


def distinct_body(prompt_bytes: int) -> dict[str, Any]:
    """A request whose prompt begins with a number that the load generator changes in each."""
    prompt = "%" * 12 + " and then " + "some more words " * (prompt_bytes // 16)
    return PLAIN_BODY | {"messages": [{"role": "user", "content": prompt[:prompt_bytes]}]}


class BuildFailed(Exception):
    """There is no C compiler, or it refused the source; the text says which."""


def built(name: str) -> Path:
    """The program `name`, compiled with gcc if need be."""
    source, program = _SOURCES / f"{name}.c", _BUILT / name
    if program.exists() and program.stat().st_mtime >= source.stat().st_mtime:
        return program
    _BUILT.mkdir(parents=True, exist_ok=True)
    fresh = Path(tempfile.mkdtemp(dir=_BUILT)) / name
    try:
        done = subprocess.run(
            ["gcc", "-O2", "-Wall", "-Wextra", "-Werror", "-o", str(fresh), str(source)],
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
    except OSError as problem:
        raise BuildFailed(f"gcc cannot be run: {problem}; install it (Debian: gcc, libc6-dev)") from problem
    if done.returncode:
        raise BuildFailed(done.stderr.strip())
    fresh.replace(program)  # two runs at once both end with a whole program
    fresh.parent.rmdir()
    return program


@attrs.frozen
class Engine:
    """A running C engine."""

    port: int
    pid: int

    def stats(self) -> dict[str, int]:
        """What the engine itself counted since it started."""
        with urlopen(f"http://127.0.0.1:{self.port}/bench/stats", timeout=5) as answer:
            return dict(json.load(answer))


@contextlib.contextmanager
def engine(core: int | None, *options: str) -> Iterator[Engine]:
    """Start a C engine with the options of its own command line; it ends with the block."""
    process = machine.spawn(
        [built("engine"), "--model", MODEL, *options], core=core, log=subprocess.DEVNULL, stdout=subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield Engine(port=int(process.stdout.readline()), pid=process.pid)
    finally:
        machine.end(process)


@attrs.frozen
class Load:
    """What one run of the load generator found. Times in microseconds."""

    requests: int
    answers: int
    streams: int
    events: int
    seconds: float
    p50_us: int
    p99_us: int
    peak_open: int
    peak_streaming: int
    errors: dict[str, int]
    statuses: dict[str, int]
    latencies_us: Sequence[int]

    @property
    def wrong(self) -> Counter[str]:
        """How often what went wrong, a status other than 200 by its number."""
        broken = {kind: number for kind, number in self.errors.items() if kind != "status"}
        refused = {f"status {status}": number for status, number in self.statuses.items() if status != "200"}
        return +Counter(broken | refused)

    @property
    def per_s(self) -> float:
        return self.answers / self.seconds if self.seconds else 0.0


def body_file(folder: Path, body: dict[str, Any]) -> Path:
    """Write a request body where the load generator can read it."""
    with tempfile.NamedTemporaryFile("w", dir=folder, suffix=".json", delete=False) as file:
        json.dump(body, file, separators=(",", ":"))
    return Path(file.name)


def _arguments(port: int, body: Path, options: Sequence[str | int | float]) -> list[str]:
    return [str(built("load")), "--port", str(port), "--body", str(body), *map(str, options)]


def _read(line: str, latencies_us: Sequence[int] = ()) -> Load:
    found = json.loads(line)
    return Load(latencies_us=latencies_us, **{name: found[name] for name in _LOAD_FIELDS})


_LOAD_FIELDS = [field.name for field in attrs.fields(Load) if field.name != "latencies_us"]


def load(core: int | None, port: int, body: Path, *options: str | int | float, limit_s: float = 60.0) -> Load:
    """Run a load to its end. `limit_s` bounds it; what is unfinished then is one of its errors."""
    with tempfile.NamedTemporaryFile() as latencies, tempfile.TemporaryFile() as complaints:
        command = _arguments(port, body, [*options, "--limit-s", limit_s, "--latencies", latencies.name])
        process = machine.spawn(command, core=core, log=complaints, stdout=subprocess.PIPE)
        try:
            line, _ = process.communicate(timeout=limit_s + 20)
        finally:
            machine.end(process)
        if process.returncode:
            complaints.seek(0)
            raise RuntimeError(f"load generator: {complaints.read().decode(errors='replace').strip()}")
        times = array("I")
        times.frombytes(Path(latencies.name).read_bytes())
        return _read(line.decode(), times)


@contextlib.contextmanager
def held(core: int | None, port: int, body: Path, *options: str | int | float) -> Iterator[Load]:
    """Run a load and keep its connections open, idle, for the length of the block."""
    process = machine.spawn(
        _arguments(port, body, [*options, "--hold", "--limit-s", 60]),
        core=core,
        log=subprocess.DEVNULL,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        yield _read(process.stdout.readline().decode())
    finally:
        machine.end(process)


def begin(core: int | None, port: int, body: Path, *options: str | int | float) -> subprocess.Popen[bytes]:
    """Start a load without waiting for it; the caller reads `finished` or ends it with `machine.end`."""
    return machine.spawn(_arguments(port, body, options), core=core, log=subprocess.DEVNULL, stdout=subprocess.PIPE)


def finished(process: subprocess.Popen[bytes], *, timeout_s: float) -> Load:
    """Wait for a load that was begun."""
    try:
        line, _ = process.communicate(timeout=timeout_s)
    finally:
        machine.end(process)
    return _read(line.decode())

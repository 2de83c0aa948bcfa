"""Real llama.cpp servers for tests: processes of `appliance-llama-server` on models whose text is known."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import attrs

from tests.engines.tiny_gguf import TinyModels

STOP_S = 5.0
"""How long a server may take to end after SIGTERM before it is killed; it takes milliseconds."""


@attrs.frozen
class LlamaEngine:
    """A running server. `url` has no trailing slash and no `/v1`; `log` is what it wrote to stderr."""

    url: str
    process: subprocess.Popen[str]
    log: Path
    models: TinyModels

    @property
    def port(self) -> int:
        return int(self.url.rpartition(":")[2])


@contextmanager
def serving(models: TinyModels, log: Path, *flags: str) -> Iterator[LlamaEngine]:
    """Run a server on a port that the kernel chooses, with `flags` added; ends it on leaving.

    The line that names its address comes after the model is loaded, so it answers 200 from the first moment. One thread
    and two slots: tests share two cores, and two slots are what it takes to see one of them busy.
    """
    with log.open("w") as err:
        process = start(
            [
                *("-m", str(models.model), "--host", "127.0.0.1", "--port", "0", "--alias", "tiny"),
                *("--threads", "1", "--threads-http", "4", "--parallel", "2", "--ctx-size", "4096"),
                *flags,
            ],
            err,
        )
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            if not line.startswith("listening on "):
                raise RuntimeError(f"the server did not start (status {process.wait()}): {log.read_text()}")
            yield LlamaEngine(line.split()[-1], process, log, models)
        finally:
            process.terminate()
            try:
                process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def start(flags: list[str], err: IO[str] | int) -> subprocess.Popen[str]:
    """Start the program with exactly these flags. Its stdout is a pipe of text."""
    command = [sys.executable, "-m", "appliance.llama_server.main", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=err, text=True)

"""`appliance serve` as a process, for tests of the operator's side: its log, its ports, ctl against it."""

from __future__ import annotations

import json
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import attrs

from tests.processes import APPLIANCE, environment

START_S = 30.0


class Log:
    """What a process writes to standard error, line by line."""

    def __init__(self, popen: subprocess.Popen[bytes]) -> None:
        assert popen.stderr is not None
        self.lines: list[str] = []
        self._pipe = popen.stderr
        self._held = b""

    def until(self, wanted: str) -> str:
        """Read on until a line holds `wanted`; that line. Fails after `START_S`, or when the process has ended."""
        until = time.monotonic() + START_S
        while select.select([self._pipe], [], [], max(0.0, until - time.monotonic()))[0]:
            piece = os.read(self._pipe.fileno(), 65536)
            *whole, self._held = (self._held + piece).split(b"\n")
            fresh = [line.decode() for line in whole]
            self.lines += fresh
            for line in fresh:
                if wanted in line:
                    return line
            if not piece:
                break
        raise AssertionError(f"not logged: {wanted}; {self.lines}")


@attrs.frozen
class Router:
    """A running router. `env` puts ctl beside it; nothing of an installed one's settings is heard."""

    popen: subprocess.Popen[bytes]
    folder: Path
    env: dict[str, str]
    door: int
    metrics: int
    log: Log

    @property
    def admin(self) -> str:
        return str(self.folder / "appliance-run" / "admin.sock")

    def ctl(self, *arguments: str, **env: str) -> subprocess.CompletedProcess[str]:
        """`appliance ctl` with these arguments, its output as text."""
        return ctl(*arguments, env={**self.env, **env})

    def read(self, *arguments: str) -> Any:
        """What a read of ctl says with --json."""
        done = self.ctl(*arguments, "--json")
        assert done.returncode == 0, done.stderr
        return json.loads(done.stdout)

    def get(self, path: str, port: int | None = None, method: str = "GET") -> tuple[int, dict[str, str], str]:
        """A request to the metrics listener (or another port): status, fields, body."""
        connection = HTTPConnection("127.0.0.1", port or self.metrics, timeout=20)
        try:
            connection.request(method, path)
            answer = connection.getresponse()
            return answer.status, {name.lower(): value for name, value in answer.getheaders()}, answer.read().decode()
        finally:
            connection.close()

    def chat(self, request_id: str, **body: Any) -> tuple[int, str]:
        """A chat request at the door: status and body; the body as far as it came where it was cut."""
        connection = HTTPConnection("127.0.0.1", self.door, timeout=20)
        ask = {"model": "llama", "messages": [{"role": "user", "content": "one two three"}], **body}
        try:
            connection.request(
                "POST", "/v1/chat/completions", json.dumps(ask),
                {"content-type": "application/json", "x-request-id": request_id},
            )  # fmt: skip
            answer = connection.getresponse()
            text = b""
            try:
                while piece := answer.read1():
                    text += piece
            except (OSError, HTTPException):
                return answer.status, text.decode()
            return answer.status, text.decode()
        finally:
            connection.close()

    def stop(self) -> int:
        """Let it end as an operator does; its exit status."""
        if self.popen.poll() is None:
            os.kill(self.popen.pid, signal.SIGTERM)
        return self.popen.wait(START_S)


def ctl(*arguments: str, env: dict[str, str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        (*APPLIANCE, "ctl", *arguments), capture_output=True, text=True, timeout=60, env=env, check=False
    )


@contextmanager
def router(folder: Path, configuration: str) -> Iterator[Router]:
    """`appliance serve` on ports of the kernel's choice; `configuration` is what follows `[server]`."""
    (folder / "appliance.toml").write_text(
        f'[server]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\ndrain_s = 10\n{configuration}'
    )
    env = environment(folder)
    popen = subprocess.Popen((*APPLIANCE, "serve"), stderr=subprocess.PIPE, env=env, start_new_session=True, bufsize=0)
    log = Log(popen)
    try:
        line = log.until("event=serving")
        door = re.search(r"listen=http://127\.0\.0\.1:(\d+)", line)
        metrics = re.search(r"metrics=127\.0\.0\.1:(\d+)", line)
        assert door is not None and metrics is not None, line
        yield Router(popen, folder, env, int(door[1]), int(metrics[1]), log)
    finally:
        if popen.poll() is None:
            os.kill(popen.pid, signal.SIGTERM)
        try:
            popen.wait(START_S)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()
            raise
        finally:
            assert popen.stderr is not None
            popen.stderr.close()

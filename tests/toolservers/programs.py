"""Tool servers made of the official packages, as programs of their own."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import attrs
import httpx

HERE = Path(__file__).parent
START_S = 120.0
"""For a program that imports for seconds, and for tens of them on a busy machine. Only ends what would fail anyway."""


@attrs.frozen
class Running:
    url: str
    process: subprocess.Popen[bytes]

    async def seen(self) -> list[dict[str, Any]]:
        async with httpx.AsyncClient() as client:
            return (await client.get(self.url + "/seen")).json()

    async def ran(self, tool: str) -> int:
        return sum(row.get("ran") == tool for row in await self.seen())


def python_server(python: str, name: str, *flags: str) -> tuple[str, ...]:
    return python, str(HERE / "python_server.py"), "--name", name, *flags


@contextmanager
def program(command: Sequence[str]) -> Iterator[subprocess.Popen[bytes]]:
    environment = {**os.environ, "MCP_SDK": os.environ.get("TEST_MCP_SDK", "")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env=environment) as process:
        try:
            yield process
        finally:
            process.kill()


def first_line(process: subprocess.Popen[bytes]) -> str:
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    assert line, f"{process.args} ended without a word"
    return line

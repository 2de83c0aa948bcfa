"""Ask a program something and take its answer, within a bound.

A program that talks to a broken driver may never come back, and one in an uninterruptible system call does not even die
of SIGKILL. So the time to answer and the time to die are both bounded, and what is still there after both is left
behind: the caller is told, and goes on. `trio.run_process` cannot be used for this, because it waits for the process
without a bound after having killed it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping, Sequence

import attrs
import trio

MAX_ANSWER_BYTES = 4 << 20
"""More than any program asked here has to say (vLLM's whole help is 155 kB); the rest is dropped, as overlong."""

DYING_S = 2.0
"""How long a killed process may take to be gone before it is left behind."""


@attrs.frozen
class Answer:
    """What a program said. `status` is its exit status (negative: the signal), None when it was stopped or never ran.

    `trouble` says in a few words why the answer is not to be trusted as a whole, "" when the program ended by itself
    within its time. `absent`: there is no such program.
    """

    stdout: str = ""
    stderr: str = ""
    status: int | None = None
    trouble: str = ""
    absent: bool = False


async def ask(argv: Sequence[str], *, limit_s: float, env: Mapping[str, str] | None = None) -> Answer:
    """Run `argv` and return what it said within `limit_s` seconds; never raises for anything the program does.

    `env` is added to our own environment. The program gets a session of its own, so that what it started dies with it.
    """
    try:
        process = await trio.lowlevel.open_process(
            list(argv),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env={**os.environ, **(env or {})},
            start_new_session=True,
        )
    except FileNotFoundError:
        return Answer(trouble=f"{argv[0]} is not there", absent=True)
    except OSError as broken:
        return Answer(trouble=f"{argv[0]} cannot be run: {broken.strerror}")
    heard: dict[str, bytearray] = {"stdout": bytearray(), "stderr": bytearray()}
    trouble, ended = "", False
    try:
        with trio.move_on_after(limit_s):
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_hear, process.stdout, heard["stdout"])
                nursery.start_soon(_hear, process.stderr, heard["stderr"])
            # Only now, when nobody holds its pipes: a process that was waited for gives its id back, and the group that
            # would be killed below could be somebody else's.
            await process.wait()
            ended = True
    finally:
        if not ended:
            trouble = await _end(process, f"no answer within {limit_s:g} s")
    over = any(len(text) > MAX_ANSWER_BYTES for text in heard.values())
    return Answer(
        stdout=_text(heard["stdout"]),
        stderr=_text(heard["stderr"]),
        status=None if trouble else process.returncode,
        trouble=trouble or ("the answer is too long" if over else ""),
    )


async def _hear(stream: trio.abc.ReceiveStream | None, into: bytearray) -> None:
    assert stream is not None
    async for chunk in stream:
        # Read on when there is enough: a program whose pipe is full does not end.
        if len(into) <= MAX_ANSWER_BYTES:
            into += chunk


async def _end(process: trio.Process, trouble: str) -> str:
    """Kill the whole session; return `trouble`, with more said when the process does not even die."""
    with trio.CancelScope(shield=True), trio.move_on_after(DYING_S) as dying:
        # Not waited for yet, so the id is still the session's, also when the leader is gone and only children are left.
        # One that runs as another user (sudo, a setuid program) is not ours to kill: it is left behind like one that
        # cannot die.
        with contextlib.suppress(PermissionError, ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()
    if dying.cancelled_caught:
        return f"{trouble}, and it does not die of SIGKILL either (pid {process.pid})"
    return trouble


def _text(heard: bytearray) -> str:
    return bytes(heard[:MAX_ANSWER_BYTES]).decode("utf-8", "replace")

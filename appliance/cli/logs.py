"""Log lines on standard error: logfmt for people and grep, JSON for collectors."""

from __future__ import annotations

import logging
import os
import select
import sys

import structlog


def set_up(level: str, form: str) -> None:
    """Configure structlog for this process. `level` and `form` as in `[logging]`; may be called again for a new
    level.
    """
    renderer: structlog.typing.Processor
    if form == "json":
        renderer = structlog.processors.JSONRenderer()
    else:
        renderer = structlog.processors.LogfmtRenderer(key_order=["ts", "level", "logger", "event"], bool_as_flag=False)
    structlog.configure(
        processors=[
            structlog.processors.add_log_level,
            _name_logger,
            structlog.processors.TimeStamper(fmt="iso", utc=True, key="ts"),
            structlog.processors.format_exc_info,
            renderer,
        ],
        wrapper_class=structlog.make_filtering_bound_logger(getattr(logging, level.upper())),
        logger_factory=_Lines,
        cache_logger_on_first_use=False,
    )


_PIECE_BYTES = 4096
"""What a pipe takes without waiting when it says that it takes anything."""


class _Lines:
    """A logger that writes lines to standard error and survives a closed one: a full disk behind it stops no
    request.

    Nor does a reader who does not read (a terminal that was stopped, a pager): what cannot be written at once is left
    out, and how much that was is said in the first line that can be. Otherwise everything would wait for that reader.
    """

    _lost = 0

    def __init__(self, name: str = "appliance") -> None:
        self.name = name

    def msg(self, message: str) -> None:
        try:
            sys.stderr.flush()
            descriptor = sys.stderr.fileno()
        except (AttributeError, OSError, ValueError):
            self._write_elsewhere(message)
            return
        if _Lines._lost:
            message = f"[{_Lines._lost} lines are left out: nobody took them]\n{message}"
        if _write(descriptor, f"{message}\n".encode("utf-8", "backslashreplace")):
            _Lines._lost = 0
        else:
            _Lines._lost += 1

    def _write_elsewhere(self, message: str) -> None:
        """Where standard error is an object of Python's alone."""
        try:
            sys.stderr.write(message + "\n")
        except (AttributeError, OSError, ValueError):
            return

    debug = info = warning = error = critical = exception = log = msg


def _write(descriptor: int, line: bytes) -> bool:
    """Write as much as goes without waiting; whether that was all of it, or nobody will ever take it."""
    poll = select.poll()
    poll.register(descriptor, select.POLLOUT)
    try:
        while line:
            if not poll.poll(0):
                return False
            line = line[os.write(descriptor, line[:_PIECE_BYTES]) :]
    except OSError:
        return True
    return True


def _name_logger(logger: _Lines, _: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    event["logger"] = logger.name
    return event

"""Log lines on standard error: logfmt for people and grep, JSON for collectors."""

from __future__ import annotations

import logging
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


class _Lines:
    """A logger that writes lines to standard error and survives a closed one: a full disk behind it stops no
    request.
    """

    def __init__(self, name: str = "appliance") -> None:
        self.name = name

    def msg(self, message: str) -> None:
        try:
            sys.stderr.write(message + "\n")
            sys.stderr.flush()
        except (OSError, ValueError):
            return

    debug = info = warning = error = critical = exception = log = msg


def _name_logger(logger: _Lines, _: str, event: structlog.typing.EventDict) -> structlog.typing.EventDict:
    event["logger"] = logger.name
    return event

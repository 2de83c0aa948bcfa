"""The log lines about groups and daemons: each change once, and no more of them than a disk can take."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import structlog

from ..facts.groups import Announced, Told
from ..rules.groups.daemons import Daemon
from ..rules.groups.gate import NOT_PROBED, Standing
from ..rules.groups.once import Allowance

MOST_FAULTS = 20
SHOWN_MODELS = 20

log = structlog.get_logger("groups")


class Telling:
    """What has been told so far. `clock` is monotonic; daemons that are `guessed` were named by nobody, so that their
    absence is no news."""

    def __init__(self, clock: Callable[[], float], guessed: Callable[[Daemon], bool]) -> None:
        self._clock = clock
        self._guessed = guessed
        self._why: dict[str, str] = {}
        self._faults: set[str] = set()
        self._lines = Allowance()

    def found(self, daemon: Daemon, groups: int) -> None:
        """A daemon's document was read."""
        if daemon.told != "found":
            self._tell("info", "daemon is watched", daemon=daemon.address, groups=groups)
            daemon.told = "found"

    def lost(self, daemon: Daemon, where: str, error: str) -> None:
        """A daemon did not answer at the address `where`."""
        if daemon.told != "lost" and not (daemon.told == "" and self._guessed(daemon)):
            self._tell("warning", "daemon does not answer", daemon=where, reason=error)
            daemon.told = "lost"

    def judged(
        self, why: Mapping[str, str], groups: Mapping[str, Announced], standings: Mapping[str, Standing]
    ) -> None:
        """Why each group that is shown gets no requests, "" where it does."""
        for name, reason in why.items():
            told = self._why.get(name)
            if not reason and told != "":
                standing = standings[name]
                models = ",".join(standing.names[:SHOWN_MODELS]) + (
                    ",..." if len(standing.names) > SHOWN_MODELS else ""
                )
                self._tell("info", "group serves", group=name, url=standing.url, models=models)
                self._why[name] = ""
            elif reason and told == "":
                self._tell("warning", "group does not serve", group=name, reason=reason)
                self._why[name] = reason
            elif told is None and reason and reason != NOT_PROBED and groups[name].announces:
                self._tell("info", "group does not serve yet", group=name, reason=reason)
                self._why[name] = reason
        for name in [name for name in self._why if name not in why]:
            if self._why.pop(name) == "":
                self._tell("warning", "group is gone", group=name)

    def survived(self, where: str, fault: Exception) -> None:
        """What a daemon says must not end a router that serves: a fault of ours ended the step it happened in."""
        what = repr(fault)[:200]
        if what not in self._faults and len(self._faults) < MOST_FAULTS:
            self._faults.add(what)
            log.error("fault while finding groups", where=where, exc_info=fault)

    def _tell(self, level: str, event: str, **fields: object) -> None:
        """A change, unless there are too many of them."""
        if self._lines.take(self._clock()):
            if self._lines.passed_over:
                fields["passed_over"], self._lines.passed_over = self._lines.passed_over, 0
            say(Told(event, level, fields))


def say(told: Told | None) -> None:
    """A line that was found worth it; nothing for None."""
    if told is not None:
        log.log({"info": 20, "warning": 30, "error": 40}[told.level], told.event, **told.fields)

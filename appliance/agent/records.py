"""What is written down about a shard before anybody hears of it, so that the next agent can find what this one left.

    STATE/shards/word            a random word: the first part of every marker of this state directory
    STATE/shards/home            which machine it belongs to (`home.py`)
    STATE/shards/lock            held (flock) by the agent that owns the directory; its pid stands in it
    STATE/shards/NAME/record.json
    STATE/logs/NAME.log          and .log.1, what was cut off it, and .log.before, the last of the start before

A record is written when the shard is to be started, when each of its processes has been, and at each change of state,
always before the change is reported. An agent that dies between the start of a process and its record leaves one that
carries a marker and is described nowhere: it is killed, and the shard begins anew.

Files are replaced as a whole by renaming, so none is ever half written. They are not synced to the disk: they describe
processes, and when the machine goes down those are gone too. All are readable by the agent's user alone, because the
shard's key is in them.
"""

from __future__ import annotations

import contextlib
import hashlib
import math
import os
import re
import secrets
import shutil
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Literal

import attrs
import msgspec

from appliance.agent import procfs
from appliance.agent.home import belongs, settle
from appliance.agent.ownership import own, removed
from appliance.agent.private import make_private, replace
from appliance.agent.wording import to_json
from appliance.facts.launch import HttpReady, StopStep
from appliance.facts.replica import Shard
from appliance.facts.report import ENDED, Report, State

VERSION = 1

KEPT = 64
"""How many ended shards are remembered, newest first; nobody may ever come and ask."""

Wish = Literal["run", "stop"]

_WORD = re.compile(r"[0-9a-f]{16}")
_MOST_PIDS = 1 << 22
"""Linux gives out no higher number."""


@attrs.frozen
class Process:
    """One command of the shard, started. `pid` 0: it is known to be gone. `started` is in clock ticks since the boot.

    `lines` are command lines it may have: the one it was started with and those it was seen with later, since scripts
    run as their interpreter, and wrappers replace themselves.
    """

    name: str
    argv: tuple[str, ...]
    stop: tuple[StopStep, ...]
    pid: int = 0
    started: int = 0
    lines: tuple[tuple[str, ...], ...] = ()


@attrs.frozen
class Record:
    """Everything the next agent must know of one shard.

    `marker` is in the environment of all its processes. `wish` is what was asked for last. `processes` are those that
    were started, in that order; `complete` once the last one, the engine's own, is among them. `stop_by` and `since`
    are in seconds since 1970. `directories` were made for it and go with it, `secrets` must not be shown. `load_bytes`
    is the size of the weights, 0 unknown. `used_bytes` is what was in use of each GPU before, by UUID.
    """

    shard: Shard
    marker: str
    boot: str
    agent_id: str = ""
    version: int = VERSION
    wish: Wish = "run"
    stop_by: float = 0.0
    state: State = "starting"
    since: float = 0.0
    reason: str = ""
    exit: str = ""
    tail: tuple[str, ...] = ()
    processes: tuple[Process, ...] = ()
    complete: bool = False
    ports: tuple[int, ...] = ()
    ready: HttpReady | None = None
    directories: tuple[str, ...] = ()
    secrets: tuple[str, ...] = attrs.field(default=(), repr=False)
    log: str = ""
    load_bytes: int = 0
    used_bytes: dict[str, int] = attrs.field(factory=dict)
    refused_port: int = 0

    @property
    def ended(self) -> bool:
        return self.state in ENDED

    @property
    def main(self) -> Process | None:
        """The engine's own process, None before it was started."""
        return self.processes[-1] if self.complete else None

    def report(self, *, adopted: bool = False) -> Report:
        """What there is to tell of it."""
        ready = self.ready
        host = f"[{ready.host}]" if ready and ":" in ready.host else ready.host if ready else ""
        return Report(
            shard=self.shard,
            state=self.state,
            since=self.since,
            reason=self.reason,
            exit=self.exit,
            tail=self.tail,
            pid=self.main.pid if self.main and not self.ended else 0,
            port=ready.port if ready else 0,
            url=f"http://{host}:{ready.port}" if ready else "",
            ports=self.ports,
            adopted=adopted,
            log=self.log,
            refused_port=self.refused_port,
        )


def describes(process: Process, record: Record, boot: str) -> bool:
    """Whether the process that has this pid now is the one that was recorded.

    Start time and boot must be those of the record. So must be the marker, and with it nothing else is asked: nobody
    else has it, and a program may have become another one that calls itself something else. Where the marker is not for
    us to see, or was written over, the command line says it; a single word in place of several is a title that the
    process has given itself, as vLLM's and SGLang's do.
    """
    seen = procfs.see(process.pid) if process.pid else None
    if seen is None or seen.ended or seen.started != process.started or record.boot != boot:
        return False
    marker = procfs.marker_of(process.pid)
    if marker:
        return marker == record.marker
    line = tuple(word for word in procfs.command_line(process.pid) if word)
    titled = len(line) == 1 and (len(process.argv) > 1)
    if marker is not None and not titled:
        return False
    return titled or any(line == tuple(word for word in known if word) for known in process.lines)


class Store:
    """The records of one state directory. `open` before everything else; it raises `ownership.StateInUse`,
    `home.NotOurs`, and OSError."""

    def __init__(self, state_dir: str) -> None:
        self.shards = Path(state_dir, "shards")
        self._logs = Path(state_dir, "logs")
        self._lock = -1
        self.word = ""
        self.boot = ""

    def open(self, check: Callable[[], None] = lambda: None) -> None:
        """Make the folders, own them, and learn the word. Blocks on the disk; `check` as of `ownership.own`."""
        for folder in (self.shards, self._logs):
            folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            belongs(folder)
            make_private(folder)
        self._lock = own(self.shards / "lock", check)
        try:
            self.boot = procfs.boot_id()
            settle(self.shards)
            self._learn_word(self.shards / "word")
        except BaseException:
            self.close()
            raise

    def _learn_word(self, path: Path) -> None:
        try:
            self.word = path.read_bytes().decode("ascii", "replace").strip()
        except FileNotFoundError:
            self.word = ""
        if not _WORD.fullmatch(self.word):
            # What runs has the old one in its marker, and only by that is it known as ours.
            words = Counter(record.marker.partition(".")[0] for record in self.read_all()[0])
            self.word = next((word for word, _ in words.most_common() if _WORD.fullmatch(word)), secrets.token_hex(8))
            replace(path, self.word.encode())

    def close(self) -> None:
        """Give the directory up."""
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def removed(self) -> bool:
        """Whether somebody has taken the directory away from under us. Blocks on the disk."""
        return self._lock >= 0 and removed(self._lock, self.shards / "lock")

    def folder(self, shard_id: str) -> str:
        """The shard's own folder."""
        return str(self.shards / _name(shard_id))

    def log(self, shard_id: str) -> str:
        return str(self._logs / f"{_name(shard_id)}.log")

    def new(self, shard: Shard, agent_id: str, now: float) -> Record:
        """A record of a shard that is about to be started, with a marker nobody has had before. Not written yet."""
        return Record(
            shard=shard,
            marker=f"{self.word}.{secrets.token_hex(8)}.{shard.id}",
            boot=self.boot,
            agent_id=agent_id,
            since=now,
            secrets=(shard.key,) if shard.key else (),
            log=self.log(shard.id),
        )

    def write(self, record: Record) -> None:
        """Replace the shard's record. Raises OSError; the old one stays then."""
        folder = Path(self.folder(record.shard.id))
        folder.mkdir(mode=0o700, exist_ok=True)
        replace(folder / "record.json", to_json(record))

    def read_all(self) -> tuple[list[Record], list[str]]:
        """Every readable record, and a sentence for each that is not. Those that ended long ago are dropped."""
        found, troubles = [], []
        for path in sorted(self.shards.glob("*/record.json")):
            try:
                record = msgspec.json.decode(path.read_bytes(), type=Record)
                if record.version != VERSION:
                    raise ValueError(f"it is of version {record.version}, this agent knows {VERSION}")
                if path.parent.name != _name(record.shard.id):
                    raise ValueError(f"it is of shard {record.shard.id} and lies in the wrong folder")
                for nonsense in _nonsense(record):
                    raise ValueError(nonsense)
            except (OSError, ValueError, RecursionError) as unreadable:
                troubles.append(f"{path}: {unreadable}")
            else:
                # Where the directory is now, and not where it was before somebody moved it.
                found.append(attrs.evolve(record, log=self.log(record.shard.id)))
        ended = sorted((record for record in found if record.ended), key=lambda each: each.since, reverse=True)
        for old in ended[KEPT:]:
            self.remove(old.shard.id)
            found.remove(old)
        return found, troubles

    def remove(self, shard_id: str) -> None:
        """Drop the record and the log of a shard of which nothing runs any more."""
        shutil.rmtree(self.folder(shard_id), ignore_errors=True)
        for suffix in ("", ".1", ".before"):
            with contextlib.suppress(OSError):
                os.unlink(self.log(shard_id) + suffix)


def _name(shard_id: str) -> str:
    """A name for files: what can be read of the id, and enough of its hash that no two share one."""
    digest = hashlib.sha256(shard_id.encode()).hexdigest()[:8]
    return f"{re.sub(r'[^A-Za-z0-9_.-]', '-', shard_id)[:80].strip('.-')}-{digest}"


def _nonsense(record: Record) -> Iterator[str]:
    """What cannot be true of any record, and would be acted on if it were believed."""
    if record.complete and not record.processes:
        yield "its engine was started, and is not in it"
    for process in record.processes:
        if not 0 <= process.pid <= _MOST_PIDS:
            yield f"there is no pid {process.pid}"
        if not all(0 <= step.grace_s < math.inf for step in process.stop):
            yield "a step of its stop takes less than no time"
    ready = record.ready
    ports = [*record.ports, *([ready.port] if ready else ())]
    if not all(0 < port < 65536 for port in ports):
        yield f"a port of it is none: {ports}"
    if ready is not None and not 0 < ready.timeout_s < math.inf:
        yield "readiness is asked for in less than no time"
    texts = [*record.directories, *([ready.host, ready.health, ready.models] if ready else ())]
    if any("\0" in text for text in texts):
        yield "a text of it holds a zero byte"

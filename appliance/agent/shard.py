"""One shard as a tree of tasks: brought up in order, watched, torn down in order.

    live
    |- bound of the log
    '- watchers        until the first of them says how it ends
       |- stop command
       |- bring-up     plan, rendezvous, sidecars, engine, then probes until it serves
       '- exit watch   one for each process
    then: engine, sidecars (last first), whatever else has the marker, memory of the GPUs

How it ends is a report and no exception. Being cancelled is not an end: it means that the agent stops, and then
everything is left as it is, for the next one to adopt. So each change is in the record before it is reported, and a
teardown that was cut off in the middle is taken up where it was.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import attrs
import trio

from appliance.agent import gpumemory, logs, procfs, sockets
from appliance.agent.adopting import Found
from appliance.agent.loading import Loading
from appliance.agent.node import Node
from appliance.agent.planning import Planning
from appliance.agent.process import Handle, end, end_marked, launch
from appliance.agent.ready import Probed, idle, listens, probe
from appliance.agent.records import Record
from appliance.agent.scopes import bus, still
from appliance.agent.wording import plain, sentence
from appliance.facts.launch import LaunchPlan, Listening
from appliance.facts.replica import Shard
from appliance.facts.report import Report, State
from appliance.rules.engines.plan import CannotLaunch

TAIL_LINES = 20
AGAIN_S = 1.0
"""Between two tries to end what could not be ended."""

_DRAIN_LOOK_S = 0.5


@attrs.frozen
class Ending:
    """How a shard's life ended, before what is left of it is gone."""

    state: State
    reason: str = ""


class ShardTree:
    """One shard from its start to its end. `live` runs once; everything else is plain calls, from the same Trio run.

    `save` writes a record (blocking, raises OSError); `others` gives the ports that all other shards hold; `changed` is
    called after each change of `report`. `found` is what an earlier run left, None for a shard that starts now.
    """

    def __init__(
        self,
        record: Record,
        node: Node,
        folder: str,
        save: Callable[[Record], None],
        others: Callable[[str], frozenset[int]],
        changed: Callable[[], None],
        found: Found | None = None,
    ) -> None:
        self.record = record
        self.held = frozenset(record.ports) if found is not None and found.handles else frozenset[int]()
        self._node = node
        self._folder = folder
        self._save = save
        self._others = others
        self._changed = changed
        self._handles = list(found.handles) if found is not None else []
        self._adopted = bool(self._handles)
        self._stop = trio.Event()
        # By a clock that nobody sets. What the record says was said by the one that may be set.
        self._stop_by = trio.current_time() + max(0.0, record.stop_by - max(node.now(), record.since))
        self._ending: Ending | None = None
        self._watchers = trio.CancelScope()
        self._saving = trio.Lock()
        self.report: Report = record.report(adopted=self._adopted)
        if record.wish == "stop":
            self._stop.set()

    @property
    def shard(self) -> Shard:
        return self.record.shard

    @property
    def secrets(self) -> tuple[str, ...]:
        return self.record.secrets

    @property
    def log(self) -> str:
        return self.record.log

    def ask_to_stop(self, drain_s: float) -> None:
        """Have it stopped once it has nothing to do, at the latest in `drain_s`. The earliest time asked for stands."""
        by = trio.current_time() + drain_s
        self._stop_by = min(self._stop_by, by) if self._stop.is_set() else by
        self._stop.set()

    async def live(self) -> None:
        """From wherever the record says it is to its end. Cancelled, it leaves everything as it is."""
        if self.record.ended:
            return
        try:
            async with trio.open_nursery() as tree:
                if not self._handles and not self._stop.is_set():
                    await trio.to_thread.run_sync(logs.begin, self.log)
                written = [f"/proc/{each.process.pid}/fd/1" for each in reversed(self._handles) if not each.ended]
                tree.start_soon(
                    logs.keep_bounded, self.log, self._node.log_bytes, written, name=f"log of {self.shard.id}"
                )
                await self._tear_down(await self._until_it_ends())
                tree.cancel_scope.cancel()
        except Exception as fault:
            await self._give_up(f"the agent could not go on with it: {_innermost(fault)}")
        finally:
            for handle in self._handles:
                handle.close()

    async def _give_up(self, reason: str) -> None:
        """End it after a fault of ours or of the disk, which must neither take the other shards along nor leave this
        one's engine behind. Until that has worked it has not ended, or it would be started a second time."""
        self.record = attrs.evolve(self.record, state="stopping")
        while True:
            try:
                await self._tear_down(Ending("failed", reason))
                return
            except Exception as fault:
                self._tell(f"{reason}; it cannot be ended yet: {_innermost(fault)}")
            await trio.sleep(AGAIN_S)

    async def _until_it_ends(self) -> Ending:
        if self.record.state == "stopping" and self.record.wish == "run":
            return Ending("failed", self.record.reason)
        if self._stop.is_set() and not self._handles:
            return Ending("stopped")
        async with trio.open_nursery() as watchers:
            self._watchers = watchers.cancel_scope
            watchers.start_soon(self._heed_stop)
            for handle in self._handles:
                watchers.start_soon(self._watch_exit, handle)
            if not self._handles:
                watchers.start_soon(self._bring_up, watchers)
            elif self.record.state in ("starting", "loading"):
                watchers.start_soon(self._load)
        assert self._ending is not None
        return self._ending

    def _end(self, state: State, reason: str = "") -> None:
        """Decide how it ends; the first word stands."""
        if self._ending is None:
            self._ending = Ending(state, reason)
            self._watchers.cancel()

    async def _heed_stop(self) -> None:
        await self._stop.wait()
        ready, quiet = self.record.ready, 0
        left_s = self._stop_by - trio.current_time()
        if self.record.state in ("ready", "draining") and ready is not None and left_s > 0:
            await self._become("draining", wish="stop", stop_by=self._node.now() + left_s)
            # Twice, since a request may be on its way here from a router that has just stopped choosing us.
            while trio.current_time() < self._stop_by and quiet < 2:
                quiet = quiet + 1 if await idle(self.shard.profile.engine, ready) else 0
                await trio.sleep(min(_DRAIN_LOOK_S, max(0.0, self._stop_by - trio.current_time())))
        self._end("stopped")

    async def _watch_exit(self, handle: Handle) -> None:
        away = handle.ended
        await handle.wait()
        what = "the engine" if handle is self._handles[-1] and self.record.complete else handle.process.name
        when = "while the agent was away" if away and self._adopted else f"while {self.record.state}"
        if self._stop.is_set():
            self._end("stopped", f"{what} ended by itself {when}")
        else:
            self._end("failed", f"{what} ended {when}")

    async def _bring_up(self, watchers: trio.Nursery) -> None:
        try:
            made = await self._plan()
            await trio.to_thread.run_sync(_prepare, made, self._folder)
            if made.awaits is not None and not await self._await(made.awaits, "the leader's rendezvous"):
                return
            scope = await still(self._node.scope)
            for command in made.commands:
                last = command is made.main
                env = {**command.env, **bus(self._node.environment, scope)}
                handle, self.record = await trio.to_thread.run_sync(
                    partial(
                        launch,
                        attrs.evolve(command, env=env),
                        scope,
                        self._folder,
                        self.record,
                        last=last,
                        save=self._save,
                    )
                )
                self._handles.append(handle)
                watchers.start_soon(self._watch_exit, handle)
                if command.until is not None and not await self._await(command.until, command.name):
                    return
        except CannotLaunch as refused:
            self._end("failed", str(refused))
        except OSError as broken:
            self._end("failed", f"it cannot be started: {broken}")
        else:
            await self._become("loading", reason="")
            await self._load()

    async def _plan(self) -> LaunchPlan:
        """A plan whose ports are free and held by this shard from now on. Raises CannotLaunch."""
        planning = Planning(self._node, self.shard, self.record.marker, self._folder, self._others)
        found = await planning.plan(self._hold, self._note_refused)
        made, shard = found.plan, self.shard
        secrets = {*made.secrets, *(logs.secrets_of(pair for each in made.commands for pair in each.env.items()))}
        used = {gpu.uuid: gpu.used_bytes for gpu in found.inventory.gpus if gpu.uuid in shard.gpus}
        self.record = attrs.evolve(
            self.record,
            ports=tuple(sorted(self.held)),
            ready=made.ready,
            directories=made.directories,
            secrets=tuple(sorted(map(plain, secrets), key=len, reverse=True)),
            load_bytes=found.weight_bytes,
            used_bytes=self.record.used_bytes or {uuid: used for uuid, used in used.items() if used is not None},
        )
        return made

    def _hold(self, numbers: frozenset[int]) -> None:
        self.held = numbers

    def _note_refused(self, port: int) -> None:
        """Whoever chose the rendezvous port is told that it was the port, so that it chooses another one."""
        self.record = attrs.evolve(self.record, refused_port=port)

    async def _await(self, wanted: Listening, what: str) -> bool:
        at = f"{wanted.host}:{wanted.port}"
        self._tell(f"waiting for {what} at {at}")
        if await listens(wanted):
            self._tell("")
            return True
        self._end("failed", f"{what} did not listen at {at} within {wanted.within_s:g} s")
        return False

    async def _load(self) -> None:
        """Until it serves, or has been silent for too long. A rank that serves nothing is ready by being alive."""
        if self.record.state == "starting":
            await self._become("loading", reason="")
        record, node = self.record, self._node
        loading = Loading(self.log, node.patience, record.load_bytes, node.now() - record.since)
        while record.ready is not None:
            probed = await probe(record.ready)
            if probed.ready:
                try:
                    foreign = await trio.to_thread.run_sync(_strangers, record)
                except OSError as blind:
                    probed = Probed(False, f"whose port it is cannot be seen: {blind.strerror}")
                else:
                    if foreign:
                        self._end("failed", f"another process listens on its port {min(foreign)}")
                        return
                    break
            self._tell(probed.why_not)
            if over := loading.why_over():
                self._end("failed", f"{over}: {probed.why_not}")
                return
            await self._learn_line()
            await trio.sleep(node.patience.probe_every_s)
        await self._learn_line()
        await self._become("ready", reason="")

    async def _learn_line(self) -> None:
        """Write the engine's command line down where it has become another one, or it could not be adopted."""
        main = self.record.main
        line: tuple[str, ...] = ()
        with contextlib.suppress(OSError):
            line = procfs.command_line(main.pid) if main is not None else ()
        if main is None or len(line) < 2 or line in main.lines:
            return
        main = attrs.evolve(main, lines=(*main.lines[-7:], line))
        self.record = attrs.evolve(self.record, processes=(*self.record.processes[:-1], main))
        await self._become(self.record.state)

    async def _tear_down(self, ending: Ending) -> None:
        """End everything, the engine first, and tell how it ended only when it is over."""
        was = self.record.state
        wish = "stop" if ending.state == "stopped" else "run"
        await self._become("stopping", reason=ending.reason, wish=wish)
        left: list[int] = []
        for handle in reversed(self._handles):
            left += await end(handle, handle.process.stop)
        left += await end_marked(self.record.marker)
        # Only now, since from here on their numbers may be given out again.
        exits = [handle.exit() for handle in self._handles]
        reasons = [ending.reason] if ending.reason else []
        if was in ("starting", "loading") and ending.state == "failed":
            foreign = await trio.to_thread.run_sync(sockets.listened_on, self.record.ports)
            told = [f"another process listens on its port {port}" for port in sorted(foreign)[:1]]
            reasons += [each for each in told if each not in reasons]
        if self.shard.gpus and self._node.read_gpus is not None and self._handles:
            reasons += await gpumemory.wait_until_back(
                self._node.read_gpus, self.shard.gpus, self.record.used_bytes, self._node.memory_wait_s
            )
        state: State = ending.state
        if left:
            state = "failed"
            reasons.append(f"not gone after SIGKILL: {', '.join(f'pid {pid}' for pid in dict.fromkeys(left))}")
        tail = await trio.to_thread.run_sync(logs.tail, self.log, TAIL_LINES, self.secrets)
        await trio.to_thread.run_sync(_clear, self._folder, self.record.directories)
        self.held = frozenset()
        await self._become(
            state,
            reason="; ".join(reasons),
            exit=exits[-1] if exits and self.record.complete else "",
            tail=tuple(tail) if state == "failed" else (),
        )

    async def _become(self, state: State, **changes: Any) -> None:
        """Record first, report second."""
        if "reason" in changes:
            changes["reason"] = sentence(changes["reason"])
        since = self.record.since if state == self.record.state else self._node.now()
        self.record = attrs.evolve(self.record, state=state, since=since, **changes)
        # One after the other, or of two at once the older might be the one that stays.
        async with self._saving:
            # A disk that is full must not stop what runs: what the old record says of the processes holds still.
            with contextlib.suppress(OSError):
                await trio.to_thread.run_sync(self._save, self.record)
        self.report = self.record.report(adopted=self._adopted)
        self._changed()

    def _tell(self, reason: str) -> None:
        """Say what it waits for. Not recorded: the next agent will see for itself."""
        reason = sentence(reason)
        if self.report.reason != reason:
            self.report = attrs.evolve(self.record.report(adopted=self._adopted), reason=reason)
            self._changed()


def _prepare(made: LaunchPlan, folder: str) -> None:
    """Folders and files of a plan, for our own user alone. Raises OSError."""
    for directory in (folder, *made.directories):
        Path(directory).mkdir(mode=0o700, parents=True, exist_ok=True)
        os.chmod(directory, 0o700)
    for file in made.files:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(file.path)
        descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, file.mode)
        with os.fdopen(descriptor, "w") as opened:
            os.fchmod(descriptor, file.mode)
            opened.write(file.text)


def _clear(folder: str, directories: Sequence[str]) -> None:
    """Take away keys and whatever else was made for one run; the record stays."""
    for directory in directories:
        shutil.rmtree(directory, ignore_errors=True)
    with contextlib.suppress(OSError):
        for path in Path(folder).iterdir():
            if path.is_file() and not path.name.endswith(("record.json", ".new")):
                path.unlink()


def _strangers(record: Record) -> set[int]:
    ours = procfs.marked(lambda marker: marker == record.marker)
    return sockets.strangers(record.ports, [*ours, *(process.pid for process in record.processes if process.pid)])


def _innermost(fault: BaseException) -> str:
    while isinstance(fault, BaseExceptionGroup):
        fault = fault.exceptions[0]
    return f"{type(fault).__name__}: {fault}" if str(fault) else type(fault).__name__

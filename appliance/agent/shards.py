"""Every shard of this agent: started and stopped by command, told of by reports, found again after a restart.

Each shard is a tree of tasks (`shard.py`) in one nursery, which `run` holds. Commands are plain calls and have no
answer; the report that follows is the answer. Cancelling `run` ends the tasks and touches no engine: what runs is
described in its record (`records.py`), and the next agent adopts it. Stopping an engine is a command and nothing else.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NoReturn

import structlog
import trio

from appliance.agent import logs, procfs, records
from appliance.agent.adopting import Found, Sorted, sort_out
from appliance.agent.discovery.reading import Ours
from appliance.agent.following import Following
from appliance.agent.node import Node
from appliance.agent.records import Record
from appliance.agent.scopes import find_scope
from appliance.agent.shard import ShardTree
from appliance.facts.hardware import Gpu, Inventory
from appliance.facts.replica import Shard
from appliance.facts.report import Report
from appliance.rules.engines.patience import Patience
from appliance.rules.engines.ports import PortPool

LOOK_S = 15.0
"""Seconds between two looks at whether the state directory is still there."""

log = structlog.get_logger("agent")


class Shards:
    """All shards of one agent, which owns the folder `state_dir`/shards. Made and used inside one Trio run.

    Call `adopt` once before anything else, then start `run` in a nursery; the other methods may be called in between.
    `state_dir` holds records and logs, `run_dir` sockets (short, absolute). `agent_id` names the agent to operators;
    what tells its processes from those of another agent on the host is a random word kept in the state directory.
    `executables` as in `agent.executables`; `own_argv` starts this program again; `log_bytes` bounds what is kept of
    one shard's output; `memory_wait_s` is how long memory of GPUs may take to come back after a stop. `inventory` gives
    the node as last seen, `port_range` the first and last port (both usable), `environment` is the agent's own.
    `read_gpus` looks at the GPUs again (None: there are none to wait for). `bundle` is the folder of a frozen
    executable, `patience` how long loading may take, `booted` a folder that is there where systemd runs the machine.
    `sorted` says what `adopt` found and killed.
    """

    def __init__(
        self,
        state_dir: str,
        run_dir: str,
        agent_id: str,
        executables: Mapping[str, str],
        own_argv: Sequence[str],
        log_bytes: int,
        memory_wait_s: float,
        inventory: Callable[[], Inventory],
        port_range: tuple[int, int],
        environment: Mapping[str, str],
        *,
        read_gpus: Callable[[], Awaitable[tuple[Gpu, ...]]] | None = None,
        bundle: str = "",
        llamacpp_threads: int = 0,
        patience: Patience | None = None,
        now: Callable[[], float] = time.time,
        which: Callable[[str], str | None] = shutil.which,
        booted: str = "/run/systemd/system",
    ) -> None:
        self._booted = booted
        self._state_dir = state_dir
        self._store = records.Store(state_dir)
        self._node = Node(
            run_dir=run_dir,
            agent_id=agent_id,
            executables=dict(executables),
            own_argv=tuple(own_argv),
            log_bytes=log_bytes,
            memory_wait_s=memory_wait_s,
            inventory=inventory,
            ports=PortPool(*port_range),
            environment=dict(environment),
            read_gpus=read_gpus,
            bundle=bundle,
            llamacpp_threads=llamacpp_threads,
            patience=patience or Patience(),
            now=now,
            which=which,
        )
        self._trees: dict[str, ShardTree] = {}
        self._nursery: trio.Nursery | None = None
        self._adopted = False
        self.sorted = Sorted(())
        self._news = trio.Event()

    async def adopt(self) -> list[Report]:
        """Find what earlier runs of this agent left: adopt it, or kill it. Call it once, before anything else.

        A process is adopted only where pid, start time, command line and marker all are those of its record. Processes
        with our marker that no record describes are killed, and so are those of this directory whose records were
        removed (`lost.py`); nothing else is ever touched. Raises `ownership.StateInUse` when another agent owns the
        state directory; `home.NotOurs` when it is a copy, or another user's; OSError when it cannot be
        written, and when processes cannot be looked at.
        """
        # Not left behind when cancelled: such a thread would go on killing what the next agent starts.
        await trio.to_thread.run_sync(self._store.open, trio.from_thread.check_cancelled)
        try:
            self._node.scope = await find_scope(self._booted)
            self.sorted = await trio.to_thread.run_sync(sort_out, self._store, trio.from_thread.check_cancelled)
        except BaseException:
            self._store.close()
            raise
        for each in self.sorted.found:
            self._add(each.record, each)
        self._adopted = True
        return list(self.reports().values())

    async def run(self, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Hold the trees of all shards. Started when they are. Cancelling it leaves every engine running."""
        try:
            async with trio.open_nursery() as nursery:
                self._nursery = nursery
                for tree in self._trees.values():
                    nursery.start_soon(tree.live, name=f"shard {tree.shard.id}")
                task_status.started()
                await self._watch_directory()
        finally:
            self._nursery = None

    async def _watch_directory(self) -> NoReturn:
        """Tell once that the state directory is gone: what runs is watched all the same, but nothing can be written
        down of it, so that no other agent could ever adopt it."""
        told = False
        while True:
            gone = await trio.to_thread.run_sync(self._store.removed, abandon_on_cancel=True)
            if gone and not told:
                log.error(
                    "the state directory was removed while this agent runs, nothing new can be started",
                    directory=self._state_dir,
                    next_step="put it back, or restart the agent, which ends the engines that run now",
                )
            elif told and not gone:
                log.info("the state directory is back", directory=self._state_dir)
            told = gone
            await trio.sleep(LOOK_S)

    def start(self, shard: Shard) -> None:
        """Have `shard` run. Nothing happens while one of that id is there and has not ended; one that has ended is
        started once more. That it cannot be started is told by its report, never raised."""
        if not self._adopted:
            raise RuntimeError("adopt() comes before start(): two engines for one shard would be the end of it")
        there = self._trees.get(shard.id)
        if there is not None and not there.report.ended:
            return
        record = self._store.new(shard, self._node.agent_id, self._node.now())
        # Where that fails, so will the start, and its report says so.
        with contextlib.suppress(OSError):
            self._store.write(record)
        tree = self._add(record, None)
        if self._nursery is not None:
            self._nursery.start_soon(tree.live, name=f"shard {shard.id}")

    def stop(self, shard_id: str, *, drain_s: float = 0) -> None:
        """Stop a shard; unknown ones and those that have ended are left alone.

        With `drain_s` it first goes on serving until it has nothing to do, or that time is over; a second call may
        shorten it. Whoever calls has stopped choosing it before.
        """
        tree = self._trees.get(shard_id)
        if tree is not None:
            tree.ask_to_stop(drain_s)

    def forget(self, shard_id: str) -> None:
        """Drop an ended shard with its record and log, once its report has been taken note of; others stay."""
        tree = self._trees.get(shard_id)
        if tree is not None and tree.report.ended:
            del self._trees[shard_id]
            self._store.remove(shard_id)
            self._changed()

    def close(self) -> None:
        """Give the state directory to the next agent, once `run` has ended. The end of the process does so too."""
        self._store.close()

    def reports(self) -> dict[str, Report]:
        """What is known of every shard now, by its id."""
        return {shard_id: tree.report for shard_id, tree in self._trees.items()}

    async def changed(self) -> None:
        """Return at the next change of any report. What changed between two calls of `reports` without a checkpoint
        in between is never missed."""
        await self._news.wait()

    async def log_lines(self, shard_id: str, n: int) -> list[str]:
        """The last `n` lines of a shard's output, without keys. Raises KeyError for an unknown shard."""
        tree = self._trees[shard_id]
        return await trio.to_thread.run_sync(logs.tail, tree.log, n, tree.secrets)

    def follow_log(self, shard_id: str) -> Following:
        """The later lines of a shard's output, without keys; its methods block. Raises KeyError for an unknown one."""
        tree = self._trees[shard_id]
        return Following(tree.log, lambda: tree.secrets)

    def ours(self) -> Ours:
        """What discovery must not hold against a GPU: processes with our marker, and GPUs of shards that run."""
        running = [tree.shard for tree in self._trees.values() if not tree.report.ended]
        word = self._store.word

        def is_pid(pid: int) -> bool:
            return pid == os.getpid() or (procfs.marker_of(pid) or "").startswith(f"{word}.")

        return Ours(is_pid, frozenset(gpu for shard in running for gpu in shard.gpus))

    def _add(self, record: Record, found: Found | None) -> ShardTree:
        """The tree of a shard that was started just now (`found` None) or left by an earlier run."""
        folder = self._store.folder(record.shard.id)
        tree = ShardTree(record, self._node, folder, self._store.write, self._others, self._changed, found)
        self._trees[record.shard.id] = tree
        self._changed()
        return tree

    def _others(self, shard_id: str) -> frozenset[int]:
        """Ports that every other shard of this agent holds."""
        held = (tree.held for other, tree in self._trees.items() if other != shard_id)
        return frozenset[int]().union(*held)

    def _changed(self) -> None:
        news, self._news = self._news, trio.Event()
        news.set()

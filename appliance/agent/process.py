"""One process of a shard: started so that it outlives us, watched, ended with everything it started.

It runs in a session and process group of its own and writes to a file, so that neither a signal to the agent's group
nor the end of the agent reaches it (a pipe would break). It is watched through a pidfd, whether it is our child or was
adopted: its exit is seen at once and without polling.

A group may be signalled only while it is provably still the process's own: numbers of processes and groups are given
out again. Our own child is therefore not waited for (reaped) before its group is empty: as long as it is not, the
kernel keeps its number. An adopted one is reaped by somebody else; once it is gone, its group counts as ours only while
a process in it has our marker, or was seen in it when the leader still lived.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
from collections.abc import Callable, Sequence

import attrs
import trio

from appliance.agent import procfs
from appliance.agent.records import Process, Record, describes
from appliance.facts.launch import Command, StopStep

GONE_S = 5.0
"""How long processes may take to be gone after SIGKILL; one in an uninterruptible system call takes longer."""

KEEP_ENVIRONMENT = {"SPT_NOENV": "1"}
"""vLLM and SGLang name their processes with `setproctitle`, which writes over the environment that `/proc` shows, and
the marker with it, so that no survivor could be found. Told this, it writes over the command line alone."""

_LOOK_S = 0.05


@attrs.define(eq=False)
class Handle:
    """A process of ours that was started or adopted. Made by `launch` and `adopt`; whoever has it closes it.

    `pidfd` is -1 for one that had ended before it could be adopted.
    """

    process: Process
    marker: str
    pidfd: int
    popen: subprocess.Popen[bytes] | None = None
    _known: dict[int, int] = attrs.field(factory=dict)

    @property
    def adopted(self) -> bool:
        return self.popen is None

    @property
    def ended(self) -> bool:
        """Whether it has ended; its children may be there still."""
        if self.pidfd < 0:
            return True
        poll = select.poll()
        poll.register(self.pidfd, select.POLLIN)
        return bool(poll.poll(0))

    async def wait(self) -> None:
        """Return when it has ended. Fetches no status."""
        if not self.ended:
            await trio.lowlevel.wait_readable(self.pidfd)

    def exit(self) -> str:
        """How it ended, which is known only of our own children. Only after `end`: it gives the process's number away.

        "" while it runs.
        """
        if not self.ended:
            return ""
        if self.popen is None:
            return "unknown (adopted)"
        status = self.popen.wait()
        return f"exit status {status}" if status >= 0 else f"signal {_signal_name(-status)}"

    def remember_group(self) -> None:
        """Note who is in the group while the leader proves that it is ours. Reads `/proc` once."""
        if not self.ended:
            found = {seen.pid: seen.started for seen in procfs.members(self.process.pid)}
            if not self.ended:
                self._known = found

    def group(self) -> list[procfs.Seen]:
        """The living processes of its group, itself included, as far as they are provably ours. Reads `/proc` once."""
        if not self.process.pid:
            return []
        found = procfs.members(self.process.pid)
        if self._pinned():
            return found
        leader = procfs.see(self.process.pid)
        if leader is not None and leader.started != self.process.started:
            return []
        if self._marks(found):
            return found
        return [seen for seen in found if self._known.get(seen.pid) == seen.started]

    def send(self, number: signal.Signals, target: str) -> None:
        """Send a signal to the process (`leader`) or to its whole `group`. Nothing happens to one that is gone, or that
        has become another user's (a wrapper that changes it); such a one is told of as not gone."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            if target == "leader":
                if not self.ended:
                    signal.pidfd_send_signal(self.pidfd, number)
            elif self._pinned() or self._marks(found := self.group()):
                # At one blow, or a process that becomes another one every few milliseconds would get away.
                os.killpg(self.process.pid, number)
            else:
                for seen in found:
                    _signal_if_same(seen, number)

    def close(self) -> None:
        """Let go of it. What runs goes on running."""
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1

    def _marks(self, members: Sequence[procfs.Seen]) -> bool:
        return any(procfs.marker_of(seen.pid) == self.marker for seen in members)

    def _pinned(self) -> bool:
        """Whether the number of its group cannot be anybody else's now."""
        if self.pidfd < 0:
            return False
        return self.popen.returncode is None if self.popen is not None else not self.ended


def launch(
    command: Command,
    prefix: Sequence[str],
    folder: str,
    record: Record,
    *,
    last: bool,
    save: Callable[[Record], None],
) -> tuple[Handle, Record]:
    """Start one command of a shard and write it down. Blocks; run it in a thread that is not left behind.

    Raises OSError when it cannot be started, and when it cannot be written down: then nothing runs. An agent that dies
    between the two leaves a process whose marker says that it is ours, and no record that describes it.
    """
    argv = [*prefix, *command.argv]
    output = os.open(record.log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        _leave_nothing_open()
        popen = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=output,
            env={**KEEP_ENVIRONMENT, **command.env},
            cwd=folder,
            start_new_session=True,
            close_fds=False,
        )
    finally:
        os.close(output)
    pidfd = -1
    try:
        pidfd = os.pidfd_open(popen.pid)
        seen = procfs.see(popen.pid)
        lines = dict.fromkeys([tuple(argv), command.argv, procfs.command_line(popen.pid)])
        process = Process(
            name=command.name,
            argv=command.argv,
            stop=command.stop,
            pid=popen.pid,
            started=seen.started if seen else 0,
            lines=tuple(line for line in lines if line),
        )
        record = attrs.evolve(record, processes=(*record.processes, process), complete=last)
        save(record)
    except BaseException:
        os.killpg(popen.pid, signal.SIGKILL)
        popen.wait()
        if pidfd >= 0:
            os.close(pidfd)
        raise
    return Handle(process, record.marker, pidfd, popen), record


def _leave_nothing_open() -> None:
    """Have everything closed by the kernel in the moment in which a child becomes another program.

    What is inherited by accident would be held open for months. Closed by the child itself it would be gone before that
    moment, which a slow disk may put off: and the lock of the state directory must be held until then, since a child of
    an agent that was killed is known by nothing else. The price: what another thread opens right now, without that
    mark, stays open.
    """
    for name in os.listdir("/proc/self/fd"):
        if int(name) > 2:
            with contextlib.suppress(OSError):
                os.set_inheritable(int(name), False)


def adopt(process: Process, record: Record, boot: str) -> Handle:
    """The process of a record, if that is what has its pid now; otherwise a handle of one that has ended. Raises
    OSError where it cannot be looked at."""
    if process.pid:
        # First opened, then looked at: what is looked at is what will be watched and hit.
        pidfd = -1
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(process.pid)
        try:
            if pidfd >= 0 and describes(process, record, boot):
                handle = Handle(process, record.marker, pidfd)
                handle.remember_group()
                return handle
        except BaseException:
            os.close(pidfd)
            raise
        if pidfd >= 0:
            os.close(pidfd)
    return Handle(process if record.boot == boot else attrs.evolve(process, pid=0), record.marker, -1)


async def end(handle: Handle, steps: Sequence[StopStep]) -> tuple[int, ...]:
    """Stop it: the plan's steps, each with its grace, then SIGKILL for what is left of its group. The pids of those
    that do not die of that within GONE_S."""
    with contextlib.suppress(OSError):
        await trio.to_thread.run_sync(handle.remember_group)
    for step in steps:
        if handle.ended:
            break
        handle.send(signal.Signals[step.signal], step.target)
        with trio.move_on_after(step.grace_s):
            await handle.wait()
    return await _kill_until_gone(handle.group, lambda found: handle.send(signal.SIGKILL, "group"))


async def end_marked(marker: str) -> tuple[int, ...]:
    """SIGKILL everything that has this marker in its environment, until there is nothing; pids as of `end`."""

    def find() -> list[procfs.Seen]:
        found = (procfs.see(pid) for pid in procfs.marked(lambda each: each == marker))
        return [seen for seen in found if seen is not None and not seen.ended]

    return await _kill_until_gone(find, lambda found: [kill_marked(seen.pid, marker) for seen in found])


def kill_marked(pid: int, marker: str) -> bool:
    """SIGKILL the process if it carries exactly this marker; whether it was sent."""
    return procfs.kill_if(pid, lambda: procfs.marker_of(pid) == marker)


async def _kill_until_gone(
    find: Callable[[], list[procfs.Seen]], kill: Callable[[list[procfs.Seen]], object]
) -> tuple[int, ...]:
    """Again and again, since they may fork between the look and the blow, and until two looks have found nothing,
    since they may do so in the middle of one."""
    with trio.move_on_after(GONE_S):
        nothing = 0
        while nothing < 2:
            try:
                found = await trio.to_thread.run_sync(find)
            except OSError:
                # No descriptors to look with: that may pass. To see nothing is not to see that nothing is left.
                await trio.sleep(_LOOK_S)
                continue
            nothing = 0 if found else nothing + 1
            if found:
                kill(found)
                await trio.sleep(_LOOK_S)
        return ()
    return tuple(seen.pid for seen in await trio.to_thread.run_sync(find))


def _signal_if_same(seen: procfs.Seen, number: signal.Signals) -> None:
    try:
        pidfd = os.pidfd_open(seen.pid)
    except OSError:
        return
    try:
        now = procfs.see(seen.pid)
        if now is not None and (now.started, now.group) == (seen.started, seen.group):
            signal.pidfd_send_signal(pidfd, number)
    except ProcessLookupError:
        return
    finally:
        os.close(pidfd)


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return str(number)

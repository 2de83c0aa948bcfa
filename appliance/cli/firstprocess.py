"""What process 1 of a container owes the others, for a program that has its own children to wait for.

Processes whose parent has ended become children of process 1, and stay as zombies until it fetches their status:
engines leave some with every stop. The program cannot do so itself. It would have to wait for any child at all, and
would take the statuses of engines, which Python and Trio wait for. So as process 1 it splits: the parent stays that,
and does nothing but hand on signals and fetch statuses; the child goes on as the program.

It also makes signals work that come early. The kernel drops those that process 1 has no handler for, and a stop in the
first half second would be lost.
"""

from __future__ import annotations

import os
import signal

HANDED_ON = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2)

_FOR_ONE = ("LISTEN_PID", "WATCHDOG_PID")
"""Variables that mean one process by its number."""


_parted = False


def ends_everything() -> bool:
    """Whether the end of this program is the end of process 1, and so of every process beside it."""
    return _parted


def split() -> None:
    """As process 1: return in a child of it, and never in process 1, which ends with the child's status. Otherwise
    nothing. To be called while there is one thread, and before much was imported: the parent keeps all of that."""
    if os.getpid() != 1:
        return
    watched = {*HANDED_ON, signal.SIGCHLD}
    # Before the fork, or what comes right after it would be lost.
    before = signal.pthread_sigmask(signal.SIG_BLOCK, watched)
    child = os.fork()
    if child == 0:
        global _parted
        _parted = True
        # What a terminal sends goes to its foreground processes, and would come a second time from the parent.
        os.setsid()
        os.environ.update({name: str(os.getpid()) for name in _FOR_ONE if os.environ.get(name) == "1"})
        signal.pthread_sigmask(signal.SIG_SETMASK, before)
        return
    while True:
        number = signal.sigwait(watched)
        if number == signal.SIGCHLD:
            _reap(child)
        else:
            # Not gone: as long as nobody has fetched its status, the number is the child's.
            os.kill(child, number)


def _reap(child: int) -> None:
    """Fetch every status there is; with the child's own this process ends."""
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        if pid == child:
            code = os.waitstatus_to_exitcode(status)
            os._exit(code if code >= 0 else 128 - code)

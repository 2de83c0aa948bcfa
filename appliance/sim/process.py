"""A sim as a process: signals, ranks, loading, serving, and the exit status that tells how it ended."""

from __future__ import annotations

import resource
import signal
import socket
import time
from collections.abc import Callable

import attrs
import trio

from .engine import Engine
from .front import Front
from .listening import bind
from .ranks import follow, lead
from .settings import Settings

Say = Callable[[str], None]


@attrs.define
class Ending:
    """How the process ends: the first reason stands. `message` is one line for stderr, "" for an ordinary stop."""

    status: int = 0
    message: str = ""
    crashed: bool = False
    _event: trio.Event = attrs.field(factory=trio.Event)

    def say(self, status: int, message: str = "", *, crashed: bool = False) -> None:
        if not self._event.is_set():
            self.status, self.message, self.crashed = status, message, crashed
            self._event.set()

    async def wait(self) -> None:
        await self._event.wait()


async def run(settings: Settings, say: Say) -> Ending:
    """Live until a signal, a crash or a lost rank says otherwise. `say` takes lines for the operator.

    Raises CannotListen when a port is taken, at once and not after loading.
    """
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))  # the usual 1024 are too few for 1,000 streams
    ending = Ending()
    if settings.ranks.leads:
        await _lead(settings, say, ending)
    else:
        async with trio.open_nursery() as ground:
            await ground.start(_watch_signals, ending)
            ground.start_soon(
                follow, settings.ranks, lambda: say(f"rank {settings.ranks.node_rank} has joined"), _loser(ending)
            )
            await ending.wait()
            ground.cancel_scope.cancel()
    return ending


async def _lead(settings: Settings, say: Say, ending: Ending) -> None:
    ranks, misbehaviour = settings.ranks, settings.misbehaviour
    with bind(settings.host, settings.port, "--port") as listener:
        engine = Engine(settings, settings.name or f"sim-{listener.getsockname()[1]}", time.time)
        engine.on_crash = lambda: ending.say(
            1, f"simulated crash after {misbehaviour.fail_after} requests", crashed=True
        )
        front = Front(engine)
        rendezvous = (
            bind(ranks.master_addr, ranks.master_port, "--master-port", backlog=128) if ranks.nnodes > 1 else None
        )
        async with trio.open_nursery() as ground:
            await ground.start(_watch_signals, ending)
            ground.start_soon(_live, front, listener, rendezvous, say, _loser(ending))
            await ending.wait()
            if ending.crashed:
                front.crash()
            else:
                await front.stop(ending.message or "the engine is stopping")
            ground.cancel_scope.cancel()


async def _live(
    front: Front, listener: socket.socket, rendezvous: socket.socket | None, say: Say, lost: Callable[[str], None]
) -> None:
    """Find the other ranks, load, serve. Ends when the front does; until then by cancellation."""
    engine = front.engine
    misbehaviour = engine.settings.misbehaviour
    async with trio.open_nursery() as nursery:
        if rendezvous is not None:
            say(f"waiting for {engine.settings.ranks.nnodes - 1} more ranks")
            await nursery.start(lead, engine.settings.ranks, rendezvous, lost)
        if misbehaviour.while_loading == "503":
            engine.loading = True
            await nursery.start(front.serve, listener)
        if misbehaviour.load_s > 0:
            say(f"loading for {misbehaviour.load_s:g} s")
            await trio.sleep(misbehaviour.load_s)
        engine.loading = False
        if misbehaviour.while_loading != "503":
            await nursery.start(front.serve, listener)
        host, port = listener.getsockname()[:2]
        url = f"http://[{host}]:{port}" if ":" in host else f"http://{host}:{port}"
        say(f"{engine.name} serves {', '.join(engine.settings.models)} at {url}")


def _loser(ending: Ending) -> Callable[[str], None]:
    return lambda why: ending.say(1, why)


async def _watch_signals(ending: Ending, *, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    with trio.open_signal_receiver(signal.SIGTERM, signal.SIGINT) as signals:
        task_status.started()
        async for _ in signals:
            ending.say(0)

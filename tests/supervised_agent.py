"""Agents that are killed: `python -m tests.supervised_agent FOLDER FIRST_PORT LAST_PORT`.

For each line of JSON on its standard input it forks an agent (what takes long, importing, is done by then), says its
pid, and fetches its status when it has ended. The line says what the agent does after it has adopted:

    run    shards to start: name -> flags of the stub engine, or of `executable` on `source` where those are given
    seed   start and stop them at random for ever, by this seed (null: do not)
    stop   stop everything that is there

Its reports lie in FOLDER/reports.json after the first line of every change. SIGTERM ends it, as it ends `appliance
agent`: by cancelling all tasks.
"""

from __future__ import annotations

import json
import os
import random
import signal
import sys
from pathlib import Path
from typing import Any

import trio

from appliance.agent.shards import Shards
from tests.shard_scene import scene, stub


async def be_an_agent(shards: Shards, folder: Path, order: dict[str, Any]) -> None:
    await shards.adopt()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(heed_sigterm, nursery.cancel_scope)
        nursery.start_soon(tell, shards, folder)
        await nursery.start(shards.run)
        flags: dict[str, list[str]] = order["run"]
        if order["seed"] is None:
            for name, args in flags.items():
                shards.start(stub(name, *args, source=order["source"]))
        else:
            nursery.start_soon(at_random, shards, flags, random.Random(order["seed"]))
        for shard_id in list(shards.reports()) if order["stop"] else ():
            shards.stop(shard_id)


async def heed_sigterm(scope: trio.CancelScope) -> None:
    with trio.open_signal_receiver(signal.SIGTERM) as signals:
        async for _ in signals:
            scope.cancel()


async def tell(shards: Shards, folder: Path) -> None:
    beside, path = folder / "reports.new", folder / "reports.json"
    while True:
        rows = {
            shard_id: {
                "state": report.state,
                "pid": report.pid,
                "reason": report.reason,
                "exit": report.exit,
                "tail": report.tail,
                "adopted": report.adopted,
                "port": report.port,
            }
            for shard_id, report in shards.reports().items()
        }
        beside.write_text(json.dumps({"agent": os.getpid(), "shards": rows}))
        beside.rename(path)
        await shards.changed()


async def at_random(shards: Shards, flags: dict[str, list[str]], rng: random.Random) -> None:
    while True:
        name = rng.choice(sorted(flags))
        if rng.random() < 0.6:
            shards.start(stub(name, *flags[name]))
        else:
            shards.stop(f"{name}/0", drain_s=rng.choice((0.0, 0.0, 0.2)))
        await trio.sleep(rng.random() * 0.1)


def main() -> None:
    folder, first, last = Path(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3])
    made = scene(folder, (first, last)).__enter__()
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            order = json.loads(line)
            programs = {"executables": {"llamacpp": order["executable"]}} if order["executable"] else {}
            trio.run(be_an_agent, made.shards(**programs), folder, order)
            os._exit(0)
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


if __name__ == "__main__":
    main()

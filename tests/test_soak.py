"""Mixed load with random departures on every route; afterwards it must be as if nobody had ever been there.

15 s of it by default; `SOAK_S=60` for the long run, which holds the memory to 5% from its 20th second on.
"""

from __future__ import annotations

import gc
import os
import random
import re
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio

from appliance.door.connection import Connection
from appliance.door.reply import HttpReply
from appliance.facts.call import Call
from appliance.gateway.archive import KEPT_RECORDS
from tests.engines import sim_engine
from tests.fake_engine import fake_engine, says
from tests.processes import until
from tests.raw_client import Client, chat, request
from tests.routers import router
from tests.serve_process import Router, endpoint, processes
from tests.soak_requests import Asking, choose, cut, endless
from tests.test_soak_streams import ALL_FREE, NONE_LEFT, gauges, summed

SOAK_S = float(os.environ.get("SOAK_S", "15"))
PEOPLE = 32
PATIENCE_S = 2.5
PAUSE_S = 0.02
AT_ONCE = 20
FILLS = 3
GROWTH = 0.05 if SOAK_S >= 60 else 0.10
"""What the resident memory may grow from the first third on. In the short run some of the books are still filling."""


@pytest.fixture(scope="module")
def sims() -> Iterator[list[sim_engine.Router]]:
    flags = ("--decode-tokens-per-second", "300", "--max-num-seqs", "64")
    with ExitStack() as stack:
        yield [stack.enter_context(sim_engine.running(*flags)) for _ in range(3)]


@attrs.define(eq=False)
class Soak:
    """The people and what they met."""

    port: int
    over: bool = False
    statuses: Counter[int] = attrs.field(factory=Counter)
    left: Counter[str] = attrs.field(factory=Counter)
    response_ids: list[str] = attrs.field(factory=list)

    async def person(self, rng: random.Random) -> None:
        while not self.over:
            await self.visit(choose(rng, self.response_ids))
            await trio.sleep(rng.random() * 2 * PAUSE_S)

    async def visit(self, asking: Asking) -> None:
        self.left[asking.leaving] += 1
        stream = await trio.open_tcp_stream("127.0.0.1", self.port)
        try:
            with trio.move_on_after(PATIENCE_S):
                await self._ask(stream, asking)
        except (trio.BrokenResourceError, trio.ClosedResourceError):
            self.left["cut off"] += 1
        if asking.leaving == "reset":
            cut(stream)
        await trio.aclose_forcefully(stream)

    async def _ask(self, stream: trio.SocketStream, asking: Asking) -> None:
        raw = asking.raw
        if asking.leaving != "stay" and asking.after_s == 0.0:
            await stream.send_all(raw[: len(raw) * 2 // 3])
            return
        await stream.send_all(raw)
        if asking.leaving == "half-close":
            await trio.sleep(asking.after_s)
            await stream.send_eof()
            await self._read(stream)
        elif asking.leaving == "stay":
            await self._read(stream)
        else:
            with trio.move_on_after(asking.after_s):
                await self._read(stream)

    async def _read(self, stream: trio.SocketStream) -> None:
        """Read until the answer seems to be there, or the connection ends; a mistake costs some patience, no more."""
        data = b""
        async for piece in stream:
            data += piece
            head, _, body = data.partition(b"\r\n\r\n")
            length = re.search(rb"content-length: (\d+)", head)
            if (
                data.endswith(b"0\r\n\r\n")
                or (length is not None and len(body) >= int(length[1]))
                or len(data) > 1 << 20
            ):
                break
        if data.startswith(b"HTTP/1.1 "):
            self.statuses[int(data[9:12])] += 1
            found = re.search(rb'"id": ?"(resp_[\w-]+)"', data)
            if found:
                self.response_ids = [*self.response_ids[-50:], found[1].decode()]


async def fill_the_books(port: int) -> None:
    """Quick requests down the same road, three times what the books keep: memory is judged once they are full, and
    have been for long enough that new entries fit into the holes of old ones."""
    ask = request("POST", "/tokenize", body=b'{"model":"m","prompt":"a b c"}')

    async def fill(times: int) -> None:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        for _ in range(times):
            await stream.send_all(ask * AT_ONCE)
            answered = 0
            while answered < AT_ONCE:
                answered += (await stream.receive_some(65536)).count(b"HTTP/1.1 200 ")
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        for _ in range(16):
            nursery.start_soon(fill, KEPT_RECORDS * FILLS // 16 // AT_ONCE)


async def ask_admin(router: Router, path: str) -> Any:
    client = Client(await trio.open_unix_socket(router.admin))
    await client.send(request("GET", path))
    answer = (await client.answer()).json()
    await client.close()
    return answer


def names(task: dict[str, Any], above: str = "") -> Counter[str]:
    """Every task of a tree by its path of names."""
    path = f"{above}/{task['name']}"
    if task["name"] == "management API":
        return Counter([path])  # it serves whoever asks for this
    found = Counter({path: task.get("count", 1)})
    for nursery in task.get("nurseries", ()):
        for child in nursery:
            found += names(child, path)
    return found


def resident_bytes(router: Router) -> int:
    return int(Path(f"/proc/{router.pid}/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def test_nothing_is_left_of_a_storm(tmp_path: Path, sims: list[sim_engine.Router]) -> None:
    async with processes(tmp_path) as routers:
        tables = "".join(endpoint(f"s{number}", sim.url) for number, sim in enumerate(sims))
        routers.configure(
            'cors_origins = ["https://chat.example.org"]\n' + tables + '[[models]]\nname = "m"\naliases = ["alias"]\n'
        )
        router = await routers.start()
        await ask_admin(router, "/debug/tasks")  # the management API starts with its first request
        tasks = names(await ask_admin(router, "/debug/tasks"))

        began = time.monotonic()
        await fill_the_books(router.door)
        print(f"books filled after {time.monotonic() - began:.1f} s")
        soak = Soak(router.door)
        async with trio.open_nursery() as people:
            for number in range(PEOPLE):
                people.start_soon(soak.person, random.Random(number))
            memory = []
            for until_s in (SOAK_S / 3, SOAK_S):
                await trio.sleep(until_s - (SOAK_S / 3 if memory else 0))
                gauges(router)  # a scrape belongs to the load
                memory.append(resident_bytes(router))
            soak.over = True
        async with trio.open_nursery() as people:
            for number in range(16):
                people.start_soon(soak.visit, endless(number))

        await until(lambda: summed(sims) == ALL_FREE, "the engines are free")
        await until(lambda: gauges(router) == NONE_LEFT, "every gauge of ours reads 0")
        status = await ask_admin(router, "/status")
        first, last = memory
        print(
            f"{SOAK_S:.0f} s: {sum(soak.left.values())} requests {dict(soak.left)},"
            f" statuses {dict(sorted(soak.statuses.items()))};"
            f" RSS {first / 2**20:.1f} -> {last / 2**20:.1f} MiB ({last / first - 1:+.1%})"
        )
        assert status["requests"]["running"] == status["connections"] == 0
        await _same_tasks(router, tasks)
        assert not [line for line in router.log if "Traceback" in line or "failed inside the router" in line]
        assert soak.statuses[500] < sum(soak.statuses.values()) / 10, "only those that the engines were told to give"
        assert last < first * (1 + GROWTH)
        assert await router.stop() == 0


async def _same_tasks(router: Router, before: Counter[str]) -> None:
    """The tree of tasks is the one before the storm; connections that linger get a moment."""
    give_up = time.monotonic() + 10
    while (now := names(await ask_admin(router, "/debug/tasks"))) != before:
        assert time.monotonic() < give_up, (now - before, before - now)
        await trio.sleep(0.2)


async def test_the_books_keep_nothing_of_a_request_alive(tmp_path: Path) -> None:
    """Four thousand records stay; a task, a socket or a body that one of them held would stay as well. A traceback in a
    refusal holds them all."""
    async with fake_engine(says(b"no HTTP")) as engine, router(tmp_path, engine) as door:
        for ask in (chat(), chat(stream=True), chat(model="nobody"), chat(**{"user": "x", "stream": True})):
            assert (await door.ask(ask)).status in (404, 502)
        await door.settled()
        assert len(list(door.app.gateway.books.recent(10))) == 4
        gc.collect()
        held = [thing for thing in gc.get_objects() if isinstance(thing, Call | HttpReply | Connection)]
        assert held == []
        tasks = [thing for thing in gc.get_objects() if isinstance(thing, trio.lowlevel.Task)]
        # the poller still has the line of which it heard last in its hand
        assert sum(task.name == "connection" for task in tasks) <= 1

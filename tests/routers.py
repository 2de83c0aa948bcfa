"""A running router for tests: all of `appliance serve` in the test's own Trio loop, in front of scripted engines.

    async with fake_engine(says(*streamed(event("a"), DONE))) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(stream=True))

In the same process, so that a test can look into it (`door.app`) and let time pass (`door.later`), and so that it costs
milliseconds. The ports are the kernel's choice. When the block ends without an error, every connection of the test is
closed and the router must be as if nothing had happened: no request live or in line, no lease out, no byte held
(`Running.settled`). For a router as a process there is `tests/operator_router.py`.
"""

from __future__ import annotations

import io
import json
import os
import ssl
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, redirect_stderr
from pathlib import Path
from typing import Any

import attrs
import trio

from appliance.cli.config import Loaded, load
from appliance.cli.router import Router
from appliance.nursery.sleeper import sweep_once
from tests.fake_engine import FakeEngine
from tests.raw_client import WITHIN_S, Answer, Client


@attrs.define(eq=False)
class Running:
    """The router, its ports, and a hand on its clock. `file` is its configuration, read again by `app.reload()`."""

    app: Router
    file: Path
    port: int
    metrics: int
    _log: io.StringIO
    _clients: list[Client] = attrs.field(factory=list)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @property
    def log(self) -> list[dict[str, Any]]:
        """What it has logged, one dictionary a line."""
        return [json.loads(line) for line in self._log.getvalue().splitlines() if line.startswith("{")]

    def told(self, event: str) -> list[dict[str, Any]]:
        return [line for line in self.log if line["event"] == event]

    def later(self, seconds: float) -> None:
        """Let everything that is armed see a clock `seconds` ahead: what is due by then strikes."""
        sweep_once(tuple(self.app.sleepers), time.monotonic() + seconds)

    def nearly(self) -> None:
        """Let everything that is armed come near its time, and nothing strike, however long the test has taken."""
        for sleeper in tuple(self.app.sleepers):
            sweep_once((sleeper,), sleeper.due - 0.1)

    async def held_by(self, deadline: str, *, begun: bool = False) -> None:
        """Wait until there is a request that nothing but this deadline will end; `begun`: it has got some of its
        answer."""

        def there() -> bool:
            for record in self.app.gateway.books.live.values():
                assert record.sleeper is not None
                return record.sleeper.due_name == deadline and bool(record.first_byte_at) == begun
            return False

        await self.until(f"{deadline} runs", there)

    async def connect(self, context: ssl.SSLContext | None = None, port: int = 0, host: str = "127.0.0.1") -> Client:
        """A connection to the door, with TLS where a context is given; closed when the router's block ends."""
        stream: trio.abc.HalfCloseableStream = await trio.open_tcp_stream(host, port or self.port)
        if context is not None:
            stream = trio.SSLStream(stream, context, server_hostname="localhost", https_compatible=True)  # type: ignore[assignment]
        client = Client(stream)
        self._clients.append(client)
        return client

    async def ask(self, raw: bytes, *, port: int = 0) -> Answer:
        """One request on a connection of its own."""
        client = await self.connect(port=port)
        await client.send(raw)
        answer = await client.answer(raw.split(b" ", 1)[0].decode())
        await client.close()
        return answer

    async def until(self, what: str, wanted: Any) -> None:
        """Wait until `wanted()` is true; `what` is the sentence that a test fails with."""
        with trio.move_on_after(WITHIN_S):
            while not wanted():  # noqa: ASYNC110  the kernel is in between, so there is no event to wait for
                await trio.sleep(0.002)
            return
        raise AssertionError(f"never true: {what}")

    async def settled(self) -> None:
        """Close the test's connections; then nothing of any request may be left."""
        for client in self._clients:
            await trio.aclose_forcefully(client.stream)
        app = self.app
        await self.until("every connection of a client has ended", lambda: not app.listeners.connections)
        assert not app.gateway.books.live
        assert {member.id: member.in_flight for member in app.gateway.table.members.values() if member.in_flight} == {}
        assert app.buffers.held_bytes == 0
        rules = app.gateway.gate.rules
        assert (rules.lines.count, rules.leased) == (0, set())
        assert {load.id for load in rules.loads.values() if not load.idle or load.proven or load.unproven} == set()


@asynccontextmanager
async def router(
    folder: Path, *engines: FakeEngine, config: str = "", listen: str = "127.0.0.1:0"
) -> AsyncIterator[Running]:
    """A router in front of `engines`; `config` is further TOML, in front of their tables. The log is JSON, caught."""
    file = folder / "appliance.toml"
    file.write_text(config + "\n" + "".join(engine.toml for engine in engines))
    env = {name: value for name, value in os.environ.items() if not name.startswith("APPLIANCE_")} | {
        "STATE_DIRECTORY": str(folder / "appliance-state"),
        "RUNTIME_DIRECTORY": str(folder / "appliance-run"),
        "APPLIANCE_LOGGING__FORMAT": "json",
    }
    arguments: dict[str, object] = {"server.listen": [listen], "server.metrics_listen": ["127.0.0.1:0"]}

    def read() -> Loaded:
        return load(file, env, arguments=arguments)

    written = io.StringIO()
    with redirect_stderr(written):
        async with trio.open_nursery() as nursery:
            app = Router(read(), read)
            nursery.start_soon(app.run, name="router")
            running = Running(app, file, 0, 0, written)
            await running.until("the router serves", lambda: running.told("serving"))
            running.port = int(app.addresses[0].rpartition(":")[2])
            running.metrics = int(app.operations.metrics[0].rpartition(":")[2])
            yield running
            await running.settled()
            nursery.cancel_scope.cancel()

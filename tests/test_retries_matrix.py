"""The retry matrix, played with real sockets: each way an engine can fail, in front of nobody else, of a second
endpoint, of a fallback, and of two more that fail alike. What came out is the table in `docs/retries.md`.

    python -m tests.test_retries_matrix        prints the table, for the page
"""

from __future__ import annotations

import math
import re
import socket
import struct
import sys
import tempfile
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import attrs
import trio
from trio.testing import wait_all_tasks_blocked

from tests.fake_engine import CHAT, DONE, STREAM_HEAD, Script, event, fake_engine, says, streamed, whole
from tests.raw_client import BEYOND_SOCKETS, BrokenOff, chat
from tests.routers import router

PAGE = Path(__file__).parent.parent / "docs" / "retries.md"
ERROR = b'data: {"error":{"message":"m","type":"t","param":null,"code":%d}}\n\n'
LARGE = "x" * BEYOND_SOCKETS


@attrs.frozen
class Case:
    """One way to fail. `engine` makes it, at a port of the kernel's choice. Where it hangs, `deadline` is the one that
    is to strike, once the stream has `begun` or before."""

    engine: Callable[[trio.Nursery], int]
    stream: bool = False
    deadline: str = ""
    begun: bool = False
    filler: str = ""


def scripted(script: Script) -> Callable[[trio.Nursery], int]:
    """An engine that reads the request and then does this."""

    def start(nursery: trio.Nursery) -> int:
        bound = socket.socket()
        bound.bind(("127.0.0.1", 0))
        bound.listen(64)
        listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))

        async def serve() -> None:
            async with fake_engine(script) as engine:
                await trio.serve_listeners(engine._serve, [listener])

        nursery.start_soon(serve)
        return int(bound.getsockname()[1])

    return start


def refusing(nursery: trio.Nursery) -> int:
    """A port that is taken and not listened on."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))

    async def hold() -> None:
        with bound:
            await trio.sleep_forever()

    nursery.start_soon(hold)
    return int(bound.getsockname()[1])


def swallowing(nursery: trio.Nursery) -> int:
    """A listener whose queue is full: connecting takes for ever."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen(0)
    port = int(bound.getsockname()[1])
    clients = []
    for _ in range(3):
        clients.append(socket.socket())
        clients[-1].setblocking(False)
        clients[-1].connect_ex(("127.0.0.1", port))

    async def hold() -> None:
        try:
            await trio.sleep_forever()
        finally:
            for sock in (bound, *clients):
                sock.close()

    nursery.start_soon(hold)
    return port


def resetting(nursery: trio.Nursery) -> int:
    """An engine that resets every connection before it has read the request, which is a large one."""
    bound = socket.socket()
    bound.bind(("127.0.0.1", 0))
    bound.listen(64)
    listener = trio.SocketListener(trio.socket.from_stdlib_socket(bound))

    async def reset(stream: trio.SocketStream) -> None:
        stream.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        await stream.receive_some(1000)
        await stream.aclose()

    nursery.start_soon(trio.serve_listeners, reset, [listener])
    return int(bound.getsockname()[1])


HANGS = says(then="silent")
BEGUN = streamed(event("a"), end=b"")

CASES: dict[str, Case] = {
    "connection refused": Case(refusing),
    "reset before the request was sent whole": Case(resetting, filler=LARGE),
    "reset after it was sent": Case(scripted(says(then="reset"))),
    "closed after it was sent": Case(scripted(says(then="close"))),
    "reset after a byte of an answer": Case(scripted(says(b"H", then="reset"))),
    "an answer that is not HTTP": Case(scripted(says(b"garbage", then="close"))),
    "HTTP 500": Case(scripted(says(whole(500, {})))),
    "HTTP 429": Case(scripted(says(whole(429, {}, "retry-after: 7")))),
    "HTTP 503": Case(scripted(says(whole(503, {})))),
    "HTTP 400": Case(scripted(says(whole(400, {})))),
    "HTTP 404": Case(scripted(says(whole(404, {})))),
    "HTTP 501": Case(scripted(says(whole(501, {})))),
    "HTTP 401 (our key)": Case(scripted(says(whole(401, {})))),
    "first event an error (500)": Case(scripted(says(*streamed(ERROR % 500, DONE))), stream=True),
    "first event an error (503)": Case(scripted(says(*streamed(ERROR % 503, DONE))), stream=True),
    "first event an error (400)": Case(scripted(says(*streamed(ERROR % 400, DONE))), stream=True),
    "an error event later": Case(scripted(says(*streamed(event("a"), ERROR % 500, DONE))), stream=True),
    "cut before the first event": Case(scripted(says(STREAM_HEAD, then="reset")), stream=True),
    "cut in the middle of a stream": Case(scripted(says(*BEGUN, then="reset")), stream=True),
    "a stream that ends without its end": Case(scripted(says(*streamed(event("a")))), stream=True),
    "deadline dial_s": Case(swallowing, deadline="dial_s"),
    "deadline first_token_s": Case(scripted(HANGS), stream=True, deadline="first_token_s"),
    "deadline total_s": Case(scripted(HANGS), deadline="total_s"),
    "deadline idle_s": Case(scripted(says(*BEGUN, then="silent")), stream=True, deadline="idle_s", begun=True),
    "deadline stream_total_s": Case(
        scripted(says(*BEGUN, then="silent")), stream=True, deadline="stream_total_s", begun=True
    ),
}
AFTER_S = {"dial_s": 5, "first_token_s": 600, "total_s": 1800, "idle_s": 120, "stream_total_s": 100}
SETUPS = ("alone", "a second endpoint", "a fallback", "two more that fail alike")


@attrs.frozen
class Seen:
    """What came of one request: what the client saw, how often which engine was tried, and what that did to a."""

    client: str
    tried: str
    breaker: str

    def __str__(self) -> str:
        return f"{self.client}; {self.tried}"


def good(stream: bool) -> Script:
    return says(*streamed(event("a"), DONE)) if stream else says(whole(200, CHAT))


@asynccontextmanager
async def endpoints(case: Case, setup: str) -> AsyncIterator[str]:
    """The configuration in front of the engines of a set-up; a is preferred, so that it is always tried first."""
    async with AsyncExitStack() as stack:
        nursery = await stack.enter_async_context(trio.open_nursery())
        engines = {"a": (case.engine(nursery), "llama", 9)}
        if setup == "a second endpoint":
            engines["b"] = (scripted(good(case.stream))(nursery), "llama", 8)
        if setup == "a fallback":
            engines["f"] = (scripted(good(case.stream))(nursery), "other", 8)
        if setup == "two more that fail alike":
            engines["b"] = (case.engine(nursery), "llama", 8)
            engines["c"] = (case.engine(nursery), "llama", 7)
        config = "[deadlines]\nstream_total_s = 100\n" if case.deadline == "stream_total_s" else ""
        if setup == "a fallback":
            config += '[[models]]\nname = "llama"\nfallbacks = ["other"]\n'
        for id, (port, model, priority) in engines.items():
            config += f'[[endpoints]]\nid = "{id}"\nurl = "http://127.0.0.1:{port}"\nmodels = ["{model}"]\n'
            config += f'pool = "{id}"\npool_priority = {priority}\n'
        yield config
        nursery.cancel_scope.cancel()


async def play(case: Case, setup: str, folder: Path) -> Seen:
    async with endpoints(case, setup) as config, router(folder, config=config) as door:
        await wait_all_tasks_blocked()
        door.app.gateway.drop_stale(math.inf)  # a used connection has a row of its own, below
        client = await door.connect()
        await client.send(chat(stream=case.stream, **({"filler": case.filler} if case.filler else {})))
        if case.deadline:
            await door.held_by(case.deadline, begun=case.begun)
            door.later(AFTER_S[case.deadline] + 1)
        try:
            answer = await client.answer("POST")
            seen = str(answer.status)
            if answer.status == 200 and b'"error"' in answer.body:
                seen = "200, the engine's error event, its [DONE]"
            elif answer.status >= 400:
                code = answer.json()["error"]["code"]
                seen += f" {code}" if str(code).startswith("upstream_") else ", the engine's own"
                if "retry-after" in answer.fields:
                    seen += f", Retry-After {answer.fields['retry-after']}"
        except BrokenOff as broken:
            body = broken.args[0].body
            error = re.search(rb'"code":"(\w+)"', body)
            assert error is not None and b"[DONE]" not in body
            seen = f"200, error event {error[1].decode()}, cut"
        await wait_all_tasks_blocked()
        gateway = door.app.gateway
        (record,) = gateway.books.recent(5)
        names = [attempt.endpoint for attempt in record.attempts]
        if record.outcome == "ok" or record.reason == "error_event":
            names.append(record.endpoint)
        tried = ", ".join(name if names.count(name) == 1 else f"{name} twice" for name in dict.fromkeys(names))
        member = gateway.table.members["a"]
        failures = member.breaker.history.bit_count()
        assert member.breaker.closed
        breaker = "nothing"
        if failures:
            breaker = "a failure" if failures == 1 else f"{failures} failures"
        elif member.penalty:
            breaker = "less weight"
        return Seen(seen, tried, breaker)


async def matrix(folder: Path) -> dict[str, list[Seen]]:
    seen: dict[str, list[Seen]] = {}
    for number, (name, case) in enumerate(CASES.items()):
        row = seen[name] = []
        for setup in SETUPS:
            place = folder / f"{number}-{len(row)}"
            place.mkdir()
            row.append(await play(case, setup, place))
    return seen


def table(seen: dict[str, list[Seen]]) -> str:
    """The matrix in Markdown."""
    lines = [
        "| the engine | " + " | ".join(SETUPS) + " | its breaker |",
        "|---|" + "---|" * (len(SETUPS) + 1),
    ]
    for name, row in seen.items():
        effects = list(dict.fromkeys(one.breaker for one in row))
        lines.append(f"| {name} | " + " | ".join(map(str, row)) + f" | {' / '.join(effects)} |")
    return "\n".join(lines) + "\n"


async def test_the_matrix_is_what_the_page_says(tmp_path: Path) -> None:
    seen = await matrix(tmp_path)
    printed = table(seen)
    print(printed)
    for name, row in seen.items():
        for setup, one in zip(SETUPS, row, strict=True):
            assert one.tried.count("twice") <= 1, (name, setup, "a request was sent a third time")
            if name.startswith("deadline"):
                assert one.tried == "a", (name, setup, "a deadline tried again")
            if one.client == "200":
                assert setup in ("a second endpoint", "a fallback")
    assert printed in PAGE.read_text(), "docs/retries.md is not what the router does"


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as place:
        sys.stdout.write(table(trio.run(matrix, Path(place))))

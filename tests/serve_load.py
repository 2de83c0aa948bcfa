"""A load of people who ask without a pause, each in a way of their own, and count what went wrong.

A worker asks again as soon as it has its answer: streamed or whole, on a fresh connection each time or on one that it
keeps for as long as it may. Every answer must be whole and right; a refusal, a reset or a missing end is a failure.
"""

from __future__ import annotations

import itertools
import json
import ssl
from collections.abc import Iterator

import attrs
import trio

from tests.processes import until
from tests.raw_client import Answer, BrokenOff, Client, chat

WORDS = "one two three"
SAID = b"You said: one two three"


@attrs.define(eq=False)
class Load:
    """`connections` workers at `port`. `model` may be changed at any time; `context` None is plain HTTP."""

    port: int
    connections: int = 64
    model: str = "m"
    context: ssl.SSLContext | None = None
    done: int = 0
    fresh: int = 0
    failures: list[str] = attrs.field(factory=list)
    certificates: list[bytes] = attrs.field(factory=list)
    """What the fresh connections were shown, in order."""
    _over: bool = False

    async def run(self) -> None:
        """Ask until `end`; each worker ends with its present answer."""
        async with trio.open_nursery() as nursery:
            for number in range(self.connections):
                nursery.start_soon(self._work, number)

    def end(self) -> None:
        self._over = True

    async def more(self, requests: int) -> None:
        """Wait until so many more are done."""
        goal = self.done + requests
        await until(lambda: self.done >= goal or self.failures, f"{requests} more requests are done")

    async def _work(self, number: int) -> None:
        keeps, streams = bool(number & 1), itertools.cycle((bool(number & 2), not number & 2))
        client: Client | None = None
        while not self._over:
            try:
                if client is None:
                    client = await self._connect()
                answer = await self._ask(client, next(streams))
            except (OSError, BrokenOff, trio.BrokenResourceError, trio.ClosedResourceError, trio.TooSlowError) as error:
                self.failures.append(f"{number}: {error!r} {error.__cause__!r}")
                answer = None
            if client is not None and (answer is None or answer.closes or not keeps):
                await _leave(client)
                client = None
        if client is not None:
            await _leave(client)

    async def _connect(self) -> Client:
        stream: trio.abc.HalfCloseableStream = await trio.open_tcp_stream("127.0.0.1", self.port)
        self.fresh += 1
        if self.context is not None:
            stream = trio.SSLStream(stream, self.context, server_hostname="localhost", https_compatible=True)  # type: ignore[assignment]
            await stream.do_handshake()  # type: ignore[attr-defined]
            self.certificates.append(stream.getpeercert(binary_form=True))  # type: ignore[attr-defined]
        return Client(stream)

    async def _ask(self, client: Client, stream: bool) -> Answer:
        ask = chat(model=self.model, stream=stream, messages=[{"role": "user", "content": WORDS}])
        await client.send(ask)
        answer = await client.answer("POST")
        self.done += 1
        if answer.status != 200 or text_of(answer) != SAID:
            self.failures.append(f"{answer.status} {answer.fields} {answer.body[:300]!r}")
        return answer


def text_of(answer: Answer) -> bytes:
    """What was said, b"" where the answer is not whole."""
    if "event-stream" not in answer.fields.get("content-type", ""):
        return str(answer.json()["choices"][0]["message"]["content"]).encode()
    if not answer.body.endswith(b"data: [DONE]\n\n"):
        return b""
    return b"".join(_deltas(answer.body))


@attrs.define(eq=False)
class LongStream:
    """A stream of `words` words; `run` as a task, `answer` once it is over, `error` where it broke off."""

    port: int
    words: int
    begun: trio.Event = attrs.field(factory=trio.Event)
    answer: Answer | None = None
    error: BrokenOff | None = None

    async def run(self) -> None:
        client = Client(await trio.open_tcp_stream("127.0.0.1", self.port))
        await client.send(chat(model="m", stream=True, max_tokens=self.words, ignore_eos=True))
        client.buffer = await client.until(b"data: ") + client.buffer
        self.begun.set()
        try:
            self.answer = await client.answer("POST")
        except BrokenOff as error:
            self.error = error
        await _leave(client)

    @property
    def complete(self) -> bool:
        return self.answer is not None and len(text_of(self.answer).split()) == self.words


def _deltas(body: bytes) -> Iterator[bytes]:
    for line in body.split(b"\n"):
        if line.startswith(b"data: {"):
            for choice in json.loads(line[6:]).get("choices", []):
                yield str(choice["delta"].get("content") or "").encode()


async def _leave(client: Client) -> None:
    with trio.move_on_after(1):
        await trio.aclose_forcefully(client.stream)

"""Clients that stream without a pause while parts of a cluster die, and what became of each of their requests."""

from __future__ import annotations

import json

import attrs
import trio

from tests.processes import until
from tests.raw_client import BrokenOff, Client, chat


@attrs.frozen
class Outcome:
    """One request. `engine` is the sim that served it, as it names itself, "" where none began.

    `how`: `whole`; `error event` (cut in the middle, and told so: no end of its own, and the body aborted); `refused`
    with the status in `detail`; `broken` for everything else, which nobody should ever see.
    """

    how: str
    engine: str = ""
    detail: str = ""


@attrs.define(eq=False)
class Streams:
    """`clients` at `port`, each asking again as soon as it has its answer; `words` a stream."""

    port: int
    clients: int = 8
    words: int = 20
    model: str = "m"
    host: str = "127.0.0.1"
    outcomes: list[Outcome] = attrs.field(factory=list)
    _over: bool = False

    @property
    def whole(self) -> int:
        return sum(each.how == "whole" for each in self.outcomes)

    @property
    def harmed(self) -> list[Outcome]:
        return [each for each in self.outcomes if each.how != "whole"]

    async def run(self) -> None:
        """Ask until `end`; each client ends with its present answer."""
        async with trio.open_nursery() as nursery:
            for _ in range(self.clients):
                nursery.start_soon(self._work)

    def end(self) -> None:
        self._over = True

    async def more(self, requests: int, within_s: float = 60.0) -> None:
        """Wait until so many more have ended."""
        goal = len(self.outcomes) + requests
        await until(lambda: len(self.outcomes) >= goal, f"{requests} more requests have ended", within_s)

    async def _work(self) -> None:
        while not self._over:
            try:
                client = Client(await trio.open_tcp_stream(self.host, self.port), within_s=60.0)
            except OSError as error:
                self.outcomes.append(Outcome("refused", detail=str(error)))
                await trio.sleep(0.05)
                continue
            try:
                self.outcomes.append(await self._ask(client))
            finally:
                await trio.aclose_forcefully(client.stream)
            if self.outcomes[-1].how != "whole":
                await trio.sleep(0.02)

    async def _ask(self, client: Client) -> Outcome:
        try:
            await client.send(chat(model=self.model, stream=True, max_tokens=self.words, ignore_eos=True))
            answer = await client.answer("POST")
        except BrokenOff as broken:
            events = _events(broken.args[0].body)
            if events and "error" in events[-1]:
                return Outcome("error event", _engine(events), json.dumps(events[-1]["error"]))
            return Outcome("broken", _engine(events), repr(broken.args[0]))
        except (OSError, trio.BrokenResourceError, trio.TooSlowError) as error:
            return Outcome("broken", detail=repr(error))
        events = _events(answer.body)
        if answer.status != 200:
            return Outcome("refused", detail=f"{answer.status} {answer.body.decode()}")
        said = sum(bool(choice["delta"].get("content")) for event in events for choice in event.get("choices", ()))
        if said == self.words and answer.body.endswith(b"data: [DONE]\n\n"):
            return Outcome("whole", _engine(events))
        return Outcome("broken", _engine(events), f"{said} words, then {answer.body[-200:]!r}")


def _events(body: bytes) -> list[dict[str, object]]:
    return [json.loads(line[6:]) for line in body.split(b"\n") if line.startswith(b"data: {") and line.endswith(b"}")]


def _engine(events: list[dict[str, object]]) -> str:
    return next((str(event["system_fingerprint"]) for event in events if event.get("system_fingerprint")), "")

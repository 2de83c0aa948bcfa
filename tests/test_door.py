"""The door's everyday: what goes through it, and that it goes through unchanged."""

from __future__ import annotations

from pathlib import Path

from tests.fake_engine import CHAT, DONE, event, fake_engine, says, streamed
from tests.raw_client import chat
from tests.routers import router


async def test_an_answer_comes_through(tmp_path: Path) -> None:
    async with fake_engine() as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat())
        assert answer.status == 200
        assert answer.json() == CHAT
        (asked,) = engine.asked
        assert asked.target == "/v1/chat/completions"


async def test_a_stream_comes_through(tmp_path: Path) -> None:
    async with fake_engine(says(*streamed(event("a"), event("b"), DONE))) as engine, router(tmp_path, engine) as door:
        answer = await door.ask(chat(stream=True))
        assert answer.status == 200
        assert answer.body == event("a") + event("b") + DONE

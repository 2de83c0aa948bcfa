"""One machine, one process: a real llama.cpp server is placed, serves, sleeps, is woken and drained."""

from __future__ import annotations

from pathlib import Path

import trio

from tests.agent_process import LLAMA_SERVER, chat, need_llama
from tests.cluster import cluster
from tests.engines.tiny_gguf import TinyModels

MODEL = """
[[models]]
name = "tiny"
scaling = {{ min_replicas = 0, idle_s = {idle_s} }}
[[models.profiles]]
name = "cpu"
engine = "llamacpp"
source = "{source}"
gpus_per_node = 0
context_tokens = 4096
[agent]
node = "box"
address = "127.0.0.1"
listen = "127.0.0.1:0"
gpus = {{ backend = "none" }}
executables = {{ llamacpp = "{server}" }}
llamacpp = {{ threads = 1 }}
"""


async def test_placed_served_asleep_woken_and_drained(tmp_path: Path, tiny_models: TinyModels) -> None:
    need_llama()
    async with cluster(tmp_path) as made:

        def models(idle_s: int) -> str:
            return MODEL.format(idle_s=idle_s, source=tiny_models.model, server=LLAMA_SERVER)

        made.configure(models(idle_s=2))
        await made.serve("--with-agent")
        assert await made.replicas("tiny") == [], "nobody has asked yet"
        door = f"http://{made.host}:{made.door_port}"
        said: list[str] = []

        async def ask() -> None:
            said.append(await trio.to_thread.run_sync(chat, door, "tiny"))

        # four at once, which all wait for the one that they wake
        async with trio.open_nursery() as nursery:
            for _ in range(4):
                nursery.start_soon(ask)
        (first,) = await made.ready("tiny")
        assert made.control.engines()

        # asleep once nobody has asked for a while; woken again as another replica
        await made.come(lambda: made.replicas("tiny"), lambda found: not found, "it sleeps")
        assert not made.control.engines()
        await ask()
        assert len(said) == 5 and set(said) == {said[0]} and said[0]
        await made.reload(models(idle_s=600), drain_grace_s=2)
        (second,) = await made.ready("tiny")
        assert second["id"] != first["id"]

        # there is no other node to move to: the end of the grace drains it
        await made.control.run("ctl", "drain", "box")
        assert not made.control.engines()

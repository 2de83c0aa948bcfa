"""A thousand people in one process: `python -m tests.stream_clients PORT STREAMS WORDS`.

Each opens one stream and reads it to its end. Prints how many were whole, and what was wrong with the first few that
were not; ends with 0. Killed, it takes all of them along at one instant, which is what it is for.
"""

from __future__ import annotations

import resource
import sys

import trio

from tests.raw_client import chat

AT_ONCE = 50
PAUSE_S = 0.03


async def read(port: int, words: int, wrong: list[str]) -> None:
    try:
        stream = await trio.open_tcp_stream("127.0.0.1", port)
        await stream.send_all(chat(model="m", stream=True, max_tokens=words, ignore_eos=True))
        tail, events = b"", 0
        async for data in stream:
            tail += data
            events += tail.count(b"\ndata: {")
            if tail.endswith(b"\r\n0\r\n\r\n"):
                break
            tail = tail[-2000:] if b"[DONE]" in tail else tail[-8:]
        if b"data: [DONE]" not in tail or events < words:
            wrong.append(f"{events} events, then {tail[-200:]!r}")
        await trio.aclose_forcefully(stream)
    except (OSError, trio.BrokenResourceError) as error:
        wrong.append(repr(error))


async def main(port: int, streams: int, words: int) -> None:
    wrong: list[str] = []
    async with trio.open_nursery() as nursery:
        for number in range(streams):
            nursery.start_soon(read, port, words, wrong)
            if number % AT_ONCE == 0:
                await trio.sleep(PAUSE_S)
    print(streams - len(wrong), *wrong[:5], sep="\n")


if __name__ == "__main__":
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    trio.run(main, *map(int, sys.argv[1:]))

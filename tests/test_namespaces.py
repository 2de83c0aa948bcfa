"""Machines that lose power: no FIN, no reset, only silence. What runs on them, or for them, ends within 30 s."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from appliance.wire.line import silent_s
from tests.engines import sim_engine
from tests.namespaces import Machine, machine
from tests.processes import until
from tests.raw_client import BrokenOff, Client, chat, request
from tests.serve_process import Router, endpoint, processes

NOTICED_S = 30.0
SPEED = ("--decode-tokens-per-second", "10")


@pytest.fixture
def far() -> Iterator[Machine]:
    with machine() as made:
        yield made


@pytest.fixture
def sim() -> Iterator[sim_engine.Router]:
    with sim_engine.running(*SPEED, model="near") as process:
        yield process


async def test_silence_is_noticed(tmp_path: Path, far: Machine, sim: sim_engine.Router) -> None:
    """An engine and some clients on one machine, whose cable is pulled in the middle of everything."""
    with far.sim(*SPEED, model="far") as lost:
        async with processes(tmp_path) as routers, trio.open_nursery() as nursery:
            routers.configure(
                endpoint("near", sim.url, ("near",)) + endpoint("far", lost.url, ("far",)), listen=f"{far.here}:0"
            )
            router = await routers.start()
            port = int(router.log[-1].partition(f"{far.here}:")[2].split()[0])
            long: dict[str, Any] = {"max_tokens": 5000, "ignore_eos": True}

            # clients here, whose engine goes: one streams and has words, one waits for a whole answer
            streaming, waiting = [Client(await trio.open_tcp_stream(far.here, port)) for _ in range(2)]
            await streaming.send(chat(model="far", stream=True, **long))
            await streaming.until(b"data: ")
            await waiting.send(chat(model="far", **long))
            # clients over there, whose engine stays: the same, and one that does nothing
            theirs = [far.connect(port) for _ in range(3)]
            theirs[0].sendall(chat(model="near", stream=True, **long))
            theirs[0].recv(100)
            theirs[1].sendall(chat(model="near", **long))
            theirs[2].sendall(request("GET", "/healthz"))
            theirs[2].recv(100)
            await until(lambda: _running(sim) == 2 and _running(lost) == 2, "all of it runs")
            assert (await _status(router))["connections"] == 5

            began = time.monotonic()
            took: dict[str, float] = {}
            far.pull_the_cable()

            async def note(what: str, end: Any) -> None:
                await end()
                took[what] = round(time.monotonic() - began, 1)

            async def stream_ends() -> None:
                rest, how = await _rest(streaming)
                event = json.loads(rest[rest.rindex(b"data: {") + 6 :].partition(b"\n")[0])
                assert event["error"]["code"] == "upstream_failed", event
                assert b"[DONE]" not in rest
                assert not rest.endswith(b"0\r\n\r\n"), f"looks complete, and ended {how}"

            async def answer_ends() -> None:
                status, body = await _answer(waiting)
                assert status == 502 and json.loads(body)["error"]["code"] == "upstream_failed", (status, body)

            async def engine_is_free() -> None:
                await until(lambda: _running(sim) == 0, "the engine works for nobody", NOTICED_S)

            async def connections_are_gone() -> None:
                with trio.fail_after(NOTICED_S):
                    # all but that of `waiting`, whose answer leaves it open
                    while (await _status(router))["connections"] > 1:  # noqa: ASYNC110 - another process brings it about
                        await trio.sleep(0.5)

            with trio.fail_after(NOTICED_S):
                async with trio.open_nursery() as noticing:
                    noticing.start_soon(note, "stream on a lost engine", stream_ends)
                    noticing.start_soon(note, "answer of a lost engine", answer_ends)
                    noticing.start_soon(note, "work for lost clients", engine_is_free)
                    noticing.start_soon(note, "connections of lost clients", connections_are_gone)
            print("noticed after", took)

            client = Client(await trio.open_tcp_stream(far.here, port))
            await client.send(chat(model="far"))
            answer = await client.answer("POST")
            assert answer.status in (502, 503, 504), "nobody is there, and that is said at once or after dial_s"
            status = await _status(router)
            assert status["requests"]["running"] == 0
            assert await router.stop() == 0
            for sock in theirs:
                sock.close()
            nursery.cancel_scope.cancel()


def _running(sim: sim_engine.Router) -> float:
    return sim.metrics()["vllm:num_requests_running"]


async def _status(router: Router) -> dict[str, Any]:
    client = Client(await trio.open_unix_socket(router.admin))
    await client.send(request("GET", "/status"))
    answer: dict[str, Any] = (await client.answer()).json()
    await client.close()
    return answer


async def _rest(client: Client) -> tuple[bytes, str]:
    """What comes until the end; longer than `Client.rest` waits."""
    while True:
        try:
            data = await client.stream.receive_some(65536)
        except trio.BrokenResourceError:
            return client.buffer, "reset"
        if not data:
            return client.buffer, "closed"
        client.buffer += data


async def _answer(client: Client) -> tuple[int, bytes]:
    data = b""
    while b"\r\n\r\n" not in data or not data.endswith(b"}"):
        piece = await client.stream.receive_some(65536)
        if not piece:
            raise BrokenOff(data)
        data += piece
    return int(data.split(b" ", 2)[1]), data.partition(b"\r\n\r\n")[2]


async def test_a_living_client_that_takes_nothing_is_not_lost() -> None:
    """Its window is closed: nothing is on its way, so nothing is acknowledged, for as long as it likes."""
    with (
        socket.create_server(("127.0.0.1", 0)) as listener,
        socket.create_connection(listener.getsockname()),
        listener.accept()[0] as sock,
    ):
        assert silent_s(sock) < 5
        sock.setblocking(False)
        with pytest.raises(BlockingIOError):
            while True:
                sock.send(bytes(65536))
        await trio.sleep(0.05)
        assert silent_s(sock) == 0.0
    assert silent_s(sock) == 0.0, "a closed one neither"
    near, far = socket.socketpair()
    assert silent_s(near) == 0.0
    near.close()
    far.close()

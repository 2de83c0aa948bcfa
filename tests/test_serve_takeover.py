"""A router replaced while 64 people ask without a pause: nobody notices."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest
import trio

from appliance.admin.handover import HandOver, Offer
from appliance.admin.sockets import Peer
from appliance.facts.errors import Refusal
from tests.engines import sim_engine
from tests.processes import until
from tests.raw_client import Client, request
from tests.serve_load import Load, LongStream
from tests.serve_process import Router, endpoint, processes

SPEED = ("--decode-tokens-per-second", "20", "--max-num-seqs", "512")


@pytest.fixture(scope="module")
def sim() -> Iterator[sim_engine.Router]:
    with sim_engine.running(*SPEED) as process:
        yield process


def ready(router: Router) -> bool:
    try:
        with urlopen(f"http://127.0.0.1:{router.metrics}/readyz", timeout=5) as answer:
            return bool(answer.status == 200)
    except HTTPError:
        return False


@asynccontextmanager
async def under_load(port: int) -> AsyncIterator[Load]:
    """64 connections' worth of requests beside the block; at its end all of them must have been answered."""
    load = Load(port)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(load.run)
        await load.more(100)
        yield load
        load.end()
    print(f"{load.done} requests on {load.fresh} connections, {len(load.failures)} failed")
    assert load.failures == []
    assert load.fresh > 100


async def test_a_takeover_loses_nothing(tmp_path: Path, sim: sim_engine.Router) -> None:
    """Three in a row, with a stream that is finished where it began, however short `drain_s` is."""
    async with processes(tmp_path) as routers, trio.open_nursery() as nursery:
        routers.configure(endpoint("a", sim.url, models=None), drain_s=0.1)
        router = await routers.start()
        await until(lambda: ready(router), "the endpoint has said what it serves")
        first, (port, metrics) = router, (router.door, router.metrics)
        stream = LongStream(port, 200)
        nursery.start_soon(stream.run)
        await stream.begun.wait()
        async with under_load(port) as load:
            for _ in range(3):
                before, router = router, await routers.start("--takeover")
                await router.logged(f'event="took over" pid={before.pid}')
                assert (router.door, router.metrics) == (port, metrics)
                await load.more(150)
                if before is not first:
                    assert await before.ended() == 0
                elif stream.answer is None:
                    assert first.popen.poll() is None, "it still has the long stream"
        assert await first.ended() == 0
        assert stream.complete
        assert routers.lock.read_text() == f"{router.pid}\n"
        assert await router.stop() == 0
        assert not router.admin.exists()


async def test_a_supervisor_restarts_it_without_a_loss(tmp_path: Path, sim: sim_engine.Router) -> None:
    """As a socket unit does: the sockets stay open in the parent, where connections wait meanwhile."""
    async with processes(tmp_path) as routers:
        routers.configure(endpoint("a", sim.url, models=None), listen="127.0.0.1:1", drain_s=10)
        with (
            socket.create_server(("127.0.0.1", 0), backlog=512) as door,
            socket.create_server(("127.0.0.1", 0)) as more,
        ):
            passed = (door.fileno(), more.fileno())
            names = {"LISTEN_FDNAMES": "door:metrics"}
            router = await routers.start(passed=passed, env=names)
            assert (router.door, router.metrics) == (door.getsockname()[1], more.getsockname()[1])
            async with under_load(router.door) as load:
                for _ in range(2):
                    assert await router.stop() == 0
                    router = await routers.start(passed=passed, env=names)
                    await load.more(150)
            assert "--takeover" in (await routers.refused("--takeover", passed=passed))[-1]
            assert "must restart it too (systemctl restart)" in (await routers.refused("--takeover"))[-1]
            assert await router.stop() == 0


async def test_a_router_that_is_replaced_says_ready_until_its_end(tmp_path: Path, sim: sim_engine.Router) -> None:
    """A balancer that keeps a connection for its checks must not take the address out. And its last requests get the
    bound of a stop as soon as somebody asks for one."""
    async with processes(tmp_path) as routers, trio.open_nursery() as nursery:
        routers.configure(endpoint("a", sim.url), drain_s=0.2)
        old = await routers.start()
        stream = LongStream(old.door, 1000)
        nursery.start_soon(stream.run)
        await stream.begun.wait()
        checks = Client(await trio.open_tcp_stream("127.0.0.1", old.door))
        new = await routers.start("--takeover")
        await checks.send(request("GET", "/readyz"))
        answer = await checks.answer()
        assert (answer.status, answer.closes) == (200, True)
        old.send(signal.SIGTERM)
        assert await old.ended() == 0
        await until(lambda: stream.error, "its last stream was cut")
        assert await new.stop() == 0


async def test_nobody_to_take_over_from(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("")
        (line,) = await routers.refused("--takeover")
        assert f"no router runs here (nobody listens at {tmp_path}/appliance-run/admin.sock)" in line
        assert "start this one without --takeover" in line
        assert not routers.lock.exists(), "nothing was touched"


async def test_the_running_router_has_another_admin_socket(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("", admin_socket=f"{tmp_path}/here.sock")
        router = await routers.start()
        routers.configure("", admin_socket=f"{tmp_path}/there.sock")
        (line,) = await routers.refused("--takeover")
        assert f"nobody listens at {tmp_path}/there.sock, but pid {router.pid} owns" in line
        assert await router.stop() == 0


async def test_a_stuck_router_is_named(tmp_path: Path) -> None:
    """And goes on as if nothing had been asked, should it come back."""
    async with processes(tmp_path) as routers:
        routers.configure("")
        router = await routers.start()
        router.send(signal.SIGSTOP)
        (line,) = await routers.refused("--takeover")
        assert f"pid {router.pid} does not answer within 5 s" in line
        assert f"kill -KILL {router.pid}" in line and "without --takeover" in line
        router.send(signal.SIGCONT)
        client = Client(await trio.open_tcp_stream("127.0.0.1", router.door))
        await client.send(request("GET", "/healthz"))
        assert (await client.answer()).json()["status"] == "ok"
        assert await (await routers.start("--takeover")).stop() == 0
        assert await router.ended() == 0


async def test_a_takeover_that_fails_changes_nothing(tmp_path: Path, sim: sim_engine.Router) -> None:
    """A port in use, found only after the sockets were passed; then a process killed in the middle of it."""
    async with processes(tmp_path) as routers:
        routers.configure(endpoint("a", sim.url))
        router = await routers.start()
        with socket.create_server(("127.0.0.1", 0)) as holder:
            taken = f"127.0.0.1:{holder.getsockname()[1]}"
            (line,) = await routers.refused("--takeover", "--listen", "127.0.0.1:0", "--listen", taken)
            assert line.startswith(f"appliance serve: server.listen: {taken} is in use by another process")
        async with under_load(router.door):
            # an endpoint that is asked for its models and does not answer: the takeover waits for it, and is killed
            with socket.create_server(("127.0.0.1", 0)) as silent:
                url = f"http://127.0.0.1:{silent.getsockname()[1]}"
                routers.configure(endpoint("a", sim.url) + endpoint("b", url, models=None))
                taking = routers.begin("--takeover")
                asked, _ = await trio.to_thread.run_sync(silent.accept)
                (line,) = await routers.refused("--takeover")
                assert "another process is taking over from this router at this moment" in line
                taking.send(signal.SIGKILL)
                await taking.ended()
                asked.close()
        assert routers.lock.read_text() == f"{router.pid}\n"
        routers.configure(endpoint("a", sim.url))
        new = await routers.start("--takeover")
        assert await router.ended() == 0
        assert await new.stop() == 0


async def test_a_takeover_may_move_the_door(tmp_path: Path) -> None:
    """What the new configuration wants and the old one had goes over, the rest is opened and closed."""
    async with processes(tmp_path) as routers:
        routers.configure("", listen=["127.0.0.1:0", "127.0.0.2:0"])
        old = await routers.start()
        kept = old.door
        routers.configure("", listen=[f"127.0.0.1:{kept}", "127.0.0.3:0"])
        new = await routers.start("--takeover")
        assert await old.ended() == 0
        assert new.door == kept
        gone = int(old.log[0].partition("127.0.0.2:")[2].split()[0])
        with pytest.raises(OSError, match="all attempts to connect"):
            await trio.open_tcp_stream("127.0.0.2", gone)
        assert "http://127.0.0.3:" in new.log[0]
        assert await new.stop() == 0


async def test_only_its_own_user_takes_over(tmp_path: Path) -> None:
    """Whoever may use the admin socket (its group) may not run the router as themselves."""
    if os.geteuid() != 0:
        pytest.skip("needs root, to become somebody else")

    def never() -> Offer:
        raise AssertionError("asked")

    async def nothing() -> dict[str, Any]:
        raise AssertionError("told")

    handover = HandOver(never, nothing)
    with pytest.raises(Refusal, match="only root and the user with uid 0"):
        await handover.answer(_Head(), Peer(1, 12345, 0), _Reply())  # type: ignore[arg-type]


class _Head:
    method = b"POST"
    path = b"/takeover"


class _Reply:
    line = object()

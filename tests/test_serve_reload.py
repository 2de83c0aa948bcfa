"""SIGHUP while 64 people ask without a pause, over TLS: what can change changes, and no request fails."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import trio

from tests.engines import sim_engine
from tests.processes import until
from tests.raw_client import Client, request
from tests.serve_certificates import Certificate, believing, make
from tests.serve_load import Load, LongStream
from tests.serve_process import Router, endpoint, processes


@pytest.fixture(scope="module")
def sims() -> Iterator[list[sim_engine.Router]]:
    speed = ("--decode-tokens-per-second", "10", "--max-num-seqs", "512")
    with ExitStack() as stack:
        yield [stack.enter_context(sim_engine.running(*speed)) for _ in range(2)]


def model(*aliases: str) -> str:
    quoted = ", ".join(f'"{alias}"' for alias in aliases)
    return f'[[models]]\nname = "m"\naliases = [{quoted}]\n'


async def reload(router: Router, said: str, times: int) -> str:
    router.send(signal.SIGHUP)
    return await router.logged(said, times)


async def test_reloads_under_load_fail_no_request(tmp_path: Path, sims: list[sim_engine.Router]) -> None:
    certificates = [make(tmp_path, name) for name in ("first", "second")]
    taken = 'event="configuration reloaded"'
    a, b = (endpoint(name, sim.url) for name, sim in zip("ab", sims, strict=True))
    async with processes(tmp_path) as routers, trio.open_nursery() as nursery:

        def configure(rest: str, certificate: Certificate, **more: object) -> None:
            routers.configure(rest, tls_cert=certificate.cert, tls_key=certificate.key, **more)

        first, second = certificates
        configure(a + model(), first)
        router = await routers.start()
        load = Load(router.door, context=believing(certificates))
        nursery.start_soon(load.run)
        await load.more(100)
        assert set(load.certificates) == {first.der}

        configure(a + b + model("chat"), first)  # an endpoint and an alias come
        line = await reload(router, taken, 1)
        assert "endpoints.b" in line and "models.m.aliases" in line
        load.model = "chat"
        await until(lambda: sims[1].metrics()["vllm:num_requests_running"], "the new endpoint is used")

        configure(b + model("chat"), first)  # an endpoint goes, with requests running on it
        assert sims[0].metrics()["vllm:num_requests_running"]
        assert "endpoints.a" in await reload(router, taken, 2)
        await load.more(100)
        assert sims[0].metrics()["vllm:num_requests_running"] == 0

        configure(a + b + model("chat"), second)  # another certificate, and it is back
        await reload(router, taken, 3)
        shown = len(load.certificates)
        await load.more(300)
        assert set(load.certificates[shown + load.connections :]) == {second.der}

        for broken in (  # faults of every kind: nothing changes, and each is told
            ("[[endpoints]\n", "expected TOML"),
            (a + a + model("chat"), "endpoints[1].id"),
            (a + b + model("m"), "shadows the model of that name"),
        ):
            configure(broken[0], second)
            router.send(signal.SIGHUP)
            assert "the old one goes on" in await router.logged(broken[1])
        routers.config.unlink()
        assert "level=error" in await reload(router, "the old one goes on", 4)
        first.key.write_text("garbage")
        configure(a + b + model("chat"), first)
        assert "server.tls_key" in await reload(router, "the old one goes on", 5)
        shown = len(load.certificates)
        await load.more(100)
        assert set(load.certificates[shown:]) == {second.der}

        configure(a + b + model("chat", "talk"), second, listen="127.0.0.1:0", metrics_listen="127.0.0.1:9")
        await reload(router, taken, 4)
        assert "server.metrics_listen" in await router.logged("some changes need a restart")
        load.model = "talk"
        await load.more(100)

        for number in range(10):  # in quick succession, each taking something away and giving it back
            configure((a if number % 2 else a + b) + model("chat", "talk"), certificates[1])
            await reload(router, taken, 5 + number)
        await load.more(300)
        load.end()
        await until(lambda: nursery.child_tasks == frozenset(), "all have their answers")
        assert load.failures == []
        print(f"{load.done} requests on {load.fresh} TLS connections over 14 reloads, {len(load.failures)} failed")
        assert not [line for line in router.log if "Traceback" in line]
        assert await router.stop() == 0


async def test_a_stream_on_an_endpoint_that_goes_is_finished(tmp_path: Path, sims: list[sim_engine.Router]) -> None:
    """Both where the endpoint is taken out, and where only its settings change (its connections are then renewed)."""
    async with processes(tmp_path) as routers, trio.open_nursery() as nursery:
        routers.configure(endpoint("a", sims[0].url))
        router = await routers.start()
        streams = [LongStream(router.door, 40) for _ in range(3)]
        for stream in streams:
            nursery.start_soon(stream.run)
            await stream.begun.wait()
        routers.configure(endpoint("a", sims[0].url) + "capacity = 7\n")
        assert "endpoints.a.capacity" in await reload(router, 'event="configuration reloaded"', 1)
        routers.configure(endpoint("b", sims[1].url))
        await reload(router, 'event="configuration reloaded"', 2)
        await until(lambda: nursery.child_tasks == frozenset(), "the streams are over")
        assert [stream.complete for stream in streams] == [True] * 3
        assert await router.stop() == 0


async def test_reload_leaves_alone_what_did_not_change(tmp_path: Path, sims: list[sim_engine.Router]) -> None:
    """A fault is told once: an endpoint that is away is not told again by each reload. And the router's own page of
    models stays as it was."""
    async with processes(tmp_path) as routers:
        routers.configure(endpoint("a", sims[0].url) + endpoint("gone", "http://127.0.0.1:1", models=None))
        router = await routers.start()
        told = "endpoint does not list its models"
        await router.logged(told)
        for number in range(3):
            routers.configure(
                endpoint("a", sims[0].url) + endpoint("gone", "http://127.0.0.1:1", models=None) + model(f"x{number}")
            )
            await reload(router, 'event="configuration reloaded"', number + 1)
            await _listed(router, {"m", f"x{number}"})
        assert len([line for line in router.log if told in line]) == 1
        assert await router.stop() == 0


async def _listed(router: Router, names: set[str]) -> None:
    client = Client(await trio.open_tcp_stream("127.0.0.1", router.door))
    await client.send(request("GET", "/v1/models"))
    assert {entry["id"] for entry in (await client.answer()).json()["data"]} == names
    await client.close()


def test_nothing_of_these_is_left_over(sims: list[sim_engine.Router]) -> None:
    """The last one here: whatever was reloaded meanwhile, no engine holds anything for anybody."""
    for sim in sims:
        metrics = sim.metrics()
        assert metrics["vllm:num_requests_running"] == metrics["vllm:num_requests_waiting"] == 0
        assert metrics["vllm:kv_cache_usage_perc"] == 0

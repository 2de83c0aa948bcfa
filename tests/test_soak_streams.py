"""1,000 streams at one instant over three engines: all complete, and a hang-up of all of them frees everything."""

from __future__ import annotations

import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from urllib.request import urlopen

import pytest

from tests.engines import sim_engine
from tests.processes import until
from tests.serve_process import Router, endpoint, processes

STREAMS = 1000
WORDS, WORDS_PER_S = 48, 4
LONG = 400
"""Words of a stream that is killed: it must not end by itself before that, however slow the machine is."""


@pytest.fixture(scope="module")
def sims() -> Iterator[list[sim_engine.Router]]:
    flags = ("--decode-tokens-per-second", str(WORDS_PER_S), "--max-num-seqs", "512", "--kv-blocks", "65536")
    with ExitStack() as stack:
        yield [stack.enter_context(sim_engine.running(*flags)) for _ in range(3)]


def summed(sims: list[sim_engine.Router]) -> dict[str, float]:
    """Running, waiting and KV use over all sims."""
    read = [sim.metrics() for sim in sims]
    names = {"running": "num_requests_running", "waiting": "num_requests_waiting", "kv": "kv_cache_usage_perc"}
    return {name: sum(each[f"vllm:{metric}"] for each in read) for name, metric in names.items()}


def gauges(router: Router) -> dict[str, float]:
    """Every gauge of ours that counts what is under way."""
    with urlopen(f"http://127.0.0.1:{router.metrics}/metrics", timeout=10) as answer:
        read = sim_engine.read_metrics(answer.read().decode())
    names = ("appliance_endpoint_inflight", "appliance_requests_running", "appliance_queue_depth")
    return {name.removeprefix("appliance_"): read[name] for name in names}


ALL_FREE = {"running": 0, "waiting": 0, "kv": 0}
NONE_LEFT = {"endpoint_inflight": 0, "requests_running": 0, "queue_depth": 0}


async def test_a_thousand_streams(tmp_path: Path, sims: list[sim_engine.Router]) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("".join(endpoint(f"s{number}", sim.url) for number, sim in enumerate(sims)))
        router = await routers.start()

        clients = begin(router, WORDS)
        try:
            await until(lambda: summed(sims)["running"] == STREAMS, "all streams run at one instant")
            assert gauges(router)["requests_running"] == gauges(router)["endpoint_inflight"] == STREAMS
            await until(lambda: clients.poll() is not None, "all streams have ended", 60)
            assert clients.stdout is not None
            assert clients.stdout.read().split("\n", 1) == [str(STREAMS), ""]
            await until(lambda: summed(sims) == ALL_FREE, "the engines are free")
            assert gauges(router) == NONE_LEFT

            clients = begin(router, LONG)
            await until(lambda: summed(sims)["running"] == STREAMS, "all streams run at one instant")
            assert gauges(router)["requests_running"] == gauges(router)["endpoint_inflight"] == STREAMS
            clients.kill()
            began = time.monotonic()
            await until(lambda: summed(sims) == ALL_FREE, "every block of every engine is free")
            took_s = time.monotonic() - began
            await until(lambda: gauges(router) == NONE_LEFT, "every gauge of ours reads 0")
            print(f"{STREAMS} streams ran and ended; killed, they were gone from the engines after {took_s:.1f} s")
        finally:
            clients.kill()
            clients.wait()
        assert await router.stop() == 0


def begin(router: Router, words: int) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.stream_clients", str(router.door), str(STREAMS), str(words)]
    root = Path(__file__).parent.parent
    return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=root, start_new_session=True)

"""A thousand streams in one sim: all of them complete, and nothing is held once all their clients have left."""

from __future__ import annotations

import contextlib
import json
import resource
import select
import socket
import time
from collections.abc import Callable, Iterator

import pytest

from tests.engines.sim_engine import Process, running

STREAMS = 1000
WORDS = 30
AT_MOST_S = 60.0


@pytest.fixture(scope="module")
def sim() -> Iterator[Process]:
    """20 words a second for each of 1,000, and room for them all."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    if most < 2 * STREAMS:
        pytest.skip(f"this machine allows {most} open files")
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    flags = ["--decode-tokens-per-second", "20", "--max-num-seqs", str(STREAMS), "--kv-blocks", "300000"]
    with running(*flags) as process:
        yield process


class Crowd:
    """Many clients in one loop; `tails` holds the last bytes each has seen."""

    def __init__(self, url: str, count: int, words: int) -> None:
        host, port = url.removeprefix("http://").split(":")
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": words, "ignore_eos": True}).encode()
        head = b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n" % len(body)
        self.epoll = select.epoll()
        self.sockets: dict[int, socket.socket] = {}
        self.tails: dict[int, bytes] = {}
        self.events = 0
        for _ in range(count):
            sock = socket.create_connection((host, int(port)), timeout=AT_MOST_S)
            sock.sendall(head + body)
            sock.setblocking(False)
            self.epoll.register(sock, select.EPOLLIN)
            self.sockets[sock.fileno()] = sock
            self.tails[sock.fileno()] = b""

    def read_until(self, ready: Callable[[Crowd], bool]) -> None:
        """Read what comes until `ready(self)`; fails after `AT_MOST_S`."""
        end = time.monotonic() + AT_MOST_S
        while not ready(self):
            assert time.monotonic() < end, f"{self.finished} of {len(self.sockets)} finished, {self.events} events"
            for number, _ in self.epoll.poll(0.1):
                data = self.sockets[number].recv(1 << 20)
                if not data:
                    self.epoll.unregister(number)
                self.events += data.count(b"data: ")
                self.tails[number] = (self.tails[number] + data)[-40:]

    @property
    def finished(self) -> int:
        return sum(tail.endswith(b"data: [DONE]\n\n\r\n0\r\n\r\n") for tail in self.tails.values())

    def leave(self) -> None:
        for sock in self.sockets.values():
            sock.close()
        self.epoll.close()


@contextlib.contextmanager
def crowd_of(sim: Process, words: int) -> Iterator[Crowd]:
    crowd = Crowd(sim.url, STREAMS, words)
    try:
        yield crowd
    finally:
        crowd.leave()


def test_a_thousand_streams_complete(sim: Process) -> None:
    made = sim.metrics()["vllm:generation_tokens_total"]
    with crowd_of(sim, WORDS) as crowd:
        crowd.read_until(lambda crowd: crowd.finished == STREAMS)
        assert crowd.events == STREAMS * (WORDS + 2)  # each with its closing event and its end
        metrics = sim.metrics()
    assert metrics["vllm:generation_tokens_total"] == made + STREAMS * WORDS
    assert metrics["vllm:num_requests_running"] == metrics["vllm:kv_cache_usage_perc"] == 0


def test_a_thousand_clients_that_leave_at_once_leave_nothing_behind(sim: Process) -> None:
    ended = sim.metrics()["vllm:request_success_total"]
    with crowd_of(sim, words=4000) as crowd:  # minutes of it: nobody finishes
        crowd.read_until(lambda crowd: all(crowd.tails.values()))  # each has begun
        metrics = sim.metrics()
        assert metrics["vllm:num_requests_running"] == STREAMS
        assert metrics["vllm:kv_cache_usage_perc"] > 0
    end = time.monotonic() + AT_MOST_S
    while (metrics := sim.metrics())["vllm:num_requests_running"]:
        assert time.monotonic() < end
    assert metrics["vllm:kv_cache_usage_perc"] == metrics["vllm:num_requests_waiting"] == 0
    assert metrics["vllm:request_success_total"] == ended + STREAMS

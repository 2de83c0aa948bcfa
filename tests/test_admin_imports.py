"""What a router carries in memory before and after somebody administers it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.processes import environment

PROGRAM = """
import json, os, socket, sys, trio
from http.client import HTTPConnection
from appliance.cli.config import load
from appliance.cli.router import Router

def read():
    return load(None, os.environ)

def ask(sock, path):
    connection = HTTPConnection("x", timeout=20)
    connection.sock = sock
    connection.request("GET", path)
    assert connection.getresponse().status == 200
    connection.close()
    return sorted({name.partition(".")[0] for name in sys.modules})

def at_door(path):
    host, _, port = router.urls[0].removeprefix("http://").rpartition(":")
    return ask(socket.create_connection((host, int(port))), path)

def at_metrics(path):
    host, _, port = router.operations.metrics[0].rpartition(":")
    return ask(socket.create_connection((host, int(port))), path)

def at_admin(path):
    sock = socket.socket(socket.AF_UNIX)
    sock.connect(router.settings.server.admin_socket)
    return ask(sock, path)

async def ask_all():
    seen = {}
    for name, question, path in (
        ("door", at_door, "/healthz"), ("ready", at_metrics, "/healthz"),
        ("scraped", at_metrics, "/metrics"), ("administered", at_admin, "/status"),
    ):
        seen[name] = await trio.to_thread.run_sync(question, path)
    print(json.dumps(seen))
    router.begin_stop()

async def main():
    async with trio.open_nursery() as nursery:
        nursery.start_soon(router.run)
        while not router.operations.metrics or not router.urls:
            await trio.sleep(0.01)
        await trio.sleep(0.05)
        nursery.start_soon(ask_all)

router = Router(read(), read)
trio.run(main)
"""
API = {"quart", "quart_trio", "hypercorn", "werkzeug", "jinja2", "h11"}
NEVER = {"httpx", "sqlite3", "cryptography", "argon2", "opentelemetry", "trio_websocket", "mcp"}


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory) -> dict[str, set[str]]:
    folder: Path = tmp_path_factory.mktemp("imports")
    (folder / "appliance.toml").write_text('[server]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\n')
    done = subprocess.run(
        (sys.executable, "-c", PROGRAM), capture_output=True, text=True, timeout=60, env=environment(folder), check=True
    )
    return {name: set(modules) for name, modules in json.loads(done.stdout).items()}


def test_an_idle_router_that_nobody_administers_has_no_pages_in_memory(seen: dict[str, set[str]]) -> None:
    assert not seen["door"] & (API | NEVER | {"prometheus_client"})
    assert not seen["ready"] & (API | {"prometheus_client"})


def test_a_scrape_brings_the_metrics_alone(seen: dict[str, set[str]]) -> None:
    assert "prometheus_client" in seen["scraped"]
    assert not seen["scraped"] & (API | NEVER)


def test_the_first_question_brings_the_management_api(seen: dict[str, set[str]]) -> None:
    assert seen["administered"] >= API
    assert not seen["administered"] & (NEVER - {"cryptography"})

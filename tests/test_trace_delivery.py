"""Delivery: a collector that is dead, slow or in a bad mood costs no request anything."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import trio.testing
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli.config import Loaded, load
from appliance.cli.router import Router
from appliance.cli.startfailed import StartFailed
from appliance.gateway import trace
from appliance.gateway.otlp import collector_of, header_lines
from tests.collector import collector, rejecting
from tests.fake_engine import fake_engine, whole
from tests.raw_client import chat
from tests.routers import Running, router

FAILING, BACK = "spans cannot be delivered, requests go on", "spans are delivered again"


@pytest.fixture(autouse=True)
def at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches leave, and are tried again, without a pause."""
    monkeypatch.setattr("appliance.gateway.trace.FLUSH_S", 0.001)
    monkeypatch.setattr("appliance.gateway.otlp.FIRST_PAUSE_S", 0.001)
    monkeypatch.setattr("appliance.gateway.otlp.MOST_PAUSE_S", 0.01)


def tracing(port: int) -> str:
    return f'[tracing]\nendpoint = "http://127.0.0.1:{port}"\n'


async def ask(door: Running, *request_ids: str) -> None:
    for request_id in request_ids:
        assert (await door.ask(chat(f"x-request-id: {request_id}"))).status == 200


def dropped(door: Running) -> int:
    return door.app.gateway.meters.trace_dropped


def unused_port() -> socket.socket:
    """A port of the kernel's choice at which nobody listens while the socket is open."""
    held = socket.socket()
    held.bind(("127.0.0.1", 0))
    return held


async def test_a_dead_collector_costs_nothing_and_holds_no_more_than_its_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(trace, "MOST_WAITING", 20)
    monkeypatch.setattr(trace, "BATCH", 5)
    monkeypatch.setattr(trace, "FLUSH_S", 3600.0)  # none leaves before it is full
    held = unused_port()
    port = held.getsockname()[1]
    async with fake_engine() as engine, router(tmp_path, engine, config=tracing(port)) as door:
        await ask(door, *(f"r{number}" for number in range(60)))
        await door.until("it is told", lambda: door.told(FAILING))
        exporter = door.app.exporter
        assert exporter is not None
        assert len(exporter.tracer._waiting) == 20
        # each record is four spans, and one batch is under way
        assert dropped(door) == 4 * (60 - 20 - 5)
        (line,) = door.told(FAILING)
        assert line["level"] == "warning"
        assert line["collector"] == f"http://127.0.0.1:{port}"
        assert "cannot connect" in line["reason"]
        page = await door.ask(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n", port=door.metrics)
        assert f"appliance_trace_dropped_total {float(dropped(door))}" in page.body.decode()
        held.close()
        async with collector(port) as to:
            await door.until("what waited arrives", lambda: to.trace_of("r59"))
            assert len(door.told(FAILING)) == 1
            assert [line["level"] for line in door.told(BACK)] == ["info"]
            arrived = {span.about["appliance.request_id"] for span in to.spans if "http.route" in span.about}
            assert {f"r{number}" for number in range(40, 60)} <= arrived
            assert len(arrived) == 25
            monkeypatch.setattr(trace, "FLUSH_S", 0.001)
            await ask(door, "after")
            await door.until("and what comes now", lambda: to.trace_of("after"))
            assert len(door.told(FAILING)) == len(door.told(BACK)) == 1


async def test_a_silent_collector_holds_up_nobody(tmp_path: Path) -> None:
    async with fake_engine() as engine, collector() as to:
        to.says = "silent"
        async with router(tmp_path, engine, config=tracing(to.port)) as door:
            await ask(door, "first")
            await door.until("the delivery hangs", lambda: to.asked)
            await ask(door, *(f"r{number}" for number in range(20)))
            assert not door.told(FAILING)
            door.later(11)
            await door.until("it is told", lambda: door.told(FAILING))
            assert door.told(FAILING)[0]["reason"] == "no answer within 10 s"
            to.says = whole(200, b"")
            door.later(11)  # a second try may have begun meanwhile
            await door.until("all of it arrives", lambda: to.trace_of("r19"))
            assert to.trace_of("first")
            assert dropped(door) == 0


@pytest.mark.parametrize("status", [429, 502, 503, 504])
async def test_a_busy_collector_is_asked_again(tmp_path: Path, status: int) -> None:
    async with fake_engine() as engine, collector() as to:
        to.says = whole(status, b"")
        async with router(tmp_path, engine, config=tracing(to.port)) as door:
            await ask(door, "first")
            await door.until("it was asked again", lambda: len(to.asked) > 2)
            to.says = whole(200, b"")
            await door.until("it arrives", lambda: to.trace_of("first"))
            assert {asked.body for asked in to.asked} == {to.asked[0].body}
            assert door.told(FAILING)[0]["reason"] == f"it answers {status}"
            await door.until("the end of it is told", lambda: door.told(BACK))
            assert dropped(door) == 0


async def test_a_batch_that_no_try_will_help_is_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with fake_engine() as engine, collector() as to:
        to.says = whole(404, b"not here")
        async with router(tmp_path, engine, config=tracing(to.port)) as door:
            await ask(door, "first")
            await door.until("it is counted", lambda: dropped(door) == 4)
            assert len(to.asked) == 1
            assert "404" in door.told(FAILING)[0]["reason"]
            # one that is refused for too long gives way too
            to.says = whole(503, b"")
            monkeypatch.setattr("appliance.gateway.otlp.GIVE_UP_S", 0.0)
            await ask(door, "second")
            await door.until("it is counted", lambda: dropped(door) == 8)
            assert len(to.asked) == 2
            assert len(door.told(FAILING)) == 1


async def test_what_a_collector_rejects_is_counted_and_not_sent_again(tmp_path: Path) -> None:
    async with fake_engine() as engine, collector() as to:
        to.says = rejecting(2)
        async with router(tmp_path, engine, config=tracing(to.port)) as door:
            await ask(door, "first")
            await door.until("it is told", lambda: door.told(FAILING))
            assert door.told(FAILING)[0]["reason"] == "it rejected 2 of the spans"
            assert dropped(door) == 2
            to.says = whole(200, b"{}", "content-type: application/json")
            await ask(door, "second")
            await door.until("it is over", lambda: door.told(BACK))
            assert len(to.asked) == 2


async def test_a_connection_that_the_collector_closed_is_no_trouble(tmp_path: Path) -> None:
    async with fake_engine() as engine, collector() as to, router(tmp_path, engine, config=tracing(to.port)) as door:
        await ask(door, "first")
        await door.until("it arrives", lambda: to.trace_of("first"))
        to.closes = 1  # it hung up in the moment before the next delivery
        await ask(door, "second")
        await door.until("it arrives", lambda: to.trace_of("second"))
        assert not door.told(FAILING)
        assert len(to.asked) == 3


async def test_a_stop_delivers_what_is_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.gateway.trace.FLUSH_S", 3600.0)
    async with fake_engine() as engine, collector() as to, router(tmp_path, engine, config=tracing(to.port)) as door:
        await ask(door, "last")
        await trio.testing.wait_all_tasks_blocked(0.01)
        assert not to.asked
        door.app.begin_stop()
        await door.until("it has stopped", lambda: door.told("stopped"))
        assert to.trace_of("last")


async def test_a_stop_waits_for_no_dead_collector(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "BATCH", 1)
    for name in ("FIRST_PAUSE_S", "LAST_S", "GIVE_UP_S"):
        monkeypatch.setattr(f"appliance.gateway.otlp.{name}", 3600.0)
    async with fake_engine() as engine, collector() as to:
        to.says = whole(503, b"")
        async with router(tmp_path, engine, config=tracing(to.port)) as door:
            await ask(door, "first", "second", "third")
            await door.until("the first delivery fails", lambda: door.told(FAILING))
            door.app.begin_stop()
            await door.until("it has stopped", lambda: door.told("stopped"))
            assert len(to.asked) == 2  # once more with what was under way, and not with everything that waits
            assert dropped(door) == 12


async def test_a_stop_waits_for_a_silent_collector_within_a_bound(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("appliance.gateway.otlp.LAST_S", 0.01)
    monkeypatch.setattr("appliance.gateway.otlp.WITHIN_S", 3600.0)
    async with fake_engine() as engine, collector() as to:
        to.says = "silent"
        async with router(tmp_path, engine, config=tracing(to.port)) as door:
            await ask(door, "first")
            await door.until("the delivery hangs", lambda: to.asked)
            door.app.begin_stop()
            await door.until("it has stopped", lambda: door.told("stopped"))


async def test_the_requests_of_a_delivery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20hush, x-scope = one")
    async with fake_engine() as engine, collector() as to:
        config = f'[tracing]\nendpoint = "{to.url}/otlp/v1/traces"\n'
        async with router(tmp_path, engine, config=config) as door:
            await ask(door, "first")
            await door.until("it arrives", lambda: to.trace_of("first"))
            (asked,) = to.asked
            assert (asked.method, asked.target) == ("POST", "/otlp/v1/traces")
            assert asked.by_name["content-type"] == "application/x-protobuf"
            assert asked.by_name["authorization"] == "Bearer hush"
            assert asked.by_name["x-scope"] == "one"
            assert "hush" not in json.dumps(door.log)
            assert "authorization" not in engine.asked[0].by_name


@pytest.mark.parametrize(
    ("url", "shown", "line"),
    [
        ("http://c", "http://c:80", b""),
        ("https://c", "https://c:443", b""),
        ("http://[::1]:4318/", "http://[::1]:4318", b""),
        ("http://c:4318/v1/traces", "http://c:4318", b""),
        ("https://c:4318/otlp/v1/traces/", "https://c:4318/otlp", b""),
        ("https://me:hun%3Ater2@c:4318", "https://c:4318", b"authorization: Basic bWU6aHVuOnRlcjI=\r\n"),
        ("https://me@c", "https://c:443", b"authorization: Basic bWU6\r\n"),
    ],
)
def test_the_address_of_a_collector(url: str, shown: str, line: bytes) -> None:
    endpoint, password = collector_of(url)
    assert endpoint.url == shown
    assert password == line


@pytest.mark.parametrize("text", ["hush", "=hush", "a b=hush", "x=hu%0d%0ash: 1", "x=hu%C3%A9sh", "ok=1,hush"])
def test_malformed_headers_are_refused_at_the_start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(tracing(1))

    def read() -> Loaded:
        return load(file, {"STATE_DIRECTORY": str(tmp_path), "RUNTIME_DIRECTORY": str(tmp_path)})

    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", text)
    with pytest.raises(StartFailed, match="OTEL_EXPORTER_OTLP_HEADERS: expected name=value") as refused:
        Router(read(), read)
    assert "hu" not in str(refused.value)


@given(st.text())
def test_no_header_breaks_out_of_its_line(text: str) -> None:
    try:
        lines = header_lines(text)
    except ValueError:
        return
    for line in lines.split(b"\r\n")[:-1]:
        assert b": " in line and not set(line) & set(b"\r\n")


def test_nothing_of_it_is_imported_while_it_is_off(tmp_path: Path) -> None:
    code = """
import sys
from appliance.cli.config import load
from appliance.cli.router import Router
Router(load(None, {"STATE_DIRECTORY": "/nowhere", "RUNTIME_DIRECTORY": "/nowhere"}), None)
wanted = ("opentelemetry", "google.protobuf", "appliance.gateway.trace", "appliance.gateway.spans")
print([name for name in sys.modules if name.startswith(wanted)])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, timeout=60)
    assert done.stdout.strip() == "[]"

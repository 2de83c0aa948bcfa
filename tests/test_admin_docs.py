"""`docs/operations.md` names what there is: commands, metrics, and every key of every document."""

from __future__ import annotations

import random
import re
import time
from pathlib import Path
from typing import Any, cast

import click
import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.admin import documents, fleet, memory, placing
from appliance.admin.metrics import Scrapes
from appliance.admin.running import Running
from appliance.cli.ctl.commands import COMMANDS, ctl
from appliance.control.plane import Plane
from appliance.facts.call import Ask, Call, Caller, Route
from appliance.facts.catalog import Profile
from appliance.facts.choice import REFUSED, Attempt
from appliance.facts.endpoint import Endpoint
from appliance.facts.settings import Model, Settings
from appliance.gateway.record import Record
from appliance.gateway.service import Gateway
from appliance.gateway.usage import Tally
from appliance.nursery.sleeper import Sleeper
from appliance.rules.scheduling.pipeline import choose
from appliance.rules.scheduling.retry import next_step
from appliance.wire.line import Poller
from tests.plane_scene import machine, scene

DOCS = (Path(__file__).parent.parent / "docs" / "operations.md").read_text()
SETTINGS = Settings(
    endpoints=(Endpoint("a", "127.0.0.1", 1, models=("llama",)),), models=(Model("llama", fallbacks=("llama-small",)),)
)


@pytest.fixture
def everything() -> dict[str, Any]:
    """Every document, with at least one of everything in it."""
    poller = Poller()
    gateway = Gateway(SETTINGS, poller, random.Random(1))
    now = time.monotonic()
    call = Call(b"id", b"POST", b"/v1/x", Route("chat"), {}, b"", Ask(), "llama", True, Caller(), now)
    record = Record.of(call, Sleeper())
    record.tickets += (gateway.gate.ask(gateway.table.entries["llama"], call, Sleeper(), now),)
    record.choices += (choose(gateway.table.entries["llama"], gateway.policy, now, gateway.rng)[1],)
    record.attempts += (Attempt("a", REFUSED),)
    record.steps += ((now, next_step(record.attempts, passed_on=False, another=False)),)
    record.tally, record.promises = Tally(), gateway.promises
    gateway.books.open(record)
    running = Running(
        gateway, 0.0, (), (), "", False, True, lambda: 0, lambda: False,
        lambda: {"file": None, "values": [], "needs_restart": []}, lambda: "",
    )  # fmt: skip
    shown = {
        "status": documents.status(running, now),
        "endpoints": documents.endpoints(gateway, now),
        "models": documents.models(gateway, now),
        "model": documents.model(gateway, "llama", now),
        "bands": documents.bands(gateway, now),
        "requests": list(documents.requests(gateway, 1, now)),
        "request": documents.request(gateway, "id", now),
        "memory": memory.document(),
    }
    gateway.close()
    poller.close()
    return shown


def keys_of(value: Any) -> set[str]:
    """Every key, at any depth, but the names of bands, scorers, settings and codes."""
    match value:
        case dict():
            return set(value) | set().union(*(keys_of(inner) for inner in value.values()))
        case list():
            return set().union(*(keys_of(inner) for inner in value))
    return set()


NAMES = {"platinum", "gold", "silver", "bronze", "dial_s", "first_token_s", "idle_s", "stream_total_s", "write_stall_s"}
INNER = {
    "endpoint",
    "filter",
    "scores",
    "total",
    "result",
    "looked_up",
    "seen_before",
    "name",
    "in_s",
    "wait_s",
    "ahead",
}
"""Keys of small documents inside others, which their own names explain."""


@pytest.mark.parametrize("name", ["status", "endpoints", "models", "model", "bands", "requests", "request", "memory"])
def test_every_key_is_named(everything: dict[str, Any], name: str) -> None:
    known = set(re.findall(r"[a-z_0-9]+", "\n".join(line for line in DOCS.splitlines() if line.startswith("| `"))))
    scorers = {"queue", "kv", "inflight", "prefix", "session"}
    missing = keys_of(everything[name]) - known - NAMES - INNER - scorers
    if name in ("request", "memory"):
        missing -= {"blocker", "ceiling", "saturation", "counts", "collections", "uncollectable"}
    assert not missing


async def test_every_key_about_the_fleet_is_named(tmp_path: Path) -> None:
    small = Model("llama", profiles=(Profile("one", "sim"),))
    large = Model("huge", profiles=(Profile("many", "sim", gpus_per_node=16, tensor_parallel=16),))
    async with scene(tmp_path, [small, large], {"a": machine(2, fabric="blue", bad={1: "broken"})}) as plane:
        plane.act()
        plane.says("llama", "failed", reason="it ended", tail=("no more memory",))
        plane.act()
        await plane.cordon("a", "somebody")
        now = time.monotonic()
        played = cast(Plane, plane)
        nodes = await fleet.nodes(played, now)
        del nodes["nodes"][0]["inventory"]
        shown = [
            nodes,
            await fleet.changed(played, "a", "drain", True, now),
            await fleet.replicas(played, now),
            placing.placement(played, "huge", now),
            placing.placement(played, "llama", now),
            placing.scaled(played, "llama", ""),
            {"fleet": fleet.summary(played, now), "replicas": placing.of_model(played, "llama", now)},
            await fleet.audit(played, 10),
        ]
    del shown[1]["node"]
    known = set(re.findall(r"[a-z_0-9]+", "\n".join(line for line in DOCS.splitlines() if line.startswith("| `"))))
    states = {"stopping", "starting", "loading", "draining", "incomplete"}
    assert not set().union(*(keys_of(document) for document in shown)) - known - states


async def test_every_metric_is_named(tmp_path: Path) -> None:
    poller = Poller()
    gateway = Gateway(SETTINGS, poller, random.Random(1))
    async with scene(tmp_path, [], {"a": machine()}) as plane:
        text, _ = Scrapes(gateway, lambda: cast(Plane, plane))("text/plain")
    gateway.close()
    poller.close()
    families = {
        family.name + ("_total" if family.type == "counter" else "")
        for family in text_string_to_metric_families(text.decode())
        if family.name.startswith("appliance_")
    }
    named = set(re.findall(r"^\| `(appliance_\w+)", DOCS, re.M))
    assert families == named


def test_every_command_is_named() -> None:
    context = click.Context(ctl)
    for name in COMMANDS:
        command = ctl.get_command(context, name)
        assert command is not None and f"`ctl {name}" in DOCS
        if isinstance(command, click.Group):
            assert all(f"`ctl {name} {inner}" in DOCS for inner in command.commands)

"""A whole cluster of real processes on loopback: one `serve` with its control plane, and agents that joined it.

Nodes have addresses of their own (127.0.1.N), so that engines of two nodes can have the same port, and inventories in
files. Everything is done as an operator would: `ctl init`, `ctl node add`, `agent join`, `ctl`. Whatever is still alive
at the end of the block is killed, engines by the marker of their node's state directory.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import random
import shlex
import signal
import socket
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import trio

from appliance.agent import procfs
from appliance.cli.config import toml_value
from tests.processes import APPLIANCE, Process, environment, spawn

T = TypeVar("T")
GPU_BYTES = 85899345920
FIXED_PORTS = range(32000, 32768)
QUICK = {"settle_s": 2, "unreachable_after_s": 2, "lost_after_s": 5, "drain_grace_s": 30, "wake_wait_s": 60}
"""Timings of a control plane in tests; the proportions are those of the defaults."""


def inventory(node: str, gpus: int = 8, fabric: str = "", gpu: str = "NVIDIA H100 80GB HBM3") -> dict[str, Any]:
    """What `agent.inventory_file` holds for a node of so many GPUs."""
    found: dict[str, Any] = {"node": node, "cpus": {"count": 16}, "memory": {"total_bytes": 1 << 40}}
    found["gpus"] = [{"name": gpu, "memory_bytes": GPU_BYTES, "uuid": f"GPU-{node}-{n}"} for n in range(gpus)]
    if fabric:
        found["fabrics"] = [{"name": fabric, "transport": "ib", "rails": [{"adapter": "mlx5_0"}]}]
    return found


class Place:
    """A folder with configuration and state of one machine, on which `appliance` can be run.

    `within` goes before each command: how a command is run in a network namespace.
    """

    def __init__(self, folder: Path, name: str, within: Sequence[str] = ()) -> None:
        self.name = name
        self.folder = folder / name
        self.folder.mkdir(parents=True)
        self.config = self.folder / "appliance.toml"
        self.state = self.folder / "appliance-state"
        self.within = tuple(within)
        self.process: Process | None = None
        self._starts = 0

    @property
    def environment(self) -> dict[str, str]:
        return environment(self.folder)

    async def run(self, *words: str, status: int = 0) -> str:
        """What a command that ends by itself prints; its exit status must be `status`."""
        done = await trio.run_process(
            [*self.within, *APPLIANCE, *words],
            env=self.environment,
            capture_stdout=True,
            capture_stderr=True,
            check=False,
        )
        told = done.stdout.decode() + done.stderr.decode()
        assert done.returncode == status, (words, done.returncode, told)
        return done.stdout.decode() if not status else told

    def begin(self, *words: str) -> Process:
        """Start a part that goes on, without waiting."""
        log_file = self.folder / f"{words[0]}-{self._starts}.log"
        self._starts += 1
        self.process = Process(spawn((*self.within, *APPLIANCE, *words), log_file, self.environment), log_file)
        return self.process

    def engines(self) -> dict[int, str]:
        """Pid -> marker of every engine process of this machine."""
        with contextlib.suppress(FileNotFoundError):
            word = (self.state / "shards" / "word").read_text().strip()
            return procfs.marked(lambda marker: bool(word) and marker.startswith(f"{word}."))
        return {}

    def kill(self, *, engines: bool = True) -> None:
        """The machine dies: its part of the program, and with it the engines."""
        if self.process is not None:
            self.process.kill()
        for pid in self.engines() if engines else ():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@attrs.define(eq=False)
class Cluster:
    """`control` is where `serve` runs; `nodes` are by name. `models` are the tables of the configuration."""

    folder: Path
    host: str = "127.0.0.1"
    control: Place = attrs.field(init=False)
    nodes: dict[str, Place] = attrs.field(factory=dict)
    link_port: int = 0
    door_port: int = 0

    def __attrs_post_init__(self) -> None:
        self.control = Place(self.folder, "control")
        # Fixed ports: whoever starts again must be found where it was.
        self.link_port, self.door_port = _free_ports(self.host, 2)

    def configure(self, models: str, **control: object) -> None:
        """Write the configuration of `serve`."""
        own = {"listen": f"{self.host}:{self.link_port}", **QUICK, **control}
        server = {"listen": f"{self.host}:{self.door_port}", "metrics_listen": f"{self.host}:0", "drain_s": 10}
        sections = [("server", server), ("control", own), ("scheduling", {"scrape_s": 0.25})]
        lines = [line for name, keys in sections for line in (f"[{name}]", *_lines(keys))]
        self.control.config.write_text("\n".join([*lines, models]))

    async def begin(self) -> None:
        """Make the cluster and serve."""
        await self.control.run("ctl", "init", "--host", self.host)
        await self.serve()

    async def serve(self, *flags: str) -> Process:
        process = self.control.begin("serve", *flags)
        await process.logged("event=serving")
        return process

    async def reload(self, models: str, **control: object) -> None:
        """Write the configuration anew and have it taken."""
        assert self.control.process is not None
        told = sum('event="configuration reloaded"' in line for line in self.control.process.log)
        self.configure(models, **control)
        self.control.process.popen.send_signal(signal.SIGHUP)
        await self.control.process.logged('event="configuration reloaded"', told + 1)

    async def add(self, node: str, found: Mapping[str, Any], address: str = "", within: Sequence[str] = ()) -> Place:
        """A machine joins, and its agent runs. `found` is its inventory."""
        number = len(self.nodes)
        place = self.nodes[node] = Place(self.folder, node, within)
        address = address or f"127.0.1.{number + 1}"
        interfaces = [{"name": "eth0", "addresses": [address]}]
        hardware = place.folder / "inventory.json"
        hardware.write_text(json.dumps({**found, "address": address, "interfaces": interfaces}))
        # Below what the kernel gives out by itself; nodes on loopback share one machine's ports.
        first = 20000 + (os.getpid() % 40) * 300 + number * 50
        own = {
            "address": address,
            "listen": f"{address}:0",
            "port_range": [first, first + 49],
            "inventory_file": str(hardware),
            "llamacpp": {"threads": 1},
            "executables": {"llamacpp": str(Path(sys.executable).with_name("appliance-llama-server"))},
        }
        place.config.write_text("\n".join(["[agent]", *_lines(own)]))
        line = shlex.split(await self.control.run("ctl", "node", "add", node))
        assert line[:3] == ["appliance", "agent", "join"], line
        await place.run(*line[1:])
        await self.start(node)
        await self.node_is(node, "ready")
        return place

    async def add_all(self, found: Mapping[str, Mapping[str, Any]]) -> None:
        """Several machines join at one time; inventories by node."""
        async with trio.open_nursery() as nursery:
            for node, hardware in found.items():
                nursery.start_soon(self.add, node, hardware)

    async def start(self, node: str) -> Process:
        """Start the agent of a machine that has joined."""
        process = self.nodes[node].begin("agent")
        await process.logged('event="agent runs"')
        return process

    async def ctl(self, *words: str) -> Any:
        """The document of a `ctl` command that prints JSON."""
        return json.loads(await self.control.run("ctl", *words, "--json"))

    async def ask(self, path: str) -> Any:
        """A document of the management API: what `ctl` asks, without the price of a process. Of `/nodes` and the like
        the list itself."""
        found = await trio.to_thread.run_sync(_get, self.control.folder / "appliance-run" / "admin.sock", path)
        return found.get(path[1:], found)

    async def replicas(self, model: str = "", state: str = "") -> list[dict[str, Any]]:
        """Replicas that exist now."""
        found = await self.ask("/replicas")
        return [each for each in found if each["id"] and model in ("", each["model"]) and state in ("", each["state"])]

    async def ready(self, model: str, count: int = 1, within_s: float = 60.0) -> list[dict[str, Any]]:
        """Wait until exactly `count` replicas of the model are there, all of them ready and taking requests."""
        found = await self.come(
            lambda: self.replicas(model),
            lambda found: len(found) == count and all(each["state"] == "ready" for each in found),
            f"{count} ready replicas of {model}",
            within_s,
        )
        # What is ready is published by the pass that follows.
        wanted = {each["id"] for each in found}
        await self.come(
            lambda: self.ask("/endpoints"),
            lambda endpoints: wanted <= {each["id"] for each in endpoints},
            f"the replicas of {model} are endpoints",
        )
        return found

    async def node(self, name: str) -> dict[str, Any]:
        """What is known of a node; its state is "" while nobody has heard of it."""
        found = await self.ask("/nodes")
        return next((each for each in found if each["name"] == name), {"name": name, "state": ""})

    async def node_is(self, name: str, state: str, within_s: float = 40.0) -> dict[str, Any]:
        nodes = await self.come(
            lambda: self.ask("/nodes"),
            lambda found: any((each["name"], each["state"]) == (name, state) for each in found),
            f"{name} is {state}",
            within_s,
        )
        return next(each for each in nodes if each["name"] == name)

    async def come(
        self, look: Callable[[], Awaitable[T]], wanted: Callable[[T], object], what: str, within_s: float = 60.0
    ) -> T:
        """Look until it is as wanted; what was seen then."""
        with trio.move_on_after(within_s):
            while not wanted(found := await look()):  # noqa: ASYNC110 - other processes bring it about
                await trio.sleep(0.1)
            return found
        raise AssertionError(f"never true: {what}; last seen: {found}")

    def engines(self) -> dict[str, set[int]]:
        """Pids of all engine processes, by node."""
        return {name: set(place.engines()) for name, place in self.nodes.items()}

    def kill(self) -> None:
        for place in (self.control, *self.nodes.values()):
            place.kill()


@asynccontextmanager
async def cluster(folder: Path, **more: Any) -> AsyncIterator[Cluster]:
    made = Cluster(folder, **more)
    try:
        yield made
    finally:
        made.kill()


def sim_model(name: str = "m", *, replicas: int = 1, profile: str = "gpus_per_node = 1", scaling: str = "") -> str:
    """The tables of a model that the built-in engine serves."""
    more = f", {scaling}" if scaling else ""
    return (
        f"[[models]]\nname = '{name}'\nscaling = {{ min_replicas = {replicas}{more} }}\n"
        f"[[models.profiles]]\nname = 'p'\nengine = 'sim'\n{profile}\n"
    )


def _get(sock: Path, path: str) -> Any:
    with socket.socket(socket.AF_UNIX) as line:
        line.settimeout(20)
        line.connect(str(sock))
        line.sendall(f"GET {path} HTTP/1.1\r\nhost: admin\r\nconnection: close\r\n\r\n".encode())
        answer = http.client.HTTPResponse(line)
        answer.begin()
        body = answer.read()
    assert answer.status == 200, (path, answer.status, body)
    return json.loads(body)


def _lines(keys: Mapping[str, object]) -> list[str]:
    return [f"{key} = {toml_value(value)}" for key, value in keys.items()]


def _free_ports(host: str, count: int) -> list[int]:
    """Above those of the agents, and below what the kernel gives out by itself: any connection of any test may have one
    of these in the moment in which a router starts again."""
    found: list[int] = []
    for port in random.sample(FIXED_PORTS, len(FIXED_PORTS)):
        with contextlib.suppress(OSError):
            socket.create_server((host, port)).close()
            found.append(port)
        if len(found) == count:
            return found
    raise AssertionError(f"fewer than {count} free ports on {host}")

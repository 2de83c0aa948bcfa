"""A network of three machines and more in network namespaces, on one switch: cables are pulled and addresses changed.

    with lan("router", "a", "b") as net:
        net["a"].start("agent", "register", MENTAT_GROUP="glm", MENTAT_OPENAI_API="8000/v1")
        net["router"].get("/v1/models")

Needs root and iproute2, and a kernel with bridges. Every process that a machine started is killed at its end.
"""

from __future__ import annotations

import ctypes
import http.client
import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import attrs
import pytest

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)
WITHIN_S = 40.0
T = TypeVar("T")


@attrs.define(eq=False)
class Host:
    """One machine: its namespace, the device at the switch, its address, and a folder of its own."""

    name: str
    space: str
    port: str
    address: str
    folder: Path
    started: list[subprocess.Popen[bytes]] = attrs.field(factory=list)

    def ip(self, *words: str) -> None:
        _ip("-n", self.space, *words)

    def start(self, *words: str, **environ: str) -> Path:
        """`appliance WORDS` over there; the file of its log."""
        return self.run(sys.executable, "-m", "appliance", *words, **environ)

    def run(self, *command: str, **environ: str) -> Path:
        """Any program over there; the file of its log."""
        log = self.folder / f"log-{len(self.started)}"
        env = {name: value for name, value in os.environ.items() if not name.startswith(("APPLIANCE_", "MENTAT_"))}
        env |= {
            "STATE_DIRECTORY": str(self.folder / "appliance-state"),
            "RUNTIME_DIRECTORY": str(self.folder / "appliance-run"),
            "APPLIANCE_AGENT__GPUS__BACKEND": "none",
            "MENTAT_ANNOUNCE_INTERVAL_S": "0.3",
        } | environ
        command = ("ip", "netns", "exec", self.space, *command)
        with log.open("wb") as opened:
            self.started.append(
                subprocess.Popen(command, stdout=opened, stderr=opened, env=env, start_new_session=True)
            )
        return log

    def within(self, work: Callable[[], T]) -> T:
        """What `work` gives when its sockets are made over there."""
        result: list[T | BaseException] = []

        def run() -> None:
            try:
                descriptor = os.open(f"/run/netns/{self.space}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if _libc.setns(descriptor, _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                finally:
                    os.close(descriptor)
                result.append(work())
            except BaseException as error:
                result.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        thread.join()
        if isinstance(result[0], BaseException):
            raise result[0]
        return result[0]

    def ask(self, method: str, path: str, document: object = None) -> tuple[int, str]:
        """One request to its own door."""

        def ask() -> tuple[int, str]:
            connection = http.client.HTTPConnection("127.0.0.1", 6381, timeout=10)
            try:
                connection.request(method, path, None if document is None else json.dumps(document))
                answer = connection.getresponse()
                return answer.status, answer.read().decode()
            finally:
                connection.close()

        return self.within(ask)

    def get(self, path: str) -> Any:
        return json.loads(self.ask("GET", path)[1])

    def pull_the_cable(self) -> None:
        _ip("link", "set", self.port, "down")

    def plug_the_cable_in(self) -> None:
        _ip("link", "set", self.port, "up")

    def kill(self) -> None:
        for process in self.started:
            process.kill()
            process.wait()


@contextmanager
def lan(folder: Path, *names: str) -> Iterator[dict[str, Host]]:
    """Machines 198.19.N.1, .2 and so on; the test is skipped where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2")
    number = os.getpid() % 250
    switch = f"apsw{number}"
    hosts: dict[str, Host] = {}
    made = _ip("link", "add", switch, "type", "bridge", check=False)
    if made.returncode:
        pytest.skip(f"no bridge can be made here: {made.stderr.strip()}")
    try:
        _ip("link", "set", switch, "up")
        for place, name in enumerate(names, 1):
            space, port = f"apl{number}{name}", f"ap{number}p{place}"
            if _ip("netns", "add", space, check=False).returncode:
                pytest.skip("no network namespace can be made here")
            home = folder / name
            home.mkdir()
            host = hosts[name] = Host(name, space, port, f"198.19.{number}.{place}", home)
            _ip("link", "add", port, "type", "veth", "peer", "name", "lan0", "netns", space)
            _ip("link", "set", port, "master", switch, "up")
            host.ip("addr", "add", f"{host.address}/24", "broadcast", "+", "dev", "lan0")
            host.ip("link", "set", "lan0", "up")
            host.ip("link", "set", "lo", "up")
        yield hosts
    finally:
        for host in hosts.values():
            host.kill()
            _ip("link", "del", host.port, check=False)
            _ip("netns", "del", host.space, check=False)
        _ip("link", "del", switch, check=False)


def until(what: str, wanted: Callable[[], T]) -> T:
    """What `wanted` gives once that is true. Errors of connections count as not yet."""
    end = time.monotonic() + WITHIN_S
    seen: object = None
    while time.monotonic() < end:
        try:
            seen = found = wanted()
            if found:
                return found
        except (OSError, http.client.HTTPException, ValueError, KeyError) as error:
            seen = error
        time.sleep(0.1)
    raise AssertionError(f"never true: {what} (last seen: {seen!r})")


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(("ip", *words), capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, (words, done.stderr)
    return done


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

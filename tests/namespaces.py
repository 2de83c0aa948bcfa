"""A second machine in a network namespace, whose cable can be pulled: bytes to it are lost, and nothing says so.

Needs root and iproute2. The link is a veth pair; only the far end is set down, so that this side sees what it would
see of a machine without power: no answer.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import attrs
import pytest

from tests.engines import sim_engine

_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


@attrs.frozen
class Machine:
    """`here` and `there` are the addresses of the two ends."""

    name: str
    here: str
    there: str

    def pull_the_cable(self) -> None:
        _ip("-n", self.name, "link", "set", _far(self.name), "down")

    def plug_the_cable_in(self) -> None:
        _ip("-n", self.name, "link", "set", _far(self.name), "up")

    @contextmanager
    def sim(self, *flags: str, model: str) -> Iterator[sim_engine.Process]:
        """`appliance sim` over there, ready."""
        command = [sys.executable, "-m", "appliance", "sim", "--host", self.there, "--port", "0", "--model", model]
        popen = subprocess.Popen(
            ["ip", "netns", "exec", self.name, *command, *flags],
            stdout=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            yield sim_engine.Process(popen, sim_engine.wait_until_ready(popen))
        finally:
            sim_engine.stop(popen)

    def connect(self, port: int) -> socket.socket:
        """A connection from there to a port here. A socket belongs to the namespace it was made in, whoever uses it
        later, so a thread goes there to make it and ends."""
        made: list[socket.socket | BaseException] = []

        def connect() -> None:
            try:
                descriptor = os.open(f"/run/netns/{self.name}", os.O_RDONLY | os.O_CLOEXEC)
                try:
                    if _libc.setns(descriptor, _CLONE_NEWNET):
                        raise OSError(ctypes.get_errno(), "setns")
                finally:
                    os.close(descriptor)
                made.append(socket.create_connection((self.here, port), timeout=10))
            except BaseException as error:
                made.append(error)

        thread = threading.Thread(target=connect)
        thread.start()
        thread.join()
        (result,) = made
        if isinstance(result, BaseException):
            raise result
        return result


@contextmanager
def machine() -> Iterator[Machine]:
    """A machine, gone at the end of the block; skips the test where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need iproute2")
    number = os.getpid() % 16384
    name = f"applnc{os.getpid()}"
    # 198.18.0.0/15 is for tests of networks: nobody routes it
    first = f"198.18.{number // 64}.{number % 64 * 4}".rpartition(".")
    here, there = (f"{first[0]}.{int(first[2]) + place}" for place in (1, 2))
    made = _ip("netns", "add", name, check=False)
    if made.returncode:
        pytest.skip(f"no network namespace can be made here: {made.stderr.strip()}")
    try:
        near, far = _near(name), _far(name)
        _ip("link", "add", near, "type", "veth", "peer", "name", far, "netns", name)
        _ip("addr", "add", f"{here}/30", "dev", near)
        _ip("link", "set", near, "up")
        _ip("-n", name, "addr", "add", f"{there}/30", "dev", far)
        for device in (far, "lo"):
            _ip("-n", name, "link", "set", device, "up")
        yield Machine(name, here, there)
    finally:
        _ip("link", "del", _near(name), check=False)
        _ip("netns", "del", name)


def _near(name: str) -> str:
    return f"ap{name.removeprefix('applnc')}h"


def _far(name: str) -> str:
    return f"ap{name.removeprefix('applnc')}f"


def _ip(*words: str, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(("ip", *words), capture_output=True, text=True, check=False)
    assert not check or done.returncode == 0, (words, done.stderr)
    return done


def need_unshare(*flags: str) -> None:
    """Skip the test where no such namespaces can be made: they need root, and a container often may not either."""
    program = shutil.which("unshare")
    if program is None:
        pytest.skip("namespaces need unshare of util-linux")
    tried = subprocess.run([program, *flags, "true"], capture_output=True, text=True, check=False)
    if tried.returncode:
        pytest.skip(f"no namespace can be made here: {tried.stderr.strip()}")

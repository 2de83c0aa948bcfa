"""Which sockets go where, who owns a state directory, and what a supervisor's words mean."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.admin.sockets import peer_of
from appliance.cli import statelock
from appliance.cli.listening import is_loopback, match
from appliance.cli.startfailed import StartFailed
from appliance.cli.supervisor import Supervisor, passed_sockets
from appliance.facts.settings import Address

hosts = st.sampled_from(["0.0.0.0", "127.0.0.1", "::"])
wanted_addresses = st.lists(st.builds(Address, hosts, st.integers(0, 3)), max_size=6)
bound_addresses = st.lists(st.builds(Address, hosts, st.integers(1, 3)), max_size=6, unique=True)


@given(wanted_addresses, bound_addresses)
def test_a_socket_goes_to_whoever_wants_it(wanted: list[Address], have: list[Address]) -> None:
    found = match(wanted, have)
    used = [number for number in found if number is not None]
    assert len(found) == len(wanted)
    assert len(set(used)) == len(used), "no socket twice"
    for address, number in zip(wanted, found, strict=True):
        if number is None:
            if address.port:
                assert address not in have or have.index(address) in used, "an exact one is never left lying"
            else:
                left = [other for place, other in enumerate(have) if place not in used]
                assert address.host not in [other.host for other in left]
        else:
            assert have[number].host == address.host
            assert address.port in (0, have[number].port)


def test_an_exact_socket_is_not_given_to_one_that_takes_any() -> None:
    assert match([Address("::", 0), Address("::", 7)], [Address("::", 7), Address("::", 8)]) == [1, 0]


@pytest.mark.parametrize(
    ("host", "expected"),
    [("127.0.0.1", True), ("127.8.9.1", True), ("::1", True), ("0.0.0.0", False), ("::", False), ("10.0.0.1", False)],
)
def test_who_reaches_an_address(host: str, expected: bool) -> None:
    assert is_loopback(Address(host, 1)) is expected


# -- the lock --------------------------------------------------------------------------------------------------------


def test_a_lock_names_its_owner_and_is_let_go(tmp_path: Path) -> None:
    folder = f"{tmp_path}/deep/state"
    assert statelock.owner(folder) == ""
    lock = statelock.take(folder)
    assert statelock.owner(folder) == str(os.getpid())
    with pytest.raises(StartFailed, match=rf"in use by another appliance serve \(pid {os.getpid()}\)"):
        statelock.take(folder)
    lock.close()
    assert statelock.owner(folder) == ""
    statelock.take(folder).close()


def test_a_lock_outlasts_the_process_that_passes_it_on(tmp_path: Path) -> None:
    folder = str(tmp_path)
    old = statelock.take(folder)
    new = statelock.adopt(os.dup(old.descriptor), folder)
    assert not new.ours
    new.close()  # a takeover that came to nothing: the name stays, and so does the lock
    assert statelock.owner(folder) == str(os.getpid())
    new = statelock.adopt(os.dup(old.descriptor), folder)
    old.ours = False
    new.claim()
    old.close()
    assert statelock.owner(folder) == str(os.getpid())
    new.close()
    assert statelock.owner(folder) == ""


def test_another_state_directory_has_a_lock_of_its_own(tmp_path: Path) -> None:
    old = statelock.take(f"{tmp_path}/a")
    new = statelock.adopt(os.dup(old.descriptor), f"{tmp_path}/b")
    ours = [os.path.realpath(f"/proc/self/fd/{number}") for number in os.listdir("/proc/self/fd")]
    assert ours.count(f"{tmp_path}/a/serve.lock") == 1, "what was passed and is not wanted is closed"
    assert statelock.owner(f"{tmp_path}/a") == statelock.owner(f"{tmp_path}/b") == str(os.getpid())
    for lock in (old, new):
        lock.close()


def test_no_state_directory_at_all() -> None:
    with pytest.raises(StartFailed, match="neither HOME nor XDG_STATE_HOME is set"):
        statelock.take("")


# -- a supervisor ----------------------------------------------------------------------------------------------------


def test_variables_of_a_supervisor_are_taken_out() -> None:
    """Also where they are for another process: a child of ours would come to the same wrong idea."""
    environ = {"LISTEN_FDS": "2", "LISTEN_PID": "1", "LISTEN_FDNAMES": "a:b", "HOME": "/"}
    assert not passed_sockets(environ)
    environ |= {"NOTIFY_SOCKET": "/nowhere", "WATCHDOG_USEC": "3000000", "WATCHDOG_PID": str(os.getpid())}
    supervisor = Supervisor.of(environ)
    assert supervisor and supervisor.watchdog_s == 3.0
    assert environ == {"HOME": "/"}


@pytest.mark.parametrize(
    ("environ", "watchdog_s"),
    [
        ({}, 0.0),
        ({"WATCHDOG_USEC": "1000000"}, 0.0),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "500000"}, 0.5),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "500000", "WATCHDOG_PID": "1"}, 0.0),
        ({"NOTIFY_SOCKET": "@x", "WATCHDOG_USEC": "soon"}, 0.0),
    ],
)
def test_who_wants_a_watchdog(environ: dict[str, str], watchdog_s: float) -> None:
    assert Supervisor.of(dict(environ)).watchdog_s == watchdog_s


def test_a_supervisor_in_the_abstract_namespace_hears() -> None:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
        heard.bind(f"\0appliance-test-{os.getpid()}")
        Supervisor(f"@appliance-test-{os.getpid()}").ready()
        heard.settimeout(5)
        assert heard.recv(100) == b"READY=1"


def test_a_listener_names_whoever_called_listen_last(tmp_path: Path) -> None:
    """What a takeover of the admin socket rests on: those who connect are told the pid of the process that serves."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{tmp_path}/s")
        code = f"import socket; socket.socket(fileno={listener.fileno()}).listen(1)"
        child = subprocess.Popen((sys.executable, "-c", code), pass_fds=[listener.fileno()])
        assert child.wait() == 0
        for pid in (child.pid, os.getpid()):
            with socket.socket(socket.AF_UNIX) as client:
                client.connect(f"{tmp_path}/s")
                assert peer_of(client).pid == pid
            listener.listen(1)

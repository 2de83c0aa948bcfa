"""Unix sockets with a mode, where a dead process may have left one."""

from __future__ import annotations

import fcntl
import os
import socket
import stat
from pathlib import Path

import pytest

from appliance.admin.sockets import CannotListen, connect, listen, peer_of, remove_dead


def leave_behind(path: Path) -> None:
    """What a process leaves that was killed: a socket file behind which nobody listens."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
        sock.listen()


@pytest.mark.parametrize("mode", [0o660, 0o600])
def test_the_socket_has_its_mode_whatever_the_umask(tmp_path: Path, mode: int) -> None:
    before = os.umask(0o777)
    try:
        # the folder is there: one made under this umask could not be entered
        made = listen(str(tmp_path / "a.sock"), mode)
    finally:
        os.umask(before)
    assert stat.S_IMODE(os.stat(made.path).st_mode) == mode
    made.close()


def test_the_folder_is_made_and_closed_to_others(tmp_path: Path) -> None:
    made = listen(str(tmp_path / "run" / "appliance" / "a.sock"), 0o660)
    assert stat.S_IMODE(os.stat(tmp_path / "run" / "appliance").st_mode) & 0o007 == 0
    made.close()
    assert os.listdir(tmp_path / "run" / "appliance") == []


def test_a_dead_socket_is_replaced(tmp_path: Path) -> None:
    leave_behind(tmp_path / "a.sock")
    made = listen(str(tmp_path / "a.sock"), 0o660)
    with connect(made.path):
        made.sock.accept()[0].close()
    made.close()
    assert not (tmp_path / "a.sock").exists()


def test_a_live_one_is_left_alone_and_its_process_named(tmp_path: Path) -> None:
    first = listen(str(tmp_path / "a.sock"), 0o660)
    with pytest.raises(CannotListen, match=rf"another appliance serve runs here \(pid {os.getpid()}\)"):
        listen(first.path, 0o660)
    with connect(first.path):
        pass
    first.close()


def test_a_live_one_whose_queue_is_full_is_alive(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "a.sock"))
        sock.listen(0)
        waiting = [connect(str(tmp_path / "a.sock"))]
        with pytest.raises(BlockingIOError):
            waiting.append(connect(str(tmp_path / "a.sock")))
        with pytest.raises(CannotListen, match="another appliance serve runs here"):
            listen(str(tmp_path / "a.sock"), 0o660)
        for each in waiting:
            each.close()


def test_something_else_in_the_way_is_not_removed(tmp_path: Path) -> None:
    (tmp_path / "a.sock").write_text("mine")
    with pytest.raises(CannotListen, match="is no socket"):
        listen(str(tmp_path / "a.sock"), 0o660)
    assert (tmp_path / "a.sock").read_text() == "mine"


def test_what_cannot_be_made_is_told_in_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CannotListen, match=r"cannot listen on .*/file/a\.sock: .*; name another path"):
        listen(str(tmp_path / "file" / "a.sock"), 0o660)


def test_two_that_start_at_once_do_not_unlink_each_others_socket(tmp_path: Path) -> None:
    """The other process has looked, found the socket dead, and holds the lock."""
    leave_behind(tmp_path / "a.sock")
    other = os.open(tmp_path, os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    with pytest.raises(CannotListen, match="another process is starting"):
        listen(str(tmp_path / "a.sock"), 0o660)
    assert (tmp_path / "a.sock").exists()
    os.close(other)
    listen(str(tmp_path / "a.sock"), 0o660).close()


def test_a_successors_socket_is_not_removed(tmp_path: Path) -> None:
    made = listen(str(tmp_path / "a.sock"), 0o660)
    os.unlink(made.path)
    leave_behind(tmp_path / "a.sock")
    made.close()
    assert (tmp_path / "a.sock").exists()


def test_a_path_too_long_for_a_socket_works_by_its_folder(tmp_path: Path) -> None:
    folder = tmp_path / ("x" * 60) / ("y" * 60)
    made = listen(str(folder / "a.sock"), 0o600)
    assert made.path == str(folder / "a.sock") and (folder / "a.sock").is_socket()
    with connect(made.path) as ours:
        theirs = made.sock.accept()[0]
        theirs.send(b"hello")
        assert ours.recv(5) == b"hello"
        assert (peer_of(theirs).pid, peer_of(theirs).uid) == (os.getpid(), os.getuid())
        theirs.close()
    made.close()
    assert os.listdir(folder) == []


def test_only_dead_sockets_of_that_pattern_are_cleared_away(tmp_path: Path) -> None:
    leave_behind(tmp_path / "admin-1.sock")
    leave_behind(tmp_path / "other-1.sock")
    (tmp_path / "admin-2.sock").touch()
    live = listen(str(tmp_path / "admin-3.sock"), 0o600)
    remove_dead(str(tmp_path), "admin-{}.sock")
    assert sorted(os.listdir(tmp_path)) == ["admin-2.sock", "admin-3.sock", "other-1.sock"]
    live.close()
    remove_dead(str(tmp_path / "absent"), "admin-{}.sock")

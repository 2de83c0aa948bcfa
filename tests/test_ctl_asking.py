"""How ctl finds a router, and what it says when it cannot."""

from __future__ import annotations

import socket
from pathlib import Path

import click
import pytest

from appliance.cli.ctl import asking
from appliance.cli.main import run


@pytest.fixture
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[str, str]:
    """The two usual sockets, behind which nobody is yet."""
    found = (str(tmp_path / "mine.sock"), str(tmp_path / "machine.sock"))
    monkeypatch.setattr(asking, "admin_sockets", lambda *_: found)
    monkeypatch.delenv("APPLIANCE_ADMIN", raising=False)
    return found


def test_the_first_place_where_somebody_answers_counts(places: tuple[str, str]) -> None:
    with (
        socket.socket(socket.AF_UNIX) as dead,
        socket.socket(socket.AF_UNIX) as live,
        click.Context(click.Command("x")),
    ):
        dead.bind(places[0])  # a file without a listener, as a killed router leaves it
        live.bind(places[1])
        live.listen()
        connection = asking._connection()
        assert connection.path == places[1]
        connection.close()


def test_a_socket_of_others_is_told_as_such(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def connect(self: asking._UnixConnection) -> None:
        raise PermissionError(13, "Permission denied") if self.path == places[1] else FileNotFoundError

    monkeypatch.setattr(asking._UnixConnection, "connect", connect)
    assert run(["ctl", "status"]) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"appliance: cannot use {places[1]}: permission denied; ")
    assert line.endswith("run ctl as the user or in the group of 'appliance serve'")


def test_a_router_that_falls_silent_is_told_as_such(
    places: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(asking, "ANSWER_S", 0.05)
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(places[0])
        silent.listen()
        assert run(["ctl", "status"]) == 1
    assert f"{places[0]} gave no answer: timed out; look at the router's log" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["cordon", ""], ["explain", "placement", " "], ["models", "stop", ""]])
def test_an_empty_name_is_no_name(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["ctl", *words]) == 2
    assert (
        "a name is empty; 'ctl nodes', 'ctl replicas', 'ctl models' and 'ctl requests' list those there are"
        in capsys.readouterr().err
    )

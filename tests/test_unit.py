"""The systemd unit of an agent: its words reach the program as they are, and a stop leaves engines alone."""

from __future__ import annotations

import configparser

from appliance.cli.unit import unit


def read(text: str) -> configparser.ConfigParser:
    parser = configparser.ConfigParser(interpolation=None, strict=False, delimiters="=")
    parser.optionxform = str  # type: ignore[assignment,method-assign]
    parser.read_string(text)
    return parser


def test_a_stop_ends_the_agent_alone_and_a_crash_starts_it_again() -> None:
    service = read(unit(["/usr/bin/appliance", "agent"], {}))["Service"]
    assert service["KillMode"] == "process"
    assert service["Restart"] == "always"
    assert service["Type"] == "notify"
    assert service["ExecStart"] == "/usr/bin/appliance agent"
    assert "User" not in service
    assert "Environment" not in service


def test_words_with_blanks_and_signs_are_quoted() -> None:
    text = unit(["/opt/my app/appliance", "agent", "--config", '/etc/50%"$x.toml'], {"STATE_DIRECTORY": "/a b"}, "me")
    service = read(text)["Service"]
    assert service["ExecStart"] == '"/opt/my app/appliance" agent --config "/etc/50%%\\"$$x.toml"'
    assert service["Environment"] == '"STATE_DIRECTORY=/a b"'
    assert service["User"] == "me"

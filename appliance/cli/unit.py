"""The systemd unit of an agent."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

NAME = "appliance-agent.service"
FILE = f"/etc/systemd/system/{NAME}"


def unit(argv: Sequence[str], environment: Mapping[str, str], user: str = "") -> str:
    """A unit that runs `argv` as `user` ("" for root) with these variables.

    `KillMode=process`: a stop ends the agent alone. Without it systemd would kill every engine along with it.
    """
    lines = [
        "[Unit]",
        "Description=appliance agent: the hardware of this node, and the engines on it",
        "Wants=network-online.target",
        "After=network-online.target",
        "",
        "[Service]",
        "Type=notify",
        f"ExecStart={' '.join(map(_quoted, argv))}",
        "ExecReload=/bin/kill -HUP $MAINPID",
        "# Engines go on when the agent stops, and the next one takes them over.",
        "KillMode=process",
        "Restart=always",
        "RestartSec=2",
        *([f"User={user}"] if user else []),
        *(f"Environment={_quoted(f'{name}={value}')}" for name, value in environment.items()),
        "",
        "[Install]",
        "WantedBy=multi-user.target",
    ]
    return "\n".join(lines) + "\n"


def _quoted(word: str) -> str:
    """One word as systemd reads it: % and $ mean something there, blanks and quotes part words."""
    plain = word.replace("%", "%%").replace("$", "$$")
    if plain and not set(plain) & set(" \t\"'\\;"):
        return plain
    escaped = plain.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'

"""`[groups]`, the names by which other routers of announced groups are set up, and what is said of them at a start."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.cli.config import ConfigError, Loaded, advice, load, show
from appliance.cli.config.mentat import NAMES
from appliance.facts.address import Address
from appliance.facts.groups import GroupsSettings


def loaded(text: str = "", folder: Path | None = None, **environ: str) -> Loaded:
    if folder is None:
        return load(None, environ, uid=0)
    file = folder / "appliance.toml"
    file.write_text(text)
    return load(file, environ, uid=0)


def faults(**environ: str) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        loaded(**environ)
    return [str(fault) for fault in refused.value.faults]


@pytest.fixture(autouse=True)
def no_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.cli.config.folders.MACHINE_FILE", f"{tmp_path}/etc/appliance.toml")


def test_nothing_set_means_the_local_daemon_and_the_own_networks() -> None:
    groups = loaded().settings.groups
    assert groups.daemons == ("127.0.0.1:6380",)
    assert groups.allowed_sources == ("local", "172.16.0.0/12")
    assert (groups.fresh_s, groups.promote_s, groups.model_wait_s) == (18.0, 30.0, 0.0)
    assert groups.universes == ("default", "appliance")


def test_every_name_lies_over_its_key(tmp_path: Path) -> None:
    key = tmp_path / "key"
    key.write_text(" k \n")
    found = loaded(
        SERVE_PORT="7000",
        MENTAT_DAEMONS="10.0.0.1:6380, 10.0.0.2",
        MENTAT_ANNOUNCE_PORT="7001",
        MENTAT_ANNOUNCE_INTERVAL_S="0.5",
        MENTAT_ANNOUNCE_ADDR="10.0.0.3,10.0.0.4:99",
        MENTAT_SECRET="s",
        MENTAT_SECRET_FILE=str(key),
        MENTAT_UNIVERSE=" blue ",
        ALLOWED_SOURCES="local,10.0.0.0/8,192.168.1.,::1",
        DISCOVER_PEERS="0",
        POLL_INTERVAL_S="1",
        PROBE_INTERVAL_S="2",
        PROBE_TIMEOUT_S="3",
        PROBE_FRESH_S="40",
        PROBE_PROMOTE_S="5",
        SERVING_TIMEOUT_S="6",
        MODEL_WAIT_S="7",
        SSE_KEEPALIVE_S="8",
        MODEL_TTL_S="9",
        MCP_TIMEOUT_S="10",
        TOOLS_TTL_S="11",
    )
    settings = found.settings
    assert settings.server.listen == (Address("0.0.0.0", 7000),)
    assert (settings.deadlines.sse_ping_s, settings.deadlines.sse_ping_before_first_token) == (8.0, True)
    assert settings.groups == GroupsSettings(
        daemons=("10.0.0.1:6380", "10.0.0.2:6380"),
        announce_port=7001,
        announce_interval_s=0.5,
        announce_addrs=("10.0.0.3", "10.0.0.4:99"),
        universe="blue",
        secret="s",
        secret_file=str(key),
        allowed_sources=("local", "10.0.0.0/8", "192.168.1.", "::1"),
        discover_peers=False,
        poll_interval_s=1,
        probe_interval_s=2,
        probe_timeout_s=3,
        probe_fresh_s=40,
        probe_promote_s=5,
        serving_timeout_s=6,
        model_wait_s=7,
        model_ttl_s=9,
        mcp_timeout_s=10,
        tools_ttl_s=11,
    )
    told = {row.origin for row in show(found) if row.origin.startswith("environment ")}
    assert told == {f"environment {name}" for name in NAMES}


def test_blank_means_the_default_but_for_the_daemons() -> None:
    found = loaded(**{name: " " for name in NAMES})
    assert found.settings.groups.daemons == ()
    assert found.origins["groups.daemons"] == "environment MENTAT_DAEMONS"
    assert [key for key, origin in found.origins.items() if origin != "default"] == ["groups.daemons"]


def test_our_own_name_wins() -> None:
    found = loaded(POLL_INTERVAL_S="1", APPLIANCE_GROUPS__POLL_INTERVAL_S="2")
    assert found.settings.groups.poll_interval_s == 2
    assert found.origins["groups.poll_interval_s"] == "environment APPLIANCE_GROUPS__POLL_INTERVAL_S"


@pytest.mark.parametrize(
    ("name", "text", "fault"),
    [
        ("SERVE_PORT", "x", 'SERVE_PORT: expected a port from 1 to 65535, got "x"'),
        ("SERVE_PORT", "0", 'SERVE_PORT: expected a port from 1 to 65535, got "0"'),
        ("MENTAT_ANNOUNCE_PORT", "65536", 'MENTAT_ANNOUNCE_PORT: expected a port from 0 to 65535, got "65536"'),
        ("POLL_INTERVAL_S", "soon", 'POLL_INTERVAL_S: expected a number of seconds above 0, got "soon"'),
        ("POLL_INTERVAL_S", "0", 'POLL_INTERVAL_S: expected a number of seconds above 0, got "0"'),
        *[
            (
                name,
                "1e-7",
                f"groups.{key}: expected a number of seconds of at least 0.05, got 1e-07 (from {name})",
            )
            for name, key in (
                ("POLL_INTERVAL_S", "poll_interval_s"),
                ("PROBE_INTERVAL_S", "probe_interval_s"),
                ("MENTAT_ANNOUNCE_INTERVAL_S", "announce_interval_s"),
            )
        ],
        ("PROBE_TIMEOUT_S", "nan", 'PROBE_TIMEOUT_S: expected a number of seconds above 0, got "nan"'),
        ("PROBE_TIMEOUT_S", "inf", 'PROBE_TIMEOUT_S: expected a number of seconds above 0, got "inf"'),
        ("MODEL_WAIT_S", "-1", 'MODEL_WAIT_S: expected a number of seconds, 0 or more, got "-1"'),
        ("SSE_KEEPALIVE_S", "x", 'SSE_KEEPALIVE_S: expected a number of seconds, 0 or more, got "x"'),
        ("DISCOVER_PEERS", "yes", 'DISCOVER_PEERS: expected 0 or 1, got "yes"'),
        (
            "ALLOWED_SOURCES",
            "local,box",
            'groups.allowed_sources[1]: expected "local", a network, an address or the beginning of one,'
            ' such as "10.0.", got "box" (from ALLOWED_SOURCES)',
        ),
        (
            "MENTAT_DAEMONS",
            "http://box",
            'groups.daemons: expected a host and perhaps a port, such as "10.0.0.5:6380", got "http://box"'
            " (from MENTAT_DAEMONS)",
        ),
    ],
)
def test_what_cannot_be_read_is_a_fault(name: str, text: str, fault: str) -> None:
    assert faults(**{name: text}) == [fault]


def test_no_pings_are_asked_for_with_nought() -> None:
    deadlines = loaded(SSE_KEEPALIVE_S="0").settings.deadlines
    assert (deadlines.sse_ping_s, deadlines.sse_ping_before_first_token) == (15.0, False)


def test_a_secret_that_cannot_be_read_ends_the_load(tmp_path: Path) -> None:
    absent = tmp_path / "absent"
    (fault,) = faults(MENTAT_SECRET_FILE=str(absent), MENTAT_SECRET="still unsigned would be wrong")
    assert fault.startswith(f"groups.secret_file: expected a readable file, got {absent}: ")
    empty = tmp_path / "empty"
    empty.write_text(" \n")
    (fault,) = faults(MENTAT_SECRET_FILE=str(empty))
    assert fault.startswith(f"groups.secret_file: expected a file with a secret, got an empty one in {empty}")


def test_a_secret_is_never_shown() -> None:
    found = loaded(MENTAT_SECRET="hunter2")
    assert {row.path: row.value for row in show(found)}["groups.secret"] == "***"
    assert "hunter2" not in repr(found.settings) + repr(show(found))


def test_timings_that_hang_together() -> None:
    assert advice(loaded()) == ()
    assert advice(loaded(PROBE_INTERVAL_S="30", PROBE_TIMEOUT_S="3", PROBE_FRESH_S="100")) == ()
    (alone,) = advice(loaded(PROBE_INTERVAL_S="30"))
    assert alone.startswith("groups.probe_interval_s is set alone")
    (short,) = advice(loaded(PROBE_FRESH_S="4"))
    assert short.startswith("groups.probe_fresh_s: 4 s is less than an interval and a timeout (8 s)")
    assert advice(loaded(PROBE_FRESH_S="4", APPLIANCE_GROUPS__ENABLED="false")) == ()


def test_a_model_says_whether_groups_may_join(tmp_path: Path) -> None:
    found = loaded('[[models]]\nname = "a"\ngroups = true\n[[models]]\nname = "b"', tmp_path)
    assert [model.groups for model in found.settings.models] == [True, False]

"""How a configuration is found, overlaid, told and changed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import pytest

from appliance.cli.config import (
    ConfigError,
    Loaded,
    admin_sockets,
    changes,
    keep_fixed,
    load,
    places,
    show,
)
from appliance.facts.endpoint import Endpoint
from appliance.facts.errors import Fault
from appliance.facts.settings import Address, Model, Settings, Weights

USER = 1000
HOME = "/nonexistent/home"
"""Short, since the path of a socket may be; nothing is made there, and nothing is found."""


def write(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text)
    return file


def loaded(folder: Path, text: str, **environ: str) -> Loaded:
    return load(write(folder / "appliance.toml", text), environ, uid=0)


def faults(path: Path | None, environ: dict[str, str], **more: Any) -> list[str]:
    with pytest.raises(ConfigError) as refused:
        load(path, environ, **({"uid": 0} | more))
    return [str(fault) for fault in refused.value.faults]


@pytest.fixture(autouse=True)
def no_file_of_this_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("appliance.cli.config.folders.MACHINE_FILE", f"{tmp_path}/etc/appliance/appliance.toml")


# where it is found


def test_no_file_at_all_is_fine() -> None:
    found = load(None, {"HOME": HOME}, uid=USER)
    assert found.file is None
    assert found.settings.server.listen == (Address("0.0.0.0", 6381),)
    assert found.settings.endpoints == ()


def test_the_first_file_counts(tmp_path: Path) -> None:
    xdg = write(tmp_path / ".config/appliance/appliance.toml", "[server]\ndrain_s = 1")
    env = write(tmp_path / "env.toml", "[server]\ndrain_s = 2")
    arg = write(tmp_path / "arg.toml", "[server]\ndrain_s = 3")
    environ = {"HOME": str(tmp_path)}
    assert load(None, environ, uid=USER).file == str(xdg)
    assert load(None, environ | {"APPLIANCE_CONFIG": ""}, uid=USER).settings.server.drain_s == 1
    assert load(None, environ | {"APPLIANCE_CONFIG": str(env)}, uid=USER).settings.server.drain_s == 2
    assert load(arg, environ | {"APPLIANCE_CONFIG": str(env)}, uid=USER).settings.server.drain_s == 3
    etc = write(tmp_path / "etc/appliance/appliance.toml", "[server]\ndrain_s = 4")
    assert load(None, environ, uid=USER).file == str(xdg)
    assert load(None, environ, uid=0).file == str(etc)
    assert load(None, {"HOME": "/elsewhere"}, uid=USER).settings.server.drain_s == 4


def test_a_named_file_must_exist(tmp_path: Path) -> None:
    absent = tmp_path / "absent.toml"
    assert faults(absent, {}) == [f"{absent}: no such file"]
    assert faults(None, {"APPLIANCE_CONFIG": str(absent)}) == [f"{absent}: no such file (from APPLIANCE_CONFIG)"]
    assert faults(tmp_path, {}) == [f"{tmp_path}: cannot be read: Is a directory; name another file"]


def test_a_file_that_is_no_text(tmp_path: Path) -> None:
    file = tmp_path / "appliance.toml"
    file.write_bytes(b"[server]\nx = '\xff'")
    assert faults(file, {}) == [f"{file}: expected UTF-8, got 0xff at byte 14"]
    file.write_bytes("\ufeff[server]\r\ndrain_s = 7\r\n".encode())
    assert load(file, {}, uid=0).settings.server.drain_s == 7


def test_the_environment_is_judged_although_the_file_cannot_be_read(tmp_path: Path) -> None:
    file = write(tmp_path / "appliance.toml", "[server")
    environ = {
        "APPLIANCE_SERVER__LISTN": "1",
        "APPLIANCE_SERVER__DRAIN_S": "x",
        "APPLIANCE_MODELS": '[{name="m", fallbacks="n"}]',
    }
    paths = [fault.partition(": ")[0] for fault in faults(file, environ)]
    # The fallback is not judged: the file may have named its target.
    assert paths == [str(file), "APPLIANCE_SERVER__LISTN", "server.drain_s"]


@pytest.mark.parametrize(
    ("environ", "uid", "files", "state", "runtime"),
    [
        ({"HOME": "/root"}, 0, ["/etc"], "/var/lib/appliance", "/run/appliance"),
        ({"XDG_CONFIG_HOME": "/x", "XDG_STATE_HOME": "/x"}, 0, ["/etc"], "/var/lib/appliance", "/run/appliance"),
        ({"HOME": "/h"}, USER, ["/h/.config", "/etc"], "/h/.local/state/appliance", "/h/.local/state/appliance/run"),
        (
            {"HOME": "/h", "XDG_CONFIG_HOME": "/c/", "XDG_STATE_HOME": "/s", "XDG_RUNTIME_DIR": "/run/user/7"},
            USER,
            ["/c", "/etc"],
            "/s/appliance",
            "/run/user/7/appliance",
        ),
        (
            {"HOME": "/h", "XDG_STATE_HOME": "s"},
            USER,
            ["/h/.config", "/etc"],
            "/h/.local/state/appliance",
            "/h/.local/state/appliance/run",
        ),
        ({}, USER, ["/etc"], "", ""),
        (
            {"STATE_DIRECTORY": "/var/lib/appliance", "RUNTIME_DIRECTORY": "/run/appliance:/run/other"},
            USER,
            ["/etc"],
            "/var/lib/appliance",
            "/run/appliance",
        ),
        ({"STATE_DIRECTORY": "/var/lib/appliance-b"}, 0, ["/etc"], "/var/lib/appliance-b", "/run/appliance"),
        ({"STATE_DIRECTORY": "/var/lib/runner"}, 0, ["/etc"], "/var/lib/runner/appliance", "/run/appliance"),
        ({"APPLIANCE_RUNTIME_DIR": "/big"}, 0, ["/etc"], "/var/lib/appliance", "/run/appliance"),
    ],
)
def test_folders(
    environ: dict[str, str], uid: int, files: list[str], state: str, runtime: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    found = places(environ, uid)
    assert found.config_files == tuple(f"{folder}/appliance/appliance.toml" for folder in files)
    assert (found.state_dir, found.runtime_dir) == (state, runtime)


def test_folders_reach_the_settings() -> None:
    settings = load(None, {"HOME": HOME}, uid=USER).settings
    assert settings.state_dir == f"{HOME}/.local/state/appliance"
    assert settings.server.admin_socket == f"{settings.runtime_dir}/admin.sock"


def test_no_home_is_a_fault() -> None:
    assert faults(None, {}, uid=USER) == [
        "HOME: expected a folder of one's own: set HOME, XDG_STATE_HOME or STATE_DIRECTORY"
    ]


def test_relative_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """They start at the file where the file holds them, and where the process was started otherwise."""
    write(tmp_path / "file/key", "k")
    write(tmp_path / "cwd/key", "k")
    file = write(tmp_path / "file/appliance.toml", "[[endpoints]]\nid='a'\nurl='http://h'\napi_key_file='./key'")
    monkeypatch.chdir(tmp_path / "cwd")
    endpoints = "[{id='a', url='http://h', api_key_file='key'}]"
    assert load("../file/appliance.toml", {}, uid=0).settings.endpoints[0].api_key_file == f"{tmp_path}/file/key"
    environ = {"APPLIANCE_ENDPOINTS": endpoints, "APPLIANCE_SERVER__ADMIN_SOCKET": "a.sock"}
    settings = load(file, environ, uid=0).settings
    assert settings.endpoints[0].api_key_file == f"{tmp_path}/cwd/key"
    assert settings.server.admin_socket == f"{tmp_path}/cwd/a.sock"


# values


def test_everything_at_once(tmp_path: Path) -> None:
    write(tmp_path / "key", "sk-1")
    settings = loaded(
        tmp_path,
        """
        [server]
        listen = ["0.0.0.0:6381", "[::]:6381", "localhost:0"]
        metrics_listen = "[0:0::1]:6390"
        trusted_proxies = ["10.0.0.1", "fd00::/8"]
        cors_origins = ["HTTPS://Chat.Example.org:443", "http://localhost:3000", "tauri://localhost", "http://[::1]:80"]
        [[endpoints]]
        id = "a"
        url = "http://10.0.0.5:8000/v1"
        models = ["llama", "org/name"]
        engine = "vllm"
        pool_priority = 2
        capacity = 8
        api_key_file = "key"
        [[endpoints]]
        id = "b"
        url = "https://[fd00::1]/proxy/v1/"
        pool = "spare"
        [[endpoints]]
        id = "c"
        url = "http://node-3.lan:8080"
        [[models]]
        name = "llama"
        aliases = ["chat"]
        fallbacks = ["org/name"]
        context_tokens = 32768
        [scheduling]
        picker = "weighted"
        weights = { queue = 2 }
        """,
    ).settings
    server = settings.server
    assert server.listen == (Address("0.0.0.0", 6381), Address("::", 6381), Address("127.0.0.1", 0))
    assert server.metrics_listen == (Address("::1", 6390),)
    assert server.trusted_proxies == ("10.0.0.1/32", "fd00::/8")
    assert server.cors_origins == (
        "https://chat.example.org",
        "http://localhost:3000",
        "tauri://localhost",
        "http://[::1]",
    )
    assert settings.endpoints == (
        Endpoint("a", "10.0.0.5", 8000, False, "", ("llama", "org/name"), "vllm", "main", 2, 8, f"{tmp_path}/key"),
        Endpoint("b", "fd00::1", 443, True, "/proxy", pool="spare"),
        Endpoint("c", "node-3.lan", 8080),
    )
    assert settings.models == (Model("llama", ("chat",), ("org/name",), 32768),)
    assert settings.scheduling.weights == Weights(queue=2.0)
    assert type(settings.scheduling.weights.queue) is float


@pytest.mark.parametrize(
    "url",
    [
        "http://", "http:///v1", "h:80", "http://h:0", "http://h:", "http://h:99999", "http://h:x", "http://10.0.0.256",
        "http://[::1", "http://[zz]", "http://a b", " http://h", "http://h\n", "http://-h", "http://h..i", "http://h/a/../b",
        "http://h/a//b", "http://h/?x", "http://h/#x", "http://h/#", "http://h/a b", "http://u@h", "http://:p@h", "http://*",
        "unix:///x", "http://h\\i",
    ],
)  # fmt: skip
def test_urls_that_are_none(url: str) -> None:
    environ = {"APPLIANCE_ENDPOINTS": f"[{{id='a', url={url!r}}}]".replace("'", '"')}
    assert len(faults(None, environ)) == 1


@pytest.mark.parametrize(
    "origin", ["null", "https://", "https://a b", "https://u@h", "https://h:x", "https://h:0", "h", "https://h?x"]
)
def test_origins_that_are_none(origin: str) -> None:
    assert len(faults(None, {"APPLIANCE_SERVER__CORS_ORIGINS": origin})) == 1


# the environment


@pytest.mark.parametrize(
    ("variable", "text", "value"),
    [
        ("SERVER__LISTEN", "127.0.0.1:80", ["127.0.0.1:80"]),
        ("SERVER__LISTEN", '"127.0.0.1:80"', ["127.0.0.1:80"]),
        ("SERVER__LISTEN", '["127.0.0.1:80", "[::1]:80"]', ["127.0.0.1:80", "[::1]:80"]),
        ("SERVER__LISTEN", "[::1]:80", ["[::1]:80"]),
        ("SERVER__METRICS_LISTEN", "", []),
        ("SERVER__DRAIN_S", " 5 # seconds", 5.0),
        ("SERVER__ACCESS_LOG", "true", True),
        ("SERVER__MAX_BODY_BYTES", "1_000", 1000),
        ("TRACING__ENDPOINT", "https://a", "https://a"),
        ("TRACING__ENDPOINT", "'https://a'", "https://a"),
        ("TRACING__ENDPOINT", "", ""),
        ("SERVER__ADMIN_SOCKET", "/5", "/5"),
        ("LOGGING__LEVEL", "debug", "debug"),
        ("SCHEDULING__WEIGHTS__KV", "3", 3.0),
    ],
)
def test_overlays(variable: str, text: str, value: object) -> None:
    name = f"APPLIANCE_{variable}"
    path = variable.lower().replace("__", ".")
    assert [row for row in show(load(None, {name: text}, uid=0)) if row.origin != "default"] == [
        (path, value, f"environment {name}")
    ]


def test_text_that_looks_like_a_number_is_text_where_text_is_wanted() -> None:
    environ = {"APPLIANCE_MODELS": "[{name = 'm', aliases = ['5']}]", "APPLIANCE_SERVER__TLS_CERT": "5"}
    assert [fault.partition(",")[0] for fault in faults(None, environ)] == [
        "server.tls_key: missing; expected the path of a file",
        "server.tls_cert: expected a readable file",
    ]


@pytest.mark.parametrize(
    ("variable", "text", "fault"),
    [
        ("SERVER__LISTN", "1", "APPLIANCE_SERVER__LISTN: unknown key; did you mean APPLIANCE_SERVER__LISTEN?"),
        ("SERVER_LISTEN", "1", "APPLIANCE_SERVER_LISTEN: unknown key; did you mean APPLIANCE_SERVER__LISTEN?"),
        ("server__LISTEN", "1", "APPLIANCE_server__LISTEN: unknown key; did you mean APPLIANCE_SERVER__LISTEN?"),
        ("ZEBRA", "1", "APPLIANCE_ZEBRA: unknown key"),
        ("", "1", "APPLIANCE_: unknown key"),
        ("SERVER__", "1", "APPLIANCE_SERVER__: unknown key; did you mean APPLIANCE_SERVER?"),
        (
            "SERVER__DRAIN_S__X",
            "1",
            "APPLIANCE_SERVER__DRAIN_S__X: unknown key; did you mean APPLIANCE_SERVER__DRAIN_S?",
        ),
        (
            "ENDPOINTS__0__URL",
            "x",
            "APPLIANCE_ENDPOINTS__0__URL: unknown key; the whole list is given as APPLIANCE_ENDPOINTS='[{...}]'",
        ),
        ("AUTH__ENABLED", "true", "APPLIANCE_AUTH__ENABLED: not available in this version"),
        (
            "SERVER__DRAIN_S",
            "soon",
            'server.drain_s: expected a number of seconds, 0 or more, got "soon" (from APPLIANCE_SERVER__DRAIN_S)',
        ),
        (
            "SERVER__DRAIN_S",
            "",
            'server.drain_s: expected a number of seconds, 0 or more, got "" (from APPLIANCE_SERVER__DRAIN_S)',
        ),
        (
            "SERVER__DRAIN_S",
            "1\naccess_log = true",
            'server.drain_s: expected a number of seconds, 0 or more, got "1\\naccess_log = true"'
            " (from APPLIANCE_SERVER__DRAIN_S)",
        ),
        (
            "SERVER__ACCESS_LOG",
            "1",
            "server.access_log: expected true or false, got 1 (from APPLIANCE_SERVER__ACCESS_LOG)",
        ),
        (
            "ENDPOINTS",
            "[{id = 'a', url = 'foo'}]",
            'endpoints[0].url: expected http:// or https:// with a host, got "foo" (from APPLIANCE_ENDPOINTS)',
        ),
        (
            "ENDPOINTS",
            "[{",
            'APPLIANCE_ENDPOINTS: expected TOML, got "[{": Invalid initial character for a key part',
        ),
        (
            "ENDPOINTS",
            "http://h",
            'APPLIANCE_ENDPOINTS: expected TOML, got "http://h": Invalid value',
        ),
        (
            "MODELS",
            "[{name = 'm', aliases = 'm'}]",
            'models[0].aliases: "m" shadows the model of that name (models[0].name) (from APPLIANCE_MODELS)',
        ),
        (
            "LOGGING__LEVEL",
            "\udcff",
            'logging.level: expected "debug", "info", "warning" or "error", got "\\udcff"'
            " (from APPLIANCE_LOGGING__LEVEL)",
        ),
        (
            "TRACING__ENDPOINT",
            "[" * 5000,
            f'tracing.endpoint: expected http:// or https:// with a host, got "{"[" * 80}..."'
            " (from APPLIANCE_TRACING__ENDPOINT)",
        ),
    ],
)
def test_faulty_overlays(variable: str, text: str, fault: str) -> None:
    assert faults(None, {f"APPLIANCE_{variable}": text}) == [fault]


def test_variables_that_are_no_overlays() -> None:
    environ = {
        "APPLIANCE_ADMIN": "/x",
        "APPLIANCE_RUNTIME_DIR": "/y",
        "APPLIANCE": "z",
        "SERVER__LISTEN": "q",
        "MENTAT_GROUP": "s",
    }
    assert {row.origin for row in show(load(None, environ, uid=0))} == {"default"}


def test_a_value_replaces_that_of_the_file_as_a_whole(tmp_path: Path) -> None:
    text = "[scheduling.weights]\nkv = 5\nqueue = 6\n[[endpoints]]\nid='a'\nurl='http://h'\n[[endpoints]]\nid='b'\nurl='http://h'"
    whole = {"APPLIANCE_SCHEDULING__WEIGHTS": "{kv = 7}", "APPLIANCE_SCHEDULING__WEIGHTS__INFLIGHT": "8"}
    found = loaded(tmp_path, text, APPLIANCE_ENDPOINTS="[{id='c', url='http://i'}]", **whole)
    assert found.settings.scheduling.weights == Weights(kv=7.0, inflight=8.0)
    assert [endpoint.id for endpoint in found.settings.endpoints] == ["c"]
    assert {key: origin for key, origin in found.origins.items() if "weights" in key} == {
        "scheduling.weights.queue": "default",
        "scheduling.weights.kv": "environment APPLIANCE_SCHEDULING__WEIGHTS",
        "scheduling.weights.inflight": "environment APPLIANCE_SCHEDULING__WEIGHTS__INFLIGHT",
        "scheduling.weights.prefix": "default",
        "scheduling.weights.session": "default",
    }
    assert found.origins["endpoints[0].url"] == "environment APPLIANCE_ENDPOINTS"
    assert found.origins["endpoints[0].pool"] == "default"


def test_one_key_of_a_table_leaves_the_others_to_the_file(tmp_path: Path) -> None:
    found = loaded(tmp_path, "[scheduling.weights]\nkv = 5\nqueue = 6", APPLIANCE_SCHEDULING__WEIGHTS__KV="7")
    assert found.settings.scheduling.weights == Weights(kv=7.0, queue=6.0)
    assert found.origins["scheduling.weights.queue"] == "file"


def test_an_overlay_over_a_section_that_is_none_leaves_the_fault_of_the_file(tmp_path: Path) -> None:
    file = write(tmp_path / "appliance.toml", "scheduling = 3")
    assert faults(file, {"APPLIANCE_SCHEDULING__WEIGHTS__KV": "7"}) == [
        "scheduling: expected a table ([scheduling]), got 3"
    ]


def test_the_command_line_wins(tmp_path: Path) -> None:
    file = write(tmp_path / "appliance.toml", "[server]\nlisten = '0.0.0.0:1'")
    environ = {"APPLIANCE_SERVER__LISTEN": "0.0.0.0:2"}
    found = load(file, environ, arguments={"server.listen": ["0.0.0.0:3"]}, uid=0)
    assert found.settings.server.listen == (Address("0.0.0.0", 3),)
    assert found.origins["server.listen"] == "command line"
    assert faults(file, environ, arguments={"server.listen": ["x"]})[0].endswith('got "x" (from the command line)')


# showing


def test_show_tells_where_each_value_came_from_and_masks_passwords(tmp_path: Path) -> None:
    write(tmp_path / "key", "sk-secret")
    text = """
        [tracing]
        endpoint = "https://me:hunter2@collector:4318/"
        [[endpoints]]
        id = "a"
        url = "http://h:1/v1"
        api_key_file = "key"
    """
    found = loaded(tmp_path, text, APPLIANCE_SERVER__DRAIN_S="5")
    assert found.settings.tracing.endpoint == "https://me:hunter2@collector:4318"
    rows = {row.path: (row.value, row.origin) for row in show(found)}
    assert rows["tracing.endpoint"] == ("https://***@collector:4318", "file")
    assert rows["endpoints[0].url"] == ("http://h:1", "file")
    assert rows["endpoints[0].models"] == (None, "default")
    assert rows["endpoints[0].api_key_file"] == (f"{tmp_path}/key", "file")
    assert rows["server.drain_s"] == (5.0, "environment APPLIANCE_SERVER__DRAIN_S")
    assert rows["server.admin_socket"] == ("/run/appliance/admin.sock", "default")
    assert not any("sk-secret" in str(row) or "hunter2" in str(row) for row in show(found))


# asking a running process


def test_admin_sockets(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    home = {"HOME": "/h", "XDG_RUNTIME_DIR": "/run/user/7"}
    assert admin_sockets(None, {}, uid=0) == ("/run/appliance/admin.sock",)
    usual = ("/run/user/7/appliance/admin.sock", "/run/appliance/admin.sock")
    assert admin_sockets(None, home, uid=USER) == usual
    # Faults elsewhere are not ctl's affair.
    file = write(tmp_path / "f/appliance.toml", "[server]\nadmin_socket = 'a.sock'\ntls_cert = 'absent'\n[zebra]")
    assert admin_sockets(file, home, uid=USER) == (f"{tmp_path}/f/a.sock", *usual)
    overlaid = home | {"APPLIANCE_SERVER__ADMIN_SOCKET": "b.sock", "APPLIANCE_ZEBRA": "1"}
    assert admin_sockets(file, overlaid, uid=USER) == (f"{tmp_path}/b.sock", *usual)
    assert admin_sockets(write(tmp_path / "broken.toml", "[server"), home, uid=USER) == usual
    assert admin_sockets(write(tmp_path / "odd.toml", "server = 5"), home, uid=USER) == usual
    assert admin_sockets(tmp_path / "absent", home, uid=USER) == usual


# reloading


def settings(**sections: Any) -> Settings:
    """The defaults with keys of sections changed: `settings(server={"drain_s": 5})`."""
    base = Settings()
    made = {
        name: attrs.evolve(getattr(base, name), **value) if isinstance(value, dict) else value
        for name, value in sections.items()
    }
    return attrs.evolve(base, **made)


def test_nothing_changed() -> None:
    assert changes(Settings(), Settings()) == ((), ())


def test_changes_are_told_by_key_and_by_whether_they_need_a_restart() -> None:
    new = settings(
        server={"drain_s": 5.0, "listen": (Address("::", 1),), "admin_socket": "/x"},
        logging={"level": "debug"},
        scheduling={"weights": Weights(kv=9.0)},
        tracing={"endpoint": "http://c"},
    )
    live, fixed = changes(Settings(), new)
    assert live == ("server.drain_s", "scheduling.weights.kv", "logging.level")
    assert fixed == ("server.listen", "server.admin_socket", "tracing.endpoint")


def test_entries_are_told_by_name() -> None:
    a, b, c = Endpoint("a", "h", 1), Endpoint("b", "h", 2), Endpoint("c", "h", 3)
    old = settings(endpoints=(a, b), models=(Model("m"),))
    new = settings(endpoints=(attrs.evolve(b, port=9, capacity=4), c), models=(Model("m", aliases=("x",)),))
    assert changes(old, new) == (
        ("endpoints.a", "endpoints.b.url", "endpoints.b.capacity", "endpoints.c", "models.m.aliases"),
        (),
    )
    assert changes(settings(endpoints=(a, b)), settings(endpoints=(b, a))) == (("endpoints",), ())


def test_another_certificate_is_live_but_turning_tls_on_is_not() -> None:
    plain, tls = Settings(), settings(server={"tls_cert": "/a", "tls_key": "/k"})
    other = settings(server={"tls_cert": "/b", "tls_key": "/k"})
    assert changes(tls, other) == (("server.tls_cert",), ())
    assert changes(plain, tls) == ((), ("server.tls_cert", "server.tls_key"))
    assert changes(tls, plain) == ((), ("server.tls_cert", "server.tls_key"))
    assert keep_fixed(plain, tls) == plain
    assert keep_fixed(tls, plain) == tls
    assert keep_fixed(tls, other) == other


def test_what_holds_after_a_reload_differs_in_nothing_that_needs_a_restart() -> None:
    old = attrs.evolve(Settings(), state_dir="/s")
    new = settings(
        server={"drain_s": 5.0, "listen": (Address("::", 1),)},
        endpoints=(Endpoint("a", "h", 1),),
        scheduling={"prefix": attrs.evolve(old.scheduling.prefix, max_bytes=1 << 20), "picker": "weighted"},
    )
    kept = keep_fixed(old, new)
    assert kept.server.listen == old.server.listen
    assert kept.scheduling.prefix == old.scheduling.prefix
    assert kept.state_dir == "/s"
    assert changes(old, kept) == (changes(old, new)[0], ())


def test_a_fault_is_printed_as_path_and_message() -> None:
    assert str(ConfigError([Fault("a.b", "c"), Fault("d", "e")])) == "a.b: c\nd: e"

"""Every rule of the configuration: what is written, and the fault it must give."""

from __future__ import annotations

import datetime
import itertools
import os
import pty
import random
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.cli.config import ConfigError, load
from appliance.cli.config.check import check
from appliance.facts.endpoint import Endpoint
from appliance.facts.settings import NOT_YET, Model, Settings


def faults(folder: Path, text: str, environ: Mapping[str, str] | None = None) -> list[str]:
    file = folder / "appliance.toml"
    file.write_text(text)
    try:
        load(file, environ or {}, uid=0)
    except ConfigError as error:
        assert str(error).splitlines() == [str(fault) for fault in error.faults]
        return [str(fault) for fault in error.faults]
    return []


ADDRESS = 'a numeric address with a port, such as "0.0.0.0:6381" or "[::]:6381"'
URL = "http:// or https:// with a host"
ORIGIN = 'an origin such as "https://chat.example.org" (scheme, host, port if unusual, no path)'
ENDPOINT = '[[endpoints]]\nid = "a"\nurl = "http://10.0.0.5:8000/v1"\n'


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        # names
        ('[server]\nlistn = "x"', "server.listn: unknown key; did you mean listen?"),
        ('listen = "0.0.0.0:1"', "listen: unknown key; did you mean server.listen?"),
        ("[servr]", "servr: unknown key; did you mean server?"),
        ("[zebra]\nx = 1", "zebra: unknown key"),
        ('[server]\n"a b" = 1', 'server."a b": unknown key'),
        ('[server]\n"\\u001b[31m" = 1', 'server."\\u001b[31m": unknown key'),
        (ENDPOINT + "pool_prio = 3", "endpoints[0].pool_prio: unknown key; did you mean pool_priority?"),
        ("[scheduling.weights]\nspeed = 1", "scheduling.weights.speed: unknown key"),
        # types
        ("[server]\ndrain_s = 'abc'", 'server.drain_s: expected a number of seconds, 0 or more, got "abc"'),
        ("[server]\ndrain_s = true", "server.drain_s: expected a number of seconds, 0 or more, got true"),
        ("[server]\ndrain_s = [1]", "server.drain_s: expected a number of seconds, 0 or more, got a list"),
        (
            "[server]\ndrain_s = 2020-01-01",
            "server.drain_s: expected a number of seconds, 0 or more, got a date or a time",
        ),
        (
            "[server]\nmax_body_bytes = 1.5",
            "server.max_body_bytes: expected a whole number of bytes, 1 or more, got 1.5",
        ),
        ("[server]\naccess_log = 1", "server.access_log: expected true or false, got 1"),
        ("[tracing]\nendpoint = 5", f"tracing.endpoint: expected {URL}, got 5"),
        ("[server]\ntls_cert = {}", "server.tls_cert: expected the path of a file, got a table"),
        ("server = 3", "server: expected a table ([server]), got 3"),
        ("[[server]]", "server: expected a table ([server]), got a list"),
        ("[endpoints]", "endpoints: expected a list of tables ([[endpoints]]), got a table"),
        ("endpoints = [1]", "endpoints: expected a list of tables ([[endpoints]]), got a list"),
        ("[scheduling]\nprefix = 3", "scheduling.prefix: expected a table ([scheduling.prefix]), got 3"),
        ("[server]\nlisten = 6381", f"server.listen: expected a list, each {ADDRESS}, got 6381"),
        # numbers
        ("[deadlines]\ndial_s = 0", "deadlines.dial_s: expected a number of seconds above 0, got 0"),
        ("[deadlines]\ndial_s = -1", "deadlines.dial_s: expected a number of seconds above 0, got -1"),
        ("[deadlines]\ndial_s = inf", "deadlines.dial_s: expected a number of seconds above 0, got inf"),
        ("[deadlines]\nidle_s = nan", "deadlines.idle_s: expected a number of seconds above 0, got nan"),
        (
            "[deadlines]\nstream_total_s = -0.5",
            "deadlines.stream_total_s: expected a number of seconds, 0 or more, got -0.5",
        ),
        ("[tracing]\nsample_ratio = 1.5", "tracing.sample_ratio: expected a number from 0 to 1, got 1.5"),
        ("[scheduling]\nscrape_s = 0", "scheduling.scrape_s: expected a number of seconds of at least 0.05, got 0"),
        (
            ENDPOINT + f"capacity = {2**63}",
            f"endpoints[0].capacity: expected a whole number, 0 or more, got {2**63}",
        ),
        (
            "[server]\nmax_buffered_bytes = 5",
            "server.max_buffered_bytes: expected at least max_body_bytes (134217728), or the largest body could never"
            " come in, got 5",
        ),
        # words
        ("[scheduling]\npicker = 'bst'", 'scheduling.picker: expected "best" or "weighted", got "bst"'),
        (
            ENDPOINT + "engine = 'vlm'",
            'endpoints[0].engine: expected "vllm", "sglang", "llamacpp", "sim" or "openai", got "vlm"',
        ),
        # listeners
        ("[server]\nlisten = 'foo:80'", f'server.listen: expected {ADDRESS}, got "foo:80"'),
        ("[server]\nlisten = ['0.0.0.0:1', '::1:2']", f'server.listen[1]: expected {ADDRESS}, got "::1:2"'),
        ("[server]\nlisten = '0.0.0.0:65536'", f'server.listen: expected {ADDRESS}, got "0.0.0.0:65536"'),
        ("[server]\nlisten = '0.0.0.0'", f'server.listen: expected {ADDRESS}, got "0.0.0.0"'),
        ("[server]\nlisten = '[127.0.0.1]:1'", f'server.listen: expected {ADDRESS}, got "[127.0.0.1]:1"'),
        ("[server]\nlisten = []", f"server.listen: expected at least 1: {ADDRESS}"),
        ("[server]\nlisten = ''", f"server.listen: expected at least 1: {ADDRESS}"),
        (
            "[server]\nlisten = ['0.0.0.0:1', '0.0.0.0:1']",
            'server.listen[1]: expected another address than server.listen[0], got "0.0.0.0:1"',
        ),
        (
            "[server]\nlisten = '127.0.0.1:6390'",
            'server.metrics_listen: expected another address than server.listen, got "127.0.0.1:6390"',
        ),
        (
            f"[server]\nadmin_socket = '/{'x' * 107}'",
            f'server.admin_socket: expected at most 107 bytes, got "/{"x" * 107}"',
        ),
        # addresses of others
        (
            "[server]\ntrusted_proxies = ['10.0.0.1', 'foo']",
            'server.trusted_proxies[1]: expected an address or a network such as "10.0.0.0/24", got "foo"',
        ),
        (
            "[server]\ntrusted_proxies = '10.0.0.1/8'",
            "server.trusted_proxies: expected a network without host bits (10.0.0.0/8) or a single address,"
            ' got "10.0.0.1/8"',
        ),
        ("[server]\ncors_origins = '*'", f'server.cors_origins: expected {ORIGIN}, got "*"'),
        ("[server]\ncors_origins = 'https://a/'", f'server.cors_origins: expected {ORIGIN}, got "https://a/"'),
        (
            "[tracing]\nendpoint = 'https://a/?x'",
            'tracing.endpoint: expected a URL without ? and #, got "https://a/?x"',
        ),
        # endpoints
        ('[[endpoints]]\nurl = "http://h"', "endpoints[0].id: missing; expected a name without spaces around it"),
        ('[[endpoints]]\nid = "a"', f"endpoints[0].url: missing; expected {URL}"),
        (ENDPOINT + "models = []", "endpoints[0].models: expected at least 1: a name without spaces around it"),
        (
            ENDPOINT + "models = ['x', ' y']",
            'endpoints[0].models[1]: expected a name without spaces around it, got " y"',
        ),
        (ENDPOINT + 'pool = ""', 'endpoints[0].pool: expected a name without spaces around it, got ""'),
        (
            ENDPOINT + 'pool = "a\\u0000b"',
            'endpoints[0].pool: expected a string without control characters, got "a\\u0000b"',
        ),
        (
            ENDPOINT + ENDPOINT,
            'endpoints[1].id: expected a unique name, got "a", which is endpoints[0].id already',
        ),
        # models
        (
            "[[models]]\nname = 'm'\n[[models]]\nname = 'm'",
            'models[1].name: expected a unique name, got "m", which is models[0].name already',
        ),
        (
            "[[models]]\nname = 'm'\n[[models]]\nname = 'n'\naliases = ['m']",
            'models[1].aliases: "m" shadows the model of that name (models[0].name)',
        ),
        (
            "[[models]]\nname = 'm'\n[[models]]\nname = 'n'\naliases = ['m']\nfallbacks = ['m']",
            'models[1].aliases: "m" shadows the model of that name (models[0].name)',
        ),
        (
            "[[models]]\nname = 'm'\naliases = ['x', 'm']",
            'models[0].aliases[1]: "m" shadows the model of that name (models[0].name)',
        ),
        (
            ENDPOINT + "models = ['llama']\n[[models]]\nname = 'm'\naliases = ['llama']",
            'models[0].aliases: "llama" shadows the model of that name (endpoints[0].models)',
        ),
        (
            "[[models]]\nname = 'm'\naliases = ['c']\n[[models]]\nname = 'n'\naliases = ['c']",
            'models[1].aliases: "c" is an alias already (models[0].aliases)',
        ),
        (
            "[[models]]\nname = 'm'\naliases = ['c', 'c']",
            'models[0].aliases[1]: "c" is an alias already (models[0].aliases[0])',
        ),
        (
            "[[models]]\nname = 'm'\nfallbacks = ['x']",
            'models[0].fallbacks: expected the name of a model, got "x"; name it in [[models]] or in the models of an'
            " endpoint",
        ),
        ("[[models]]\nname = 'm'\nfallbacks = ['m']", "models[0].fallbacks: expected no loop, got m -> m"),
        (
            "[[models]]\nname = 'm'\nfallbacks = ['n', 'n']\n[[models]]\nname = 'n'",
            'models[0].fallbacks[1]: "n" is listed twice',
        ),
        (
            "[[models]]\nname = 'm'\nfallbacks = ['n']\n[[models]]\nname = 'n'\naliases = ['c']\nfallbacks = ['o']\n"
            "[[models]]\nname = 'o'\nfallbacks = ['c']",
            "models[1].fallbacks: expected no loop, got n -> o -> n",
        ),
        # the file itself
        ("[server\n", "{file}: line 1, column 8: expected TOML: Expected ']' at the end of a table declaration"),
        ("[server]\nlisten = \n", "{file}: line 2, column 10: expected TOML: Invalid value"),
        ("x = " + "[" * 5000, "{file}: expected TOML, got brackets nested too deeply"),
    ],
)
def test_one_fault(tmp_path: Path, text: str, fault: str) -> None:
    assert faults(tmp_path, text) == [fault.replace("{file}", str(tmp_path / "appliance.toml"))]


@pytest.mark.parametrize(
    "text",
    [
        "[[models]]\nname = 'm'\nfallbacks = ['llama']\n" + ENDPOINT + "models = ['llama']",
        "[[models]]\nname = 'm'\nfallbacks = ['c']\n[[models]]\nname = 'n'\naliases = ['c']",
        "[[models]]\nname = 'a'\nfallbacks = ['b', 'c']\n"
        "[[models]]\nname = 'b'\nfallbacks = ['c']\n[[models]]\nname = 'c'",
        "[server]\nlisten = ['127.0.0.1:0', '127.0.0.1:0']\nmetrics_listen = []",
        "[server]\ndrain_s = 0\n[deadlines]\nstream_total_s = 0\ndial_s = 0.001",
        ENDPOINT + "pool_priority = -5\nmodels = 'llama'",
    ],
)
def test_no_fault(tmp_path: Path, text: str) -> None:
    assert faults(tmp_path, text) == []


@pytest.mark.parametrize("name", NOT_YET)
def test_what_is_not_built_is_refused_by_name(tmp_path: Path, name: str) -> None:
    section, _, key = name.partition(".")
    if section == "models":
        text, path = f"[[models]]\nname = 'm'\n{key} = 1", f"models[0].{key}"
    else:
        text, path = (f"[{section}]\n{key} = 1" if key else f"[{name}]\nx = 1"), name
    assert faults(tmp_path, text) == [f"{path}: not available in this version"]
    variable = f"APPLIANCE_{name.upper().replace('.', '__')}__X"
    assert faults(tmp_path, "", {variable: "1"}) == [f"{variable}: not available in this version"]


def test_all_faults_come_at_once(tmp_path: Path) -> None:
    """One of each kind in a single file, and none hides another."""
    text = """
        [server]
        listen = "nowhere"
        tls_cert = "absent.pem"
        drain = 5
        [auth]
        enabled = true
        [[endpoints]]
        id = "a"
        url = "foo"
        models = ["llama"]
        [[endpoints]]
        id = "a"
        url = "http://h"
        capacity = -1
        [[models]]
        name = "m"
        aliases = ["llama"]
        fallbacks = ["n", "typo"]
        [[models]]
        name = "n"
        fallbacks = ["m"]
    """
    found = faults(tmp_path, text, {"APPLIANCE_SERVER__LISTN": "1", "APPLIANCE_DEADLINES__IDLE_S": "soon"})
    assert [fault.partition(": ")[0] for fault in found] == [
        "APPLIANCE_SERVER__LISTN",
        "auth",
        "server.drain",
        "server.listen",
        "deadlines.idle_s",
        "endpoints[0].url",
        "endpoints[1].capacity",
        "server.tls_key",
        "endpoints[1].id",
        "models[0].aliases",
        "models[0].fallbacks[0]",
        "models[0].fallbacks[1]",
        "server.tls_cert",
    ]


def test_a_faulty_name_does_not_make_its_uses_faulty(tmp_path: Path) -> None:
    text = "[[models]]\nname = 5\n[[models]]\nname = 'n'\nfallbacks = ['m']\n[[models]]\nname = 6"
    assert [fault.partition(":")[0] for fault in faults(tmp_path, text)] == ["models[0].name", "models[2].name"]


def test_a_faulty_item_leaves_the_numbers_of_the_others(tmp_path: Path) -> None:
    text = "[[models]]\nname = 'm'\naliases = ['', 'm', '']\nfallbacks = [1, 'x']"
    assert [fault.partition(":")[0] for fault in faults(tmp_path, text)] == [
        "models[0].aliases[0]",
        "models[0].aliases[2]",
        "models[0].fallbacks[0]",
        "models[0].aliases[1]",
    ]


@pytest.mark.parametrize("url", ["http://user:hunter2@h/v1", "http://user:hun/hunter2@h", "ftp://hunter2@h"])
def test_no_fault_shows_a_password(tmp_path: Path, url: str) -> None:
    endpoint = ENDPOINT.replace("http://10.0.0.5:8000/v1", url)
    text = f"[tracing]\nendpoint = '{url}?x=1'\n{endpoint}"
    found = faults(tmp_path, text)
    assert len(found) == 2
    assert "hunter2" not in "".join(found)


def test_a_long_value_is_cut(tmp_path: Path) -> None:
    assert len(faults(tmp_path, f"[scheduling]\npicker = '{'x' * 5000}'")[0]) < 200
    assert len(faults(tmp_path, f"[server]\naccess_log = {'9' * 4000}")[0]) < 200


# files


def test_files_that_cannot_be_read(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for name, why in [
        ("absent", "expected a readable file, got {}: No such file or directory"),
        ("folder", "expected a regular file, got {}"),
        ("pipe", "expected a regular file, got {}"),
    ]:
        found = faults(tmp_path, f"{ENDPOINT}api_key_file = '{name}'")
        assert found == [f"endpoints[0].api_key_file: {why.format(tmp_path / name)}"]


def test_a_file_without_permission(tmp_path: Path) -> None:
    (tmp_path / "key").write_text("k")
    (tmp_path / "key").chmod(0)
    if os.access(tmp_path / "key", os.R_OK):
        pytest.skip("this user reads everything")
    assert "Permission denied" in faults(tmp_path, f"{ENDPOINT}api_key_file = 'key'")[0]


@pytest.mark.parametrize(
    ("content", "what"),
    [(b"", "an empty one"), (b"\n", "an empty one"), (b"a\nb", "something else"), (b"\xff", "something else")],
)
def test_a_key_file_without_one_key(tmp_path: Path, content: bytes, what: str) -> None:
    (tmp_path / "key").write_bytes(content)
    assert faults(tmp_path, f"{ENDPOINT}api_key_file = 'key'") == [
        f"endpoints[0].api_key_file: expected a file with one key on one line, got {what} in {tmp_path / 'key'}"
    ]
    (tmp_path / "key").write_bytes(b"  sk-1234\n")
    assert faults(tmp_path, f"{ENDPOINT}api_key_file = 'key'") == []


def certificate(folder: Path, name: str, password: bytes | None = None) -> None:
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key = ec.generate_private_key(ec.SECP256R1())
    subject = x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)])
    start = datetime.datetime(2020, 1, 1)
    cert = (
        x509.CertificateBuilder(subject, subject, key.public_key(), 1, start, start + datetime.timedelta(days=36500))
        .sign(key, hashes.SHA256())
        .public_bytes(serialization.Encoding.PEM)
    )
    hide = serialization.BestAvailableEncryption(password) if password else serialization.NoEncryption()
    (folder / f"{name}.pem").write_bytes(cert)
    (folder / f"{name}.key").write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, hide)
    )


def test_certificates(tmp_path: Path) -> None:
    certificate(tmp_path, "a")
    certificate(tmp_path, "b")
    certificate(tmp_path, "locked", b"secret")
    (tmp_path / "junk").write_text("junk")

    def pair(cert: str, key: str) -> list[str]:
        return faults(tmp_path, f"[server]\ntls_cert = '{cert}'\ntls_key = '{key}'")

    no_key = "server.tls_key: expected a key in PEM without a password, in "
    assert pair("a.pem", "a.key") == []
    assert pair("a.pem", "b.key") == [
        f"server.tls_key: expected the key of {tmp_path}/a.pem, got another one's in {tmp_path}/b.key"
    ]
    assert pair("locked.pem", "locked.key")[0].startswith(f"{no_key}{tmp_path}/locked.key")
    assert pair("a.pem", "junk") == [f"{no_key}{tmp_path}/junk"]
    assert pair("junk", "a.key") == [f"server.tls_cert: expected a certificate in PEM, in {tmp_path}/junk"]
    assert pair("a.pem", "") == [
        "server.tls_key: missing; expected the path of a file, since server.tls_cert is set",
    ]
    assert pair("", "a.key") == [
        "server.tls_cert: missing; expected the path of a file, since server.tls_key is set",
    ]


def test_an_encrypted_key_asks_no_terminal_for_its_password(tmp_path: Path) -> None:
    """A start from a shell would otherwise wait at a prompt, and one from a service manager would fail: two stories."""
    certificate(tmp_path, "locked", b"secret")
    file = tmp_path / "appliance.toml"
    file.write_text("[server]\ntls_cert = 'locked.pem'\ntls_key = 'locked.key'")
    ours, theirs = pty.openpty()
    program = (
        "import os, sys\n"
        "from appliance.cli.config import ConfigError, load\n"
        "os.open(sys.argv[1], os.O_RDWR)\n"  # the first terminal that the leader of a session opens is its own
        "try: load(sys.argv[2], {}, uid=0)\n"
        "except ConfigError as error: print(error)\n"
    )
    ran = subprocess.run(
        [sys.executable, "-c", program, os.ttyname(theirs), str(file)],
        cwd=Path(__file__).parents[1],
        stdin=theirs,
        capture_output=True,
        start_new_session=True,
        timeout=60,
        text=True,
    )
    os.close(ours)
    os.close(theirs)
    assert ran.stdout.startswith("server.tls_key: expected a key in PEM without a password"), ran.stderr


# loops, on random graphs


@settings(deadline=None)
@given(seed=st.integers(0, 2**32), size=st.integers(1, 7))
def test_fallbacks_are_refused_exactly_when_there_is_a_loop(seed: int, size: int) -> None:
    rng = random.Random(seed)
    chains = {str(i): [str(j) for j in rng.sample(range(size), rng.randint(0, min(2, size)))] for i in range(size)}
    made = Settings(models=tuple(Model(name, fallbacks=tuple(chain)) for name, chain in chains.items()))

    def ends(name: str, above: tuple[str, ...] = ()) -> bool:
        return name not in above and all(ends(target, (*above, name)) for target in chains[name])

    loops = check(made)
    assert bool(loops) == (not all(map(ends, chains)))
    for fault in loops:
        names = fault.message.removeprefix("expected no loop, got ").split(" -> ")
        assert names[0] == names[-1] == min(names, key=int)
        assert all(after in chains[name] for name, after in itertools.pairwise(names))
    # Taking out every fallback that was named leaves no loop.
    for fault in loops:
        number, _, item = fault.path.removeprefix("models[").partition("].fallbacks")
        chain = made.models[int(number)].fallbacks
        chains[number] = [name for name in chains[number] if name != chain[int(item[1:-1]) if item else 0]]
    assert all(map(ends, chains))


def test_check_alone_takes_settings_made_by_hand() -> None:
    endpoint = Endpoint("a", "h", 1)
    assert [fault.path for fault in check(Settings(endpoints=(endpoint, endpoint)))] == ["endpoints[1].id"]

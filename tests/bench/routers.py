"""The routers that are compared, each with the command that starts it and what is switched on in it.

All of them get the same engines and the plainest policy they have: a router that thinks harder by default would be
charged for it here. Each is started, asked until it answers through to an engine, and stopped; one that cannot be is a
`Skipped` with the reason, so that a comparison never loses a side in silence.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import attrs

from tests.bench import machine
from tests.bench.native import MODEL, PLAIN_BODY, Engine

PEERS_VENV = machine.REPOSITORY / ".venv-bench"
_ANSWERS_WITHIN_S = 45.0
_CAPACITY = (
    8192  # of each engine, told to our admission: a cold engine is filled slowly on purpose, which is not the row
)


class Missing(Exception):
    """This router is not on this machine; the text says how to get it."""


@attrs.frozen
class Site:
    """Where a router is to listen, and for whom it routes."""

    port: int
    metrics_port: int
    upstreams: tuple[int, ...]
    folder: Path
    engine: str = "openai"
    settings: str = ""
    capacity: int = _CAPACITY


@attrs.frozen
class Launch:
    command: tuple[str, ...]
    version: str
    switched_on: str
    env: dict[str, str] | None = None


@attrs.frozen
class Running:
    """A router that answered. `pid` is the root of the process tree that is charged for it."""

    name: str
    port: int
    pid: int
    metrics_port: int
    version: str
    switched_on: str
    admin_socket: Path | None = None


@attrs.frozen
class Skipped:
    name: str
    reason: str


def _peer(command: str, package: str) -> tuple[str, str]:
    """The path of an installed peer's command, and its version."""
    path = PEERS_VENV / "bin" / command
    if not path.exists():
        raise Missing("not installed: run `python -m tests.bench install`")
    found = list(PEERS_VENV.glob(f"lib/python*/site-packages/{package}-*.dist-info"))
    return str(path), found[0].name.removesuffix(".dist-info").rpartition("-")[2] if found else "unknown"


def _vllm_router(site: Site) -> Launch:
    command, version = _peer("vllm-router", "vllm_router")
    return Launch(
        (
            *(command, "--host", "127.0.0.1", "--port", str(site.port)),
            *("--policy", "round_robin", "--log-level", "warning"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.metrics_port)),
            *("--worker-urls", *(f"http://127.0.0.1:{port}" for port in site.upstreams)),
        ),
        version,
        "round robin, metrics, retries, circuit breaker",
    )


def _smg(site: Site) -> Launch:
    command, version = _peer("smg", "smg")
    return Launch(
        (
            *(command, "launch", "--host", "127.0.0.1", "--port", str(site.port)),
            *("--policy", "round_robin", "--log-level", "warn", "--disable-tokenizer-autoload"),
            *("--prometheus-host", "127.0.0.1", "--prometheus-port", str(site.metrics_port)),
            *("--worker-urls", *(f"http://127.0.0.1:{port}" for port in site.upstreams)),
        ),
        version,
        "round robin, metrics, retries, circuit breaker, load polling",
    )


_NGINX = """\
daemon off; worker_processes 1; worker_rlimit_nofile 65536; pid {folder}/nginx.pid; error_log {folder}/nginx.log warn;
{user}
events {{ worker_connections 16384; }}
http {{
    access_log off; client_max_body_size 128m; keepalive_timeout 300s; keepalive_requests 1000000000;
    client_body_temp_path {folder}/nginx-body; proxy_temp_path {folder}/nginx-proxy;
    fastcgi_temp_path {folder}/nginx-fastcgi; uwsgi_temp_path {folder}/nginx-uwsgi; scgi_temp_path {folder}/nginx-scgi;
    upstream engines {{ {servers} keepalive 2048; keepalive_requests 1000000000; }}
    server {{
        listen 127.0.0.1:{port} backlog=4096;
        location / {{
            proxy_pass http://engines; proxy_http_version 1.1; proxy_set_header Connection "";
            proxy_buffering off; proxy_read_timeout 300s;
        }}
    }}
}}
"""


def nginx_path() -> str | None:
    """nginx from the system, or the one that `install` unpacked beside the peers."""
    unpacked = PEERS_VENV / "debian" / "usr" / "sbin" / "nginx"
    return shutil.which("nginx") or shutil.which("/usr/sbin/nginx") or shutil.which(str(unpacked))


def _nginx(site: Site) -> Launch:
    path = nginx_path()
    if path is None:
        raise Missing("not installed: run `python -m tests.bench install`, or install the package nginx")
    said = subprocess.run([path, "-v"], capture_output=True, text=True, timeout=10, check=False).stderr
    servers = " ".join(f"server 127.0.0.1:{port} max_fails=0;" for port in site.upstreams)
    user = "user root;" if os.geteuid() == 0 else ""
    text = _NGINX.format(folder=site.folder, port=site.port, servers=servers, user=user)
    (site.folder / "nginx.conf").write_text(text)
    return Launch(
        (path, "-p", str(site.folder), "-c", str(site.folder / "nginx.conf")),
        said.rpartition("/")[2].strip(),
        "plain proxy, round robin, keep-alive to the engines, no response buffering",
    )


def _appliance(site: Site) -> Launch:
    path = Path(sys.executable).parent / "appliance"
    if not path.exists():
        raise Missing(f"no command {path.name} beside this Python: install the project into this environment")
    endpoints = "".join(
        f'[[endpoints]]\nid = "e{number}"\nurl = "http://127.0.0.1:{port}/v1"\n'
        f'models = ["{MODEL}"]\nengine = "{site.engine}"\ncapacity = {site.capacity}\n'
        for number, port in enumerate(site.upstreams)
    )
    (site.folder / "appliance.toml").write_text(
        f'[server]\nlisten = "127.0.0.1:{site.port}"\nmetrics_listen = "127.0.0.1:{site.metrics_port}"\n'
        f'admin_socket = "{site.folder / "admin.sock"}"\n{site.settings}\n{endpoints}'
    )
    env = {name: value for name, value in os.environ.items() if not name.startswith("APPLIANCE_")}
    # Directories of its own, as root and as anybody else: a router in service here is left alone.
    env |= {name: str(site.folder) for name in ("STATE_DIRECTORY", "RUNTIME_DIRECTORY", "XDG_CONFIG_HOME")}
    version = subprocess.run([str(path), "version"], capture_output=True, text=True, timeout=20, env=env, check=False)
    return Launch(
        (str(path), "serve", "--config", str(site.folder / "appliance.toml")),
        version.stdout.strip() or "unknown",
        "admission (known capacity), scoring, retries, circuit breaker, deadlines, metrics, usage, decision records",
        env,
    )


RECIPES: dict[str, Callable[[Site], Launch]] = {
    "appliance": _appliance,
    "vllm-router": _vllm_router,
    "smg": _smg,
    "nginx": _nginx,
}
ALL = ("appliance", "vllm-router", "smg", "nginx")
DIRECT = "direct"  # no router at all: the load goes to the engine, which is then what is measured


def _tail(log: Path) -> str:
    text = re.sub(r"\x1b\[[0-9;]*m", "", log.read_text(errors="replace"))
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return " | ".join(lines[-3:])[-500:]


def ask(port: int) -> int:
    """Send one small chat request; the status of the answer. OSError when there was none."""
    request = Request(
        f"http://127.0.0.1:{port}/v1/chat/completions",
        json.dumps(PLAIN_BODY).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urlopen(request, timeout=10) as answer:
            answer.read()
            return int(answer.status)
    except HTTPError as problem:
        return problem.code


def _wait_until_it_answers(process: subprocess.Popen[bytes], port: int, log: Path) -> None:
    """Until an answer came through to an engine. Missing when that takes too long or the process ends."""
    give_up = time.monotonic() + _ANSWERS_WITHIN_S
    last = "nothing"
    while time.monotonic() < give_up:
        if process.poll() is not None:
            raise Missing(f"it ended at once with status {process.returncode}: {_tail(log)}")
        try:
            status = ask(port)
        except OSError as problem:
            last = str(problem)
        else:
            if status == 200:
                return
            last = f"status {status}"
        time.sleep(0.1)
    raise Missing(f"no answer through it within {_ANSWERS_WITHIN_S:.0f} s (last: {last}); its log ends: {_tail(log)}")


@contextlib.contextmanager
def running(
    names: Sequence[str],
    engines: Sequence[Engine],
    cores: machine.Cores,
    folder: Path,
    *,
    engine: str = "openai",
    settings: str = "",
    capacity: int = _CAPACITY,
) -> Iterator[tuple[list[Running], list[Skipped]]]:
    """Start the named routers side by side; one that is not being measured is idle. All end with the block.

    `engine`, `settings` (lines of TOML) and `capacity` (of each engine, 0: unknown) are for our own configuration.
    """
    up: list[Running] = []
    skipped: list[Skipped] = []
    with contextlib.ExitStack() as stack:
        for name in names:
            if name == DIRECT:
                up.append(Running(name, engines[0].port, engines[0].pid, 0, "", "no router"))
                continue
            home = folder / name
            home.mkdir()
            upstreams = tuple(each.port for each in engines)
            site = Site(machine.free_port(), machine.free_port(), upstreams, home, engine, settings, capacity)
            log = home / "log"
            try:
                launch = RECIPES[name](site)
                with log.open("wb") as sink:
                    process = machine.spawn(launch.command, core=cores.router, log=sink, env=launch.env, cwd=home)
                stack.callback(machine.end, process)
                _wait_until_it_answers(process, site.port, log)
            except (Missing, OSError, subprocess.TimeoutExpired) as problem:
                skipped.append(Skipped(name, str(problem)))
                continue
            admin = home / "admin.sock" if name == "appliance" else None
            up.append(
                Running(name, site.port, process.pid, site.metrics_port, launch.version, launch.switched_on, admin)
            )
        yield up, skipped

"""Try the program that `make binary` built, as a stranger would: no Python, no source, an environment of its own.

    python packaging/smoke.py dist/appliance/appliance

Prints a line per trial. Exit status 1 at the first that fails, with what was seen.
"""

from __future__ import annotations

import gzip
import http.client
import http.server
import json
import os
import re
import socket
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

WITHIN_S = 60.0
STARTS = 9
MODEL = "smoke"


class Failed(Exception):
    """A trial that failed; the message says what was seen."""


class Trial:
    """The program, the folder that it may write to, and an environment that names nothing else."""

    def __init__(self, program: Path, folder: Path) -> None:
        self.program = str(program)
        self.folder = folder
        self.env = {
            "PATH": os.defpath,
            "APPLIANCE_CONFIG": str(folder / "appliance.toml"),
            "STATE_DIRECTORY": str(folder / "appliance-state"),
            "RUNTIME_DIRECTORY": str(folder / "appliance-run"),
        }
        (folder / "appliance.toml").touch()  # one that is named must be there

    def run(self, *arguments: str, status: int = 0, **env: str) -> str:
        """What the program prints. Raises Failed where it does not end with `status`."""
        done = subprocess.run(
            (self.program, *arguments),
            capture_output=True,
            text=True,
            timeout=WITHIN_S,
            env={**self.env, **env},
            check=False,
        )
        if done.returncode != status:
            raise Failed(f"{' '.join(arguments)}: status {done.returncode}\n{done.stdout}{done.stderr}")
        return done.stdout or done.stderr

    @contextmanager
    def running(self, *arguments: str, says: str) -> Iterator[tuple[subprocess.Popen[str], re.Match[str]]]:
        """The program as a process, once it has printed a line with `says` in it; ended by SIGTERM, with status 0."""
        with subprocess.Popen(
            (self.program, *arguments), stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=self.env
        ) as process:
            assert process.stdout is not None
            watch = threading.Timer(WITHIN_S, process.kill)
            watch.start()
            lines: list[str] = []
            try:
                for line in process.stdout:
                    lines.append(line)
                    found = re.search(says, line)
                    if found is not None:
                        break
                else:
                    raise Failed(f"{arguments[0]} ended before it said {says!r}:\n{''.join(lines)}")
                # what else it prints is read, or it would wait for room in the pipe
                reader = threading.Thread(target=lambda: lines.extend(process.stdout or ()), daemon=True)
                reader.start()
                yield process, found
                process.terminate()
                if process.wait() != 0:
                    raise Failed(f"{arguments[0]} ended with {process.returncode}:\n{''.join(lines)}")
            finally:
                watch.cancel()
                process.kill()


class Collector(http.server.BaseHTTPRequestHandler):
    """Takes every delivery of spans."""

    taken: list[bytes] = []  # noqa: RUF012  one list for all requests is what it is for

    def do_POST(self) -> None:
        self.taken.append(self.rfile.read(int(self.headers["content-length"])))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:
        """Say nothing."""


def expect(what: str, seen: object, wanted: bool) -> None:
    if not wanted:
        raise Failed(f"{what}: {seen}")
    print(f"ok    {what}", flush=True)


def ask(port: int, method: str, path: str, body: bytes = b"", **fields: str) -> tuple[int, bytes]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=WITHIN_S)
    try:
        connection.request(method, path, body or None, {name.replace("_", "-"): text for name, text in fields.items()})
        answer = connection.getresponse()
        return answer.status, answer.read()
    finally:
        connection.close()


def chat(**more: object) -> bytes:
    return json.dumps({"model": MODEL, "messages": [{"role": "user", "content": "one two three"}], **more}).encode()


def try_commands(trial: Trial) -> None:
    said = trial.run("version")
    expect("version says its name and number", said, re.fullmatch(r"appliance \d+\.\d+\S*\n", said) is not None)
    taken = []
    for _ in range(STARTS):
        begun = time.perf_counter()
        trial.run("version")
        taken.append(time.perf_counter() - begun)
    print(
        f"      {1000 * statistics.median(taken):.0f} ms, {1000 * min(taken):.0f} ms at best, once the files are read"
    )
    said = trial.run("--help")
    expect("--help lists the commands", said, all(f"  {name} " in said for name in ("serve", "ctl", "sim", "agent")))
    for group in ("serve", "sim", "ctl", "ctl config", "ctl explain", "agent"):
        said = trial.run(*group.split(), "--help")
        expect(f"{group} --help", said, said.startswith(f"Usage: appliance {group}"))
    example = trial.folder / "example.toml"
    example.write_text(trial.run("ctl", "config", "example"))
    expect(
        "ctl config check of the example", example, trial.run("ctl", "config", "check", str(example)).startswith("ok")
    )
    example.write_text("[server]\nlistn = 1\n")
    said = trial.run("ctl", "config", "check", str(example), status=1)
    expect("ctl config check of a bad file", said, "server.listn: unknown key" in said)


def try_children(trial: Trial) -> None:
    """A program that ours starts must find the environment as it was before ours."""
    tools = trial.folder / "bin"
    tools.mkdir()
    report = trial.folder / "environment"
    tool = tools / "nvidia-smi"
    tool.write_text(f"#!/bin/sh\nenv > {report}\n")
    tool.chmod(0o755)
    path = f"{tools}:{os.defpath}"
    for given in ({}, {"LD_LIBRARY_PATH": "/opt/of-the-host"}):
        report.unlink(missing_ok=True)
        trial.run("agent", "inventory", PATH=path, **given)
        if not report.exists():
            print("--    a child's environment: not tried, NVML works here and nothing is started")
            return
        heard = dict(line.split("=", 1) for line in report.read_text().splitlines() if "=" in line)
        ours = {name for name in heard if name.startswith(("_PYI", "_MEI", "PYINSTALLER", "LD_LIBRARY_PATH"))}
        clean = ours == set(given) and heard.get("LD_LIBRARY_PATH") == given.get("LD_LIBRARY_PATH")
        clean = clean and str(Path(trial.program).parent) not in report.read_text()
        expect(f"a child's environment is clean, {'with' if given else 'without'} a LD_LIBRARY_PATH", heard, clean)


def try_road(trial: Trial) -> None:
    with ExitStack() as stack:
        collector = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Collector)
        stack.callback(collector.shutdown)
        threading.Thread(target=collector.serve_forever, daemon=True).start()
        _, found = stack.enter_context(
            trial.running("sim", "--port", "0", "--model", MODEL, says=r"http://127\.0\.0\.1:(\d+)")
        )
        print(f"ok    sim serves at {found[1]}", flush=True)
        (trial.folder / "appliance.toml").write_text(
            '[server]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\n'
            f'[tracing]\nendpoint = "http://127.0.0.1:{collector.server_address[1]}"\n'
            f'[[endpoints]]\nid = "near"\nengine = "sim"\n'
            f'url = "http://127.0.0.1:{found[1]}/v1"\nmodels = ["{MODEL}"]\n'
            # its TLS needs the root certificates, which must have come along
            '[[endpoints]]\nid = "far"\nurl = "https://127.0.0.1:1/v1"\nmodels = ["far"]\n'
        )
        process, found = stack.enter_context(
            trial.running("serve", says=r"event=serving.*listen=http://127\.0\.0\.1:(\d+) metrics=127\.0\.0\.1:(\d+)")
        )
        door, metrics = int(found[1]), int(found[2])
        print(f"ok    serve serves at {door}", flush=True)
        try_requests(door)
        try_operator(trial, metrics)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        expect("serve is one process", children, not children)
        memory = re.search(r"VmRSS:\s+(\d+)", Path(f"/proc/{process.pid}/status").read_text())
        print(f"      {int(memory[1]) >> 10 if memory else 0} MiB resident")
    print("ok    both end with status 0 when they are told to", flush=True)
    expect("spans reached the collector", len(Collector.taken), any(MODEL.encode() in body for body in Collector.taken))


def try_cluster(trial: Trial) -> None:
    """A root, a database, an agent and an engine, all of them this program; a model that is started by who asks."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        link = free.getsockname()[1]
    (trial.folder / "appliance.toml").write_text(
        '[server]\nlisten = "127.0.0.1:0"\nmetrics_listen = "127.0.0.1:0"\n'
        f'[control]\nlisten = "127.0.0.1:{link}"\nsettle_s = 0.5\n'
        '[agent]\nnode = "box"\naddress = "127.0.0.1"\nlisten = "127.0.0.1:0"\ngpus = { backend = "none" }\n'
        f'[[models]]\nname = "{MODEL}"\nscaling = {{ min_replicas = 0 }}\n'
        '[[models.profiles]]\nname = "cpu"\nengine = "sim"\ngpus_per_node = 0\n'
    )
    said = trial.run("ctl", "init")
    expect("ctl init makes a cluster", said, (trial.folder / "appliance-state" / "pki" / "root.pem").exists())
    says = r"event=serving.*listen=http://127\.0\.0\.1:(\d+)"
    with trial.running("serve", "--with-agent", says=says) as (_, found):
        door = int(found[1])
        status, body = ask(door, "POST", "/v1/chat/completions", chat(), content_type="application/json")
        expect("a model at zero is started by who asks", body, status == 200 and b"You said" in body)
        said = trial.run("ctl", "node", "add", "other")
        expect("ctl node add prints what to run", said, said.startswith("appliance agent join --control wss://"))
        for command in ("nodes", "replicas", "audit", "node list"):
            expect(f"ctl {command}", command, bool(json.loads(trial.run("ctl", *command.split(), "--json"))))
        call = {"jsonrpc": "2.0", "id": 1, "method": "tools/call", "params": {"name": "serve_status"}}
        status, body = ask(door, "POST", "/mcp", json.dumps(call).encode(), content_type="application/json")
        expect("/mcp answers", body, status == 200 and b"content" in body)
        trial.run("ctl", "models", "stop", MODEL)
        for _ in range(100):
            if not json.loads(trial.run("ctl", "replicas", "--json"))["replicas"]:
                break
            time.sleep(0.1)
        expect(
            "its replica is stopped by an operator", trial.run("ctl", "replicas"), MODEL in trial.run("ctl", "models")
        )


def try_requests(door: int) -> None:
    typed = {"content_type": "application/json"}
    path = "/v1/chat/completions"
    status, body = ask(door, "POST", path, chat(), x_request_id="smoke-1", **typed)
    expect("a chat is answered", body, status == 200 and b"You said" in body)
    status, body = ask(door, "POST", path, chat(stream=True), **typed)
    whole = body.endswith(b"data: [DONE]\n\n") and body.count(b"data: ") > 4
    expect(f"a chat is streamed ({body.count(b'data: ')} events)", body, status == 200 and whole)
    status, body = ask(door, "POST", path, gzip.compress(chat()), content_encoding="gzip", **typed)
    expect("a gzip body is read", body, status == 200)
    try:
        import zstandard
    except ImportError:
        print("--    a zstd body: not tried, nothing here can make one")
    else:
        packed = zstandard.ZstdCompressor().compress(chat())
        status, body = ask(door, "POST", path, packed, content_encoding="zstd", **typed)
        expect("a zstd body is read", body, status == 200)
    status, body = ask(door, "POST", path, chat(model="nobody"), **typed)
    expect("an unknown model is refused", body, status == 404 and b"model_not_found" in body)
    status, body = ask(door, "POST", path, chat(model="far"), **typed)
    expect("an endpoint that is away is a 502", body, status == 502)


def try_operator(trial: Trial, metrics: int) -> None:
    status, body = ask(metrics, "GET", "/metrics")
    counted = f'appliance_requests_total{{band="silver",code="200",model="{MODEL}"}}'.encode() in body
    expect("metrics count the requests", body.decode(), status == 200 and counted)
    for command in ("status", "endpoints", "models", "requests", "doctor"):
        said = trial.run("ctl", command, "--json")
        expect(f"ctl {command}", said, bool(json.loads(said)))
    said = trial.run("ctl", "status")
    expect("ctl status for people", said, MODEL in said or "endpoint" in said)
    said = trial.run("ctl", "explain", "request", "smoke-1")
    expect("ctl explain request", said, "smoke-1" in said and "near" in said)
    said = trial.run("ctl", "config", "reload")
    expect("ctl config reload", said, True)


def main() -> int:
    program = Path(sys.argv[1]).resolve()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(program, Path(folder))
        try:
            try_commands(trial)
            try_children(trial)
            try_road(trial)
            try_cluster(trial)
        except Failed as failed:
            print(f"FAILED {failed}", file=sys.stderr)
            return 1
    print(f"{program.relative_to(Path.cwd()) if program.is_relative_to(Path.cwd()) else program} works")
    return 0


if __name__ == "__main__":
    sys.exit(main())

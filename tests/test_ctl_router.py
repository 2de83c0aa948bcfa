"""ctl, the admin socket and the metrics listener of a real router in front of a sim."""

from __future__ import annotations

import contextlib
import json
import os
import pty
import re
import select
import signal
import socket
import stat
import subprocess
import sys
import termios
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.client import HTTPConnection, HTTPException
from pathlib import Path
from typing import Any

import pytest

from tests.engines import sim_engine
from tests.operator_router import Router, ctl, router
from tests.processes import APPLIANCE, environment

READS = (
    ("status",),
    ("top",),
    ("endpoints",),
    ("models",),
    ("bands",),
    ("requests",),
    ("requests", "--limit", "1"),
    ("explain", "model", "chat"),
    ("doctor",),
    ("config", "show"),
    ("config", "show", "--running"),
    ("config", "check"),
)
SECRET = "sk-a-key-that-nobody-may-see"
PROMPT = "a prompt that nobody may see"


@pytest.fixture(scope="module")
def sim() -> Iterator[str]:
    with sim_engine.running("--decode-tokens-per-second", "0", model="llama") as running:
        yield running.url


def configuration(url: str, more: str = "") -> str:
    """An endpoint that works, one that nobody listens at, and a model that falls back from the one to the other."""
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    return f"""
[deadlines]
first_token_s = 20
{more}
[[endpoints]]
id = "good"
url = "{url}/v1"
engine = "sim"
models = ["llama"]
[[endpoints]]
id = "gone"
url = "http://127.0.0.1:{port}/v1"
engine = "sim"
models = ["big"]
[[models]]
name = "big"
fallbacks = ["llama"]
[[models]]
name = "llama"
aliases = ["chat"]
"""


@pytest.fixture(scope="module")
def running(sim: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Router]:
    with router(tmp_path_factory.mktemp("router"), configuration(sim)) as started:
        yield started


@contextmanager
def streaming(started: Router, request_id: str, **body: Any) -> Iterator[Callable[[], str]]:
    """A stream that has begun and goes on until somebody ends it; the function reads the rest of it."""
    connection = HTTPConnection("127.0.0.1", started.door, timeout=20)
    ask = {"model": "llama", "stream": True, "messages": [{"role": "user", "content": PROMPT}], **body}
    headers = {"x-request-id": request_id, "content-type": "application/json", "authorization": f"Bearer {SECRET}"}
    connection.request("POST", "/v1/chat/completions", json.dumps({"sim": {"stall_after": 2}, **ask}), headers)
    answer = connection.getresponse()
    assert answer.status == 200
    held = [answer.read1()]

    def rest() -> str:
        try:
            while piece := answer.read1():
                held.append(piece)
        except (OSError, HTTPException):
            held.append(b"<broken off>")
        return b"".join(held).decode()

    try:
        yield rest
    finally:
        connection.close()


def raw(path: str, request: bytes) -> bytes:
    """Bytes over the admin socket as they are; the answer up to the end of the connection."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(20)
        sock.connect(path)
        sock.sendall(request)
        answer = b""
        while piece := sock.recv(65536):
            answer += piece
    return answer


def api(started: Router, target: str, method: str = "GET", fields: str = "") -> tuple[int, Any]:
    """A request to the management API: status and document."""
    request = f"{method} {target} HTTP/1.1\r\nhost: x\r\nconnection: close\r\n{fields}\r\n"
    head, _, body = raw(started.admin, request.encode()).partition(b"\r\n\r\n")
    assert b"transfer-encoding" not in head.lower()
    return int(head.split()[1]), json.loads(body)


# -- reads -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("arguments", READS, ids=" ".join)
def test_every_read_has_words_and_json(running: Router, arguments: tuple[str, ...]) -> None:
    running.chat("for-every-read")
    words = running.ctl(*arguments)
    assert words.returncode == 0, words.stderr
    assert words.stdout.strip() and not words.stderr
    assert "\x1b" not in words.stdout, "no colour into a pipe"
    assert not any(line.endswith(" ") for line in words.stdout.splitlines())
    assert isinstance(running.read(*arguments), dict)


def test_status_counts(running: Router) -> None:
    before = running.read("status")
    running.chat("counted")
    after = running.read("status")
    assert after["requests"]["by_code"]["200"] == before["requests"]["by_code"].get("200", 0) + 1
    assert (after["pid"], after["state"]) == (running.popen.pid, "serving")
    assert after["listen"] == [f"http://127.0.0.1:{running.door}"]
    assert after["admin_socket"] == running.admin
    assert f"http://127.0.0.1:{running.door}  (no keys)" in running.ctl("status").stdout


def test_top_draws_over_itself_until_ctrl_c_and_gives_the_screen_back(running: Router) -> None:
    near, far = pty.openpty()
    termios.tcsetwinsize(far, (12, 90))
    popen = subprocess.Popen(
        [sys.executable, "-m", "appliance", "ctl", "top", "--admin", running.admin],
        stdin=far, stdout=far, stderr=far, start_new_session=True, env={**os.environ, "TERM": "xterm"},
    )  # fmt: skip
    os.close(far)

    def read() -> bytes:
        assert select.select([near], [], [], 30)[0], "nothing is drawn"
        return os.read(near, 65536)

    try:
        drawn = b""
        while b" a second" not in drawn:  # from the second page on
            drawn += read()
        popen.send_signal(signal.SIGINT)
        with contextlib.suppress(OSError):  # the other end is closed
            for _ in range(1000):
                drawn += read()
        assert popen.wait(30) == 0
    finally:
        popen.kill()
        popen.wait()
        os.close(near)
    before, _, pages = drawn.decode().partition("\x1b[?1049h")
    assert not before.strip() and pages.rstrip().endswith("\x1b[?1049l")
    for page in pages.split("\x1b[H")[1:]:
        assert len(page.splitlines()) <= 12
    assert "Traceback" not in pages and f"pid {running.popen.pid}" in pages


@pytest.mark.parametrize("columns", [60, 80, 120])
def test_tables_keep_to_the_width_and_lose_no_row(running: Router, columns: int) -> None:
    running.chat("a-rather-long-request-id-" + "x" * 60)
    for arguments in (*READS, ("explain", "request", "a-rather-long-request-id-" + "x" * 60)):
        text = running.ctl(*arguments, COLUMNS=str(columns)).stdout
        assert max(map(len, text.splitlines())) <= columns, (arguments, text)
    rows = running.ctl("endpoints", COLUMNS=str(columns)).stdout.splitlines()
    assert [row.split()[0] for row in rows[:3]] == ["ENDPOINT", "good", "gone"]


def test_a_pipe_gets_whole_cells(running: Router) -> None:
    name = "a-rather-long-request-id-" + "x" * 90
    running.chat(name)
    (row,) = [line for line in running.ctl("requests").stdout.splitlines() if line.startswith(name)]
    assert row.split()[2:6] == ["s", "llama", "good", "ok"]


def test_requests_come_newest_first_and_as_many_as_asked_for(running: Router) -> None:
    for number in range(3):
        running.chat(f"in-order-{number}")
    with streaming(running, "in-order-live"):
        found = running.read("requests", "--limit", "3")["requests"]
    assert [each["id"] for each in found] == ["in-order-live", "in-order-2", "in-order-1"]
    assert found[0]["outcome"] == "running"


# -- explain -----------------------------------------------------------------------------------------------------------


def test_the_story_of_a_good_request(running: Router) -> None:
    running.chat("good-one", model="chat")
    story = running.ctl("explain", "request", "good-one").stdout
    assert story.startswith("good-one  ok\nAnswered with 200 in ")
    assert "chat, an alias of llama" in story
    assert "1. Chose good, the only candidate" in story
    assert "good: it answered with 200." in story
    assert re.search(r"tokens +\d+ prompt, \d+ completion$", story, re.M)
    assert len(story.splitlines()) <= 24


def test_the_story_of_a_request_that_fell_back(running: Router) -> None:
    assert running.chat("fell-back", model="big")[0] == 200
    story = running.ctl("explain", "request", "fell-back").stdout
    assert "1. Chose gone, the only candidate" in story
    assert "gone: no connection (cannot connect to http://127.0.0.1:" in story
    assert "no other endpoint of the model could take it." in story
    assert "2. Chose good, the fallback llama, the only candidate" in story


def test_the_story_of_a_refused_request(running: Router) -> None:
    assert running.chat("nobody-serves", model="nobody")[0] == 404
    story = running.ctl("explain", "request", "nobody-serves").stdout
    assert "Refused with 404 model_not_found after " in story
    assert "nobody, which nobody here serves" in story


def test_the_story_of_a_cut_request(running: Router) -> None:
    status, body = running.chat("cut-one", stream=True, sim={"cut_after": 1})
    assert status == 200 and "[DONE]" not in body
    story = running.ctl("explain", "request", "cut-one").stdout
    assert story.startswith("cut-one  cut\nCut off after ")
    assert "it broke off in the middle of its answer" in story


def test_the_story_of_a_running_request_and_of_its_cancellation(running: Router) -> None:
    with streaming(running, "cancel-me") as rest:
        story = running.ctl("explain", "request", "cancel-me").stdout
        assert re.match(r"cancel-me  running\nRunning for .*; \w+_s strikes in ", story)
        assert "good: it is being answered." in story
        done = running.ctl("requests", "cancel", "cancel-me")
        assert (done.returncode, done.stdout) == (0, "cancelled cancel-me\n")
        text = rest()
    assert "cancelled by the operator" in text and "[DONE]" not in text
    story = running.ctl("explain", "request", "cancel-me").stdout
    assert story.startswith("cancel-me  cancelled\n")
    running.log.until(f"request_id=cancel-me by_uid={os.getuid()}")
    again = running.ctl("requests", "cancel", "cancel-me")
    assert (again.returncode, again.stderr) == (1, "appliance: request cancel-me is over: cancelled\n")


@pytest.mark.parametrize("request_id", ["a/b//c", "per%cent%2Fage", "q?u=e&s#t", "/cancel", "requests/x/cancel"])
def test_any_request_id_can_be_asked_for(running: Router, request_id: str) -> None:
    running.chat(request_id)
    assert running.read("explain", "request", request_id)["id"] == request_id


def test_explain_model_says_what_a_request_would_meet(running: Router) -> None:
    text = running.ctl("explain", "model", "chat").stdout
    assert text.startswith("llama  ready\nA request would be sent to its endpoint.")
    document = running.read("explain", "model", "big")
    assert [other["name"] for other in document["chain"]] == ["llama"]


# -- errors ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "status", "told"),
    [
        (("explain", "request", "nobody"), 1, "no request nobody is known"),
        (("explain", "model", "nobody"), 1, "the model 'nobody' does not exist; available: big, chat, llama"),
        (("requests", "cancel", "nobody"), 1, "no request nobody is known"),
        (("requests", "--limit", "0"), 2, "; see 'appliance ctl requests --help'"),
        (("explain", "request"), 2, "Missing argument 'ID'"),
        (("statsu",), 2, "No such command 'statsu'"),
        (("status", "--nonsense"), 2, "No such option"),
    ],
)
def test_errors_are_one_line_with_their_exit_status(
    running: Router, arguments: tuple[str, ...], status: int, told: str
) -> None:
    done = running.ctl(*arguments)
    assert done.returncode == status
    (line,) = done.stderr.splitlines()
    assert told in line and not done.stdout


def test_nobody_there(tmp_path: Path) -> None:
    env = environment(tmp_path)
    (tmp_path / "appliance.toml").touch()
    done = ctl("status", env=env)
    (line,) = done.stderr.splitlines()
    assert line.startswith(f"appliance: cannot reach {tmp_path}/appliance-run/admin.sock")
    assert line.endswith("is 'appliance serve' running? name its socket with --admin")
    assert done.returncode == 1
    for arguments in (("--admin", "/nowhere", "status"), ("status", "--admin", "/nowhere")):
        assert "cannot reach /nowhere:" in ctl(*arguments, env=env).stderr
    assert "cannot reach /elsewhere:" in ctl("status", env={**env, "APPLIANCE_ADMIN": "/elsewhere"}).stderr
    too_long = ctl("status", "--admin", "/x" * 100, env=env)
    assert too_long.returncode == 1 and "too long" in too_long.stderr


def test_somebody_else_there(tmp_path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(tmp_path / "x.sock"))
        sock.listen()
        sock.settimeout(30)

        def answer() -> None:
            with sock.accept()[0] as other:
                other.recv(100)
                other.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\n\r\nhello")

        thread = threading.Thread(target=answer)
        thread.start()
        done = ctl("status", "--admin", str(tmp_path / "x.sock"), env=environment(tmp_path))
        thread.join()
    assert done.returncode == 1 and "is no admin socket of 'appliance serve'" in done.stderr


# -- configuration -----------------------------------------------------------------------------------------------------


def test_config_check_tells_every_fault(tmp_path: Path) -> None:
    bad = tmp_path / "bad.toml"
    bad.write_text('[server]\nlistn = 3\ndrain_s = -1\n[[endpoints]]\nid = "a"\nurl = "foo"\n')
    env = environment(tmp_path)
    done = ctl("config", "check", str(bad), env=env)
    assert done.returncode == 1 and not done.stdout
    assert [line.split(":")[0] for line in done.stderr.splitlines()] == [
        "server.listn",
        "server.drain_s",
        "endpoints[0].url",
    ]
    faults = json.loads(ctl("config", "check", str(bad), "--json", env=env).stdout)
    assert not faults["ok"] and [fault["path"] for fault in faults["faults"]] == [
        "server.listn",
        "server.drain_s",
        "endpoints[0].url",
    ]
    assert ctl("config", "check", str(tmp_path / "absent.toml"), env=env).returncode == 1


def test_config_needs_no_router(tmp_path: Path) -> None:
    env = environment(tmp_path)
    example = ctl("config", "example", env=env)
    (tmp_path / "appliance.toml").write_text(example.stdout)
    checked = ctl("config", "check", env=env)
    assert checked.returncode == 0 and checked.stdout.startswith(f"ok: {tmp_path}/appliance.toml; ")
    shown = json.loads(ctl("config", "show", "--json", env={**env, "APPLIANCE_SERVER__DRAIN_S": "7"}).stdout)
    rows = {row["path"]: row for row in shown["values"]}
    assert rows["server.drain_s"]["value"] == 7.0
    assert rows["server.drain_s"]["origin"] == "environment APPLIANCE_SERVER__DRAIN_S"
    assert rows["deadlines.idle_s"]["origin"] == "default"


def test_reload_by_ctl(sim: str, tmp_path: Path) -> None:
    with router(tmp_path, configuration(sim)) as started:
        file = tmp_path / "appliance.toml"
        good = file.read_text()
        file.write_text(good + "[nonsense]\n[tracing]\nsample_ratio = 9\n")
        refused = started.ctl("config", "reload")
        assert refused.returncode == 1
        assert [line.split(":")[0] for line in refused.stderr.splitlines()] == ["nonsense", "tracing.sample_ratio"]
        file.write_text(good.replace('metrics_listen = "127.0.0.1:0"', "metrics_listen = []").replace("gone", "other"))
        taken = started.ctl("config", "reload")
        assert (taken.returncode, taken.stdout) == (0, "reloaded\nonly a restart takes over: server.metrics_listen\n")
        assert [each["id"] for each in started.read("endpoints")["endpoints"]] == ["good", "other"]
        assert started.read("status")["needs_restart"] == ["server.metrics_listen"]
        values = {row["path"]: row["value"] for row in started.read("config", "show", "--running")["values"]}
        assert values["server.metrics_listen"] == ["127.0.0.1:0"], "what is in effect, not what the file says"
        doctor = started.read("doctor")
        warned = {each["check"] for each in doctor["findings"] if each["verdict"] == "warning"}
        assert warned - {"endpoint"} == {"restart"}, "an endpoint that is not there may have been noticed by now"


# -- doctor ------------------------------------------------------------------------------------------------------------


def test_the_doctor_fails_where_something_does(sim: str, tmp_path: Path) -> None:
    env = environment(tmp_path)
    (tmp_path / "appliance.toml").write_text("[server]\nlistn = 3\n")
    findings = json.loads(ctl("doctor", "--json", env=env).stdout)
    assert not findings["ok"]
    assert {each["check"]: each["verdict"] for each in findings["findings"]} == {
        "router": "failed",
        "configuration": "failed",
    }
    more = '[[endpoints]]\nid = "unheard"\nurl = "http://127.0.0.1:1/v1"\n'
    with router(tmp_path, configuration(sim, more)) as started:
        started.popen.poll()
        done = started.ctl("doctor")
        assert "unheard (http://127.0.0.1:1) is unreachable: no connection to it" in done.stdout
        assert done.returncode == 0
    named = more + 'models = ["m"]\n'
    told = "requests may go there, but it did not answer when asked for its models: cannot connect to"
    with router(tmp_path, named) as started:
        done = started.ctl("doctor")
        for _ in range(50):  # it is asked for the first time beside all that starts
            if "did not answer" in done.stdout:
                break
            done = started.ctl("doctor")
        assert f"unheard (http://127.0.0.1:1) is ready: {told}" in done.stdout
        assert (done.returncode, "endpoint, all ready" in done.stdout) == (0, False), done.stdout
        assert f"unheard: {told}" in started.ctl("endpoints").stdout
        assert f"unheard: ready: {told}" in started.ctl("status").stdout
    with router(tmp_path, more) as started:
        done = started.ctl("doctor")
        assert (done.returncode, "1 endpoint, none takes requests" in done.stdout) == (1, True), done.stdout


# -- the admin socket --------------------------------------------------------------------------------------------------


def test_modes_of_the_sockets(running: Router) -> None:
    running.read("status")
    folder = running.folder / "appliance-run"
    modes = {name: stat.S_IMODE(os.stat(folder / name).st_mode) for name in os.listdir(folder)}
    assert modes == {"admin.sock": 0o660, f"admin-{running.popen.pid}.sock": 0o600}


def test_nobody_can_claim_to_be_another_user(running: Router) -> None:
    with streaming(running, "claimed") as rest:
        fields = "x-appliance-caller: 4242\r\ncontent-length: 0\r\n"
        assert api(running, "/requests/claimed/cancel", "POST", fields)[0] == 200
        rest()
    line = running.log.until("request_id=claimed")
    assert f"by_uid={os.getuid()}" in line


def test_the_api_refuses_in_the_shape_of_every_refusal(running: Router) -> None:
    for target, method, status, code in (
        ("/nothing", "GET", 404, "not_found"),
        ("/status", "DELETE", 405, "method_not_allowed"),
        ("/requests?limit=x", "GET", 400, "bad_limit"),
        ("/requests?limit=4001", "GET", 400, "bad_limit"),
        ("/debug/memory?top=-1", "GET", 400, "bad_top"),
        ("/requests/nobody", "GET", 404, "request_not_found"),
    ):
        answered, document = api(running, target, method)
        assert (answered, document["error"]["code"]) == (status, code), target
        assert set(document["error"]) == {"message", "type", "param", "code"}


def test_the_tree_of_nurseries(running: Router) -> None:
    with streaming(running, "in-the-tree"):
        _, tree = api(running, "/debug/tasks")
        text = raw(running.admin, b"GET /debug/tasks?format=text HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
    shown = json.dumps(tree)
    assert SECRET not in shown and PROMPT not in shown and "in-the-tree" not in shown
    paths = set(paths_of(tree))
    root = "<init>/appliance.cli.router.Router.run"
    for name in (
        "signals",
        "poller",
        "sweeper",
        "endpoint good/models of good",
        "endpoint good/load of good",
        "endpoint gone/models of gone",
        f"metrics/accept 127.0.0.1:{running.metrics}",
        f"admin/accept {running.admin}",
        "admin/connection",
        "admin/management API/hypercorn",
        f"door/accept 127.0.0.1:{running.door}",
        "door/connection",
    ):
        assert f"{root}/{name}" in paths, (name, sorted(paths))
    assert b"\n    door  [door/accept.py:" in text


def paths_of(task: dict[str, Any], above: str = "") -> Iterator[str]:
    path = f"{above}/{task['name']}" if above else task["name"]
    yield path
    for nursery in task.get("nurseries", ()):
        for child in nursery:
            yield from paths_of(child, path)


def test_memory_is_told_and_allocations_only_when_asked_for(running: Router) -> None:
    _, brief = api(running, "/debug/memory")
    assert brief["rss_bytes"] > 10 << 20 and "types" not in brief and not brief["tracing"]
    assert api(running, "/debug/memory/trace", "POST", "content-length: 0\r\n") == (200, {"tracing": True})
    _, full = api(running, "/debug/memory?top=5")
    assert len(full["types"]) == 5 and full["tracing"] and "allocations" in full
    assert api(running, "/debug/memory/untrace", "POST", "content-length: 0\r\n") == (200, {"tracing": False})
    assert "allocations" not in api(running, "/debug/memory?top=5")[1]


def test_a_caller_that_leaves_early_hurts_nobody(running: Router) -> None:
    for request in (b"", b"GET /sta", b"GET /debug/memory?top=200 HTTP/1.1\r\nhost: x\r\n\r\n"):
        with socket.socket(socket.AF_UNIX) as sock:
            sock.connect(running.admin)
            sock.sendall(request)
    assert running.read("status")["state"] == "serving"


def test_many_callers_at_once(running: Router) -> None:
    answers: list[int] = []
    threads = [threading.Thread(target=lambda: answers.append(api(running, "/status")[0])) for _ in range(20)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert answers == [200] * 20


def test_a_second_router_on_the_socket_is_refused(running: Router, tmp_path: Path) -> None:
    env = {**running.env, "STATE_DIRECTORY": str(tmp_path / "appliance")}
    done = subprocess.run((*APPLIANCE, "serve"), capture_output=True, text=True, timeout=60, env=env, check=False)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"server.admin_socket: another appliance serve runs here (pid {running.popen.pid})" in line
    assert running.read("status")["pid"] == running.popen.pid


def test_a_killed_router_leaves_sockets_that_the_next_one_replaces(sim: str, tmp_path: Path) -> None:
    folder = tmp_path / "appliance-run"
    with router(tmp_path, configuration(sim)) as started:
        started.read("status")
        started.popen.kill()
        started.popen.wait()
        assert len(os.listdir(folder)) == 2
    with router(tmp_path, configuration(sim)) as started:
        assert started.read("status")["pid"] == started.popen.pid
        assert sorted(os.listdir(folder)) == sorted(["admin.sock", f"admin-{started.popen.pid}.sock"])
        assert started.stop() == 0
    assert os.listdir(folder) == []


def test_after_a_stop_began_the_operator_is_still_answered(sim: str, tmp_path: Path) -> None:
    with router(tmp_path, configuration(sim)) as started:
        assert started.get("/readyz")[0] == 200
        with streaming(started, "held") as rest:
            os.kill(started.popen.pid, signal.SIGTERM)
            started.log.until("event=stopping")
            status, fields, body = started.get("/readyz")
            assert (status, fields["x-appliance-reason"]) == (503, "draining") and "stopping" in body
            assert json.loads(started.get("/healthz")[2])["status"] == "draining"
            assert started.read("status")["state"] == "draining"
            assert [each["id"] for each in started.read("requests")["requests"]] == ["held"]
            assert started.ctl("requests", "cancel", "held").returncode == 0
            assert "cancelled by the operator" in rest()
        assert started.popen.wait(20) == 0
    assert os.listdir(tmp_path / "appliance-run") == []


# -- metrics -----------------------------------------------------------------------------------------------------------


def test_the_metrics_listener_serves_three_paths(running: Router) -> None:
    status, fields, body = running.get("/metrics")
    assert status == 200 and fields["content-type"].startswith("text/plain; version=")
    assert "appliance_build_info" in body
    assert running.get("/readyz")[0] == 200
    assert json.loads(running.get("/healthz/")[2])["status"] == "ok"
    assert running.get("/metrics", method="HEAD")[2] == ""
    for path in ("/", "/v1/models", "/status", "/debug/tasks"):
        status, fields, body = running.get(path)
        assert status == 404 and json.loads(body)["error"]["code"] == "not_found", path
    status, fields, _ = running.get("/metrics", method="POST")
    assert (status, fields["allow"]) == (405, "GET, HEAD")
    assert running.get("/metrics", port=running.door)[0] == 404, "not at the door"


def test_figures_after_a_few_requests(sim: str, tmp_path: Path) -> None:
    with router(tmp_path, configuration(sim)) as started:
        for number in range(3):
            assert started.chat(f"plain-{number}", model="chat")[0] == 200
        assert started.chat("stream", stream=True, stream_options={"include_usage": True})[0] == 200
        assert started.chat("unknown", model="made up by a client")[0] == 404
        with streaming(started, "live"):
            live = sim_engine.read_metrics(started.get("/metrics")[2])
            assert live["appliance_endpoint_inflight"] == live["appliance_requests_running"] == 1
        wanted = {
            'appliance_requests_total{band="silver",code="200",model="llama"}': 4.0,
            'appliance_requests_total{band="silver",code="404",model="unknown"}': 1.0,
            'appliance_requests_total{band="silver",code="499",model="llama"}': 1.0,
            'appliance_request_duration_seconds_count{model="llama"}': 5.0,
            'appliance_time_to_first_token_seconds_count{model="llama"}': 2.0,
            'appliance_rejections_total{band="silver",reason="model_not_found"}': 1.0,
            'appliance_endpoint_inflight{endpoint="good"}': 0.0,
            'appliance_endpoint_breaker{endpoint="good"}': 0.0,
            "appliance_requests_running": 0.0,
        }
        until = time.monotonic() + 10
        while True:
            samples = dict(line.rsplit(" ", 1) for line in started.get("/metrics")[2].splitlines() if line[0] != "#")
            found = {name: float(samples.get(name, "nan")) for name in wanted}
            if found == wanted or time.monotonic() > until:  # the router learns of the client's end by itself
                break
        assert found == wanted
        prompt = float(samples['appliance_tokens_total{kind="prompt",model="llama"}'])
        assert prompt >= 4 * 5, "as the engine counted them"
        assert "made up" not in "".join(samples)

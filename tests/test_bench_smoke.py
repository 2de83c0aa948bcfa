"""The bench counts right: its engine, its load generator and its rows, with tiny numbers and no figure judged."""

from __future__ import annotations

import io
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.bench import machine, native, plan, routers, sims, stream_cost, throughput
from tests.bench.report import Report, paired_difference, paired_ratio

NO_ERRORS = dict.fromkeys(("connect", "closed", "framing", "no_done", "error_event", "status", "unfinished"), 0)


def lines_of(row: str, *options: str, status: int = 0) -> list[dict[str, Any]]:
    done = subprocess.run(
        [sys.executable, "-m", "tests.bench", row, "--quick", *options],
        cwd=machine.REPOSITORY,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == status, done.stdout + done.stderr
    lines = [json.loads(line) for line in done.stdout.splitlines()]
    assert all(line["row"] == row for line in lines)
    return lines


def until(holds: Callable[[], bool], limit_s: float = 20.0) -> None:
    """Other processes have no clock of ours to wait on: ask again until it holds."""
    give_up = time.monotonic() + limit_s
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.01)


def test_plain_answers_are_counted_alike_by_engine_and_load(tmp_path: Path) -> None:
    body = native.body_file(tmp_path, native.PLAIN_BODY)
    with native.engine(None) as engine:
        found = native.load(None, engine.port, body, "--connections", 7, "--requests", 500)
        counted = engine.stats()
    assert (found.requests, found.answers, found.errors) == (500, 500, NO_ERRORS)
    assert len(found.latencies_us) == 500
    assert counted["requests"] == counted["finished"] == 500
    assert counted["aborted"] == counted["active"] == 0


def test_an_answer_waits_as_long_as_the_engine_was_told(tmp_path: Path) -> None:
    body = native.body_file(tmp_path, native.PLAIN_BODY)
    with native.engine(None, "--delay-ms", "30") as engine:
        found = native.load(None, engine.port, body, "--connections", 3, "--each", 2)
    assert (found.requests, found.answers) == (6, 6)
    assert min(found.latencies_us) >= 30_000


def test_streams_are_read_to_the_end_mark_and_every_event_is_counted(tmp_path: Path) -> None:
    body = native.body_file(tmp_path, native.stream_body(11))
    with native.engine(None, "--interval-ms", "2") as engine:
        found = native.load(None, engine.port, body, "--stream", "--connections", 20, "--each", 2)
        counted = engine.stats()
    assert (found.streams, found.errors) == (40, NO_ERRORS)
    assert found.events == 40 * (11 + 3)
    assert counted["streams"] == counted["finished"] == 40
    assert found.peak_streaming <= 20


@pytest.mark.parametrize(
    ("fault", "error"), [("cut", "closed"), ("nodone", "no_done"), ("status", "status"), ("none", None)]
)
def test_a_broken_stream_is_never_counted_as_a_stream(tmp_path: Path, fault: str, error: str | None) -> None:
    body = native.body_file(tmp_path, native.stream_body(6))
    with native.engine(None, "--interval-ms", "1", "--break", fault) as engine:
        found = native.load(None, engine.port, body, "--stream", "--connections", 4, "--each", 3)
    assert found.streams == (12 if error is None else 0)
    assert found.errors == NO_ERRORS | ({error: 12} if error else {})
    named = {"status": "status 500"}.get(error, error) if error else None
    assert found.wrong == ({named: 12} if named else {})


def test_a_stream_that_lacks_an_event_shows_in_the_number_of_events(tmp_path: Path) -> None:
    body = native.body_file(tmp_path, native.stream_body(6))
    with native.engine(None, "--interval-ms", "1", "--break", "short") as engine:
        found = native.load(None, engine.port, body, "--stream", "--connections", 4, "--each", 1)
    assert (found.streams, found.events) == (4, 4 * (6 + 3 - 1))


def test_what_nobody_listens_to_is_an_error_and_not_an_answer(tmp_path: Path) -> None:
    body = native.body_file(tmp_path, native.PLAIN_BODY)
    found = native.load(None, machine.free_port(), body, "--connections", 2, "--requests", 2, "--seconds", 0.2)
    assert found.answers == 0
    assert found.errors["connect"] > 0


def test_a_load_that_is_killed_is_seen_by_the_engine(tmp_path: Path) -> None:
    body = native.body_file(tmp_path, native.stream_body(50_000))
    with native.engine(None) as engine:
        process = native.begin(None, engine.port, body, "--stream", "--connections", 25, "--each", 1)
        until(lambda: engine.stats()["active"] == 25)
        assert sims.metric(engine.port, "vllm:num_requests_running") == 25
        process.kill()
        machine.end(process)
        until(lambda: engine.stats()["active"] == 0)
        assert (engine.stats()["aborted"], engine.stats()["peak"]) == (25, 25)


def test_idle_connections_are_held_until_the_block_ends(tmp_path: Path) -> None:
    body = native.body_file(tmp_path, native.PLAIN_BODY)
    with native.engine(None) as engine:
        before = len(list(Path(f"/proc/{engine.pid}/fd").iterdir()))
        with native.held(None, engine.port, body, "--connections", 40, "--each", 1) as found:
            assert (found.answers, found.peak_open) == (40, 40)
            assert len(list(Path(f"/proc/{engine.pid}/fd").iterdir())) == before + 40
            assert engine.stats()["requests"] == 40


def test_distinct_prompts_differ_and_keep_their_length(tmp_path: Path) -> None:
    text = native.body_file(tmp_path, native.distinct_body(500)).read_text()
    assert "%" * 12 in text
    assert len(json.loads(text)["messages"][0]["content"]) == 500


def test_a_metric_is_matched_by_its_whole_name() -> None:
    with native.engine(None) as engine:
        assert sims.metric(engine.port, "vllm:num_requests_waiting") == 0
        with pytest.raises(KeyError):
            sims.metric(engine.port, "vllm:num_requests")


def test_ratios_are_taken_round_by_round() -> None:
    assert paired_ratio([10, 100, 1000], [5, 50, 250]) == 2
    assert paired_ratio([1.0], [0.0]) is None
    assert paired_difference([3, 5, 9], [1, 1, 1]) == 4


BURN = "import time\nwhile time.process_time() < 0.3: sum(range(1000))\n"
STAY = "print('burnt', flush=True); input()"
CHILD = "import subprocess, sys; subprocess.{}([sys.executable, '-c', {!r}])\n"


@pytest.mark.parametrize(
    "script",
    [BURN + STAY, CHILD.format("run", BURN) + STAY, CHILD.format("Popen", BURN + STAY) + "input()"],
    ids=["own", "child gone", "child there"],
)
def test_cpu_of_a_process_tree_includes_its_children(script: str) -> None:
    process = machine.spawn(
        [sys.executable, "-c", script],
        core=None,
        log=subprocess.DEVNULL,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert process.stdout is not None
        assert process.stdout.readline() == b"burnt\n"
        assert machine.cpu_s(process.pid) >= 0.28
        assert machine.rss_bytes(process.pid) > 1_000_000
    finally:
        machine.end(process)


def test_patience_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = iter(range(1_000))
    monkeypatch.setattr(plan, "core_busy_s", lambda core: float(next(busy)))
    monkeypatch.setattr(plan, "_LOOK_S", 0.01)
    patience = plan.Patience(0.05)
    patience.wait(machine.Cores(0, 0))
    assert patience.left_s <= 0
    monkeypatch.setattr(plan, "core_busy_s", lambda core: 1.0)
    calm = plan.Patience(60.0)
    calm.wait(machine.Cores(0, 0))
    assert calm.left_s > 50


def test_rows_print_conditions_figures_and_checks() -> None:
    lines = lines_of("throughput", "--routers", "direct")
    assert lines[0]["conditions"]["routers"] == {"direct": {"version": "", "switched_on": "no router"}}
    assert all(line["ok"] for line in lines if "check" in line)
    assert {line["figure"] for line in lines if "figure" in line} == {"requests_per_s", "cpu_per_request"}


@pytest.mark.parametrize(
    ("row", "figures"),
    [
        ("stream_cost", {"cpu_per_event"}),
        ("added_latency", {"added_p50", "added_p99"}),
        ("memory", {"rss_idle", "rss_after_requests", "rss_after_distinct_prompts", "rss_idle_connections"}),
    ],
)
def test_every_row_without_peers_runs(row: str, figures: set[str]) -> None:
    lines = lines_of(row, "--routers", "direct")
    assert all(line["ok"] for line in lines if "check" in line)
    assert {line["figure"] for line in lines if "figure" in line} == figures


def test_streams_over_sims_through_our_own_router() -> None:
    lines = lines_of("many_streams", "--routers", "appliance")
    checks = [line for line in lines if "check" in line]
    assert len(checks) == 5
    assert all(line["ok"] for line in checks)


def test_prefix_row_sees_hits_that_affinity_makes() -> None:
    lines = lines_of("prefix", "--routers", "appliance")
    assert all(line["ok"] for line in lines if "check" in line)
    hits = {line["router"]: line["value"] for line in lines if line.get("figure") == "hits"}
    assert set(hits) == {"oracle", "appliance", "appliance without"}
    assert all(0 < share < 1 for share in hits.values())


def test_numbers_in_a_varying_body_go_on_where_they_are_told_to(tmp_path: Path) -> None:
    body = native.body_file(tmp_path, native.distinct_body(100))
    log = tmp_path / "log"
    with log.open("wb") as sink:
        engine = machine.spawn([native.built("engine"), "--log"], core=None, log=sink, stdout=subprocess.PIPE)
        assert engine.stdout is not None
        found = native.load(None, int(engine.stdout.readline()), body, "--requests", 3, "--first", 41)
        machine.end(engine)
    assert found.answers == 3
    text = log.read_text()
    assert [number for number in range(39, 46) if f"{number:012d} and then" in text] == [41, 42, 43]


def plan_of(tmp_path: Path, *names: str) -> plan.Plan:
    report = Report("a row", io.StringIO())
    cores = machine.Cores.of_this_machine()
    return plan.Plan(report=report, cores=cores, folder=tmp_path, routers=names, rounds=1, quick=True)


@pytest.mark.parametrize(("row", "fault"), [(throughput, "status"), (stream_cost, "cut"), (stream_cost, "short")])
def test_wrong_answers_make_a_row_fail(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, row: object, fault: str
) -> None:
    sound = native.engine
    monkeypatch.setattr(native, "engine", lambda core, *options: sound(core, *options, "--break", fault))
    given = plan_of(tmp_path, "direct")
    row.measure(given)  # type: ignore[attr-defined]
    assert given.report.wrong
    assert given.report.status == 1


def test_a_peer_that_is_not_there_is_skipped_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(routers, "PEERS_VENV", tmp_path / "nowhere")
    cores = machine.Cores.of_this_machine()
    with native.engine(None) as engine, routers.running(("smg", "direct"), [engine], cores, tmp_path) as (up, skipped):
        assert [each.name for each in up] == ["direct"]
        assert [each.name for each in skipped] == ["smg"]
        assert "install" in skipped[0].reason


def test_a_router_that_ends_at_once_is_skipped_with_its_last_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(site: routers.Site) -> routers.Launch:
        return routers.Launch((sys.executable, "-c", "raise SystemExit('no such port')"), "1", "nothing")

    monkeypatch.setitem(routers.RECIPES, "nginx", failing)
    cores = machine.Cores.of_this_machine()
    with native.engine(None) as engine, routers.running(("nginx",), [engine], cores, tmp_path) as (up, skipped):
        assert up == []
        assert "no such port" in skipped[0].reason


def test_placement_is_measured_in_two_sizes() -> None:
    lines = lines_of("placement")
    assert [line["ok"] for line in lines if "check" in line] == [True, True]
    assert {line["figure"] for line in lines if "figure" in line} == {"pass", "pass, index kept"}
    assert lines[0]["conditions"]["nodes"] == [64, 640]

"""What earlier agents left may be damaged, or cannot be looked at: neither ends an engine, or the agent itself."""

from __future__ import annotations

import copy
import errno
import fcntl
import json
import os
import resource
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.agent import adopting, procfs
from appliance.agent.adopting import sort_out
from appliance.agent.ownership import StateInUse
from appliance.agent.process import launch
from appliance.agent.records import Process, Record, Store, describes
from appliance.facts.catalog import Profile
from appliance.facts.launch import Command, HttpReady, StopStep
from appliance.facts.replica import Shard
from appliance.rules.engines.engine import MARKER

SHARD = Shard("r", "m", Profile("p", "sim", gpus_per_node=0))


@pytest.fixture
def store(tmp_path: Path) -> Iterator[Store]:
    made = Store(str(tmp_path))
    made.open()
    yield made
    made.close()


def ready(store: Store, pid: int = 0, **more: Any) -> Record:
    step = StopStep("SIGTERM", "leader", 5.0)
    process = Process("engine", ("sleep", "60"), (step,), pid, 1, (("sleep", "60"),))
    record = store.new(SHARD, "a", 1e9)
    record = attrs.evolve(
        record,
        state="ready",
        processes=(process,),
        complete=True,
        ports=(20001,),
        ready=HttpReady("127.0.0.1", 20001, "m"),
        used_bytes={"GPU-1": 5},
    )
    return attrs.evolve(record, **more)


def path_of(store: Store) -> Path:
    return Path(store.folder(SHARD.id), "record.json")


def sleeper(store: Store, marker: str) -> subprocess.Popen[bytes]:
    popen = subprocess.Popen(["sleep", "60"], env={MARKER: marker}, start_new_session=True)
    # It is told to have begun a moment before the kernel has set up what can be seen of it.
    for _ in range(1000):
        if procfs.marker_of(popen.pid):
            break
        time.sleep(0.005)
    return popen


def leaves(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    yield at
    if isinstance(document, dict):
        for key in document:
            yield from leaves(document[key], (*at, key))
    elif isinstance(document, list):
        for number, each in enumerate(document):
            yield from leaves(each, (*at, number))


def put(document: Any, at: tuple[Any, ...], value: Any) -> Any:
    value = copy.deepcopy(value)  # or the next put would damage what examples are drawn from
    if not at:
        return value
    into = document
    for key in at[:-1]:
        into = into[key]
    into[at[-1]] = value
    return document


ODD = st.sampled_from(
    [None, True, -1, 0, 2**40, 2**70, 1e308, -1e308, -0.5, "", "\0", "a\0b", "../..", [], {}, [[]], {"a": None}]
)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_no_damage_to_a_record_ends_the_agent(tmp_path_factory: pytest.TempPathFactory, data: st.DataObject) -> None:
    store = Store(str(tmp_path_factory.mktemp("state")))
    store.open()
    patch = pytest.MonkeyPatch()
    patch.setattr(procfs, "marked", lambda belongs: {})
    try:
        store.write(ready(store, pid=2**22 - 1))
        text = path_of(store).read_bytes()
        document = json.loads(text)
        for _ in range(data.draw(st.integers(1, 2))):
            at = data.draw(st.sampled_from(sorted(leaves(document), key=str)))
            document = put(document, at, data.draw(ODD))
        damaged = json.dumps(document).encode()
        cut = data.draw(st.one_of(st.none(), st.integers(0, len(damaged))))
        path_of(store).write_bytes(damaged[:cut])
        found, troubles = store.read_all()
        assert len(found) + len(troubles) == 1
        for each in sort_out(store).found:
            assert each.record.log == store.log(SHARD.id)
            store.write(each.record)
            assert each.record.report().shard.id == SHARD.id
    finally:
        patch.undo()
        store.close()


@pytest.mark.parametrize(
    ("at", "value"),
    [
        (("processes", 0, "pid"), 2**70),
        (("processes", 0, "pid"), -1),
        (("processes",), []),
        (("processes", 0, "stop", 0, "grace_s"), -1),
        (("ready", "port"), 70000),
        (("ready", "timeout_s"), -1.0),
        (("ready", "host"), "a\0b"),
        (("ports",), [-5]),
    ],
)
def test_a_record_that_makes_no_sense_is_named(store: Store, at: tuple[Any, ...], value: Any) -> None:
    store.write(ready(store))
    path_of(store).write_text(json.dumps(put(json.loads(path_of(store).read_text()), at, value)))
    found, troubles = store.read_all()
    assert found == []
    assert str(path_of(store)) in troubles[0]


def test_a_record_too_deep_to_be_read_is_named(store: Store) -> None:
    store.write(ready(store))
    deep = path_of(store).read_text()[:-1] + ',"later":' + "[" * 100_000 + "]" * 100_000 + "}"
    path_of(store).write_text(deep)
    found, troubles = store.read_all()
    assert (found, len(troubles)) == ([], 1)


def test_bytes_that_are_no_text_are_written_down_all_the_same(store: Store) -> None:
    """Variables and paths may hold any bytes; a key that does must still be known where it is shown."""
    store.write(ready(store, secrets=(os.fsdecode(b"k\xff\xfey"),), reason="\ud800"))
    (found,), _ = store.read_all()
    assert found.secrets == (b"k\xff\xfey".decode("utf-8", "replace"),)


@pytest.mark.parametrize("damaged", [b"", b"\xff\xfe\0", b"no word at all"])
def test_a_lost_word_is_found_again_in_the_records(store: Store, tmp_path: Path, damaged: bytes) -> None:
    store.write(ready(store))
    word = store.word
    store.close()
    (tmp_path / "shards" / "word").write_bytes(damaged)
    again = Store(str(tmp_path))
    again.open()
    assert again.word == word
    again.close()


def test_a_full_disk_costs_the_name_of_the_owner_and_no_more(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    store.write(ready(store))
    store.close()

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    again = Store(str(tmp_path))
    again.open()
    assert len(again.read_all()[0]) == 1
    again.close()


def test_a_disk_that_went_read_only_can_be_read(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store.write(ready(store))
    store.close()
    real_open = os.open

    def read_only(path: str, flags: int, *more: Any, **named: Any) -> int:
        if flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT):
            raise OSError(errno.EROFS, "Read-only file system", path)
        return real_open(path, flags, *more, **named)

    def no_mode(*_: Any, **__: Any) -> None:
        raise OSError(errno.EROFS, "Read-only file system")

    monkeypatch.setattr(os, "open", read_only)
    monkeypatch.setattr(Path, "chmod", no_mode)
    again, third = Store(str(tmp_path)), Store(str(tmp_path))
    again.open()
    assert len(again.read_all()[0]) == 1
    with pytest.raises(StateInUse):
        third.open()
    again.close()


def in_child(what: Any) -> str:
    """What a forked child says of its doings, in a word."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            said = what() or "nothing"
        except BaseException as raised:
            said = f"{type(raised).__name__} {getattr(raised, 'errno', '')}"
        os.write(write, str(said).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as file:
        said = file.read()
    os.waitpid(child, 0)
    return said


@pytest.mark.parametrize("spare", range(4))
def test_who_cannot_look_at_an_engine_does_not_take_it_for_gone(store: Store, spare: int) -> None:
    """With too few descriptors nothing can be said of any process, least of all that it has ended."""
    record = ready(store)
    with sleeper(store, record.marker) as popen:
        try:
            seen = procfs.see(popen.pid)
            assert seen is not None
            process = attrs.evolve(record.processes[0], pid=popen.pid, started=seen.started)
            store.write(attrs.evolve(record, processes=(process,)))

            def adopt() -> str:
                first = os.dup(0)
                os.close(first)
                resource.setrlimit(resource.RLIMIT_NOFILE, (first + spare, first + spare))
                found = sort_out(store).found
                return "adopted" if found[0].handles and not found[0].handles[0].ended else "taken for gone"

            assert in_child(adopt) in ("adopted", f"OSError {errno.EMFILE}")
            assert popen.poll() is None
        finally:
            popen.kill()


def test_a_program_that_became_another_one_is_known_by_its_marker(store: Store) -> None:
    record = ready(store)
    with sleeper(store, record.marker) as popen:
        try:
            seen = procfs.see(popen.pid)
            assert seen is not None
            process = attrs.evolve(record.processes[0], argv=("x", "y"), pid=popen.pid, started=seen.started, lines=())
            assert describes(process, record, store.boot)
            assert not describes(process, attrs.evolve(record, marker=f"{record.marker}x"), store.boot)
            assert not describes(attrs.evolve(process, started=seen.started + 1), record, store.boot)
        finally:
            popen.kill()


def test_what_was_opened_is_closed_when_sorting_out_fails(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    record = ready(store)
    with sleeper(store, record.marker) as popen:
        try:
            seen = procfs.see(popen.pid)
            assert seen is not None
            process = attrs.evolve(record.processes[0], pid=popen.pid, started=seen.started)
            store.write(attrs.evolve(record, processes=(process,)))
            before = os.listdir("/proc/self/fd")

            def none_left(*_: object) -> dict[int, str]:
                raise OSError(errno.EMFILE, "Too many open files")

            monkeypatch.setattr(adopting.procfs, "marked", none_left)
            with pytest.raises(OSError, match="Too many"):
                sort_out(store)
            assert os.listdir("/proc/self/fd") == before
        finally:
            popen.kill()


def test_a_child_has_the_lock_until_it_is_the_engine(store: Store, tmp_path: Path) -> None:
    """An agent killed while the disk brings the engine's program: until that has begun, the child has no marker, and
    the next agent must wait for it. A lease on the program holds the child in the middle of its start."""
    program = tmp_path / "engine"
    program.write_text("#!/bin/sh\nexec sleep 60\n")
    program.chmod(0o755)
    record = store.new(SHARD, "a", time.time())
    command = Command("engine", (str(program),), {MARKER: record.marker}, ())
    Path(store.folder(SHARD.id)).mkdir()
    signal.signal(signal.SIGIO, signal.SIG_IGN)
    with program.open("rb") as leased:
        fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_WRLCK)
        agent = os.fork()
        if agent == 0:
            launch(command, (), str(tmp_path), record, last=True, save=store.write)
            os._exit(0)
        (tmp_path / "shards" / "lock").write_text("0")  # or the next one would take this process for its owner
        store.close()
        try:
            until = time.monotonic() + 10
            while not (children := Path(f"/proc/{agent}/task/{agent}/children").read_text().split()):
                assert time.monotonic() < until
            child = int(children[0])
            while "lease" not in Path(f"/proc/{child}/wchan").read_text() and time.monotonic() < until - 9.5:
                time.sleep(0.01)
            os.kill(agent, signal.SIGKILL)
            os.waitpid(agent, 0)
            with (tmp_path / "shards" / "lock").open() as lock, pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        finally:
            fcntl.fcntl(leased, fcntl.F_SETLEASE, fcntl.F_UNLCK)
    again = Store(str(tmp_path))
    again.open()
    try:
        assert child in sort_out(again).killed
    finally:
        again.close()

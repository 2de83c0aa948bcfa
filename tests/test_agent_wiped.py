"""State directories that somebody empties, removes, moves or copies while engines run: what is nobody's is ended, what
is somebody's is not, and no copy takes itself for the original."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest
import trio
from structlog.testing import capture_logs

from appliance.agent import home, procfs
from appliance.agent import shards as shards_module
from appliance.agent.home import Host, NotOurs
from appliance.agent.ownership import StateInUse
from appliance.agent.records import Store
from appliance.facts.report import Report
from appliance.rules.engines.engine import MARKER
from tests.agent_process import agents, model
from tests.namespaces import need_unshare
from tests.shard_scene import Scene, agent, alive, free_range, kill, reported, scene, stub, until
from tests.test_agent_adoption import making_agents
from tests.test_agent_records import in_child

PORTS = free_range(100)
STRANGE = f"{secrets.token_hex(8)}.{secrets.token_hex(8)}.r9/0"
"""Another one in each process of pytest: those that run beside us look at all processes too."""


@pytest.fixture
def place(tmp_path: Path) -> Iterator[Scene]:
    with scene(tmp_path, PORTS) as made:
        yield made


@pytest.fixture
def left() -> Iterator[list[int]]:
    """Processes to end after a test, since nothing else may know of them any more."""
    pids: list[int] = []
    yield pids
    for pid in pids:
        if alive(pid):
            kill(pid)


async def leave(place: Scene, left: list[int], *args: str, name: str = "r1") -> Report:
    """An engine that an agent has left running."""
    async with agent(place) as shards:
        shards.start(stub(name, *args))
        report = await reported(shards, f"{name}/0", "ready")
    left += place.processes()
    return report


# -- wiped -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("what", [".", "shards", "shards/*", "shards/word shards/r1-0-*"])
async def test_engines_whose_records_were_removed_are_ended_and_named(place: Scene, left: list[int], what: str) -> None:
    await leave(place, left, "--children", "1")
    assert len(left) == 2
    for path in [path for each in what.split() for path in place.state.glob(each)] if what != "." else [place.state]:
        shutil.rmtree(path) if path.is_dir() else path.unlink()
    async with agent(place) as shards:
        assert shards.sorted.lost == ("r1/0",)
        assert set(shards.sorted.killed) == set(left)
        assert shards.reports() == {}
        await until(lambda: not any(map(alive, left)))


async def test_where_the_word_is_left_only_a_record_is_missing(place: Scene, left: list[int]) -> None:
    before = await leave(place, left)
    shutil.rmtree(next(place.state.glob("shards/r1-0-*")))
    async with agent(place) as shards:
        assert (shards.sorted.lost, shards.sorted.killed) == ((), (before.pid,))


async def test_engines_of_a_directory_that_was_moved_are_the_moved_ones(place: Scene, left: list[int]) -> None:
    before = await leave(place, left)
    moved = place.folder / "elsewhere"
    place.state.rename(moved)
    async with agent(place) as shards:
        assert (shards.sorted.lost, shards.sorted.killed) == ((), ())
        assert alive(before.pid)
    async with agent(place, state_dir=str(moved)) as shards:
        assert shards.reports()["r1/0"].pid == before.pid


async def test_a_wiped_directory_ends_nothing_of_another_agent(place: Scene, left: list[int], tmp_path: Path) -> None:
    other = attrs.evolve(place, settings=place.settings | {"state_dir": str(tmp_path / "other")})
    async with agent(other) as shards:
        shards.start(stub("r1"))
        theirs = await reported(shards, "r1/0", "ready")
    left.append(theirs.pid)
    ours = await leave(place, left)
    shutil.rmtree(place.state)
    async with agent(place) as shards:
        assert shards.sorted.killed == (ours.pid,)
    assert alive(theirs.pid)


def strange(folder: Path, *before: str, marker: str = STRANGE, **how: object) -> subprocess.Popen[bytes]:
    """Somebody's process in a folder of a shard, with a marker that looks like an agent's."""
    popen = subprocess.Popen(
        [*before, "sleep", "60"], env={MARKER: marker, "PATH": os.environ["PATH"]}, cwd=folder, **how
    )  # type: ignore[call-overload]
    limit = time.monotonic() + 10
    while procfs.command_line(popen.pid)[:1] != ("sleep",) and time.monotonic() < limit and popen.poll() is None:
        time.sleep(0.005)
    return popen  # type: ignore[no-any-return]


@pytest.mark.skipif(os.geteuid() != 0, reason="starts processes of another user and in another mount namespace")
async def test_what_only_looks_like_ours_is_left_alone(place: Scene, tmp_path: Path) -> None:
    need_unshare("--mount")
    folder = place.state / "shards" / "r9-0-abc"
    folder.mkdir(parents=True)
    others = [
        strange(folder, marker=f"{STRANGE}a", user=65534),
        strange(folder, "unshare", "--mount", marker=f"{STRANGE}b"),
        strange(tmp_path, marker=f"{STRANGE}c"),
        strange(place.state / "shards", marker=f"{STRANGE}d"),
        strange(folder, marker="mine"),
    ]
    ours = strange(folder)
    try:
        assert [each.poll() for each in others] == [None] * len(others)
        shutil.rmtree(place.state)
        async with agent(place) as shards:
            assert set(shards.sorted.killed) == {ours.pid}
        assert ours.wait(10) < 0
        assert [each.poll() for each in others] == [None] * len(others)
    finally:
        for each in (*others, ours):
            each.kill()
            each.wait()


@pytest.mark.skipif(os.geteuid() != 0, reason="mounts")
def test_what_lies_under_another_disk_is_not_judged_by_its_name(tmp_path: Path) -> None:
    """A disk that was mounted over the state directory hides it; it may be taken away again."""
    need_unshare("--mount")
    (tmp_path / "s" / "shards" / "r9-0-abc").mkdir(parents=True)
    look = (
        "import sys; from pathlib import Path; from appliance.agent.lost import lost;"
        "print(lost(Path(sys.argv[1]), 'f' * 16))"
    )
    shell = (
        f'cd s/shards/r9-0-abc; {MARKER}={STRANGE} sleep 60 & cd "$OLDPWD"; sleep 0.2; '
        '"$0" -c "$1" s/shards; mount -t tmpfs none s; mkdir -p s/shards/r9-0-abc; "$0" -c "$1" s/shards; kill $!'
    )
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", shell, sys.executable, look],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parent.parent)},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.splitlines() == [str({STRANGE: "r9/0"}), "{}"], done.stderr


async def test_no_agent_begins_where_one_still_runs_on_the_removed_directory(tmp_path: Path) -> None:
    with making_agents(tmp_path, PORTS) as agents:
        agents.begin(run={"r1": []})
        pid = agents.wait(lambda found: found["r1/0"]["state"] == "ready")["r1/0"]["pid"]
        try:
            shutil.rmtree(agents.place.state)
            shards = agents.place.shards()
            with pytest.raises(StateInUse, match=rf"was removed while another agent \(pid {agents.running}\) ran"):
                await shards.adopt()
            assert alive(pid)
            agents.end()
            async with agent(agents.place) as shards:
                assert shards.sorted.lost == ("r1/0",)
                await until(lambda: not alive(pid))
        finally:
            if alive(pid):
                kill(pid)


async def test_a_directory_that_is_removed_under_an_agent_is_told_of_once(
    place: Scene, left: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(shards_module, "LOOK_S", 0.02)
    with capture_logs() as lines:
        async with agent(place) as shards:
            shards.start(stub("r1"))
            left.append((await reported(shards, "r1/0", "ready")).pid)
            await trio.sleep(0.1)
            assert lines == []
            away = place.state.with_name("away")
            place.state.rename(away)
            await until(lambda: lines)
            await trio.sleep(0.1)
            away.rename(place.state)
            await until(lambda: len(lines) > 1)
    assert [line["event"] for line in lines] == [
        "the state directory was removed while this agent runs, nothing new can be started",
        "the state directory is back",
    ]
    assert lines[0]["directory"] == str(place.state)


async def test_engines_that_another_directory_has_taken_over_are_not_lost_here(tmp_path: Path) -> None:
    """Copied to another disk and removed here: the kernel says of them that they were in this one."""
    with making_agents(tmp_path, PORTS) as agents:
        agents.begin(run={"r1": []})
        pid = agents.wait(lambda found: found["r1/0"]["state"] == "ready")["r1/0"]["pid"]
        agents.end()
        old = tmp_path / "old"
        # What the one after it sees: the same directory, as a copy of one that was removed.
        agents.place.state.rename(old)
        shutil.copytree(old, agents.place.state)
        shutil.rmtree(old)
        try:
            agents.begin()
            agents.wait(lambda found: found["r1/0"]["state"] == "ready")
            async with agent(agents.place, state_dir=str(old)) as shards:
                assert (shards.sorted.lost, shards.sorted.killed) == ((), ())
            assert alive(pid)
        finally:
            if alive(pid):
                kill(pid)


# -- copied ------------------------------------------------------------------------------------------------------------


def opened(state: Path) -> str:
    """Why an agent refuses the directory, "" where it does not."""
    store = Store(str(state))
    try:
        store.open()
    except NotOurs as why:
        return str(why)
    store.close()
    return ""


def on(monkeypatch: pytest.MonkeyPatch, boot: str, board: str = "", machine: str = "") -> None:
    monkeypatch.setattr(home, "this_host", lambda: Host(boot, board, machine))


def test_a_directory_of_another_machine_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "boot-1", "board-1", "machine-1")
    assert opened(tmp_path) == ""
    # A cloned machine has another board, and often the same machine-id.
    on(monkeypatch, "boot-2", "board-2", "machine-1")
    why = opened(tmp_path)
    assert why.startswith(f"the state directory {tmp_path} is another machine's, with its name and records: ")
    assert "where it is shared with that one, set STATE_DIRECTORY to a folder that is not;" in why
    assert f"remove {tmp_path}/shards and {tmp_path}/pki/node.*, and join anew" in why
    assert "\n" not in why
    # And it was not taken over by the refusal.
    assert opened(tmp_path) == why
    on(monkeypatch, "boot-3", "board-1", "machine-2")
    assert opened(tmp_path) == ""
    on(monkeypatch, "boot-4", "board-2", "machine-2")
    assert opened(tmp_path) != ""
    (tmp_path / "shards" / "home").unlink()
    assert opened(tmp_path) == ""


def test_what_is_not_known_refuses_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    on(monkeypatch, "boot-1", "", "machine-1")
    assert opened(tmp_path) == ""
    on(monkeypatch, "boot-2", "board-2", "")  # a container that was made anew
    assert opened(tmp_path) == ""
    on(monkeypatch, "boot-9", "", "machine-9")
    assert opened(tmp_path) != ""
    on(monkeypatch, "boot-2", "board-3", "machine-2")  # one boot is one machine, whatever else has changed
    assert opened(tmp_path) == ""
    on(monkeypatch, "boot-3", "", "machine-1")
    assert opened(tmp_path) != ""
    # What another user could read of the same machine is kept.
    on(monkeypatch, "boot-4", "", "machine-2")
    assert opened(tmp_path) == ""
    on(monkeypatch, "boot-5", "board-4", "machine-2")
    assert opened(tmp_path) != ""


@pytest.mark.parametrize("text", ["", "{", "null", '{"host": 1}', "[" * 9999])
def test_a_damaged_note_is_written_anew(tmp_path: Path, text: str) -> None:
    assert opened(tmp_path) == ""
    note = tmp_path / "shards" / "home"
    good = note.read_text()
    note.write_text(text)
    assert opened(tmp_path) == ""
    assert note.read_text() == good
    assert note.stat().st_mode & 0o777 == 0o600


async def test_a_copy_on_the_same_machine_takes_over_nothing(place: Scene, left: list[int]) -> None:
    before = await leave(place, left)
    copy = place.folder / "copy"
    shutil.copytree(place.state, copy)
    shards = place.shards(state_dir=str(copy))
    with pytest.raises(NotOurs, match=f"{copy} is a copy of {place.state}, which is still there"):
        await shards.adopt()
    assert alive(before.pid)
    # As it says: an agent of its own, with another word.
    shutil.rmtree(copy / "shards")
    async with agent(place, state_dir=str(copy)) as shards:
        assert (shards.reports(), shards.sorted.killed) == ({}, ())
    async with agent(place) as shards:
        assert shards.reports()["r1/0"].pid == before.pid
    # Or the copy goes on in its place, as after a move to another disk.
    shutil.rmtree(copy)
    shutil.copytree(place.state, copy)
    shutil.rmtree(place.state)
    async with agent(place, state_dir=str(copy)) as shards:
        assert shards.reports()["r1/0"].pid == before.pid


async def test_the_command_says_both_in_one_line(tmp_path: Path) -> None:
    async with agents(tmp_path) as scene:
        scene.configure(model("m"))
        first = await scene.start()
        engine = (await first.ready("m.1/0"))["pid"]
        await first.stop()
        shutil.copytree(scene.state, tmp_path / "appliance-copy")
        (line,) = await scene.refused(env={"STATE_DIRECTORY": str(tmp_path / "appliance-copy")})
        assert line.startswith(
            f"appliance agent: the state directory {tmp_path}/appliance-copy is a copy of {scene.state}, "
        )
        assert alive(engine)
        shutil.rmtree(scene.state)
        second = await scene.start()
        await second.logged('event="records of engines were removed while they ran, they are ended" shards=m.1/0')
        assert not alive(engine)
        await second.ready("m.1/0")


@pytest.mark.skipif(os.geteuid() != 0, reason="is two users")
def test_one_user_at_a_time(tmp_path: Path) -> None:
    """Root's records could not be read by the user whose directory it is; its engines would be killed as unknown."""
    state = tmp_path / "state"
    assert opened(state) == ""
    for folder in (state, state / "shards"):
        os.chown(folder, 4242, 4242)
    why = opened(state)
    assert why.startswith(f"{state}/shards belongs to the user 4242, and this is the user root: run the agent as that")
    assert f"(chown -R 0 {state})" in why
    os.chown(state / "shards", 0, 0)
    assert opened(state) == ""  # as where a container's root was given a user's folder
    tmp_path.chmod(0o755)

    def as_user() -> str:
        os.chdir(tmp_path)  # which the user could not reach by its path
        os.setresuid(4242, 4242, 4242)
        return opened(Path("state"))

    assert in_child(as_user).startswith("state/shards belongs to the user root, and this is the user 4242: run ")
    nobody = int(Path("/proc/sys/kernel/overflowuid").read_text())
    os.chown(state / "shards", nobody, nobody)  # as on a file server that takes root for nobody
    assert opened(state) == ""


def test_a_restored_backup_is_the_directory_itself(tmp_path: Path) -> None:
    state = tmp_path / "state"
    assert opened(state) == ""
    shutil.copytree(state, tmp_path / "backup")
    shutil.rmtree(state)
    shutil.copytree(tmp_path / "backup", state)
    assert opened(state) == ""
    (tmp_path / "by-another-name").symlink_to(state)
    assert opened(tmp_path / "by-another-name") == ""
    # A name that is no text.
    odd = tmp_path / "appliance-\udcff"
    assert opened(odd) == opened(odd) == ""
    # Moved, with its old name leading to the new one.
    state.rename(tmp_path / "data")
    state.symlink_to(tmp_path / "data")
    assert opened(tmp_path / "data") == ""

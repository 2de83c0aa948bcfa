"""What goes wrong with the database: each is one line with the next step, and nothing is half done."""

from __future__ import annotations

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import trio

from appliance.store import migrate
from appliance.store.database import opened
from appliance.store.failed import StoreFailed, explain
from appliance.store.rows import JoinToken
from appliance.store.store import open_store

T = 1_800_000_000.0


async def made(folder: Path) -> Path:
    """A database with one cordon."""
    async with open_store("", str(folder)) as store:
        await store.cordon("node-a", "root", T)
    return folder / "appliance.db"


async def refused(folder: Path, url: str = "") -> str:
    with pytest.raises(StoreFailed) as failed:
        async with open_store(url, str(folder), locked_s=0.05):
            raise AssertionError("it opened")
    assert "\n" not in str(failed.value)
    return str(failed.value)


def newer(file: Path) -> None:
    with sqlite3.connect(file) as connection:
        connection.execute("PRAGMA user_version = 7")


def foreign(file: Path) -> None:
    file.unlink()
    with sqlite3.connect(file) as connection:
        connection.execute("CREATE TABLE theirs (x)")


def cut(file: Path) -> None:
    with file.open("r+b") as opened:
        opened.truncate(8192)


def scribbled(file: Path) -> None:
    """A page in the middle holds something else."""
    with file.open("r+b") as opened:
        opened.seek(4096)
        opened.write(b"\xff" * 4096)


@pytest.mark.parametrize(
    ("damage", "told"),
    [
        (newer, "is of a newer version (7, this program knows 2): run the newer program, or put a backup"),
        (foreign, "is another program's; set store.url to a file of its own"),
        (
            lambda file: file.write_text("hello, this is a text and no database at all" * 100),
            "is damaged or no database",
        ),
        (cut, "is damaged"),
        (scribbled, "is damaged"),
        (lambda file: (file.unlink(), file.mkdir()), "is a folder; set store.url to a file"),
    ],
)
async def test_a_database_that_cannot_be_used_is_refused_and_left_as_it_is(
    tmp_path: Path, damage: Callable[[Path], None], told: str
) -> None:
    file = await made(tmp_path)
    damage(file)
    before = None if file.is_dir() else file.read_bytes()
    line = await refused(tmp_path)
    assert line.startswith(f"the database {file} ")
    assert told in line
    assert before is None or file.read_bytes() == before


async def test_a_folder_that_cannot_be_used_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert "Not a directory; set store.url" in await refused(tmp_path / "file" / "state")
    assert "No such file or directory; set store.url" in await refused(tmp_path, f"sqlite:///{tmp_path}/none/x.db")


async def test_a_file_that_this_user_may_not_write_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = await made(tmp_path)

    def forbidden(*args: object) -> int:
        raise PermissionError(13, "Permission denied", str(file))

    monkeypatch.setattr(os, "open", forbidden)  # root may do anything, so it has to be told
    assert "cannot be opened: Permission denied; set store.url to a file that this user can write" in await refused(
        tmp_path
    )


async def test_a_migration_that_fails_leaves_the_database_at_its_version(tmp_path: Path) -> None:
    connection = sqlite3.connect(tmp_path / "x.db", isolation_level=None)
    first = ("CREATE TABLE a (x)",)
    assert migrate.migrate(connection, "x", [first]) == 1
    with pytest.raises(sqlite3.Error):
        migrate.migrate(connection, "x", [first, ("CREATE TABLE b (x)", "CREATE TABLE b (x)")])
    assert not connection.in_transaction
    assert connection.execute("PRAGMA user_version").fetchone() == (1,)
    assert connection.execute("SELECT name FROM sqlite_master").fetchall() == [("a",)]
    assert migrate.migrate(connection, "x", [first, ("CREATE TABLE b (x)",)]) == 1
    assert migrate.migrate(connection, "x", [first, ("CREATE TABLE b (x)",)]) == 0
    connection.close()


async def test_an_empty_file_becomes_a_database(tmp_path: Path) -> None:
    (tmp_path / "appliance.db").touch()
    await made(tmp_path)


async def test_two_programs_may_have_it_open_and_one_that_writes_too_long_is_told_of(tmp_path: Path) -> None:
    async with open_store("", str(tmp_path), locked_s=0.05) as one, open_store("", str(tmp_path)) as other:
        await one.cordon("node-a", "root", T)
        await other.cordon("node-b", "root", T)
        assert list(await one.cordons()) == ["node-a", "node-b"]
        with sqlite3.connect(tmp_path / "appliance.db", isolation_level=None) as third:
            third.execute("BEGIN IMMEDIATE")
            with pytest.raises(StoreFailed, match="is locked by another process; end that one and do it again"):
                await one.cordon("node-c", "root", T)
            assert list(await one.cordons()) == ["node-a", "node-b"]
            third.execute("ROLLBACK")
        assert await one.cordon("node-c", "root", T)
        third.close()


async def test_one_that_somebody_holds_for_himself_is_refused(tmp_path: Path) -> None:
    file = await made(tmp_path)
    holder = sqlite3.connect(file, isolation_level=None)
    holder.execute("PRAGMA locking_mode = EXCLUSIVE")
    holder.execute("BEGIN EXCLUSIVE")
    assert "is locked by another process; end that one" in await refused(tmp_path)
    holder.close()


async def test_a_full_disk_fails_what_was_asked_and_leaves_nothing_of_it(tmp_path: Path) -> None:
    async with opened(str(tmp_path / "x.db")) as database:
        pages = database._writer.execute("PRAGMA page_count").fetchone()[0]
        database._writer.execute(f"PRAGMA max_page_count = {pages + 2}")

        def fill(connection: sqlite3.Connection) -> None:
            connection.execute("INSERT INTO cordons (node, at, by) VALUES ('before', 0, '')")
            for number in range(1000):
                connection.execute("INSERT INTO cordons (node, at, by) VALUES (?, 0, ?)", (f"{number}", "x" * 500))

        with pytest.raises(StoreFailed) as failed:
            await database.write(fill)
        assert str(failed.value) == (
            f"the database {tmp_path}/x.db cannot be written, because the disk is full; free some room and do it again"
        )
        count = "SELECT count(*) FROM cordons"
        assert await database.read(lambda connection: connection.execute(count).fetchone()) == (0,)
        database._writer.execute("PRAGMA max_page_count = 100000")
        await database.write(fill)
        assert await database.read(lambda connection: connection.execute(count).fetchone()) == (1001,)


@pytest.mark.parametrize(
    ("free", "told"),
    [
        (4096, "cannot be written, because the disk is full; free some room and do it again"),
        (1 << 30, "failed: disk I/O error; look at the disk, then do it again"),
        (None, "failed: disk I/O error; look at the disk, then do it again"),
    ],
)
def test_an_io_error_on_a_full_disk_is_called_what_it_is(
    free: int | None, told: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look(folder: str) -> object:
        if free is None:
            raise OSError(5, "gone")
        return type("Found", (), {"f_bavail": free // 512, "f_frsize": 512})

    monkeypatch.setattr(os, "statvfs", look)
    error = sqlite3.OperationalError("disk I/O error")
    error.sqlite_errorcode = sqlite3.SQLITE_IOERR_SHMSIZE
    assert str(explain("/state/x.db", error)) == f"the database /state/x.db {told}"


def taken_away(folder: Path, replaced: bool) -> None:
    for file in folder.glob("appliance.db*"):
        file.unlink()
    if replaced:
        (folder / "appliance.db").write_bytes(b"")


@pytest.mark.parametrize("replaced", [False, True])
async def test_nothing_is_written_to_a_file_that_was_taken_away(tmp_path: Path, replaced: bool) -> None:
    async with open_store("", str(tmp_path)) as store:
        await store.cordon("node-a", "root", T)
        assert list(await store.cordons()) == ["node-a"]
        taken_away(tmp_path, replaced)
        with pytest.raises(StoreFailed, match="was removed or replaced while it was in use"):
            await store.cordon("node-b", "root", T)
        assert list(await store.cordons()) == ["node-a"], "and the nodes that call are known"


async def test_a_write_that_has_begun_is_finished_and_one_that_waits_is_dropped(tmp_path: Path) -> None:
    begun, let_go = threading.Event(), threading.Event()

    def slowly(connection: sqlite3.Connection) -> None:
        connection.execute("INSERT INTO cordons (node, at, by) VALUES ('begun', 0, '')")
        begun.set()
        assert let_go.wait(10)

    async with open_store("", str(tmp_path)) as store:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(store._database.write, slowly)
            await trio.to_thread.run_sync(begun.wait, 10)
            nursery.start_soon(store.cordon, "waited", "root", T)
            await trio.testing.wait_all_tasks_blocked()
            assert await store.cordons() == {}  # a read waits for no write
            nursery.cancel_scope.cancel()
            let_go.set()
        assert list(await store.cordons()) == ["begun"]
        assert await store.cordon("after", "root", T)


async def test_without_a_further_thread_it_fails_and_the_next_one_is_served(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with open_store("", str(tmp_path)) as store:

        def none(*args: object, **more: object) -> None:
            raise RuntimeError("can't start new thread")

        with monkeypatch.context() as patched:
            patched.setattr("trio._threads.start_thread_soon", none)
            for ask in (lambda: store.cordons(), lambda: store.cordon("node-a", "root", T)):
                with pytest.raises(StoreFailed, match="no further thread; raise its limit of tasks"):
                    await ask()
        assert await store.cordon("node-a", "root", T) and list(await store.cordons()) == ["node-a"]


WRITER = """
import sys, trio
from appliance.store.rows import JoinToken
from appliance.store.store import open_store

async def main():
    async with open_store("", sys.argv[1]) as store:
        for number in range(100_000):
            await store.add_token(JoinToken(f"{number}", f"node-{number}", 2e9), "root", float(number))
            print(number, flush=True)

trio.run(main)
"""


def test_a_kill_loses_nothing_that_was_committed(tmp_path: Path) -> None:
    for round_ in range(3):
        folder = tmp_path / f"{round_}"
        writer = subprocess.Popen([sys.executable, "-c", WRITER, str(folder)], stdout=subprocess.PIPE)
        assert writer.stdout is not None
        try:
            for _ in range(20 + 7 * round_):
                last = int(writer.stdout.readline())
            writer.send_signal(signal.SIGKILL)
            last = max([last, *map(int, writer.stdout.read().split())])
        finally:
            writer.kill()
            writer.wait()
            writer.stdout.close()
        trio.run(look_after_kill, str(folder), last)


async def look_after_kill(folder: str, last: int) -> None:
    async with open_store("", folder) as store:
        kept = {token.sha256 for token in await store.tokens(0.0)}
        assert {f"{number}" for number in range(last + 1)} <= kept
        assert len(kept) <= last + 2  # at most the one that was under way
        # each with its line in the audit, or not at all
        assert {entry.target for entry in await store.entries(10_000)} == {f"node-{number}" for number in kept}
        await store.add_token(JoinToken("after", "node-x", 2e9), "root", T)

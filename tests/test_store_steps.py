"""Before any statement of any change the disk may fail or the process be killed: all of it is done, or nothing."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from appliance.store import migrate
from appliance.store.failed import StoreFailed
from appliance.store.migrations import MIGRATIONS
from appliance.store.rows import Certificate, JoinToken
from appliance.store.store import Store, open_store

T = 1_800_000_000.0
YEAR = 365 * 86400.0
MOST_STEPS = 20

Change = Callable[[Store], Awaitable[Any]]

CHANGES: dict[str, Change] = {
    "cordon": lambda store: store.cordon("c", "root", T),
    "drain": lambda store: store.drain("c", "root", T),
    "drain of a cordoned one": lambda store: store.drain("a", "root", T),
    "uncordon": lambda store: store.uncordon("a", "root", T),
    "token": lambda store: store.add_token(JoinToken("new", "b", T + 60), "root", T),
    "join": lambda store: store.redeem("open", Certificate("b", "2", T + YEAR, T), "b"),
    "renewal": lambda store: store.renew_certificate(Certificate("a", "3", T + YEAR, T), "a"),
    "revocation": lambda store: store.revoke("a", "root", T),
    "audit": lambda store: store.audit("root", "scale", "m", "3 replicas", T),
}


class Stepping:
    """A connection before each of whose statements `before` is called with its number."""

    def __init__(self, real: sqlite3.Connection, before: Callable[[int], None]) -> None:
        self._real = real
        self._before = before
        self.steps = 0

    def execute(self, *args: Any) -> Any:
        self.steps += 1
        self._before(self.steps)
        return self._real.execute(*args)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._real, name)


async def fill(store: Store) -> None:
    await store.add_token(JoinToken("old", "a", T), "root", T - 100)
    await store.redeem("old", Certificate("a", "1", T + YEAR, T - 50), "a")
    await store.add_token(JoinToken("open", "b", T + 3600), "root", T - 40)
    await store.cordon("a", "root", T - 30)


def content(folder: Path) -> list[str]:
    with sqlite3.connect(folder / "appliance.db") as connection:
        assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
        dump = [line for line in connection.iterdump() if line.startswith("INSERT")]
    connection.close()
    return dump


@pytest.mark.parametrize("name", CHANGES)
async def test_a_fault_before_any_statement_leaves_all_as_it_was(name: str, tmp_path: Path) -> None:
    async with open_store("", str(tmp_path)) as store:
        await fill(store)
        database = store._database
        real, before = database._writer, content(tmp_path)
        for broken in range(1, MOST_STEPS):

            def fail(step: int, broken: int = broken) -> None:
                if step == broken:
                    raise sqlite3.OperationalError("disk I/O error")

            stepping = Stepping(real, fail)
            database._writer = stepping  # type: ignore[assignment]
            try:
                await CHANGES[name](store)
            except StoreFailed as failed:
                assert "disk I/O error; look at the disk" in str(failed)
                assert content(tmp_path) == before
                assert not real.in_transaction
            else:
                assert stepping.steps < broken, "it went through, so every statement has failed once"
                break
        else:
            raise AssertionError("it has more statements than are tried")
        assert broken > 2 and content(tmp_path) != before


@pytest.mark.parametrize("name", CHANGES)
async def test_a_kill_before_any_statement_leaves_all_or_nothing(name: str, tmp_path: Path) -> None:
    live = tmp_path / "live"
    copies: list[Path] = []

    def keep(step: int) -> None:
        """What is on the disk at this moment, as the next process would find it."""
        copies.append(tmp_path / f"{step}")
        shutil.copytree(live, copies[-1])

    async with open_store("", str(live)) as store:
        await fill(store)
        before = content(live)
        store._database._writer = Stepping(store._database._writer, keep)  # type: ignore[assignment]
        await CHANGES[name](store)
        keep(0)
        after = content(live)
    assert before != after and len(copies) > 3
    seen = []
    for copy in copies:
        async with open_store("", str(copy)) as again:
            await again.audit("root", "after", "", "", T)
        seen.append([line for line in content(copy) if "'after'" not in line and "sqlite_sequence" not in line])
    plain = [[line for line in state if "sqlite_sequence" not in line] for state in (before, after)]
    assert seen[:-1] == [plain[0]] * (len(copies) - 1)
    assert seen[-1] == plain[1]


async def test_a_kill_in_the_midst_of_a_migration_is_a_database_of_one_version(tmp_path: Path) -> None:
    live = tmp_path / "live"
    live.mkdir()
    file = live / "appliance.db"
    real = sqlite3.connect(file, isolation_level=None)
    migrate.migrate(real, str(file), MIGRATIONS[:1])
    real.execute("INSERT INTO cordons VALUES ('a', 5.0, 'root')")
    copies: list[Path] = []

    def keep(step: int) -> None:
        copies.append(tmp_path / f"{step}")
        shutil.copytree(live, copies[-1])

    migrate.migrate(Stepping(real, keep), str(file), MIGRATIONS)  # type: ignore[arg-type]
    real.close()
    assert len(copies) > 5
    for copy in copies:
        async with open_store("", str(copy)) as store:
            assert list(await store.cordons()) == ["a"]
            assert await store.drain("a", "root", T)

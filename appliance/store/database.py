"""The database: one connection that writes, one that reads, each used by one thread at a time.

SQLite in WAL mode, so that a read never waits for a write. `synchronous=FULL`: what a call returned for is on the disk,
at the price of one fsync for each write; operators' decisions are few, and one that comes back after a power cut as if
it had never been made is a fault nobody looks for.

Both run in Trio's threads, each behind a limiter of its own of one. That is the whole queue: a call that is cancelled
while it waits does nothing, and one that has begun is finished, whatever happens to the task that asked for it.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import AsyncIterator, Callable
from typing import TypeVar

import trio

from .failed import StoreFailed, explain
from .migrate import migrate

LOCKED_S = 5.0
"""How long a call waits for another process that writes: a router that is being taken over from."""

CLOSE_S = 10.0
"""How long the end waits for a write that has begun, on a disk that does not answer."""

NO_THREAD = "start new thread"

Result = TypeVar("Result")


def location(url: str, state_dir: str) -> str:
    """The file that `store.url` means: "" the usual one, three slashes from the state folder on, four from the root."""
    if not url:
        return os.path.join(state_dir, "appliance.db")
    return os.path.join(state_dir, url.removeprefix("sqlite:///"))


class Database:
    """Two connections to one file. Made by `opened`, which closes it."""

    def __init__(self, path: str, writer: sqlite3.Connection, reader: sqlite3.Connection) -> None:
        self.path = path
        self._writer = writer
        self._reader = reader
        self._file = _identity(path)
        self._writes = trio.CapacityLimiter(1)
        self._reads = trio.CapacityLimiter(1)

    async def write(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """What `work` returns, done in one transaction of its own in a thread. Raises StoreFailed; then, and when
        `work` raises, nothing is done."""
        return await self._in_thread(self._transaction, work, self._writes)

    async def read(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        """What `work` returns, from what is committed. Raises StoreFailed."""
        return await self._in_thread(self._look, work, self._reads)

    async def _in_thread(
        self,
        call: Callable[[Callable[[sqlite3.Connection], Result]], Result],
        work: Callable[[sqlite3.Connection], Result],
        limiter: trio.CapacityLimiter,
    ) -> Result:
        try:
            return await trio.to_thread.run_sync(call, work, limiter=limiter)
        except RuntimeError as error:
            # All that Python says where the system gives no further thread. Engines of this machine may have taken
            # them, and whoever serves requests meanwhile must not end for it.
            if NO_THREAD not in str(error):
                raise
            raise StoreFailed(
                f"the database {self.path} cannot be used, because this machine gives the router no further thread;"
                " raise its limit of tasks (TasksMax= in the unit, ulimit -u), then do it again"
            ) from None

    def _transaction(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        connection = self._writer
        self._check_file()
        try:
            connection.execute("BEGIN IMMEDIATE")
            try:
                result = work(connection)
                connection.execute("COMMIT")
            except BaseException:
                if connection.in_transaction:  # a full disk has ended it already
                    connection.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise explain(self.path, error) from error
        return result

    def _check_file(self) -> None:
        """Raises StoreFailed where another file, or none, has the name of ours: what is written to ours would be gone
        with this process, a revocation too. Reading goes on: nodes should not be refused for it."""
        if self._file is None or self._file != _identity(self.path):
            raise StoreFailed(
                f"the database {self.path} was removed or replaced while it was in use, so nothing can be noted;"
                " put a backup there if you have one, and start this router anew"
            )

    def _look(self, work: Callable[[sqlite3.Connection], Result]) -> Result:
        try:
            return work(self._reader)
        except sqlite3.Error as error:
            raise explain(self.path, error) from error

    async def aclose(self) -> None:
        """Close both, after a call that has begun. Bounded by `CLOSE_S`; SQLite needs no closing to be whole."""
        with trio.CancelScope(shield=True), trio.move_on_after(CLOSE_S):
            for connection, limiter in ((self._reader, self._reads), (self._writer, self._writes)):
                await trio.to_thread.run_sync(connection.close, limiter=limiter, abandon_on_cancel=True)


@contextlib.asynccontextmanager
async def opened(path: str, locked_s: float = LOCKED_S) -> AsyncIterator[Database]:
    """The database at `path`, made or brought to this version. Raises StoreFailed."""
    writer, reader = await trio.to_thread.run_sync(_open, path, locked_s)
    database = Database(path, writer, reader)
    try:
        yield database
    finally:
        await database.aclose()


def _open(path: str, locked_s: float) -> tuple[sqlite3.Connection, sqlite3.Connection]:
    if os.path.isdir(path):
        raise StoreFailed(f"the database {path} is a folder; set store.url to a file")
    made: list[sqlite3.Connection] = []
    try:
        # For its owner alone; the files beside it take their rights from it.
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
        made.append(writer := _connection(path, locked_s))
        migrate(writer, path)
        if writer.execute("PRAGMA journal_mode = WAL").fetchone() != ("wal",):
            raise StoreFailed(f"the database {path} is on a file system without shared memory; set store.url")
        writer.execute("PRAGMA synchronous = FULL")
        made.append(reader := _connection(path, locked_s))
        reader.execute("PRAGMA query_only = ON")
    except (sqlite3.Error, OSError) as error:
        for connection in made:
            connection.close()
        raise explain(path, error) from error
    except StoreFailed:
        for connection in made:
            connection.close()
        raise
    return writer, reader


def _identity(path: str) -> tuple[int, int] | None:
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _connection(path: str, locked_s: float) -> sqlite3.Connection:
    connection = sqlite3.connect(path, timeout=locked_s, isolation_level=None, check_same_thread=False)
    connection.execute("PRAGMA foreign_keys = ON")
    return connection

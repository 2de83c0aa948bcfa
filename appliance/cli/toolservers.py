"""/mcp of a router: the tools of announced groups, and what is known of their servers.

Nothing of it is loaded before somebody asks at /mcp. The merge brings a whole HTTP client along, and most routers serve
models alone.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

import trio

from ..door.aside import Aside
from ..facts.groups import GroupsSettings
from ..facts.mcp import McpSettings, Source

if TYPE_CHECKING:
    from ..mcp.merge import Merge
    from ..mcp.serve import Endpoint


class ToolServers:
    """Made once; `run` in the router's nursery, for longer than the door answers. `sources` are the groups that
    announce a tool server at the moment, `status` is the document of /status.json."""

    def __init__(
        self, settings: GroupsSettings, sources: Callable[[], Sequence[Source]], status: Callable[[], Mapping[str, Any]]
    ) -> None:
        self.running = 0
        """Requests at /mcp that are being answered: a stop waits for them."""
        self._settings = _settings_of(settings)
        self._sources = sources
        self._status = status
        self._opening = trio.Lock()
        self._nursery: trio.Nursery | None = None
        self._merge: Merge | None = None
        self._endpoint: Endpoint | None = None

    def configure(self, settings: GroupsSettings) -> None:
        """Take changed settings."""
        self._settings = _settings_of(settings)
        if self._merge is not None:
            self._merge.configure(self._settings)

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Hold what the first request opens, until cancelled; sessions at tool servers end with it."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            task_status.started()
            await trio.sleep_forever()
        raise AssertionError("it ends only by cancellation")

    async def answer(self, method: str, fields: Sequence[tuple[str, str]], body: bytes, out: Aside) -> None:
        """Answer one request. Raises Refusal while nothing was sent."""
        self.running += 1
        try:
            await (self._endpoint or await self._opened()).answer(method, fields, body, out)
        finally:
            self.running -= 1

    def shown(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """What a status document says of groups, with what is known of their tool servers. `mcp_tools` is None while
        nobody has asked for the tools, and while `mcp_error` says why they are not to be had."""
        if "groups" not in document:
            return document
        rows = {row["group"]: row for row in self._rows()}
        groups = {name: {**group, **_columns(rows.get(name, {}))} for name, group in document["groups"].items()}
        return {**document, "groups": groups}

    def troubles(self) -> list[str]:
        """A sentence for each group whose tools could not be listed."""
        return [f"group {row['group']}: no tools, {row['error']}" for row in self._rows() if row["error"]]

    def _rows(self) -> list[dict[str, object]]:
        return self._merge.rows() if self._merge is not None else []

    async def _opened(self) -> Endpoint:
        async with self._opening:
            if self._endpoint is None:
                assert self._nursery is not None, "the door answers while it runs"
                await trio.to_thread.run_sync(_load)  # it takes a moment, and streams go on
                self._endpoint = await self._nursery.start(self._hold, name="tool servers")
        return self._endpoint

    async def _hold(self, task_status: trio.TaskStatus[Endpoint]) -> None:
        from ..mcp.merge import open_merge
        from ..mcp.serve import NAME, Endpoint

        async with open_merge(self._sources, self._status, self._settings, NAME) as merge:
            self._merge = merge
            task_status.started(Endpoint(merge))
            await trio.sleep_forever()


def _settings_of(settings: GroupsSettings) -> McpSettings:
    # No origins: pages of the router's own, under its address, are let in without being named.
    return McpSettings(settings.mcp_naming, settings.tools_ttl_s, settings.mcp_timeout_s)


def _load() -> None:
    from ..mcp import exchange, merge, serve  # noqa: F401 - for what loading leaves behind

    exchange.open_client("http://localhost")  # httpx loads most of itself when the first one is made


def _columns(row: Mapping[str, object]) -> dict[str, object]:
    return {"mcp_era": row.get("era"), "mcp_tools": row.get("tools"), "mcp_error": row.get("error")}

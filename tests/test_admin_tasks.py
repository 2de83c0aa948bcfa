"""The tree of nurseries, as `/debug/tasks` shows it."""

from __future__ import annotations

from collections.abc import Coroutine
from typing import Any

import pytest
import trio
from trio.testing import wait_all_tasks_blocked

from appliance.admin import tasks
from appliance.nursery.carried import Carried


def find(task: dict[str, Any], name: str) -> dict[str, Any]:
    """The task of that name, anywhere below."""
    found = [task] if task["name"] == name else []
    for nursery in task.get("nurseries", ()):
        for child in nursery:
            try:
                found.append(find(child, name))
            except AssertionError:
                continue
    assert found, name
    return found[0]


async def sleep_with(secret: str) -> None:
    await trio.sleep_forever()


async def two_nurseries(task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
    async with trio.open_nursery() as outer, trio.open_nursery() as inner:
        outer.start_soon(trio.sleep_forever, name="outer child")
        inner.start_soon(trio.sleep_forever, name="inner child")
        task_status.started()


async def test_names_places_and_nesting() -> None:
    async with trio.open_nursery() as nursery:
        await nursery.start(two_nurseries, name="parent")
        await wait_all_tasks_blocked()
        tree = tasks.tree()
        parent = find(tree, "parent")
        assert [[child["name"] for child in nursery] for nursery in parent["nurseries"]] == [
            ["outer child"],
            ["inner child"],
        ]
        assert "two_nurseries" in parent["waits_at"] and "test_admin_tasks.py" in parent["waits_at"]
        text = tasks.lines(tree)
        at = next(index for index, line in enumerate(text) if line.strip().startswith("parent"))
        indent = text[at].index("parent")
        assert text[at + 1].startswith(" " * (indent + 2) + "outer child")
        assert text[at + 2] == " " * (indent + 2) + "--"
        assert text[at + 3].startswith(" " * (indent + 2) + "inner child")
        nursery.cancel_scope.cancel()


async def test_tasks_that_are_alike_are_one_line_with_a_count() -> None:
    async with trio.open_nursery() as nursery:
        for _ in range(5):
            nursery.start_soon(trio.sleep_forever, name="connection")
        nursery.start_soon(trio.sleep, 1000, name="connection")
        nursery.start_soon(two_nurseries, name="connection")
        await wait_all_tasks_blocked()
        text = [line for line in tasks.lines(tasks.tree()) if line.strip().startswith("connection")]
        counted = [line for line in text if "connection x5  [" in line]
        assert len(counted) == 1 and len(text) == 3
        nursery.cancel_scope.cancel()


async def test_no_value_of_a_variable_shows() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(sleep_with, "sk-secret-key")
        await wait_all_tasks_blocked()
        shown = str(tasks.tree())
        assert "sleep_with" in shown
        assert "sk-secret-key" not in shown
        nursery.cancel_scope.cancel()


async def test_a_task_that_has_not_begun_is_told_as_such() -> None:
    async with trio.open_nursery() as nursery:
        nursery.start_soon(trio.sleep_forever, name="fresh")
        assert find(tasks.tree(), "fresh")["waits_at"] != ""
        assert "[running]" in "\n".join(tasks.lines(tasks.tree()))
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize("carried", [0, 1])
async def test_a_coroutine_that_is_carried_is_shown_where_it_waits(carried: int) -> None:
    """All connections wait in the same place of the task that owns them; what each waits for, its coroutine tells."""
    idle, busy = Carried(), Carried()

    async def waits_for_a_request() -> None:
        await idle.pause()
        await idle.pause()

    async def waits_at_home() -> None:
        await busy.sleep()
        await busy.sleep()

    async def connection(sleeper: Carried, coroutine: Coroutine[Any, Any, None]) -> None:
        await sleeper.run(coroutine)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(connection, idle, waits_for_a_request(), name="idle")
        nursery.start_soon(connection, busy, waits_at_home(), name="busy")
        await wait_all_tasks_blocked()
        for _ in range(carried):
            idle.carry_on()
            busy.carry_on()
            await wait_all_tasks_blocked()
        tree = tasks.tree()
        assert "waits_for_a_request" in find(tree, "idle")["waits_at"]
        assert "waits_at_home" in find(tree, "busy")["waits_at"]
        nursery.cancel_scope.cancel()

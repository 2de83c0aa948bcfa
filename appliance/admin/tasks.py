"""`/debug/tasks`: the live tree of nurseries and tasks, and where each of them waits.

Names of tasks and positions in code, nothing else: values of variables would hold keys and prompts.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator
from types import FrameType
from typing import Any

import trio

from ..nursery.carried import Carried

_PACKAGE = os.path.dirname(os.path.dirname(os.path.abspath(__file__))) + os.sep
_TOOLS = (f"{_PACKAGE}nursery{os.sep}", f"{_PACKAGE}wire{os.sep}")
_TRIO = os.path.dirname(os.path.abspath(trio.__file__)) + os.sep


def tree() -> dict[str, Any]:
    """The tree from Trio's root task down. A task is `name`, `waits_at` and, where it has open nurseries, `nurseries`:
    a list of lists of tasks. Tasks without nurseries that have the same name and wait at the same place are told once,
    with their `count`: five thousand idle connections are one line. Walks every task, so it is for people, not for
    polling: ten thousand of them hold up the loop for about a tenth of a second."""
    root = trio.lowlevel.current_root_task()
    assert root is not None, "only inside Trio"
    return _task(root)


def lines(task: dict[str, Any], indent: str = "") -> list[str]:
    """The tree as text, one line a task; a line between two nurseries of one task."""
    count = f" x{task['count']}" if "count" in task else ""
    text = [f"{indent}{task['name']}{count}  [{task['waits_at']}]"]
    for number, nursery in enumerate(task.get("nurseries", ())):
        if number and nursery:
            text.append(f"{indent}  --")
        for child in nursery:
            text += lines(child, indent + "  ")
    return text


def _task(task: trio.lowlevel.Task) -> dict[str, Any]:
    shown: dict[str, Any] = {"name": task.name, "waits_at": _place(task)}
    nurseries = [_merged(nursery.child_tasks) for nursery in task.child_nurseries]
    if any(nurseries):
        shown["nurseries"] = nurseries
    return shown


def _merged(tasks: Iterable[trio.lowlevel.Task]) -> list[dict[str, Any]]:
    shown: list[dict[str, Any]] = []
    alike: dict[tuple[str, str], dict[str, Any]] = {}
    for task in sorted(tasks, key=lambda task: task.name):
        one = _task(task)
        if "nurseries" not in one:
            before = alike.setdefault((one["name"], one["waits_at"]), one)
            if before is not one:
                before["count"] = before.get("count", 1) + 1
                continue
        shown.append(one)
    return shown


def _place(task: trio.lowlevel.Task) -> str:
    """The innermost position that says what the task is about, and what was called from there: every connection waits
    in the same line of Trio and of our own sockets."""
    if task is trio.lowlevel.current_task():
        return "running"
    position = called = ""
    for frame, line in _frames(task):
        code = frame.f_code
        if code.co_filename.startswith(_TRIO) or (position and code.co_filename.startswith(_TOOLS)):
            called = called or code.co_qualname
        else:
            position, called = f"{_file(code.co_filename)}:{line} {code.co_qualname}", ""
    if position and called:
        return f"{position} > {called}"
    return position or called or "not started"


def _frames(task: trio.lowlevel.Task) -> Iterator[tuple[FrameType, int]]:
    """Where a task waits, the outermost place first. One whose coroutine is carried waits where that one does."""
    for frame, line in task.iter_await_frames():
        yield frame, line
        if frame.f_code is Carried.STEERS:
            coroutine = frame.f_locals["coroutine"]
            while (inner := getattr(coroutine, "cr_frame", None)) is not None:
                yield inner, inner.f_lineno
                coroutine = coroutine.cr_await
            return


def _file(name: str) -> str:
    """A file of ours by its place in the package, another's by its place among the installed ones."""
    if name.startswith(_PACKAGE):
        return os.path.relpath(name, _PACKAGE)
    return name.rpartition("site-packages/")[2]

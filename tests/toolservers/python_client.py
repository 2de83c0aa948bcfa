"""The official Python client, 2.x or 1.x, whichever is installed. Run as a script: URL, mode, and calls as JSON.

A call is [tool, arguments]; each is made with a listener for its progress. Prints one JSON document: the version agreed
on, the tools, and what each call gave. `--leave-after S` gives up calls of `wait` after S seconds.
"""

from __future__ import annotations

import argparse
import json
from typing import Any

import anyio

try:
    from mcp import Client
except ImportError:
    Client = None


async def talk(session: Any, calls: list[Any], leave_after: float) -> dict[str, Any]:
    found: dict[str, Any] = {"tools": [], "calls": []}
    cursor = None
    while True:
        page = await (session.list_tools(cursor=cursor) if cursor else session.list_tools())
        found["tools"] += [
            {"name": tool.name, "description": tool.description, "schema": schema_of(tool)} for tool in page.tools
        ]
        cursor = getattr(page, "next_cursor", None) or getattr(page, "nextCursor", None)
        if not cursor:
            break
    for name, arguments in calls:
        steps: list[Any] = []

        async def told(progress: float, total: float | None, message: str | None, steps: list[Any] = steps) -> None:
            steps.append([progress, total, message])

        with anyio.move_on_after(leave_after if leave_after and name.endswith("wait") else None) as scope:
            try:
                result = await session.call_tool(name, arguments, progress_callback=told)
            except Exception as error:
                found["calls"].append({"raised": f"{type(error).__name__}: {error}"})
                continue
            failed = getattr(result, "is_error", None)
            failed = result.isError if failed is None else failed
            structured = getattr(result, "structured_content", None) or getattr(result, "structuredContent", None)
            text = "".join(block.text for block in result.content)
            found["calls"].append({"failed": failed, "text": text, "structured": structured, "progress": steps})
        if scope.cancelled_caught:
            found["calls"].append({"left": True})
    return found


def schema_of(tool: Any) -> Any:
    return getattr(tool, "input_schema", None) or getattr(tool, "inputSchema", None)


async def new(url: str, mode: str, calls: list[Any], leave_after: float) -> dict[str, Any]:
    async with Client(url, mode=mode) as client:
        found = await talk(client, calls, leave_after)
        return {**found, "version": client.protocol_version}


async def old(url: str, calls: list[Any], leave_after: float) -> dict[str, Any]:
    from mcp import ClientSession
    from mcp.client.streamable_http import streamable_http_client

    async with streamable_http_client(url) as (reading, writing, *_), ClientSession(reading, writing) as session:
        agreed = await session.initialize()
        found = await talk(session, calls, leave_after)
        await session.send_ping()
        return {**found, "version": agreed.protocolVersion}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("mode")
    parser.add_argument("calls", type=json.loads)
    parser.add_argument("--leave-after", type=float, default=0)
    flags = parser.parse_args()
    if Client is not None:
        found = anyio.run(new, flags.url, flags.mode, flags.calls, flags.leave_after)
    else:
        found = anyio.run(old, flags.url, flags.calls, flags.leave_after)
    print(json.dumps(found))


if __name__ == "__main__":
    main()

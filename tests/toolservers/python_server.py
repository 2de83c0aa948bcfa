"""An MCP server made of the official Python package, 2.x or 1.x, whichever is installed. Run as a script.

    --name NAME         what its tool `whoami` says
    --port N            0: the kernel chooses; the address is the first line on standard output
    --json --stateless  the package's own settings
    --key TEXT          refuses (401) whoever does not send this as Authorization
    --handshake-only    answers the modern era as servers do that never heard of it
    --paged             7 tools named t0 to t6 on pages of 2, one of them with an argument that is repeated in a header
    --mounted           lives at /mcp/, and redirects /mcp there

`GET /seen` gives what was asked of it: method, headers and body of every request, and what its tools did.
"""

from __future__ import annotations

import argparse
import json
import socket
from typing import Any

import anyio
import uvicorn

try:
    from mcp.server import MCPServer as Simple
    from mcp.server.mcpserver import Context

    NEW = True
except ImportError:
    from mcp.server.fastmcp import Context
    from mcp.server.fastmcp import FastMCP as Simple

    NEW = False

SEEN: list[dict[str, Any]] = []


def simple(name: str) -> Any:
    server = Simple(name)

    @server.tool(description="Add two numbers.")
    def add(a: int, b: int) -> int:
        SEEN.append({"ran": "add"})
        return a + b

    @server.tool()
    def whoami() -> str:
        SEEN.append({"ran": "whoami"})
        return name

    @server.tool(description="Takes n steps and tells of each.")
    async def steps(n: int, ctx: Context) -> str:
        SEEN.append({"ran": "steps"})
        for step in range(n):
            await ctx.report_progress(step + 1, n, f"step {step + 1}")
        return "done"

    @server.tool(description="Never ends by itself.")
    async def wait() -> str:
        SEEN.append({"ran": "wait"})
        try:
            await anyio.sleep(3600)
        except BaseException:
            SEEN.append({"cancelled": "wait"})
            raise
        return "never"

    @server.tool()
    def boom() -> str:
        raise ValueError("as it was meant to")

    return server


def paged(name: str) -> Any:
    """Of 2.x alone."""
    import mcp_types as types
    from mcp.server.lowlevel import Server

    schema = {"type": "object", "properties": {"where": {"type": "string", "x-mcp-header": "Where"}}}

    async def listed(ctx: Any, params: Any) -> Any:
        first = int(params.cursor) if params and params.cursor else 0
        tools = [
            types.Tool(name=f"t{n}", input_schema=schema if n == 6 else {"type": "object"})
            for n in range(first, min(first + 2, 7))
        ]
        return types.ListToolsResult(tools=tools, next_cursor=str(first + 2) if first + 2 < 7 else None)

    async def called(ctx: Any, params: Any) -> Any:
        SEEN.append({"ran": params.name})
        text = json.dumps([params.name, params.arguments])
        return types.CallToolResult(content=[types.TextContent(type="text", text=text)])

    return Server(name, on_list_tools=listed, on_call_tool=called)


def watched(app: Any, flags: argparse.Namespace) -> Any:
    async def outer(scope: Any, receive: Any, send: Any) -> None:
        if scope["type"] != "http":
            await app(scope, receive, send)
            return
        headers = {name.decode(): text.decode() for name, text in scope["headers"]}
        if scope["path"] == "/seen":
            await answer(send, 200, SEEN)
            return
        row = {"method": scope["method"], "path": scope["path"], "headers": headers, "body": ""}
        SEEN.append(row)
        if flags.key and headers.get("authorization") != flags.key:
            await answer(send, 401, {"error": "who are you"})
        elif flags.handshake_only and headers.get("mcp-protocol-version", "").startswith("2026"):
            await answer(send, 400, {"error": "unsupported protocol version"})
        elif flags.mounted and scope["path"] == "/mcp":
            await answer(send, 307, {}, [(b"location", b"/mcp/")])
        else:
            if flags.mounted:
                scope = {**scope, "path": "/mcp", "raw_path": b"/mcp"}

            async def noted() -> Any:
                message = await receive()
                row["body"] += message.get("body", b"").decode()
                return message

            await app(scope, noted, send)

    return outer


async def answer(send: Any, status: int, body: Any, headers: Any = ()) -> None:
    fields = [(b"content-type", b"application/json"), *headers]
    await send({"type": "http.response.start", "status": status, "headers": fields})
    await send({"type": "http.response.body", "body": json.dumps(body).encode()})


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--name", default="up")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--key", default="")
    for flag in ("--json", "--stateless", "--handshake-only", "--paged", "--mounted"):
        parser.add_argument(flag, action="store_true")
    flags = parser.parse_args()
    ways = {"json_response": flags.json, "stateless_http": flags.stateless}
    if flags.paged:
        app = paged(flags.name).streamable_http_app(**ways)
    elif NEW:
        app = simple(flags.name).streamable_http_app(**ways)
    else:
        server = simple(flags.name)
        server.settings.json_response, server.settings.stateless_http = flags.json, flags.stateless
        app = server.streamable_http_app()
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(("127.0.0.1", flags.port))
    listener.listen(100)  # who connects before all is loaded waits
    print(f"http://127.0.0.1:{listener.getsockname()[1]}", flush=True)
    config = uvicorn.Config(watched(app, flags), log_level="error", timeout_graceful_shutdown=0)
    uvicorn.Server(config).run(sockets=[listener])


if __name__ == "__main__":
    main()

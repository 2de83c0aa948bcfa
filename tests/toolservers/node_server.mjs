// An MCP server made of the official package for Node. Run as a script: NAME and "stateful" or "stateless";
// MCP_SDK is the folder of the package. The address is the first line on standard output.
// An unknown session is told so with 400, as servers made after the package's own examples do.
import { randomUUID } from "node:crypto";
import { createServer } from "node:http";
import { pathToFileURL } from "node:url";

const sdk = (file) => import(pathToFileURL(`${process.env.MCP_SDK}/dist/esm/${file}`).href);
const { Server } = await sdk("server/index.js");
const { StreamableHTTPServerTransport } = await sdk("server/streamableHttp.js");
const { CallToolRequestSchema, ListToolsRequestSchema } = await sdk("types.js");

const [name, kind, port] = [process.argv[2], process.argv[3], Number(process.argv[4] ?? 0)];
const seen = [];
const tools = ["add", "steps", "wait", "nested/name"].map((tool) => ({ name: tool, inputSchema: { type: "object" } }));

function made() {
  const server = new Server({ name, version: "1" }, { capabilities: { tools: {} } });
  server.setRequestHandler(ListToolsRequestSchema, async (request) =>
    request.params?.cursor === "rest" ? { tools: tools.slice(2) } : { tools: tools.slice(0, 2), nextCursor: "rest" },
  );
  server.setRequestHandler(CallToolRequestSchema, async (request, extra) => {
    const { name: tool, arguments: args } = request.params;
    seen.push({ ran: tool });
    if (tool === "steps") {
      for (let step = 1; step <= args.n; step++) {
        const progressToken = request.params._meta?.progressToken;
        const params = { progressToken, progress: step, total: args.n, message: `step ${step}` };
        await extra.sendNotification({ method: "notifications/progress", params });
      }
    }
    if (tool === "wait") {
      await new Promise((resolve) => extra.signal.addEventListener("abort", resolve));
      seen.push({ cancelled: tool });
    }
    const text = tool === "add" ? String(args.a + args.b) : tool === "steps" ? "done" : JSON.stringify([tool, args]);
    return { content: [{ type: "text", text }] };
  });
  return server;
}

const sessions = new Map();
const http = createServer(async (request, response) => {
  if (request.url === "/seen") return response.end(JSON.stringify(seen));
  seen.push({ method: request.method, headers: request.headers });
  if (kind === "stateless") {
    const transport = new StreamableHTTPServerTransport({ sessionIdGenerator: undefined });
    await made().connect(transport);
    return transport.handleRequest(request, response);
  }
  const id = request.headers["mcp-session-id"];
  let transport = sessions.get(id);
  if (id && !transport) {
    const error = { code: -32000, message: "Bad Request: No valid session ID provided" };
    response.writeHead(400, { "content-type": "application/json" });
    return response.end(JSON.stringify({ jsonrpc: "2.0", id: null, error }));
  }
  if (!transport) {
    transport = new StreamableHTTPServerTransport({
      sessionIdGenerator: randomUUID,
      onsessioninitialized: (made) => void sessions.set(made, transport),
    });
    await made().connect(transport);
  }
  await transport.handleRequest(request, response);
});
http.listen(port, "127.0.0.1", () => console.log(`http://127.0.0.1:${http.address().port}`));

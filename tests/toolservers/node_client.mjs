// The official client for Node. Run as a script: URL and calls as JSON; MCP_SDK is the folder of the package.
// Prints one JSON document: the version agreed on, the tools, and what each call gave.
// With LEAVE_AFTER_MS calls of `wait` are given up after so long.
import { pathToFileURL } from "node:url";

const sdk = (file) => import(pathToFileURL(`${process.env.MCP_SDK}/dist/esm/${file}`).href);
const { Client } = await sdk("client/index.js");
const { StreamableHTTPClientTransport } = await sdk("client/streamableHttp.js");

const [url, calls] = [process.argv[2], JSON.parse(process.argv[3])];
const leaveAfter = Number(process.env.LEAVE_AFTER_MS ?? 0);
const transport = new StreamableHTTPClientTransport(new URL(url));
const client = new Client({ name: "node", version: "1" });
await client.connect(transport);
const found = { version: transport.protocolVersion, tools: [], calls: [] };
for (let cursor; ; ) {
  const page = await client.listTools(cursor ? { cursor } : {});
  found.tools.push(...page.tools.map((t) => ({ name: t.name, description: t.description, schema: t.inputSchema })));
  cursor = page.nextCursor;
  if (!cursor) break;
}
for (const [name, args] of calls) {
  const progress = [];
  const leaving = new AbortController();
  if (leaveAfter && name.endsWith("wait")) setTimeout(() => leaving.abort(), leaveAfter);
  try {
    const result = await client.callTool({ name, arguments: args }, undefined, {
      onprogress: (step) => progress.push([step.progress, step.total, step.message]),
      signal: leaving.signal,
    });
    const text = result.content.map((block) => block.text).join("");
    found.calls.push({ failed: result.isError ?? false, text, structured: result.structuredContent ?? null, progress });
  } catch (error) {
    found.calls.push(leaving.signal.aborted ? { left: true } : { raised: String(error) });
  }
}
await client.ping();
if (transport.sessionId) await transport.terminateSession();
await client.close();
console.log(JSON.stringify(found));

"""What `make run` runs: engine, router, two commands to try, and an end that leaves nothing behind."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterable
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import NoReturn

from appliance.demo.child import Child, DidNotStart, ending, start
from appliance.demo.engine import Engine, start_engine
from appliance.demo.ports import LOOPBACK, first_free

_DOOR, _METRICS = 6381, 6390
_DRAIN_S = 2
_ENDS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)

_QUESTION = "What is the capital of France?"


def main() -> int:
    """Run until Ctrl-C. Returns 1 with the reason on stderr when something does not start, or ends by itself."""
    parser = argparse.ArgumentParser(prog="python -m appliance.demo.main", description=__doc__)
    parser.add_argument("--port", type=int, default=_DOOR, help=f"the door's port, or the next free one ({_DOOR})")
    preferred: int = parser.parse_args().port
    for end in _ENDS:
        signal.signal(end, _interrupted)
    try:
        with ExitStack() as stack:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="appliance-demo-")))
            began = time.monotonic()
            print("Starting an engine ...", flush=True)
            engine = start_engine(_scripts(), folder)
            stack.callback(engine.child.stop, 2.0)
            if engine.note:
                print(engine.note)
            print("Starting appliance serve ...", flush=True)
            door = first_free(preferred)
            metrics = first_free(_METRICS, door)
            router = _start_router(engine, door, metrics, folder)
            stack.callback(router.stop, _DRAIN_S + 3.0)
            router.wait_for(f"http://{LOOPBACK}:{door}/readyz", 30.0)
            if door != preferred:
                print(f"Port {preferred} is taken, so the door listens on {door}.")
            why = _wait((engine.child, router), _welcome(engine, door, metrics, time.monotonic() - began))
            print("\nStopping ..." if not why else f"\n{why}", flush=True)
            return 1 if why else 0
    except KeyboardInterrupt:
        return 130
    except (DidNotStart, OSError) as why:
        print(f"error: {why}", file=sys.stderr)
        return 1


def _interrupted(*_: object) -> NoReturn:
    raise KeyboardInterrupt


def _scripts() -> Path:
    """Folder of this environment's console scripts."""
    return Path(sys.executable).parent


def _start_router(engine: Engine, door: int, metrics: int, folder: Path) -> Child:
    config = folder / "appliance.toml"
    config.write_text(
        f'[server]\nlisten = "{LOOPBACK}:{door}"\nmetrics_listen = "{LOOPBACK}:{metrics}"\ndrain_s = {_DRAIN_S}\n\n'
        f'[[endpoints]]\nid = "demo"\nurl = "{engine.url}/v1"\nmodels = ["{engine.model}"]\nengine = "{engine.kind}"\n',
        encoding="utf-8",
    )
    # State and sockets go where they are thrown away, and nothing of an installed router's settings is heard.
    env = {name: value for name, value in os.environ.items() if not name.startswith("APPLIANCE_")}
    env |= {"STATE_DIRECTORY": str(folder), "RUNTIME_DIRECTORY": str(folder)}
    command = [str(_scripts() / "appliance"), "serve", "--config", str(config)]
    return start("appliance serve", command, folder, env)


def _wait(children: Iterable[Child], welcome: str) -> str:
    """Print `welcome` and wait for Ctrl-C ("") or for a child's end (which one, and what its log ends with)."""
    news = {signal.SIGCHLD, *_ENDS}
    # Blocked only now: a child started under this mask would never see SIGTERM. And blocked before the welcome: whoever
    # has read it may stop us at once, and that is an orderly end.
    old = signal.pthread_sigmask(signal.SIG_BLOCK, news)
    try:
        print(welcome, flush=True)
        while True:
            for child in children:
                if (status := child.process.poll()) is not None:
                    return f"{child.name} ended ({ending(status)})\n{child.last_lines()}"
            if signal.sigwait(news) != signal.SIGCHLD:
                return ""
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, old)


def _welcome(engine: Engine, door: int, metrics: int, took_s: float) -> str:
    url = f"http://{LOOPBACK}:{door}"
    return f"""
Ready in {took_s:.1f} s: {engine.model} ({engine.kind}) answers at {url}/v1

Ask it:

curl {url}/v1/chat/completions -H 'content-type: application/json' -d '{{"model": "{engine.model}", \
"messages": [{{"role": "user", "content": "{_QUESTION}"}}], "max_tokens": 40, "temperature": 0, "stop": ["\\n"]}}'
{_snippet(engine, url) if find_spec("openai") else ""}
Metrics: http://{LOOPBACK}:{metrics}/metrics. Ctrl-C stops everything."""


def _snippet(engine: Engine, url: str) -> str:
    return f"""
Or with the openai package, streamed:

{os.path.relpath(sys.executable)} - <<'END'
from openai import OpenAI

client = OpenAI(base_url="{url}/v1", api_key="none")
for chunk in client.chat.completions.create(
    model="{engine.model}",
    messages=[{{"role": "user", "content": "{_QUESTION}"}}],
    max_tokens=40,  # a pretrained model: it would go on
    temperature=0,
    stop=["\\n"],
    stream=True,
    stream_options={{"include_usage": True}},
):
    print("".join(choice.delta.content or "" for choice in chunk.choices), end="", flush=True)
    if chunk.usage:
        print(f"\\n({{chunk.usage.completion_tokens}} tokens)")
END
"""


if __name__ == "__main__":
    sys.exit(main())

"""An engine that does what real ones do at their worst. Run as a script; only the standard library.

It takes llama-server's flags, vLLM's and Ray's as far as it needs them, ignores the rest, and misbehaves as told:

    --load-s S            loads so long; --while-loading 503 listens meanwhile, refused (the default) does not
    --serve-as NAME       lists this name instead of the one it was given
    --exit-after S        ends by itself, with --exit-status N, or by --exit-signal N
    --ignore-term N       takes the first N SIGTERMs for nothing (-1: all)
    --children N          starts children that ignore SIGTERM and stay when it ends, in its own process group
    --orphan              starts one more that is in a session of its own and belongs to nobody
    --bare                starts one in its group that has an empty environment
    --hop                 starts one that becomes a new process every few milliseconds
    --print-bytes N       writes so much before it loads;  --print-for-ever never stops
    --say TEXT            writes this line;  --say-key writes the key it was given
    --say-env             writes its environment
    --title TEXT          overwrites its command line in /proc

Every process of it writes `pid PID` when it starts. Ray's role is played when its first argument is `start`.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def say(text: str) -> None:
    os.write(1, (text + "\n").encode())


def read_flags(argv: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--alias", "--served-model-name", dest="name", default="")
    parser.add_argument("--api-key-file", default="")
    parser.add_argument("--node-ip-address", default="127.0.0.1")
    parser.add_argument("--head", action="store_true")
    parser.add_argument("--load-s", type=float, default=0.0)
    parser.add_argument("--while-loading", default="refused")
    parser.add_argument("--serve-as", default="")
    parser.add_argument("--exit-after", type=float, default=-1.0)
    parser.add_argument("--exit-status", type=int, default=0)
    parser.add_argument("--exit-signal", type=int, default=0)
    parser.add_argument("--ignore-term", type=int, default=0)
    parser.add_argument("--children", type=int, default=0)
    parser.add_argument("--print-bytes", type=int, default=0)
    parser.add_argument("--say", default="")
    parser.add_argument("--title", default="")
    for flag in ("--orphan", "--bare", "--hop", "--print-for-ever", "--say-key", "--say-env"):
        parser.add_argument(flag, action="store_true")
    return parser.parse_known_args(argv)[0]


def main() -> None:
    say(f"pid {os.getpid()}")
    if sys.argv[1:2] == ["start"]:
        play_ray(read_flags(sys.argv[2:]))
    flags = read_flags(sys.argv[1:])
    misbehave(flags)
    server = None
    loaded = threading.Event()
    if flags.while_loading == "503":
        server = serve(flags, loaded)
    time.sleep(flags.load_s)
    loaded.set()
    if server is None:
        server = serve(flags, loaded)
    say("serving")
    while True:
        signal.pause()


def misbehave(flags: argparse.Namespace) -> None:
    left = flags.ignore_term

    def on_term(*_: object) -> None:
        nonlocal left
        say("SIGTERM")
        if left == 0:
            os._exit(0)
        left -= 1

    signal.signal(signal.SIGTERM, on_term)
    if flags.title:
        set_title(flags.title)
    for _ in range(flags.children):
        stay()
    if flags.orphan and os.fork() == 0:
        os.setsid()
        stay()
        os._exit(0)
    if flags.bare and os.fork() == 0:
        say(f"pid {os.getpid()}")
        os.execve("/bin/sleep", ["sleep", "600"], {})
    if flags.hop and os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while os.fork():
            os._exit(0)
        hop()
        os._exit(0)
    if flags.say:
        say(flags.say)
    if flags.say_key:
        with open(flags.api_key_file) as file:
            say(f"settings: api_key={file.read().strip()!r}")
    if flags.say_env:
        say(json.dumps(dict(os.environ)))
    if flags.exit_after >= 0:
        threading.Thread(target=end, args=(flags,), daemon=True).start()
    if flags.print_bytes:
        chatter(flags.print_bytes)
    if flags.print_for_ever:
        threading.Thread(target=chatter, args=(1 << 60, 0.001), daemon=True).start()


def stay() -> None:
    """A child that ignores SIGTERM and does not care whether its parent lives."""
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        say(f"pid {os.getpid()}")
        while True:
            signal.pause()


def hop() -> None:
    """For a minute or two: one whose test was killed would otherwise hop for ever, and take part of a core."""
    for _ in range(12_000):
        time.sleep(0.005)
        if os.fork():
            os._exit(0)


def end(flags: argparse.Namespace) -> None:
    time.sleep(flags.exit_after)
    if flags.exit_signal:
        os.kill(os.getpid(), flags.exit_signal)
        time.sleep(60)  # it comes in another thread, and a little later
    os._exit(flags.exit_status)


def chatter(count: int, pause_s: float = 0.0) -> None:
    line = b"x" * 127 + b"\n"
    while count > 0:
        count -= os.write(1, line)
        if pause_s:
            time.sleep(pause_s)


def set_title(title: str) -> None:
    """What `setproctitle` does: write over the memory of the command line and, unless told, of the environment."""
    with open("/proc/self/stat") as stat:
        words = stat.read().rpartition(")")[2].split()
    start, stop = int(words[45]), int(words[46])
    if "SPT_NOENV" not in os.environ:
        stop = int(words[48])
    ctypes.memset(start, 0, stop - start)
    ctypes.memmove(start, title.encode(), min(len(title), stop - start - 1))


def serve(flags: argparse.Namespace, loaded: threading.Event) -> ThreadingHTTPServer:
    names = [flags.serve_as or flags.name]

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body: Any = {"status": "ok"}
            if self.path == "/v1/models":
                body = {"object": "list", "data": [{"id": name, "object": "model"} for name in names]}
            content = json.dumps(body).encode()
            if self.path == "/metrics":
                content = b"llamacpp:requests_processing 0\nllamacpp:requests_deferred 0\n"
            self.send_response(200 if loaded.is_set() else 503)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            return

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        allow_reuse_address = True

    server = Server((flags.host, flags.port), Handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    return server


def play_ray(flags: argparse.Namespace) -> None:
    """`ray start --head --block`: listens, has children, ends with status 1 on SIGTERM."""
    listener = socket.create_server((flags.node_ip_address, flags.port)) if flags.head else None
    stay()

    def on_term(*_: object) -> None:
        say("SIGTERM to ray")
        os._exit(1)

    signal.signal(signal.SIGTERM, on_term)
    while True:
        if listener is None:
            signal.pause()
            continue
        with contextlib.suppress(OSError):
            listener.accept()[0].close()


if __name__ == "__main__":
    main()

"""`appliance-llama-server`: the command line, the start and the stop of llama.cpp's server.

The wheel's `Server` does everything that matters: it binds, answers 503 "Loading model" while it loads, and serves
llama-server's routes from threads of its own. What it lacks as a program stands here: llama-server's flags
(`flags.py`), errors of one line with exit status 1, and an end.

How it ends. `Server(...)` holds Python's lock until the model is loaded, so no Python signal handler could run in that
time: until then SIGTERM and SIGINT keep the kernel's default and end the process at once (status 143, 130). Afterwards
they end it with status 0, also at once: closing the server in order would wait for clients to hang up, as llama-server
itself does, and there is nothing to save. Streams that still run break off without their end.
"""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from appliance.llama_server import flags, openmp


def main(words: Sequence[str] | None = None) -> int:
    """Serve until SIGTERM or SIGINT. Returns 1, with one line on stderr, when that cannot begin."""
    try:
        settings = flags.parse(sys.argv[1:] if words is None else words)
    except flags.WrongFlag as wrong:
        return _failed(str(wrong))
    if settings.help:
        print(flags.usage())
        return 0
    why_not = "" if settings.version else _why_not(settings)
    if why_not:
        return _failed(why_not)
    for end in (signal.SIGTERM, signal.SIGINT):
        signal.signal(end, signal.SIG_DFL)
    openmp.provide()
    try:
        import xllamacpp
    except ImportError as missing:
        return _failed(f"the engine cannot be loaded ({missing}); pip install 'appliance[demo]' brings it")
    if settings.version:
        print(f"appliance-llama-server, xllamacpp {xllamacpp.__version__}")
        return 0
    try:
        params = params_of(settings)
    except (TypeError, ValueError, OverflowError) as wrong:
        return _failed(f"a flag has a value that llama.cpp cannot hold: {wrong}")
    try:
        server = xllamacpp.Server(params)
    except RuntimeError as broken:
        return _failed(f"llama.cpp did not start: {broken} Its own reason stands in the lines above.")
    print(f"listening on {server.listening_address}", flush=True)
    _wait_for_the_end()
    for host in settings.hosts:
        if host.endswith(".sock"):
            Path(host).unlink(missing_ok=True)
    sys.stdout.flush()
    os._exit(0)


def _why_not(settings: flags.Settings) -> str:
    """What llama.cpp would fail on, said in one line before it is asked; "" when nothing is wrong."""
    if not settings.model:
        return "no model given; -m FILE names one"
    for path in (settings.model, *(adapter.path for adapter in settings.adapters)):
        try:
            with open(path, "rb") as file:
                magic = file.read(4)
        except OSError as broken:
            return f"cannot read {path}: {broken.strerror}"
        if magic != b"GGUF":
            return f"{path} is no GGUF file"
    for host in settings.hosts:
        if not host.endswith(".sock") and settings.port:
            try:
                _try_binding(host, settings.port, shared=bool(settings.values.get("reuse_port")))
            except OSError as broken:
                return f"cannot listen on {host} port {settings.port}: {broken.strerror}; --port chooses another"
    return ""


def _try_binding(host: str, port: int, *, shared: bool) -> None:
    """Bind and let go. Raises OSError with the reason, which the wheel keeps to its log."""
    family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, proto) as sock:
        # As the server itself does: connections of a predecessor that linger must not stop us.
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        if shared:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
        sock.bind(address)


def params_of(settings: flags.Settings) -> object:
    """`xllamacpp.CommonParams` with everything the command line gave."""
    import xllamacpp

    params = xllamacpp.CommonParams()
    for path, value in settings.values.items():
        *owners, name = path.split(".")
        target = params
        for owner in owners:
            target = getattr(target, owner)
        setattr(target, name, set(value) if name == "model_alias" and isinstance(value, list) else value)
    params.lora_adapters = [xllamacpp.CommonAdapterLoraInfo(a.path, a.scale) for a in settings.adapters]
    return params


def _wait_for_the_end() -> None:
    """Return after the first SIGTERM or SIGINT.

    The wake-up descriptor is written by the C handler in whichever thread the kernel picks; Python's own handler would
    wait for the main thread, which may sleep in a call that no signal ends.
    """
    told, tell = os.pipe()
    os.set_blocking(tell, False)
    signal.set_wakeup_fd(tell)
    for end in (signal.SIGTERM, signal.SIGINT):
        signal.signal(end, lambda *_: None)
    os.read(told, 1)


def _failed(why: str) -> int:
    print(f"error: {why}", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())

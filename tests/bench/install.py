"""Get the peers: the two Rust gateways and a profiler from PyPI into a virtual environment of their own, and nginx.

Their environment is apart because they pin other versions of what the project itself depends on. nginx is only
unpacked from Debian's package, never installed: an installed one would start a web server on port 80.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.bench import routers

_PACKAGES = ("vllm-router==0.1.*", "smg==1.13.*", "py-spy")


def _say(what: str, done: subprocess.CompletedProcess[str]) -> bool:
    ok = done.returncode == 0
    tail = "" if ok else ": " + (done.stderr.strip().splitlines() or ["no reason given"])[-1]
    print(f"{what}: {'ready' if ok else 'failed'}{tail}", flush=True)
    return ok


def _run(*command: str | Path, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [str(word) for word in command], cwd=cwd, capture_output=True, text=True, timeout=600, check=False
    )


def _unpack_nginx() -> bool:
    if routers.nginx_path():
        print("nginx: ready", flush=True)
        return True
    if not (shutil.which("apt-get") and shutil.which("dpkg-deb")):
        print("nginx: failed: no apt-get here; install nginx by this system's own means", flush=True)
        return False
    with tempfile.TemporaryDirectory() as folder:
        fetched = _run("apt-get", "download", "nginx", cwd=Path(folder))
        packages = list(Path(folder).glob("*.deb"))
        if not packages:
            return _say("nginx", fetched)
        return _say("nginx", _run("dpkg-deb", "-x", packages[0], routers.PEERS_VENV / "debian"))


def install() -> int:
    """Install what is missing, each by itself, so that one that fails costs only its own comparison."""
    if not (routers.PEERS_VENV / "bin" / "python").exists() and not _say(
        routers.PEERS_VENV.name, _run(sys.executable, "-m", "venv", routers.PEERS_VENV)
    ):
        return 1
    pip = routers.PEERS_VENV / "bin" / "pip"
    ok = [_say(package, _run(pip, "install", "--quiet", package)) for package in _PACKAGES]
    ok.append(_unpack_nginx())
    return 0 if all(ok) else 1

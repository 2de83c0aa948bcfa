"""Finds the configuration, lays the environment and the command line over it, and loads it or tells every fault."""

from __future__ import annotations

import os
import re
import tomllib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import attrs

from appliance.cli.config.check import check
from appliance.cli.config.files import check_files
from appliance.cli.config.folders import Places, places
from appliance.cli.config.overlay import Layer, lay, overlay
from appliance.cli.config.schema import leaves
from appliance.cli.config.structure import Walk
from appliance.facts.errors import Fault
from appliance.facts.settings import Settings


class ConfigError(Exception):
    """A configuration that is refused, with all its faults; as a string, one line each."""

    def __init__(self, faults: Collection[Fault]) -> None:
        super().__init__(faults)
        self.faults = list(faults)

    def __str__(self) -> str:
        return "\n".join(map(str, self.faults))


@attrs.frozen
class Loaded:
    """`origins` says for each dotted key where its value came from: "default", "file", "environment NAME" or
    "command line". `file` is the file that was read, None when there is none."""

    settings: Settings
    origins: Mapping[str, str]
    file: str | None


def load(
    path: str | os.PathLike[str] | None,
    environ: Mapping[str, str],
    *,
    arguments: Mapping[str, object] | None = None,
    uid: int | None = None,
) -> Loaded:
    """The configuration in effect for a process with this environment.

    `path` is what `--config` named; `arguments` are other values of the command line by dotted key, such as
    `{"server.listen": ["127.0.0.1:0"]}`, which win over everything. `uid` defaults to the effective user.
    Reads the file and those it names; raises `ConfigError` with every fault found.
    """
    where = places(environ, uid)
    file, document, faults = _document(path, environ, where)
    readable = not faults
    layers, unknown = overlay(environ)
    faults += unknown
    layers += [Layer(tuple(key.split(".")), value, "command line") for key, value in (arguments or {}).items()]
    lay(document, layers)
    origin = _Origin(layers)
    walk = Walk(lambda key: _folder(file, origin(key)))
    settings = _with_socket(walk.settings(document, state_dir=where.state_dir, runtime_dir=where.runtime_dir))
    if readable:  # else names that the file would have given are missing, and every use of one would be told
        faulty = {fault.path for fault in walk.faults}
        walk.faults += check(settings, faulty) + check_files(settings, faulty)
    if not where.state_dir:
        faults.append(Fault("HOME", "expected a folder of one's own: set HOME, XDG_STATE_HOME or STATE_DIRECTORY"))
    faults += [origin.added(fault) for fault in walk.faults]
    if faults:
        raise ConfigError(faults)
    origins = {key: origin.of_leaf(key) if key in walk.given else "default" for key, _, _ in leaves(settings)}
    return Loaded(settings, origins, file)


def admin_sockets(
    path: str | os.PathLike[str] | None, environ: Mapping[str, str], *, uid: int | None = None
) -> tuple[str, ...]:
    """Where a running `serve` may be asked, likeliest first: the configured socket, this user's, the machine's.

    Never raises: `ctl` must reach a process whose configuration was broken after it had started, or whose key files
    this user may not read.
    """
    where = places(environ, uid)
    file, document, _ = _document(path, environ, where)
    layers, _ = overlay(environ)
    lay(document, [layer for layer in layers if layer.path[0] == "server"])
    server = document.get("server")
    configured = server.get("admin_socket") if isinstance(server, dict) else None
    origin = _Origin(layers)
    found = [f"{folder}/admin.sock" for folder in (where.runtime_dir, "/run/appliance") if folder]
    if isinstance(configured, str) and configured:
        found.insert(0, os.path.join(_folder(file, origin("server.admin_socket")), configured))
    return tuple(dict.fromkeys(found))


def _folder(file: str | None, origin: str) -> str:
    """Where relative paths of this origin start: in the file, at the file; elsewhere, where the process was started."""
    return os.path.dirname(os.path.abspath(file)) if file and origin == "file" else os.getcwd()


def _document(
    path: str | os.PathLike[str] | None, environ: Mapping[str, str], where: Places
) -> tuple[str | None, dict[str, Any], list[Fault]]:
    """The file that counts and what it holds. A file that somebody named must exist; the usual ones may be absent."""
    named = os.fspath(path) if path is not None else environ.get("APPLIANCE_CONFIG") or None
    for file in (named,) if named is not None else where.config_files:
        try:
            text = Path(file).read_bytes().decode("utf-8-sig")
            return file, tomllib.loads(text), []
        except FileNotFoundError:
            if named is not None:
                by = "" if path is not None else " (from APPLIANCE_CONFIG)"
                return file, {}, [Fault(file, f"no such file{by}")]
        except OSError as error:
            return file, {}, [Fault(file, f"cannot be read: {error.strerror}; name another file")]
        except UnicodeDecodeError as error:
            byte = error.object[error.start]
            return file, {}, [Fault(file, f"expected UTF-8, got 0x{byte:02x} at byte {error.start}")]
        except tomllib.TOMLDecodeError as error:
            return file, {}, [Fault(file, _syntax(str(error)))]
        except RecursionError:
            return file, {}, [Fault(file, "expected TOML, got brackets nested too deeply")]
    return None, {}, []


def _syntax(message: str) -> str:
    """The parser's message with the line first, where an editor and the eye look for it."""
    found = re.fullmatch(r"(.*) \(at (line \d+, column \d+|end of document)\)", message, re.S)
    return f"{found[2]}: expected TOML: {found[1]}" if found else f"expected TOML: {message}"


@attrs.frozen
class _Origin:
    """Where a key came from that the document holds: the innermost, last layer over it, or the file."""

    layers: list[Layer]

    def __call__(self, key: str) -> str:
        over = [
            (len(layer.path), number, layer.origin)
            for number, layer in enumerate(self.layers)
            if re.match(re.escape(".".join(layer.path)) + r"(?:$|[.\[])", key)
        ]
        return max(over)[2] if over else "file"

    def of_leaf(self, key: str) -> str:
        """The same of a single key, which may be a table itself: an entry that lies over it counts too."""
        entries = [layer.origin for layer in self.layers if ".".join(layer.path).startswith(f"{key}.")]
        return entries[-1] if entries else self(key)

    def added(self, fault: Fault) -> Fault:
        """`fault`, saying which variable to look at when it was not the file."""
        origin = self(fault.path)
        if origin == "file":
            return fault
        source = "the command line" if origin == "command line" else origin.removeprefix("environment ")
        return Fault(fault.path, f"{fault.message} (from {source})")


def _with_socket(settings: Settings) -> Settings:
    server = settings.server
    socket = server.admin_socket or f"{settings.runtime_dir}/admin.sock"
    return attrs.evolve(settings, server=attrs.evolve(server, admin_socket=socket))

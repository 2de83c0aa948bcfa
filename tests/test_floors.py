"""Who may import whom. Reads the imports of every file of the package and holds them to the floors.

    faces    door/  pages/  admin/  cli/
    tasks    gateway/  groups/  mcp/  control/  agent/
    ports    store/  sim/  >  wire/  >  nursery/
    cores    rules/
    values   facts/

A file imports from its own folder or from a lower floor, wherever in the file the import stands: one inside a function
or under TYPE_CHECKING is the same knowledge, loaded later. Folders of one floor do not know each other, but for the
order on the ports floor, and for the composition roots (the files directly in `cli/`), which know them all.

Two folders stand outside, because they are programs of their own that talk to the rest over HTTP only: `llama_server/`
(the engine of `make run` and of the tests) and `demo/` (`make run` itself). They import only themselves, and nothing
imports them.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import attrs
import pytest

PACKAGE = Path(__file__).parent.parent / "appliance"

FLOORS = (
    frozenset({"facts"}),
    frozenset({"rules"}),
    frozenset({"nursery"}),
    frozenset({"wire"}),
    frozenset({"store", "sim"}),
    frozenset({"gateway", "groups", "mcp", "control", "agent"}),
    frozenset({"door", "pages", "admin", "cli"}),
)
"""From the lowest to the highest. The ports floor is three here, which is its order."""

OUTSIDE = frozenset({"llama_server", "demo"})

BANNED = {
    "facts": frozenset({"trio", "httpx", "sqlite3", "time", "os", "logging"}),
    "rules": frozenset({"trio", "httpx", "sqlite3", "time", "os", "logging"}),
    "llama_server": frozenset({"trio", "httpx"}),
}
"""Modules that a folder must not import: decisions take `now`, values know no I/O, an engine is not the router."""

HEIGHT = {folder: height for height, floor in enumerate(FLOORS) for folder in floor}


@attrs.frozen
class Import:
    """One import: dotted name of the module (or of the thing in it), and where it stands."""

    name: str
    file: Path
    line: int

    @property
    def top(self) -> str:
        return self.name.split(".")[0]

    @property
    def folder(self) -> str:
        """Folder (or file) of the package that is imported; "" for the package itself and for other packages."""
        words = self.name.split(".")
        return words[1] if words[0] == "appliance" and len(words) > 1 else ""


def imports_of(file: Path, package: Path) -> Iterator[Import]:
    """Every import of a file with relative names resolved, and every import_module() of a literal name."""
    home = ("appliance", *file.relative_to(package).with_suffix("").parts[:-1])
    for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), str(file))):
        match node:
            case ast.Import(names=names):
                for alias in names:
                    yield Import(alias.name, file, node.lineno)
            case ast.ImportFrom(module=module, names=names, level=level):
                start = home[: len(home) - level + 1] if level else ()
                source = ".".join((*start, *([module] if module else [])))
                for alias in names:
                    yield Import(f"{source}.{alias.name}", file, node.lineno)
            case ast.Call(
                func=ast.Attribute(attr="import_module") | ast.Name(id="import_module" | "__import__"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield Import(name, file, node.lineno)


def faults(package: Path) -> list[str]:
    """What is wrong, one line each: where, what it imports, and which rule that breaks."""
    found = []
    inside = {path.stem if path.suffix == ".py" else path.name for path in package.iterdir()}
    for file in sorted(package.rglob("*.py")):
        place = file.relative_to(package)
        folder = place.parts[0] if len(place.parts) > 1 else ""
        if folder and folder not in HEIGHT and folder not in OUTSIDE:
            found.append(f"{place}: {folder}/ stands on no floor; give it one in tests/test_floors.py")
            continue
        for imported in imports_of(file, package):
            why = ""
            if imported.top in BANNED.get(folder, ()):
                why = f"{folder}/ must not import {imported.top}"
            elif imported.folder in inside:
                why = _why_not(place, folder, imported.folder)
            if why:
                found.append(f"{place}:{imported.line}: imports {imported.name}: {why}")
    return found


def _why_not(place: Path, here: str, there: str) -> str:
    """Why a file of folder `here` must not import folder `there` ("" for files of the package's top); "" if it may."""
    if here == there:
        return ""
    if there in OUTSIDE:
        return f"{there}/ is a program of its own"
    if here in OUTSIDE:
        return f"{here}/ is a program of its own and imports only itself"
    if not here:
        return "" if place.name == "__main__.py" and there == "cli" else "the package's own files import no floor"
    if there not in HEIGHT:
        return f"{there} stands on no floor"
    if HEIGHT[there] < HEIGHT[here] or (here == "cli" and len(place.parts) == 2):
        return ""
    return f"{there}/ is on {'the same' if HEIGHT[there] == HEIGHT[here] else 'a higher'} floor"


def test_the_package_keeps_to_its_floors() -> None:
    assert sorted(PACKAGE.rglob("*.py"))
    assert faults(PACKAGE) == []


def planted(tmp_path: Path, place: str, source: str) -> list[str]:
    """Faults of a small package with one file of this source; other folders exist and are empty."""
    package = tmp_path / "appliance"
    for folder in (*HEIGHT, *OUTSIDE):
        (package / folder).mkdir(parents=True)
        (package / folder / "__init__.py").touch()
    (package / "__init__.py").write_text("__version__ = '0'\n")
    (package / place).parent.mkdir(exist_ok=True, parents=True)
    (package / place).write_text(source)
    return faults(package)


@pytest.mark.parametrize(
    ("place", "source"),
    [
        ("facts/a.py", "import attrs\nfrom appliance.facts import b\nfrom . import c"),
        ("rules/admission/a.py", "from appliance.facts.call import Call\nfrom random import Random"),
        ("rules/admission/a.py", "from ...facts import call\nfrom ..scheduling import scorers"),
        ("wire/a.py", "import os, time, trio\nfrom appliance.nursery import beside"),
        ("sim/a.py", "from appliance.wire import http1\nfrom appliance.nursery import wake"),
        ("store/a.py", "import sqlite3\nfrom appliance.wire import codec"),
        ("gateway/a.py", "from appliance.store import usage\nfrom appliance.rules.admission import queue"),
        ("door/a.py", "from appliance.gateway import service\nfrom appliance import __version__"),
        (
            "cli/serve.py",
            "from appliance.door import accept\nfrom appliance.admin import app\nimport appliance.cli.ctl",
        ),
        ("cli/ctl/nodes.py", "from appliance.control import links"),
        ("llama_server/main.py", "import os\nfrom appliance.llama_server import flags\nimport xllamacpp"),
        ("__main__.py", "from appliance.cli.main import main"),
    ],
)
def test_what_is_allowed_passes(tmp_path: Path, place: str, source: str) -> None:
    assert planted(tmp_path, place, source) == []


@pytest.mark.parametrize(
    ("place", "source", "told"),
    [
        ("facts/a.py", "import time", "must not import time"),
        ("facts/a.py", "def f():\n    import logging", "must not import logging"),
        ("facts/a.py", "from appliance.rules import fit", "higher floor"),
        ("rules/fit/a.py", "from os import path", "must not import os"),
        ("rules/fit/a.py", "import os.path as p", "must not import os"),
        ("rules/a.py", "import trio.lowlevel", "must not import trio"),
        ("rules/a.py", "import httpx", "must not import httpx"),
        ("rules/a.py", "from sqlite3 import connect", "must not import sqlite3"),
        ("rules/a.py", "from appliance.nursery import wake", "higher floor"),
        ("rules/fit/a.py", "from ...wire import http1", "higher floor"),
        ("nursery/a.py", "from appliance.wire import http1", "higher floor"),
        ("wire/a.py", "from appliance.sim import tokens", "higher floor"),
        ("wire/a.py", "from appliance.store import keys", "higher floor"),
        ("sim/a.py", "from appliance.store import keys", "same floor"),
        ("store/a.py", "from appliance.sim import tokens", "same floor"),
        ("store/a.py", "from appliance.gateway import usage", "higher floor"),
        ("gateway/a.py", "from appliance.control import plane", "same floor"),
        ("groups/a.py", "def f():\n    from appliance.gateway import service", "same floor"),
        ("agent/a.py", "import appliance.mcp.merge", "same floor"),
        ("gateway/a.py", "from ..door import reply", "higher floor"),
        ("gateway/a.py", "from appliance import door", "higher floor"),
        ("gateway/a.py", "import importlib\nimportlib.import_module('appliance.door.reply')", "higher floor"),
        ("gateway/a.py", "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import appliance.admin", "higher"),
        ("door/a.py", "from appliance.pages import app", "same floor"),
        ("admin/a.py", "from appliance.cli import serve", "same floor"),
        ("cli/ctl/nodes.py", "from appliance.admin import app", "same floor"),
        ("cli/serve.py", "from appliance.llama_server import main", "program of its own"),
        ("llama_server/main.py", "from appliance.facts import ids", "imports only itself"),
        ("llama_server/main.py", "import trio", "must not import trio"),
        ("demo/main.py", "from appliance.cli import main", "imports only itself"),
        ("helpers/a.py", "import re", "stands on no floor"),
        ("__main__.py", "from appliance.door import accept", "import no floor"),
        ("bootenv.py", "from appliance.cli import main", "import no floor"),
    ],
)
def test_what_is_not_allowed_is_found(tmp_path: Path, place: str, source: str, told: str) -> None:
    (fault,) = planted(tmp_path, place, source)
    assert fault.startswith(place)
    assert told in fault

"""The example file and docs/configuration.md hold every key, as the classes have it."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import attrs
import pytest

from appliance.cli.config import example, load, show, toml_value
from appliance.cli.config.example_file import doc
from appliance.cli.config.rows import plain
from appliance.cli.config.schema import Field, every_key, fields_of
from appliance.cli.config.structure import Walk
from appliance.facts.catalog import Profile
from appliance.facts.endpoint import Endpoint
from appliance.facts.keys import about
from appliance.facts.settings import NOT_YET, EndpointEntry, Model, Settings

DOCS = Path(__file__).parents[1] / "docs" / "configuration.md"


def uncommented() -> str:
    return "".join(re.sub(r"^#(?! )", "", line) for line in example().splitlines(keepends=True))


def keys_of(table: Any, prefix: str = "") -> set[str]:
    """Dotted names of everything in a document, without indexes."""
    names: set[str] = set()
    for name, value in table.items():
        names.add(prefix + name)
        for inner in value if isinstance(value, list) else [value]:
            if isinstance(inner, dict):
                names |= keys_of(inner, f"{prefix}{name}.")
    return names


def rows(cls: type = Settings, prefix: str = "") -> list[str]:
    """The table rows that the docs must hold for the keys of a class."""
    found: list[str] = []
    for field in fields_of(cls):
        path = prefix + field.name
        if field.shape in ("table", "tables"):
            found += rows(field.type, f"{path}.")
        else:
            found.append(f"| `{path}` | {default(field)} | {doc(field)}{'' if field.key.live else ' *(restart)*'} |")
    return found


def default(field: Field) -> str:
    if field.required:
        return "required"
    if field.default is None:
        return "none"
    return f"`{toml_value(plain(field.default))}`"


def test_the_example_as_it_stands_changes_nothing(tmp_path: Path) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(example())
    environ = {"HOME": str(tmp_path)}
    assert load(file, environ).settings == load(None, environ, uid=0).settings


def test_the_example_uncommented_holds_every_key_and_loads_to_the_defaults(tmp_path: Path) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(uncommented())
    assert keys_of(tomllib.loads(uncommented())) == set(every_key())
    settings = load(file, {"HOME": str(tmp_path)}, uid=0).settings
    assert settings.endpoints == (Endpoint("a", "10.0.0.5", 8000, models=("llama",)),)
    assert settings.models == (Model("llama", profiles=(Profile("small", "sim"),)),)
    bare = load(None, {}, uid=0).settings
    assert attrs.evolve(settings, endpoints=(), models=(), server=bare.server) == bare
    assert attrs.evolve(settings.server, admin_socket=bare.server.admin_socket) == bare.server


@attrs.frozen
class Lane:
    name: str = attrs.field(metadata=about("Its name.", form="name", example="fast"))
    width: float = attrs.field(default=1.0, metadata=about("How wide.", above=0))
    signs: tuple[str, ...] = attrs.field(default=(), metadata=about("What stands there."))


@attrs.frozen
class Road:
    tolls: bool = attrs.field(default=False, metadata=about("Whether one pays."))
    lanes: tuple[Lane, ...] = attrs.field(
        default=(Lane("left", 2.0), Lane("right", signs=("slow",))), metadata=about("Left to right.", minimum=1)
    )


@attrs.frozen
class Map:
    road: Road = attrs.field(factory=Road, metadata=about("A road."))


def test_a_list_with_default_entries_is_shown_and_read_whole() -> None:
    """The shape of a section to come: entries that stand there until the operator writes others."""
    whole = tomllib.loads(re.sub(r"^#(?! )", "", example(Map), flags=re.M))
    walk = Walk(lambda _: "/")
    assert walk.section(Map, whole, "") == walk.section(Map, {}, "") == Map()
    assert whole["road"]["lanes"][0] == {"name": "left", "width": 2.0, "signs": []}
    assert walk.section(Map, {"road": {"lanes": [{"name": "only"}]}}, "").road.lanes == (Lane("only"),)
    assert walk.faults == []
    assert walk.section(Map, {"road": {"lanes": []}}, "") == Map()
    assert list(map(str, walk.faults)) == ["road.lanes: expected at least 1: tables ([[road.lanes]])"]


def test_every_line_of_the_example_fits_a_terminal() -> None:
    assert [line for line in example().splitlines() if len(line) > 120] == []


def test_every_key_has_a_line_of_meaning_and_an_example_where_it_must_be_given() -> None:
    for cls in (*(field.type for field in fields_of(Settings)), EndpointEntry):
        for field in fields_of(cls):
            assert field.key.doc.endswith("."), field.name
            assert not field.required or field.key.example is not None, field.name


@pytest.mark.parametrize("row", rows())
def test_the_docs_hold_every_key(row: str) -> None:
    assert row in DOCS.read_text().splitlines()


def test_the_docs_hold_no_other_key() -> None:
    assert re.findall(r"^\| `[a-z_]+\.\S+` \|.*$", DOCS.read_text(), re.M) == rows()


def test_the_docs_name_what_is_not_available_yet() -> None:
    text = DOCS.read_text()
    for name in NOT_YET:
        assert f"`{name}`" in text


def test_what_is_not_available_yet_is_no_key(tmp_path: Path) -> None:
    assert not set(NOT_YET) & set(every_key())


def test_every_key_of_the_example_is_shown(tmp_path: Path) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(uncommented())
    shown = {re.sub(r"\[\d+\]", "", row.path) for row in show(load(file, {}, uid=0))}
    sections = {key for key in every_key() if any(other.startswith(f"{key}.") for other in every_key())}
    assert shown == set(every_key()) - sections

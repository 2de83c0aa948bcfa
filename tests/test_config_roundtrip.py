"""What is shown can be loaded again, whichever way it comes in; and no document breaks the loader."""

from __future__ import annotations

import os
import re
import tempfile
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.cli.config import ConfigError, changes, example, keep_fixed, load, show, toml_value
from appliance.cli.config.forms import Mismatch, address, engine_url, origin
from appliance.cli.config.schema import Field, fields_of, leaves
from appliance.cli.config.structure import Walk
from appliance.facts.settings import Address, EngineUrl, Settings

untimed = settings(deadline=None)
"""A shared machine stalls now and then, which says nothing about the code."""

FOLDER = tempfile.TemporaryDirectory()
KEY_FILE = Path(FOLDER.name, "key")
KEY_FILE.write_text("sk-1\n")
FILE = Path(FOLDER.name, "appliance.toml")


@pytest.fixture(autouse=True, scope="module")
def folder() -> Iterator[None]:
    yield
    FOLDER.cleanup()


NAMES = st.text(st.characters(exclude_categories=("Cc", "Cs", "Zl", "Zp")), min_size=1, max_size=20).filter(
    lambda text: text == text.strip()
)
HOSTS = st.from_regex(r"[a-z]([a-z0-9-]{0,10}[a-z0-9])?(\.[a-z]{1,5})?", fullmatch=True)
PORTS = st.integers(1, 65535)
FORMS: Mapping[str, st.SearchStrategy[str]] = {
    "web": st.just("") | st.builds("https://{}:{}/x".format, HOSTS, PORTS),
    "collector": st.just("") | st.builds("http://{}:{}".format, HOSTS, PORTS),
    "origin": st.builds("{}://{}:{}".format, st.sampled_from(["http", "https", "app"]), HOSTS, PORTS),
    "network": st.ip_addresses().map(str),
    "name": NAMES,
    "file": st.just(""),
    "key_file": st.sampled_from(["", str(KEY_FILE)]),
    "socket": st.sampled_from(["/run/a.sock", "/tmp/ä b.sock"]),
    "word": st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,62}", fullmatch=True) | st.just(""),
    "ip": st.just("") | st.ip_addresses().map(str),
    "control_url": st.just("") | st.builds("wss://{}:{}".format, HOSTS, PORTS),
    "store_url": st.sampled_from(["", "sqlite:///a.db", "sqlite:////var/lib/ä b.db"]),
    "daemon": st.builds("{}:{}".format, HOSTS, PORTS),
    "announce_addr": HOSTS | st.builds("{}:{}".format, HOSTS, PORTS),
    "source": st.sampled_from(["local", "10.0.", "10.0.0.0/8"]) | st.ip_addresses().map(str),
    "universe": NAMES | st.just(""),
    "secret": st.just(""),  # it is masked where it is shown
    "secret_file": st.sampled_from(["", str(KEY_FILE)]),
    "program": st.sampled_from(["vllm", "/opt/bin/vllm"]),
    "": NAMES | st.just(""),
}


def value(field: Field) -> st.SearchStrategy[Any]:
    """Any right value of one key, as TOML knows it."""
    key = field.key
    if key.choices:
        return st.sampled_from(key.choices)
    if field.type is bool:
        return st.booleans()
    if field.type is int:
        return st.integers(
            int(key.minimum) if key.minimum is not None else -(10**6),
            int(key.maximum) if key.maximum is not None else 10**12,
        )
    if field.type is float:
        low = key.minimum if key.minimum is not None else key.above
        return st.floats(low, key.maximum if key.maximum is not None else 1e12, exclude_min=key.above is not None)
    if field.type is Address:
        return st.builds("{}:{}".format, st.ip_addresses(v=4), PORTS) | st.builds(
            "[{}]:{}".format, st.ip_addresses(v=6), PORTS
        )
    if field.type is EngineUrl:
        return st.builds(
            "{}://{}:{}{}".format,
            st.sampled_from(["http", "https"]),
            HOSTS,
            PORTS,
            st.sampled_from(["", "/v1", "/a/v1"]),
        )
    return FORMS[key.form]


def section(cls: type) -> st.SearchStrategy[dict[str, Any]]:
    """Any right table for a class, with any of its keys left out that may be."""
    required: dict[str, st.SearchStrategy[Any]] = {}
    optional: dict[str, st.SearchStrategy[Any]] = {}
    for field in fields_of(cls):
        match field.shape:
            case "table":
                made = section(field.type)
            case "tables":
                first = fields_of(field.type)[0].name
                made = st.lists(section(field.type), max_size=3, unique_by=lambda entry, first=first: entry[first])
            case "list":
                made = st.lists(value(field), min_size=int(field.key.minimum or 0), max_size=3, unique=True)
            case "map":
                names = st.sampled_from(field.key.choices or ["A", "rack.b", "x_1/y-2"])
                made = st.dictionaries(names, FORMS[field.key.form], max_size=3)
            case _:
                made = value(field)
        (required if field.required else optional)[field.name] = made
    return st.fixed_dictionaries(required, optional=optional)


DOCUMENTS = section(Settings)


def load_text(text: str, environ: Mapping[str, str] | None = None) -> Any:
    FILE.write_text(text)
    return load(FILE, environ or {}, uid=0)


def text_of(document: Mapping[str, Any]) -> str:
    return "".join(f"{name} = {toml_value(part)}\n" for name, part in document.items())


def document_of(rows: list[tuple[str, Any]]) -> dict[str, Any]:
    """The document that dotted paths spell."""
    document: dict[str, Any] = {}
    for path, shown in rows:
        if shown is None:
            continue
        *above, last = re.findall(r"[a-z_]+|\d+", path)
        at: Any = document
        for part, after in zip(above, [*above[1:], last], strict=True):
            empty: Any = [] if after.isdigit() else {}
            if part.isdigit():
                if int(part) == len(at):
                    at.append(empty)
                at = at[int(part)]
            else:
                at = at.setdefault(part, empty)
        at[last] = shown
    return document


FREE = ("port_range", "listen", "unreachable_after_s", "lost_after_s")
"""Keys of the agent and the control plane whose right values depend on more than themselves."""


def runnable(model: Mapping[str, Any]) -> dict[str, Any]:
    """The profiles of a model with what would not add up taken out, and its scaling where there is one to run."""
    if not model.get("profiles") or " " in model["name"] or model["name"].startswith("-"):
        return {}
    sums = ("nodes", "gpus_per_node", "tensor_parallel", "pipeline_parallel", "launch_mode", "args", "env")
    profiles = [
        {key: part for key, part in profile.items() if key not in sums} | {"engine": "sim"}
        for profile in model["profiles"]
    ]
    scaling = {key: part for key, part in model.get("scaling", {}).items() if key == "min_replicas"}
    return {"profiles": profiles, "scaling": scaling}


def accepted(document: Mapping[str, Any]) -> Any:
    """`document` loaded, once names that meet by chance are out of the way."""
    cleaned = dict(document)
    server = dict(cleaned.get("server", {}))
    server.pop("max_buffered_bytes", None)
    server.pop("max_body_bytes", None)
    server.pop("metrics_listen", None)
    cleaned["server"] = server
    admission = dict(cleaned.get("admission", {}))
    admission.pop("default_band", None)
    if bands := sorted(admission.pop("bands", []), key=lambda band: -band["ceiling"]):
        admission |= {"bands": bands, "default_band": bands[0]["name"]}
    cleaned["admission"] = admission
    cleaned["models"] = [
        {key: part for key, part in model.items() if key not in ("fallbacks", "aliases", "scaling", "profiles")}
        | runnable(model)
        for model in document.get("models", [])
    ]
    for name in ("agent", "control"):
        cleaned[name] = {key: part for key, part in document.get(name, {}).items() if key not in FREE}
    return load_text(text_of(cleaned))


@untimed
@given(DOCUMENTS)
def test_what_is_shown_can_be_loaded_again(document: dict[str, Any]) -> None:
    first = accepted(document)
    rows = [(row.path, row.value) for row in show(first)]
    again = load_text(text_of(document_of(rows)))
    assert again.settings == first.settings
    assert [(row.path, row.value) for row in show(again)] == rows
    assert {row.origin for row in show(again) if row.value is not None} == {"file"}


@untimed
@given(DOCUMENTS)
def test_what_is_shown_can_be_given_by_the_environment(document: dict[str, Any]) -> None:
    first = accepted(document)
    shown = document_of([(row.path, row.value) for row in show(first)])
    environ = {}
    for name, part in shown.items():
        if isinstance(part, list):
            environ[f"APPLIANCE_{name.upper()}"] = toml_value(part)
            continue
        for key, item in part.items():
            whole = not isinstance(item, dict) or not item or key == "labels"
            for inner, leaf in [("", item)] if whole else item.items():
                variable = "__".join(filter(None, (name, key, inner))).upper()
                environ[f"APPLIANCE_{variable}"] = toml_value(leaf)
    again = load_text("", environ)
    assert again.settings == first.settings
    assert all(
        origin.startswith("environment ") for key, origin in again.origins.items() if not key.endswith("].models")
    )


@untimed
@given(DOCUMENTS, DOCUMENTS)
def test_changes_are_empty_exactly_when_nothing_differs(one: dict[str, Any], other: dict[str, Any]) -> None:
    old, new = accepted(one).settings, accepted(other).settings
    live, fixed = changes(old, new)
    assert (not live and not fixed) == (old == new)
    kept = keep_fixed(old, new)
    assert changes(old, kept) == (live, ())
    assert set(fixed) == set(changes(kept, new)[1])


JUNK = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.dates() | NAMES,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(sorted({field.name for _, field, _ in leaves(Settings())})) | st.text(max_size=4),
            inner,
            max_size=3,
        )
    ),
    max_leaves=8,
)


@untimed
@given(
    st.dictionaries(
        st.sampled_from([field.name for field in fields_of(Settings)]) | st.text(max_size=5), JUNK, max_size=4
    )
)
def test_no_document_breaks_the_loader(document: dict[str, Any]) -> None:
    """Any shape in any place gives faults that fit on a line each, or settings."""
    walk = Walk(lambda _: "/")
    assert isinstance(walk.settings(document), Settings)
    for fault in walk.faults:
        assert str(fault).isprintable() and len(str(fault)) < 300


@untimed
@given(st.text(max_size=60) | st.binary(max_size=60).map(lambda raw: raw.decode("utf-8", "surrogateescape")))
def test_no_variable_breaks_the_loader(text: str) -> None:
    names = (
        "SERVER__LISTEN",
        "SERVER__DRAIN_S",
        "ENDPOINTS",
        "SERVER__PUBLIC_URL",
        "SERVER__CORS_ORIGINS",
        "SCHEDULING",
    )
    for name in names:
        try:
            load_text("", {f"APPLIANCE_{name}": text})
        except ConfigError as error:
            assert error.faults


@untimed
@given(st.text(st.sampled_from("htps:/[]@.?#%v1aZ0 \\-*"), max_size=25).map(lambda rest: f"http://{rest}"))
def test_an_engine_url_is_read_alike_when_written_again(text: str) -> None:
    try:
        url = engine_url(text)
    except Mismatch:
        return
    host = f"[{url.host}]" if ":" in url.host else url.host
    assert engine_url(f"http://{host}:{url.port}{url.base}") == url
    assert not re.search(r"[@?#\s\\]", url.host)
    assert not re.search(r"[?#\s\\]", url.base)  # an @ in a path names nobody


@untimed
@given(st.text(st.sampled_from("0123456789abf:.[]%localhost"), max_size=25))
def test_an_address_is_read_alike_when_written_again(text: str) -> None:
    try:
        read = address(text)
    except Mismatch:
        return
    assert address(str(read)) == read


@untimed
@given(st.text(st.sampled_from("htps:/[]@.?#ABz018443"), max_size=20).map(lambda rest: f"https://{rest}"))
def test_an_origin_is_read_alike_when_written_again(text: str) -> None:
    try:
        read = origin(text)
    except Mismatch:
        return
    assert origin(read) == read == read.lower()


@untimed
@given(
    st.recursive(
        st.booleans()
        | st.integers(-(2**63), 2**63 - 1)
        | st.floats(allow_nan=False)
        | st.text(st.characters(exclude_categories=("Cs",))),
        lambda inner: (
            st.lists(inner, max_size=4)
            | st.dictionaries(st.from_regex(r"[a-z_]{1,5}", fullmatch=True), inner, max_size=3)
        ),
    )
)
def test_values_are_written_as_toml(item: Any) -> None:
    text = toml_value(item)
    assert "\n" not in text
    assert tomllib.loads(f"value = {text}") == {"value": item}


def test_the_example_is_toml_of_its_own() -> None:
    tables = {"server", "deadlines", "admission", "scheduling", "control", "store", "agent", "groups"} | {
        "tracing",
        "logging",
    }
    assert set(tomllib.loads(example())) == tables
    assert os.path.exists(KEY_FILE)

"""Keys put into a file that somebody wrote: everything else stays, or nothing is done."""

from __future__ import annotations

import tomllib

import pytest
import tomli_w
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli.config import example, toml_value
from appliance.cli.config.written import with_keys

VALUES = {"control_url": "wss://box:6384", "node": "node-a"}
LINES = 'control_url = "wss://box:6384"\nnode = "node-a"\n'


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ("", f"[agent]\n{LINES}"),
        ("[logging]\nlevel = 'debug'\n", f"[logging]\nlevel = 'debug'\n\n[agent]\n{LINES}"),
        ("x = 1", f"x = 1\n\n[agent]\n{LINES}"),
        ("[agent]", '[agent]\nnode = "node-a"\ncontrol_url = "wss://box:6384"\n'),
        (
            "[ agent ] # ours\n[other]\n",
            '[ agent ] # ours\nnode = "node-a"\ncontrol_url = "wss://box:6384"\n[other]\n',
        ),
        (
            '[agent]\n# who\nnode = "old" # this\n[agent.gpus]\nnode = 1\n',
            '[agent]\ncontrol_url = "wss://box:6384"\n# who\nnode = "node-a"\n[agent.gpus]\nnode = 1\n',
        ),
        ('[agent]\r\n#node = ""\r\n', '[agent]\r\ncontrol_url = "wss://box:6384"\r\nnode = "node-a"\r\n'),
        (f"[agent]\n{LINES}", f"[agent]\n{LINES}"),
        # only a person can do these
        ("agent = { fabric = 'x' }\n", None),
        ("agent.fabric = 'x'\n", None),
        ("[agent]\nnode = '''\nold'''\n", None),
        ("agent = 1\n", None),
        ("[[agent]]\n", None),
        ("x = '''\n[agent]\n'''\n", None),
    ],
)
def test_keys_are_set_where_a_person_would_set_them(before: str, after: str | None) -> None:
    assert with_keys(before, "agent", VALUES) == after


def test_the_example_is_filled_in_where_it_stands() -> None:
    filled = with_keys(example(), "agent", VALUES)
    assert filled is not None
    assert len(filled.splitlines()) == len(example().splitlines())
    differ = [line for line, old in zip(filled.splitlines(), example().splitlines(), strict=True) if line != old]
    assert differ == LINES.splitlines()


def test_a_text_that_is_no_toml_is_said_to_be_none() -> None:
    with pytest.raises(tomllib.TOMLDecodeError):
        with_keys("[agent\n", "agent", VALUES)


NAMES = st.sampled_from(["agent", "node", "control_url", "a", "b.c", "x y"])
LEAVES = st.integers() | st.booleans() | st.text(max_size=8) | st.lists(st.integers(), max_size=2)
DOCUMENTS = st.dictionaries(
    NAMES, st.recursive(LEAVES, lambda inner: st.dictionaries(NAMES, inner, max_size=4)), max_size=4
)


@given(DOCUMENTS, st.text(max_size=12))
def test_whatever_the_file_holds_it_says_the_same_and_the_new_values(document: dict[str, object], value: str) -> None:
    text = tomli_w.dumps(document)
    changed = with_keys(text, "agent", {"node": value})
    if changed is None:
        return
    table = document.get("agent", {})
    assert isinstance(table, dict)
    assert tomllib.loads(changed) == {**document, "agent": {**table, "node": value}}
    kept = [line for line in text.splitlines() if not line.lstrip().startswith("node")]
    assert all(line in changed.splitlines() for line in kept)


@given(st.text(max_size=20))
def test_every_value_is_written_as_toml_reads_it(value: str) -> None:
    assert tomllib.loads(f"x = {toml_value(value)}") == {"x": value}

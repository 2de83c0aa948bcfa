"""Which engine the demonstration ends up with, on machines where the real one does not run."""

from __future__ import annotations

import json
import os
import sys
import urllib.request
from importlib.machinery import ModuleSpec
from pathlib import Path

import pytest

from appliance.demo import engine as demo_engine
from appliance.demo.child import DidNotStart

SCRIPTS = Path(sys.executable).parent


def scripts_with(folder: Path, llama: str) -> Path:
    """A folder of console scripts whose `appliance-llama-server` is this shell script."""
    scripts = folder / "bin"
    scripts.mkdir()
    (scripts / "appliance").symlink_to(SCRIPTS / "appliance")
    (scripts / "appliance-llama-server").write_text(f"#!/bin/sh\n{llama}\n")
    (scripts / "appliance-llama-server").chmod(0o755)
    return scripts


def models(url: str) -> list[str]:
    with urllib.request.urlopen(f"{url}/v1/models") as answer:
        return [model["id"] for model in json.load(answer)["data"]]


@pytest.fixture
def a_model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(demo_engine, "model_file", lambda: tmp_path / "model.gguf")


@pytest.mark.usefixtures("a_model")
@pytest.mark.parametrize(("script", "told"), [("kill -ILL $$", "signal 4"), ("echo broken >&2; exit 1", "status 1")])
def test_an_engine_that_dies_is_replaced_by_the_sim_with_the_reason(tmp_path: Path, script: str, told: str) -> None:
    engine = demo_engine.start_engine(scripts_with(tmp_path, script), tmp_path)
    try:
        assert engine.kind == "sim"
        assert models(engine.url) == [engine.model]
        assert told in engine.note
        assert "\n" not in engine.note
    finally:
        engine.child.stop(5.0)
    assert not os.path.exists(f"/proc/{engine.child.process.pid}")


def test_a_machine_without_the_extra_gets_the_sim(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(name: str) -> ModuleSpec | None:
        return None

    monkeypatch.setattr(demo_engine, "find_spec", nothing)
    engine = demo_engine.start_engine(SCRIPTS, tmp_path)
    try:
        assert engine.kind == "sim"
        assert "extra `demo` is not installed" in engine.note
    finally:
        engine.child.stop(5.0)


@pytest.mark.usefixtures("a_model")
def test_with_neither_engine_the_reason_is_told(tmp_path: Path) -> None:
    scripts = scripts_with(tmp_path, "exit 1")
    (scripts / "appliance").unlink()
    (scripts / "appliance").write_text("#!/bin/sh\necho no sim either >&2; exit 7\n")
    (scripts / "appliance").chmod(0o755)
    with pytest.raises(DidNotStart, match=r"sim ended \(status 7\)\n +no sim either"):
        demo_engine.start_engine(scripts, tmp_path)

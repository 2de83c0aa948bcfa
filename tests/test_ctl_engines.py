"""`appliance ctl engine-check`: what is installed, what is not, and a program that has dropped a flag."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from appliance.llama_server.flags import usage

WHOLE = usage().rstrip() + "\n"
PROGRAM = "#!{python}\nprint({text!r}, end='')\n"


def check(folder: Path, *arguments: str, llamacpp: str = "") -> tuple[int, str]:
    """Exit status and output; nothing but our own program and `llamacpp` can be found."""
    config = folder / "appliance.toml"
    config.write_text(f"[agent]\nexecutables = {{ llamacpp = '{llamacpp}' }}\n" if llamacpp else "")
    ran = subprocess.run(
        [sys.executable, "-m", "appliance", "ctl", "engine-check", *arguments],
        env={"HOME": str(folder), "APPLIANCE_CONFIG": str(config), "PATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    return ran.returncode, ran.stdout + ran.stderr


def help_text(folder: Path, text: str) -> str:
    """A program that prints this help."""
    program = folder / "their-server"
    program.write_text(PROGRAM.format(python=sys.executable, text=text))
    program.chmod(0o755)
    return str(program)


def test_what_is_not_installed_is_skipped_and_no_failure(tmp_path: Path) -> None:
    status, said = check(tmp_path)
    assert status == 0, said
    rows = {line.split()[1]: line for line in said.splitlines()[1:]}
    for name in ("vllm", "ray", "sglang", "llama-server"):
        assert "skipped" in rows[name]
        assert f"{name} is not installed here" in rows[name]
    assert " ok " in rows[sys.executable]


def test_a_flag_that_is_gone_makes_it_fail(tmp_path: Path) -> None:
    program = help_text(tmp_path, WHOLE.replace("--metrics", "--figures"))
    status, said = check(tmp_path, "llamacpp", llamacpp=program)
    assert status == 1
    assert "--metrics is not in the help text" in said
    status, said = check(tmp_path, "llamacpp", "--json", llamacpp=program)
    document = json.loads(said)
    assert (status, document["ok"]) == (1, False)
    (found,) = document["programs"]
    assert (found["engine"], found["path"], found["verdict"]) == ("llamacpp", program, "failed")
    assert found["findings"] == [{"level": "error", "flag": "--metrics", "message": "is not in the help text"}]


@pytest.mark.parametrize(("cut", "verdict"), [(False, "ok"), (True, "warning")])
def test_a_whole_help_text_and_one_that_is_cut(tmp_path: Path, cut: bool, verdict: str) -> None:
    program = help_text(tmp_path, WHOLE[: len(WHOLE) // 2] if cut else WHOLE)
    status, said = check(tmp_path, "llamacpp", "--json", llamacpp=program)
    (found,) = json.loads(said)["programs"]
    assert (status, found["verdict"]) == (0, verdict)


def test_an_engine_nobody_knows_is_wrong_usage(tmp_path: Path) -> None:
    status, said = check(tmp_path, "vlm")
    assert status == 2
    assert "'vlm' is not one of" in said

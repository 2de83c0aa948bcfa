"""Looking up our flags in engines' help: small texts in the shape of the real ones, and those where they are there."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent.enginecheck import Checked, examine
from appliance.llama_server.flags import usage
from appliance.rules.engines.check import PIPE_SIZES, Finding, check, questions, why_cut

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "engines"

ARGPARSE = """usage: engine serve [-h] --model-path MODEL_PATH [--host HOST] [--port PORT]
                    [--tp-size TP_SIZE] [--enable-lora]
                    [--lora-paths [LORA_PATHS ...]] [--speed {slow,fast}]
                    [--quick | --no-quick]

Starts it. Use --everything with care.

options:
  -h, --help            show this help message and exit
  --model-path MODEL_PATH, --model MODEL_PATH
                        Where the model lies. See also --weights.
  --host HOST           The host.
  --port PORT           The port.
  --tp-size TP_SIZE, -tp TP_SIZE
                        How many ways to split. (default: 1)
  --enable-lora         Adapters.
  --lora-paths [LORA_PATHS ...]
                        NAME=PATH pairs, as for
                        --lora-files of old.
  --speed {slow,fast}   Deprecated: use
                        --pace instead.
  --quick, --no-quick   Be quick. (default: True)
"""

COLUMNS = """----- common params -----

-h,    --help, --usage                  print usage and exit
-m,    --model FNAME                    model path to load
-a,    --alias STRING                   names, comma-separated
--lora FNAME                            an adapter
                                        (env: ARG_LORA)
--lora-scaled FNAME:SCALE,...           the same, scaled
-dev,  --device <dev1,dev2,..>          devices
                                        - none: no device
--port PORT                             port to listen on
--metrics                               serve metrics
--draft, --draft-n, --draft-max N       the argument has been removed. use --spec-draft-n-max or
                                        another
-lv,   --verbosity N                    how much to say:
                                         - 0: nothing
                                         - 1: errors
"""

CLICK = """Usage: tool start [OPTIONS]

  Start it.

Options:
  --address TEXT              the address
  --port INTEGER              the port of the head. If not
                              provided, --default-port is taken.
  --min-worker-port INTEGER   the lowest port
  --max-worker-port INTEGER   the highest; needs '--min-worker-port'
  --head                      be the head
  --include-dashboard BOOLEAN
                              start the dashboard
  --log-style [auto|pretty]   how
  -v, --verbose
  --temp-dir TEXT             where
  --help                      Show this message and exit.
"""
TEXTS = (ARGPARSE, COLUMNS, CLICK)


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.flag: finding.level for finding in findings}


@pytest.mark.parametrize(
    ("text", "flags"),
    [
        (ARGPARSE, ["--model-path", "--model", "-tp", "--tp-size", "--lora-paths", "--no-quick", "-h"]),
        (COLUMNS, ["--model", "-m", "--alias", "--lora", "--lora-scaled", "-dev", "--device", "--usage", "-lv"]),
        (CLICK, ["--port", "--min-worker-port", "--include-dashboard", "-v", "--verbose", "--log-style"]),
    ],
)
def test_what_is_offered_is_found(text: str, flags: list[str]) -> None:
    assert why_cut(text) == ""
    assert check(text, flags) == []


@pytest.mark.parametrize(
    ("text", "flag", "told"),
    [
        (ARGPARSE, "--lora", "is not in the help text"),
        (ARGPARSE, "--enable", "is not in the help text"),
        (ARGPARSE, "--tp", "is not in the help text"),
        (ARGPARSE, "--lora-path", "is not in the help text"),
        (ARGPARSE, "--everything", "is only mentioned, not offered"),
        (ARGPARSE, "--lora-files", "is only mentioned, not offered"),
        (ARGPARSE, "--pace", "is only mentioned, not offered"),
        (COLUMNS, "--spec-draft-n-max", "is only mentioned, not offered"),
        (COLUMNS, "--draft-n", "has been removed"),
        (COLUMNS, "--dev", "is not in the help text"),
        (CLICK, "--default-port", "is only mentioned, not offered"),
        (CLICK, "--worker-port", "is not in the help text"),
    ],
)
def test_what_is_not_offered_is_an_error(text: str, flag: str, told: str) -> None:
    assert check(text, [flag]) == [Finding("error", flag, told)]


def test_what_will_go_is_a_warning() -> None:
    assert check(ARGPARSE, ["--speed", "--port"]) == [Finding("warning", "--speed", "is deprecated")]


def padded(text: str, size: int) -> str:
    return text[:-1] + " " * (size - len(text)) + "\n"


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "it is empty"),
        ("\n \n", "it is empty"),
        (ARGPARSE[:-1], "its last line has no end"),
        (ARGPARSE[: ARGPARSE.index("  --speed")], "its usage offers --no-quick"),
        (ARGPARSE.replace(" (default: True)", " (default:"), "its last sentence has no end"),
        (padded(COLUMNS, 4096), "it ends after exactly 4096 bytes"),
        ("usage: engine serve [options]\n\nUse `--help=all` to show all.\n\noptions:\n  -h, --help  this\n", "2 flags"),
    ],
)
def test_a_text_that_looks_cut_is_a_warning_and_proves_nothing(text: str, why: str) -> None:
    findings = check(text, ["--port", "--gone"])
    assert findings[0].level == "warning" and findings[0].flag == "" and why in findings[0].message
    assert "error" not in levels(findings).values()
    assert levels(findings)["--gone"] == "warning"


@given(st.sampled_from(TEXTS), st.data())
def test_a_text_cut_inside_a_line_is_seen(text: str, data: st.DataObject) -> None:
    end = data.draw(st.integers(0, len(text) - 1))
    if not text[:end].endswith("\n"):
        assert why_cut(text[:end])
        assert not [finding for finding in check(text[:end], ["--port", "--gone"]) if finding.level == "error"]


@given(st.text(max_size=400) | st.lists(st.sampled_from([*"".join(TEXTS).split("\n")])).map("\n".join))
def test_no_text_crashes(text: str) -> None:
    findings = check(text, ["--port", "-m", "--no.such+flag"])
    assert [finding for finding in findings if finding.flag == "--no.such+flag"]


def test_each_program_is_asked_for_the_flags_that_are_its_own() -> None:
    vllm, ray = questions("vllm")
    assert (vllm.program.name, ray.program.name) == ("vllm", "ray")
    assert {"--headless", "--node-rank", "--lora-modules", "--max-lora-rank", "--quantization"} <= set(vllm.flags)
    assert {"--head", "--address", "--block", "--min-worker-port"} <= set(ray.flags)
    assert not {"--head", "--block"} & set(vllm.flags) and not {"--headless", "--lora-modules"} & set(ray.flags)
    assert vllm.program.help == ("--help=all",) and "VLLM_TARGET_DEVICE" in vllm.program.help_env
    (sglang,) = questions("sglang")
    assert {"--config", "--dist-init-addr", "--lora-paths", "--enable-metrics", "--device"} <= set(sglang.flags)
    (llamacpp,) = questions("llamacpp")
    assert {"--lora-scaled", "--api-key-file", "--metrics", "--n-gpu-layers"} <= set(llamacpp.flags)
    (sim,) = questions("sim")
    assert {"--nnodes", "--master-port", "--model"} <= set(sim.flags)
    with pytest.raises(KeyError):
        questions("openai")


def test_no_secret_flag_is_among_them() -> None:
    asked = {
        flag for engine in ("vllm", "sglang", "llamacpp", "sim") for each in questions(engine) for flag in each.flags
    }
    assert "--api-key" not in asked


@pytest.mark.skipif(not SAMPLES.exists(), reason="the samples are not beside the checkout")
@pytest.mark.parametrize(
    ("program", "name"),
    [
        ("vllm", "vllm-0.32.0-serve-help.txt"),
        ("ray", "ray-start-help.txt"),
        ("sglang", "sglang-0.5.23-launch-server-help.txt"),
        ("llamacpp", "llama-server-help.txt"),
    ],
)
def test_the_widest_command_passes_against_the_real_help(program: str, name: str) -> None:
    (asked,) = [
        each for engine in ("vllm", "sglang", "llamacpp") for each in questions(engine) if each.program.name == program
    ]
    text = (SAMPLES / name).read_text()
    assert len(asked.flags) >= 10
    assert check(text, asked.flags) == []
    # Each of them is found because it is there: without its lines it is missing.
    for flag in asked.flags:
        without = "\n".join(
            line for line in text.split("\n") if f"{flag} " not in f"{line} " and f"{flag}," not in line
        )
        assert flag in levels(check(without.replace(f"{flag}]", "]"), [flag]))


def test_our_own_llama_server_passes() -> None:
    (asked,) = questions("llamacpp")
    assert check(usage() + "\n", asked.flags) == []


async def test_what_is_installed_is_asked_and_what_is_not_is_skipped(tmp_path: Path) -> None:
    own = (sys.executable, "-m", "appliance")
    (sim,) = await examine("sim", {}, own)
    assert sim == Checked("sim", sys.executable, len(questions("sim")[0].flags)) and not sim.failed
    vllm, ray = await examine("vllm", {"vllm": str(tmp_path / "none"), "ray": str(tmp_path / "nor")}, own)
    assert "is not installed here" in vllm.skipped and "is not installed here" in ray.skipped
    assert not vllm.failed and not ray.failed


def program(tmp_path: Path, body: str) -> dict[str, str]:
    path = tmp_path / "engine"
    path.write_text(f"#!/bin/sh\n{body}\n")
    path.chmod(0o755)
    return {"llamacpp": str(path)}


async def test_a_flag_that_is_gone_fails_the_check(tmp_path: Path) -> None:
    (tmp_path / "help").write_text(COLUMNS)
    (checked,) = await examine("llamacpp", program(tmp_path, f'[ "$1" = --help ] && cat {tmp_path}/help'), ())
    assert checked.failed
    assert levels(list(checked.findings)).keys() == {
        "--host",
        "--ctx-size",
        "--threads",
        "--api-key-file",
        "--n-gpu-layers",
    }


async def test_help_on_the_other_stream_is_read_too(tmp_path: Path) -> None:
    (tmp_path / "help").write_text(COLUMNS)
    (checked,) = await examine("llamacpp", program(tmp_path, f"cat {tmp_path}/help >&2"), ())
    assert "--metrics" not in levels(list(checked.findings))


@pytest.mark.parametrize("body", ["exit 3", "echo broken; exit 1", "sleep 1000"])
async def test_a_program_that_does_not_answer_well_is_warned_of(body: str, tmp_path: Path) -> None:
    (checked,) = await examine("llamacpp", program(tmp_path, body), (), limit_s=1 if "sleep" in body else 60)
    assert not checked.failed
    assert "it said" in checked.findings[0].message


async def test_what_a_failing_program_left_out_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "help").write_text(COLUMNS)
    (checked,) = await examine("llamacpp", program(tmp_path, f"cat {tmp_path}/help; exit 3"), ())
    assert set(levels(list(checked.findings)).values()) == {"warning"}
    assert "exit status 3" in checked.findings[0].message


def test_pipe_sizes_are_those_of_buffers() -> None:
    assert {4096, 8192, 65536} <= PIPE_SIZES

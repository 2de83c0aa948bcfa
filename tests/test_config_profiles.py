"""Profiles and the node's own section: what no launch could use is refused at load, each fault with its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from appliance.cli.config import ConfigError, load, profiled, show, without_profiles
from appliance.facts.catalog import Model, Profile

PROFILE = "[[models]]\nname = 'm'\n[[models.profiles]]\nname = 'p'\nengine = 'sim'\n"


def faults(folder: Path, text: str) -> list[str]:
    file = folder / "appliance.toml"
    file.write_text(text)
    try:
        load(file, {"HOME": str(folder)})
    except ConfigError as error:
        return str(error).splitlines()
    return []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("gpus_per_node = 8\ntensor_parallel = 3", "tensor_parallel: 3 does not divide 8 GPUs"),
        (
            "gpus_per_node = 8\ntensor_parallel = 2\npipeline_parallel = 2",
            "pipeline_parallel: tensor_parallel 2 x 2 makes 4, but nodes 1 x gpus_per_node 8 is 8",
        ),
        (
            "gpus_per_node = 0\nnodes = 2\ntensor_parallel = 3",
            "tensor_parallel: 3 ranks cannot be spread evenly over 2",
        ),
        ("launch_mode = 'ray'", "launch_mode: ray is a way to launch vllm only"),
        ("nodes = 0", "nodes: expected a whole number, 1 or more, got 0"),
        ("args = ['--port=1']", "args: --port is set by the agent; set agent.port_range instead"),
        ("env = { CUDA_VISIBLE_DEVICES = '0' }", "env: CUDA_VISIBLE_DEVICES is set by the agent"),
        ("env = { A = 1 }", "env.A: expected a string, got 1"),
        ("env = 'x'", 'env: expected a table, each a string, got "x"'),
    ],
)
def test_a_profile_that_cannot_be_launched(tmp_path: Path, line: str, fault: str) -> None:
    (found,) = faults(tmp_path, PROFILE + line)
    assert found.startswith(f"models[0].profiles[0].{fault}")


def test_the_path_names_the_model_and_the_profile(tmp_path: Path) -> None:
    text = "[[models]]\nname = 'a'\n[[models]]\nname = 'b'\n" + PROFILE
    text += "[[models.profiles]]\nname = 'q'\nengine = 'sim'\ngpus_per_node = 8\ntensor_parallel = 3\n"
    assert faults(tmp_path, text) == ["models[2].profiles[1].tensor_parallel: 3 does not divide 8 GPUs"]


@pytest.mark.parametrize(
    ("engine", "source", "told"),
    [
        ("llamacpp", "org/name", 'expected the absolute path of a GGUF file, got "org/name"'),
        ("vllm", "", 'expected an absolute path or a hub id (org/name), got ""'),
        ("sglang", "./here", 'expected an absolute path or a hub id (org/name), got "./here"'),
        ("vllm", "org/name", None),
        ("vllm", "/models/x", None),
        ("sim", "", None),
    ],
)
def test_where_weights_may_be(tmp_path: Path, engine: str, source: str, told: str | None) -> None:
    text = f"[[models]]\nname = 'm'\n[[models.profiles]]\nname = 'p'\nengine = '{engine}'\nsource = '{source}'"
    assert faults(tmp_path, text) == ([f"models[0].profiles[0].source: {told}"] if told else [])


def test_two_profiles_of_one_name_and_a_scaling_without_any(tmp_path: Path) -> None:
    text = PROFILE + "[[models.profiles]]\nname = 'p'\nengine = 'sim'\n"
    text += "[[models]]\nname = 'n'\nscaling = { min_replicas = 2 }\n"
    assert faults(tmp_path, text) == [
        'models[0].profiles[1].name: expected a unique name within the model, got "p",'
        " which is models[0].profiles[0].name already",
        "models[1].scaling: expected a [[models.profiles]] of n too, to run replicas by",
    ]


def test_a_served_name_that_engines_misread(tmp_path: Path) -> None:
    (fault,) = faults(tmp_path, PROFILE.replace("'m'", "'two words'"))
    assert fault.startswith("models[0].name: expected no space and no leading dash")
    assert faults(tmp_path, "[[models]]\nname = 'two words'") == []


@pytest.mark.parametrize(
    ("line", "fault"),
    [
        ("port_range = [3000, 2000]", "agent.port_range: expected the first and the last port, from 1024 to 65535"),
        ("port_range = [3000, 3001, 3002]", "agent.port_range: expected the first and the last port"),
        ("executables = { vlm = 'x' }", "agent.executables.vlm: expected one of vllm, ray, sglang, llamacpp"),
        ("executables = { vllm = '' }", 'agent.executables.vllm: expected the name or the path of a program, got ""'),
        ("gpus = { backend = 'x' }", 'agent.gpus.backend: expected "auto", "nvml", "nvidia-smi" or "none", got "x"'),
        ("address = 'box'", 'agent.address: expected a numeric address such as "10.0.0.5", got "box"'),
        ("node = 'a b'", "agent.node: expected at most 63 letters"),
        ("listen = '0.0.0.0:6381'", 'agent.listen: expected another address than server.listen, got "0.0.0.0:6381"'),
        ("control_url = 'box:6384'", 'agent.control_url: expected wss://, a host and perhaps a port, such as "wss'),
        ("control_url = 'wss://box/x'", 'agent.control_url: expected wss://, a host and perhaps a port, such as "wss'),
    ],
)
def test_faults_of_the_node(tmp_path: Path, line: str, fault: str) -> None:
    (found,) = faults(tmp_path, f"[agent]\n{line}")
    assert found.startswith(fault)


@pytest.mark.parametrize(("written", "url"), [("wss://box", "wss://box:6384"), ("wss://[::1]:1/", "wss://[::1]:1")])
def test_where_the_control_plane_is(tmp_path: Path, written: str, url: str) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(f"[agent]\ncontrol_url = '{written}'")
    assert load(file, {"HOME": str(tmp_path)}).settings.agent.control_url == url


@pytest.mark.parametrize(
    ("text", "fault"),
    [
        (
            "[control]\nunreachable_after_s = 60",
            "control.lost_after_s: expected more than unreachable_after_s (60), got 60",
        ),
        ("[control]\nlisten = '0.0.0.0:6381'", "control.listen: expected another address than server.listen"),
        (
            PROFILE + "[models.scaling]\nmin_replicas = 2\nmax_replicas = 1",
            "models[0].scaling.max_replicas: expected at",
        ),
        (PROFILE + "[models.scaling]\nidle_s = 60", "models[0].scaling.idle_s: expected min_replicas = 0 too, got"),
        (
            "[store]\nurl = 'postgresql://db/x'",
            "store.url: expected sqlite:///path, since this version keeps its database",
        ),
        ("[store]\nurl = 'sqlite://x'", "store.url: expected sqlite:/// and a path, such as"),
    ],
)
def test_faults_of_the_control_plane(tmp_path: Path, text: str, fault: str) -> None:
    (found,) = faults(tmp_path, text)
    assert found.startswith(fault)


def test_a_profile_as_it_is_read(tmp_path: Path) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text(PROFILE + "env = { A = 'b', HF_TOKEN = 's3cret' }\n[agent]\nexecutables = { llamacpp = './ls' }")
    loaded = load(file, {"HOME": str(tmp_path), "APPLIANCE_AGENT__LABELS": "{rack = 'a'}"})
    (model,) = loaded.settings.models
    assert model == Model("m", profiles=(Profile("p", "sim", env={"A": "b", "HF_TOKEN": "s3cret"}),))
    assert loaded.settings.agent.executables == {"llamacpp": str(tmp_path / "ls")}
    assert loaded.settings.agent.labels == {"rack": "a"}
    shown = {row.path: row.value for row in show(loaded)}
    assert shown["models[0].profiles[0].env"] == {"A": "b", "HF_TOKEN": "***"}


def test_one_program_can_be_given_by_the_environment(tmp_path: Path) -> None:
    loaded = load(None, {"HOME": str(tmp_path), "APPLIANCE_AGENT__EXECUTABLES__VLLM": "/opt/vllm"})
    assert loaded.settings.agent.executables == {"vllm": "/opt/vllm"}


def test_what_holds_without_a_control_plane(tmp_path: Path) -> None:
    file = tmp_path / "appliance.toml"
    file.write_text("[[models]]\nname = 'a'\naliases = ['x']\n" + PROFILE)
    settings = load(file, {"HOME": str(tmp_path)}).settings
    assert len(profiled(settings)) == 1
    plain = without_profiles(settings)
    assert profiled(plain) == ()
    assert [(model.name, model.aliases) for model in plain.models] == [
        (model.name, model.aliases) for model in settings.models
    ]

"""The command line of `appliance-llama-server`, without an engine."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from appliance.llama_server.flags import ROWS, Adapter, Flag, Settings, Switch, WrongFlag, parse, usage


def parsed(line: str) -> Settings:
    return parse(line.split())


def test_usual_flags_reach_the_parameters_they_mean() -> None:
    settings = parsed(
        "-m x.gguf -a b,a --host 127.0.0.1,::1 --port 9000 -c 4096 -np 4 -t 2 -n 64 -ngl all --metrics --no-slots "
        "--no-webui --api-key one,two --temp 0.5 -fa on --timeout 30"
    )
    assert settings.model == "x.gguf"
    assert settings.hosts == ("127.0.0.1", "::1")
    assert settings.port == 9000
    assert settings.values == {
        "model.path": "x.gguf",
        "model_alias": ["b", "a"],
        "hostnames": ["127.0.0.1", "::1"],
        "port": 9000,
        "n_ctx": 4096,
        "n_parallel": 4,
        "cpuparams.n_threads": 2,
        "cpuparams_batch.n_threads": 2,
        "n_predict": 64,
        "n_gpu_layers": -2,
        "endpoint_metrics": True,
        "endpoint_slots": False,
        "ui": False,
        "api_keys": ["one", "two"],
        "sampling.temp": 0.5,
        "flash_attn_type": 1,
        "timeout_read": 30,
        "timeout_write": 30,
    }


def test_a_later_flag_wins_and_prompts_may_have_threads_of_their_own() -> None:
    settings = parsed("-t 1 --threads-batch 2 --threads 3 --slots --no-slots --slots")
    assert settings.values["cpuparams.n_threads"] == 3
    assert settings.values["cpuparams_batch.n_threads"] == 2
    assert settings.values["endpoint_slots"] is True


def test_adapters_keep_their_order_because_requests_name_them_by_number() -> None:
    settings = parsed("--lora a,b --lora-scaled c:0,d:e.gguf:0.5 --lora f")
    assert settings.adapters == (
        Adapter("a", 1.0),
        Adapter("b", 1.0),
        Adapter("c", 0.0),
        Adapter("d:e.gguf", 0.5),
        Adapter("f", 1.0),
    )


def test_keys_come_from_a_file_without_its_comments(tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("# people\none\n\n two \n")
    assert parse(["--api-key-file", str(keys)]).values["api_keys"] == ["one", "two"]


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("--frobnicate", "invalid argument: --frobnicate"),
        ("model.gguf", "invalid argument: model.gguf"),
        ("--draft 4", "invalid argument: --draft"),
        ("-c", "-c: expected a value"),
        ("-c many", "-c many: expected a number"),
        ("--temp warm", "--temp warm: expected a number"),
        ("--port 65536", "--port 65536: expected a port"),
        ("--port -1", "--port -1: expected a port"),
        ("-fa perhaps", "-fa perhaps: expected one of auto, off, on"),
        ("--pooling max", "expected one of none, mean"),
        ("--lora-scaled a.gguf", "expected FILE:SCALE"),
        ("--lora-scaled a.gguf:big", "expected FILE:SCALE"),
        ("--lora-scaled :1", "expected FILE:SCALE"),
        ("--host ,", "--host: expected an address"),
        ("--api-key-file /nowhere/keys", "No such file"),
    ],
)
def test_what_is_wrong_is_named(line: str, told: str) -> None:
    with pytest.raises(WrongFlag) as caught:
        parsed(line)
    assert told in str(caught.value)


def test_no_name_means_two_things_and_help_shows_every_one() -> None:
    names = [n for row in ROWS for n in (*row.names, *(row.off_names if isinstance(row, Switch) else ()))]
    assert [name for name, count in collections.Counter(names).items() if count > 1] == []
    text = usage()
    assert all(name in text for name in names)


def test_every_row_sets_a_parameter_that_the_wheel_has() -> None:
    xllamacpp = pytest.importorskip("xllamacpp")
    from appliance.llama_server.main import params_of

    words = {"adapters": [], "-s": "7", "-fa": "on", "-ctk": "q8_0", "-ctv": "q8_0", "-lm": "none"}
    words |= {"--pooling": "mean", "--reasoning-format": "none"}
    for row in ROWS:
        match row:
            case Flag(path="lora" | "lora-scaled"):
                continue
            case Flag(names=names, value="FILE", path="chat_template" | "api_keys"):
                line = [names[0], __file__]
            case Flag(names=names):
                line = [names[0], words.get(names[0], "1")]
            case Switch(names=names):
                line = [names[0]]
        assert isinstance(params_of(parse(line)), xllamacpp.CommonParams), row.names

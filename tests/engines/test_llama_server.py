"""The real engine itself: that what it answers is known, so that tests through the door may compare with it."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from tests.engines.llama_engine import LlamaEngine, serving, start
from tests.engines.tiny_gguf import TinyModels, words

GREEDY = {"model": "tiny", "temperature": 0}


def events(answer: httpx.Response) -> list[str]:
    """The data of each server-sent event of a finished answer."""
    return [event.removeprefix("data: ") for event in answer.text.split("\n\n") if event.startswith("data: ")]


def test_a_completion_is_the_whole_chain_of_words(llama_url: str) -> None:
    answer = httpx.post(f"{llama_url}/v1/completions", json=GREEDY | {"prompt": "hi"}).json()
    assert answer["choices"][0]["text"] == words(64)
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert answer["usage"]["completion_tokens"] == 65
    assert answer["timings"]["predicted_n"] == 65


def test_a_chat_answer_is_cut_at_max_tokens(llama_url: str) -> None:
    body = GREEDY | {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
    answer = httpx.post(f"{llama_url}/v1/chat/completions", json=body).json()
    assert answer["choices"][0]["message"]["content"] == words(5)
    assert answer["choices"][0]["finish_reason"] == "length"
    assert answer["model"] == "tiny"


def test_a_streamed_answer_is_the_same_text_with_usage_and_an_end(llama_url: str) -> None:
    body = GREEDY | {
        "messages": [{"role": "user", "content": "hi"}],
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    answer = httpx.post(f"{llama_url}/v1/chat/completions", json=body)
    *chunks, end = events(answer)
    assert end == "[DONE]"
    parsed = [json.loads(chunk) for chunk in chunks]
    deltas = [choice["delta"].get("content") or "" for chunk in parsed for choice in chunk["choices"]]
    assert "".join(deltas) == words(64)
    assert parsed[-1]["usage"]["completion_tokens"] == 65


@pytest.mark.parametrize(("adapter", "word"), [(0, " red"), (1, " blue")])
def test_an_adapter_changes_the_text_of_the_request_that_names_it(llama_url: str, adapter: int, word: str) -> None:
    body = GREEDY | {"prompt": "hi", "max_tokens": 4}
    adapted = httpx.post(f"{llama_url}/v1/completions", json=body | {"lora": [{"id": adapter, "scale": 1.0}]}).json()
    plain = httpx.post(f"{llama_url}/v1/completions", json=body).json()
    assert adapted["choices"][0]["text"] == word * 4
    assert plain["choices"][0]["text"] == words(4)


def test_health_and_models(llama_url: str) -> None:
    assert httpx.get(f"{llama_url}/health").json() == {"status": "ok"}
    (model,) = httpx.get(f"{llama_url}/v1/models").json()["data"]
    assert model["id"] == "tiny"
    assert model["owned_by"] == "llamacpp"
    assert model["meta"]["n_ctx"] == 2048


def test_metrics_count_what_was_generated(llama_url: str) -> None:
    def generated() -> float:
        found = re.search(r"^llamacpp:tokens_predicted_total (\S+)$", httpx.get(f"{llama_url}/metrics").text, re.M)
        assert found
        return float(found[1])

    before = generated()
    httpx.post(f"{llama_url}/v1/completions", json=GREEDY | {"prompt": "hi", "max_tokens": 7})
    assert generated() - before == 7


def test_a_key_is_asked_for(tiny_models: TinyModels, tmp_path: Path) -> None:
    with serving(tiny_models, tmp_path / "log", "--api-key", "secret", "--no-slots") as engine:
        assert httpx.get(f"{engine.url}/v1/models").status_code == 401
        with_key = {"authorization": "Bearer secret"}
        assert httpx.get(f"{engine.url}/v1/models", headers=with_key).status_code == 200
        assert httpx.get(f"{engine.url}/slots", headers=with_key).status_code == 501
        assert httpx.get(f"{engine.url}/metrics", headers=with_key).status_code == 501


@pytest.mark.parametrize("end", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_with_status_0_even_while_it_generates(
    tiny_models: TinyModels, tmp_path: Path, end: signal.Signals
) -> None:
    with serving(tiny_models, tmp_path / "log", "--ctx-size", "8192") as engine:
        body = GREEDY | {"prompt": "hi", "stream": True, "ignore_eos": True, "max_tokens": 4000}
        with httpx.stream("POST", f"{engine.url}/v1/completions", json=body) as answer:
            next(answer.iter_raw())
            engine.process.send_signal(end)
            assert engine.process.wait(timeout=5) == 0
        with pytest.raises(httpx.ConnectError):
            httpx.get(f"{engine.url}/health")


def refused(*flags: str) -> str:
    """The one line a start that cannot work leaves on stderr."""
    process = start(list(flags), subprocess.PIPE)
    out, err = process.communicate(timeout=30)
    assert process.returncode == 1
    assert out == ""
    (line,) = err.splitlines()
    assert line.startswith("error: ")
    return line


def test_a_taken_port_is_told_in_one_line(llama_engine: LlamaEngine) -> None:
    line = refused("-m", str(llama_engine.models.model), "--port", str(llama_engine.port))
    assert f"port {llama_engine.port}: Address already in use" in line


def test_a_port_that_only_just_ended_is_no_obstacle(tiny_models: TinyModels, tmp_path: Path) -> None:
    with (
        serving(tiny_models, tmp_path / "first") as engine,
        socket.create_connection(("127.0.0.1", engine.port)) as left,
    ):
        # The server closes this one first, so that its end lingers in TIME_WAIT.
        left.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        while left.recv(65536):
            continue
    with serving(tiny_models, tmp_path / "second", "--port", str(engine.port)) as again:
        assert again.port == engine.port


def test_a_model_that_cannot_be_read_is_told_in_one_line(tmp_path: Path) -> None:
    assert "No such file" in refused("-m", str(tmp_path / "absent.gguf"))
    (tmp_path / "text.gguf").write_text("not a model")
    assert "no GGUF file" in refused("-m", str(tmp_path / "text.gguf"))


def test_an_adapter_that_cannot_be_read_is_told_in_one_line(tiny_models: TinyModels, tmp_path: Path) -> None:
    assert "No such file" in refused("-m", str(tiny_models.model), "--lora", str(tmp_path / "absent.gguf"))


def test_a_damaged_model_ends_it_with_the_engines_own_reason(tiny_models: TinyModels, tmp_path: Path) -> None:
    damaged = tmp_path / "damaged.gguf"
    damaged.write_bytes(tiny_models.model.read_bytes()[:1000])
    process = start(["-m", str(damaged), "--port", "0"], subprocess.PIPE)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 1
    # llama.cpp writes its log from a thread of its own, so a line of it may come behind ours
    assert any(line.startswith("error: llama.cpp did not start") for line in err.splitlines()[-3:])


def python(program: str) -> str:
    """What a program of one line prints last."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return done.stdout.splitlines()[-1]


def test_nothing_of_trio_or_of_the_router_is_loaded() -> None:
    loaded = python(
        "import sys; sys.argv = ['x', '--version']; from appliance.llama_server.main import main; main(); "
        "print(*sorted(m for m in sys.modules if m.split('.')[0] in {'trio', 'httpx', 'appliance'}))"
    )
    here = "appliance.llama_server"
    assert loaded.split() == ["appliance", here, f"{here}.flags", f"{here}.main", f"{here}.openmp"]


def test_a_machine_without_openmp_gets_it_from_a_wheel() -> None:
    # The system's library cannot be found under a name that it does not have; the loader then takes what is loaded.
    mapped = python(
        "from unittest import mock; import ctypes; from appliance.llama_server import openmp; load = ctypes.CDLL\n"
        "def without(name, *mode):\n"
        "    if name == 'libgomp.so.1': raise OSError(name)\n"
        "    return load(name, *mode)\n"
        "with mock.patch.object(ctypes, 'CDLL', without): provided = openmp.provide()\n"
        "import xllamacpp\n"
        "print(provided, *{line.split()[5] for line in open('/proc/self/maps') if 'libgomp' in line})"
    )
    assert mapped.split()[:2] == ["True", "/memfd:libgomp.so.1"]
    assert len(mapped.split()) == 2

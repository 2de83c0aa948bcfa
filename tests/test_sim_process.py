"""`appliance sim` as operators and clients meet it: a process with flags, signals and an exit status."""

from __future__ import annotations

import json
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import anthropic
import openai
import pytest

from appliance.sim.words import answer_text
from tests.engines.sim_engine import Process, running, stop, wait_until_ready

HELLO: list[Any] = [{"role": "user", "content": "hello big world"}]
SAID = answer_text("hello big world")


@pytest.fixture(scope="module")
def sim() -> Iterator[Process]:
    with running("--name", "one") as process:
        yield process


def start(*flags: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "appliance", "sim", "--model", "m", *flags]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def status_of(url: str) -> int | str:
    try:
        with urllib.request.urlopen(url, timeout=5) as answer:
            status: int = answer.status
            return status
    except urllib.error.HTTPError as error:
        return error.code
    except urllib.error.URLError as error:
        return type(error.reason).__name__


# -- the official clients ---------------------------------------------------------------------------------------------


def test_the_openai_client_reads_answers_streams_usage_and_vectors(sim: Process) -> None:
    client = openai.OpenAI(base_url=f"{sim.url}/v1", api_key="none")
    whole = client.chat.completions.create(model="m", messages=HELLO)
    assert (whole.choices[0].message.content, whole.system_fingerprint) == (SAID, "one")
    options: Any = {"include_usage": True}
    text, usage = "", None
    for chunk in client.chat.completions.create(model="m", messages=HELLO, stream=True, stream_options=options):
        text += (chunk.choices[0].delta.content or "") if chunk.choices else ""
        usage = chunk.usage or usage
    assert text == SAID
    assert usage is not None and (usage.prompt_tokens, usage.completion_tokens) == (6, 5)
    assert client.completions.create(model="m", prompt="hello big world").choices[0].text == SAID
    vectors = client.embeddings.create(model="m", input=["a", "a", "b"]).data
    assert vectors[0].embedding == vectors[1].embedding != vectors[2].embedding
    assert [model.id for model in client.models.list()] == ["m"]


def test_the_openai_client_reads_responses(sim: Process) -> None:
    client = openai.OpenAI(base_url=f"{sim.url}/v1", api_key="none")
    made = client.responses.create(model="m", input="hello big world")
    assert made.output_text == SAID
    assert client.responses.retrieve(made.id).output_text == SAID
    with client.responses.stream(model="m", input="hello big world") as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")
        assert text == SAID == stream.get_final_response().output_text


def test_the_anthropic_client_reads_messages(sim: Process) -> None:
    client = anthropic.Anthropic(base_url=sim.url, api_key="none")
    made: Any = client.messages.create(model="m", max_tokens=99, messages=HELLO)
    assert (made.content[0].text, made.stop_reason, made.usage.output_tokens) == (SAID, "end_turn", 5)
    with client.messages.stream(model="m", max_tokens=3, messages=HELLO) as stream:
        assert "".join(stream.text_stream) == "You said: hello"
        assert stream.get_final_message().stop_reason == "max_tokens"


def test_the_clients_know_the_errors(sim: Process) -> None:
    client = openai.OpenAI(base_url=f"{sim.url}/v1", api_key="none", max_retries=0)
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.chat.completions.create(model="other", messages=HELLO)
    with pytest.raises(openai.RateLimitError):
        client.chat.completions.create(model="m", messages=HELLO, extra_body={"sim": {"status": 429}})
    with pytest.raises(openai.APIConnectionError):
        client.chat.completions.create(model="m", messages=HELLO, extra_body={"sim": {"reset_after": -1}})
    with pytest.raises(openai.APIError, match="the simulated engine failed"):
        list(
            client.chat.completions.create(
                model="m", messages=HELLO, stream=True, extra_body={"sim": {"error_after": 2}}
            )
        )


# -- start and end ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_stop_ends_streams_with_an_error_event_and_the_process_with_0(number: signal.Signals) -> None:
    with running("--decode-tokens-per-second", "2") as process:
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 1000, "ignore_eos": True}).encode()
        with urllib.request.urlopen(f"{process.url}/v1/completions", body, timeout=10) as answer:
            assert answer.readline().startswith(b"data: ")
            process.popen.send_signal(number)
            rest = answer.read()
            assert process.popen.wait(5) == 0  # a second in peace, but this machine may be busy
        assert b'"error"' in rest and rest.endswith(b"data: [DONE]\n\n")


def test_a_stop_does_not_wait_for_a_client_that_does_not_read() -> None:
    with running("--decode-tokens-per-second", "0") as process:
        host, port = process.url.removeprefix("http://").split(":")
        with socket.create_connection((host, int(port))) as client:
            body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 200_000, "ignore_eos": True}).encode()
            client.sendall(
                b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            )
            client.recv(1)
            assert stop(process.popen) == 0


def test_a_port_that_is_taken_is_one_line_and_1() -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        # At once: a long load must not come first.
        for flags in (["--port", str(port)], ["--port", "0", "--nnodes", "2", "--master-port", str(port)]):
            popen = start(*flags, "--load-s", "60")
            _, errors = popen.communicate(timeout=20)
            assert popen.returncode == 1
            assert re.fullmatch(r"appliance: cannot listen at 127\.0\.0\.1:\d+: .*; choose another --\S+\n", errors)


@pytest.mark.parametrize(
    ("flags", "complaint"),
    [
        (["--prot", "1"], "--prot"),
        (["--port", "0", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["--port", "0", "--node-rank", "1"], "--node-rank 1 is not below --nnodes 1"),
        (["--port", "0", "--fail-mode", "explode"], "explode"),
    ],
)
def test_wrong_usage_is_one_line_and_2(flags: list[str], complaint: str) -> None:
    popen = start(*flags)
    _, errors = popen.communicate(timeout=20)
    assert popen.returncode == 2
    assert complaint in errors and errors.count("\n") == 1 and "--help" in errors


def test_while_it_loads_the_port_refuses_and_is_taken() -> None:
    port = free_port()
    popen = start("--port", str(port), "--load-s", "600")
    try:
        assert popen.stdout is not None and popen.stdout.readline() == "loading for 600 s\n"
        assert status_of(f"http://127.0.0.1:{port}/health") == "ConnectionRefusedError"
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))
        assert stop(popen) == 0  # a stop does not wait for the load either
    finally:
        stop(popen)
        assert popen.stderr is not None
        popen.stderr.close()


def test_while_it_loads_it_may_answer_503_and_serves_afterwards() -> None:
    port = free_port()
    popen = start("--port", str(port), "--load-s", "0.5", "--while-loading", "503")
    try:
        assert popen.stdout is not None and popen.stdout.readline() == "loading for 0.5 s\n"
        assert status_of(f"http://127.0.0.1:{port}/health") == 503
        assert wait_until_ready(popen) == f"http://127.0.0.1:{port}"
        assert status_of(f"http://127.0.0.1:{port}/health") == 200
    finally:
        stop(popen)
        assert popen.stderr is not None
        popen.stderr.close()


def test_a_simulated_crash_resets_everybody_and_ends_with_1() -> None:
    with running("--fail-after", "1", "--decode-tokens-per-second", "2") as process:
        body = json.dumps({"prompt": "x", "stream": True, "max_tokens": 1000, "ignore_eos": True}).encode()
        with urllib.request.urlopen(f"{process.url}/v1/completions", body, timeout=10) as answer:
            assert answer.readline().startswith(b"data: ")
            assert status_of(f"{process.url}/health") == 200
            with pytest.raises((urllib.error.URLError, ConnectionError)):
                urllib.request.urlopen(f"{process.url}/v1/completions", body, timeout=10)
            with pytest.raises(ConnectionResetError):
                answer.read()
        assert process.popen.wait(10) == 1


# -- ranks ------------------------------------------------------------------------------------------------------------


def test_two_ranks_serve_once_both_are_there_and_die_together() -> None:
    port = free_port()
    common = ["--nnodes", "2", "--master-port", str(free_port())]
    leader = start("--port", str(port), *common)
    worker = None
    try:
        assert leader.stdout is not None and leader.stdout.readline() == "waiting for 1 more ranks\n"
        assert status_of(f"http://127.0.0.1:{port}/health") == "ConnectionRefusedError"
        worker = start("--port", str(port), *common, "--node-rank", "1")
        assert worker.stdout is not None and worker.stdout.readline() == "rank 1 has joined\n"
        assert wait_until_ready(leader) == f"http://127.0.0.1:{port}"
        assert status_of(f"http://127.0.0.1:{port}/health") == 200
        leader.kill()
        _, errors = worker.communicate(timeout=20)
        assert (worker.returncode, errors) == (1, "appliance sim: the leader is gone\n")
    finally:
        for popen in filter(None, (leader, worker)):
            stop(popen)
            assert popen.stderr is not None
            popen.stderr.close()


def test_the_key_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("APPLIANCE_SIM_API_KEY", "secret")
    with running() as process:
        assert status_of(f"{process.url}/v1/models") == 401
        assert status_of(f"{process.url}/health") == 200
        assert [model.id for model in openai.OpenAI(base_url=f"{process.url}/v1", api_key="secret").models.list()] == [
            "m"
        ]

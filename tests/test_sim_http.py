"""The sim's HTTP front: vLLM's shapes, over real sockets."""

from __future__ import annotations

import base64
import json
import struct
from typing import Any

import httpx
import pytest
import trio
import trio.testing

from appliance.sim.settings import Sizes, Speeds
from appliance.sim.words import token_ids
from tests.engines.sim_engine import Running, read_metrics, serving, until

HELLO = [{"role": "user", "content": "hello big world"}]
SAID = "You said: hello big world"


def client(sim: Running, **more: Any) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=sim.url, timeout=10, trust_env=False, verify=False, **more)


async def post(sim: Running, path: str, body: Any, **headers: str) -> httpx.Response:
    async with client(sim) as http:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await http.post(path, content=content, headers=headers)


def events(text: str) -> list[Any]:
    """The data of each event: decoded, or the text itself where it is no JSON."""
    found = []
    for event in text.split("\n\n")[:-1]:
        data = event.rpartition("data: ")[2]
        found.append(json.loads(data) if data.startswith("{") else data)
    return found


async def metrics(sim: Running) -> dict[str, float]:
    async with client(sim) as http:
        return read_metrics((await http.get("/metrics")).text)


# -- about the engine -------------------------------------------------------------------------------------------------


async def test_health_models_version_and_metrics_look_like_vllm() -> None:
    async with serving(models=("org/m", "alias"), name="one") as sim, client(sim) as http:
        health = await http.get("/health")
        assert (health.status_code, health.content, health.headers["x-sim-id"]) == (200, b"", "one")
        cards = (await http.get("/v1/models")).json()
        assert cards["object"] == "list"
        assert [card["id"] for card in cards["data"]] == ["org/m", "alias"]
        assert cards["data"][0]["max_model_len"] == 16_384 * 16
        assert (await http.get("/v1/models/org/m")).json()["id"] == "org/m"
        assert (await http.get("/v1/models/other")).status_code == 404
        assert "version" in (await http.get("/version")).json()
        page = (await http.get("/metrics")).text
        assert 'vllm:num_requests_running{engine="0",model_name="org/m"} 0.0' in page
        assert 'block_size="16"' in page and 'num_gpu_blocks="16384"' in page


def test_the_metric_names_are_vllms_own() -> None:
    """Names and types as on a page of vLLM 0.32: routers and dashboards rely on them."""
    from appliance.sim.batch import Batch
    from appliance.sim.metrics import write_metrics

    page = write_metrics(Batch(Speeds(), Sizes()), 'a"b', 1.0).decode()
    types = dict(line.split()[2:4] for line in page.splitlines() if line.startswith("# TYPE vllm:"))
    assert types == {
        "vllm:num_requests_running": "gauge",
        "vllm:num_requests_waiting": "gauge",
        "vllm:kv_cache_usage_perc": "gauge",
        "vllm:prefix_cache_queries_total": "counter",
        "vllm:prefix_cache_hits_total": "counter",
        "vllm:num_preemptions_total": "counter",
        "vllm:prompt_tokens_total": "counter",
        "vllm:prompt_tokens_cached_total": "counter",
        "vllm:generation_tokens_total": "counter",
        "vllm:request_success_total": "counter",
        "vllm:time_to_first_token_seconds": "histogram",
        "vllm:inter_token_latency_seconds": "histogram",
        "vllm:request_queue_time_seconds": "histogram",
        "vllm:e2e_request_latency_seconds": "histogram",
        "vllm:cache_config_info": "gauge",
    }
    assert 'model_name="a\\"b"' in page


async def test_metrics_count_what_happened() -> None:
    async with serving(sizes=Sizes(block_tokens=4)) as sim:
        for _ in range(2):
            await post(sim, "/v1/completions", {"prompt": "x" * 80, "max_tokens": 3, "ignore_eos": True, "n": 2})
        read = await metrics(sim)
        assert read["vllm:prompt_tokens_total"] == 80  # two answers each compute or find their prompt
        assert read["vllm:generation_tokens_total"] == 12
        assert read["vllm:prefix_cache_queries_total"] == 80
        assert read["vllm:prefix_cache_hits_total"] == 3 * 16
        assert read["vllm:request_success_total"] == 4
        assert read["vllm:time_to_first_token_seconds_count"] == 4
        assert read["vllm:num_requests_running"] == read["vllm:kv_cache_usage_perc"] == 0


async def test_metrics_show_what_runs_and_waits() -> None:
    sizes = Sizes(max_num_seqs=2, kv_blocks=100, block_tokens=4)
    async with serving(speeds=Speeds(0, 0.001), sizes=sizes) as sim, trio.open_nursery() as nursery:
        for _ in range(3):
            nursery.start_soon(post, sim, "/v1/completions", {"prompt": "x" * 8, "max_tokens": 6, "ignore_eos": True})
        await until(lambda: sim.batch.running + sim.batch.waiting == 3)
        read = await metrics(sim)
        assert (read["vllm:num_requests_running"], read["vllm:num_requests_waiting"]) == (2, 1)
        assert read["vllm:kv_cache_usage_perc"] == 0.04
        nursery.cancel_scope.cancel()


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/chat/completions", 405),
        ("POST", "/health", 405),
        ("PUT", "/v1/responses/x", 405),
    ],
)
async def test_unknown_paths_and_methods(method: str, path: str, status: int) -> None:
    async with serving() as sim, client(sim) as http:
        answer = await http.request(method, path)
        assert answer.status_code == status
        assert "detail" in answer.json()
        assert ("allow" in answer.headers) == (status == 405)


async def test_while_loading_everything_is_503() -> None:
    async with serving() as sim, client(sim) as http:
        sim.engine.loading = True
        for path in ("/health", "/v1/models", "/metrics"):
            answer = await http.get(path)
            assert (answer.status_code, answer.json()["error"]["message"]) == (503, "Loading model")
        sim.engine.loading = False
        assert (await http.get("/health")).status_code == 200


async def test_a_key_guards_v1_and_nothing_else() -> None:
    async with serving(api_key="secret") as sim, client(sim) as http:
        refused = await http.get("/v1/models")
        assert (refused.status_code, refused.json()) == (401, {"error": "Unauthorized"})
        assert (await http.get("/v1/models", headers={"authorization": "Bearer wrong"})).status_code == 401
        assert (await http.get("/v1/models", headers={"authorization": "Bearer secret"})).status_code == 200
        for path in ("/health", "/metrics", "/version"):
            assert (await http.get(path)).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "x"})).status_code == 200


# -- answers ----------------------------------------------------------------------------------------------------------


async def test_a_chat_answer() -> None:
    async with serving(name="one") as sim:
        answer = await post(sim, "/v1/chat/completions", {"model": "m", "messages": HELLO}, **{"x-request-id": "r-1"})
        assert (answer.headers["x-sim-id"], answer.headers["x-request-id"]) == ("one", "r-1")
        body = answer.json()
        assert body["object"] == "chat.completion"
        assert body["system_fingerprint"] == "one"
        assert body["choices"][0]["message"]["content"] == SAID
        assert body["choices"][0]["finish_reason"] == "stop"
        assert body["usage"] == {
            "prompt_tokens": 6,
            "completion_tokens": 5,
            "total_tokens": 11,
            "prompt_tokens_details": {"cached_tokens": 0},
        }


@pytest.mark.parametrize(
    ("asked", "text", "reason"),
    [
        ({"max_tokens": 3}, "You said: hello", "length"),
        ({"max_completion_tokens": 3}, "You said: hello", "length"),
        ({"max_tokens": 5}, SAID, "stop"),
        ({"max_tokens": 99}, SAID, "stop"),
        ({"max_tokens": 7, "ignore_eos": True}, SAID + " hello big", "length"),
        ({"max_tokens": 99, "min_tokens": 6}, SAID + " hello", "stop"),
        ({"ignore_eos": True}, SAID, "stop"),
    ],
)
async def test_the_length_of_an_answer_is_as_asked(asked: dict[str, Any], text: str, reason: str) -> None:
    async with serving() as sim:
        choice = (await post(sim, "/v1/chat/completions", {"messages": HELLO, **asked})).json()["choices"][0]
        assert (choice["message"]["content"], choice["finish_reason"]) == (text, reason)


@pytest.mark.parametrize("usage", [False, True])
async def test_a_chat_stream(usage: bool) -> None:
    async with serving() as sim:
        options = {"stream_options": {"include_usage": True}} if usage else {}
        answer = await post(sim, "/v1/chat/completions", {"messages": HELLO, "stream": True, "n": 2, **options})
        assert answer.headers["content-type"].startswith("text/event-stream")
        *chunks, done = events(answer.text)
        assert done == "[DONE]"
        if usage:
            last = chunks.pop()
            assert (last["choices"], last["usage"]["completion_tokens"], last["usage"]["prompt_tokens"]) == ([], 10, 6)
        assert all("usage" not in chunk for chunk in chunks)
        for index in range(2):
            mine = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == index]
            assert mine[0]["delta"] == {"role": "assistant", "content": ""}
            assert "".join(choice["delta"]["content"] for choice in mine) == SAID
            assert [choice["finish_reason"] for choice in mine] == [None] * 6 + ["stop"]


async def test_a_completion_of_two_prompts_whole_and_streamed() -> None:
    async with serving() as sim:
        body = {"prompt": ["one", "two"], "n": 2}
        choices = (await post(sim, "/v1/completions", body)).json()["choices"]
        expected = ["You said: one", "You said: one", "You said: two", "You said: two"]
        assert [choice["text"] for choice in choices] == expected
        streamed = events((await post(sim, "/v1/completions", {**body, "stream": True})).text)
        assert streamed.pop() == "[DONE]"
        texts = [""] * 4
        for chunk in streamed:
            texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
        assert texts == expected


async def test_a_stream_without_a_client_that_speaks_chunks() -> None:
    """HTTP/1.0: no chunks, and the end of the body is the end of the connection."""
    async with serving() as sim:
        stream = await trio.open_tcp_stream("127.0.0.1", sim.port)
        body = json.dumps({"prompt": "x", "stream": True}).encode()
        await stream.send_all(b"POST /v1/completions HTTP/1.0\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body))
        answer = b"".join([part async for part in stream])
        head, _, text = answer.partition(b"\r\n\r\n")
        assert b"transfer-encoding" not in head
        assert events(text.decode())[-1] == "[DONE]"


async def test_cached_tokens_are_in_the_usage() -> None:
    async with serving() as sim:
        for cached in (0, 96):
            answer = await post(sim, "/v1/completions", {"prompt": "x" * 400})
            assert answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"] == cached


async def test_responses_are_kept_until_deleted() -> None:
    async with serving() as sim, client(sim) as http:
        made = (await http.post("/v1/responses", json={"input": "hello"})).json()
        assert made["output"][0]["content"][0]["text"] == "You said: hello"
        path = f"/v1/responses/{made['id']}"
        assert (await http.get(path)).json() == made
        assert (await http.post(f"{path}/cancel")).status_code == 400
        assert (await http.delete(path)).json()["deleted"]
        assert (await http.get(path)).status_code == 404


async def test_a_responses_stream_is_numbered_and_kept() -> None:
    async with serving() as sim, client(sim) as http:
        answer = await http.post("/v1/responses", json={"input": "hello", "stream": True})
        found = events(answer.text)
        assert [event["sequence_number"] for event in found] == list(range(len(found)))
        assert found[0]["type"] == "response.created"
        assert found[-1]["type"] == "response.completed"
        assert "".join(event["delta"] for event in found if event["type"].endswith(".delta")) == "You said: hello"
        assert (await http.get(f"/v1/responses/{found[0]['response']['id']}")).json() == found[-1]["response"]


async def test_a_messages_stream() -> None:
    async with serving() as sim:
        body = {"model": "m", "max_tokens": 4, "stream": True, "messages": HELLO}
        found = events((await post(sim, "/v1/messages", body)).text)
        assert [event["type"] for event in found] == (
            ["message_start", "content_block_start"]
            + ["content_block_delta"] * 4
            + ["content_block_stop", "message_delta", "message_stop"]
        )
        assert found[-2]["delta"]["stop_reason"] == "max_tokens"
        assert found[-2]["usage"]["output_tokens"] == 4


async def test_embeddings_as_numbers_and_as_base64() -> None:
    async with serving() as sim:
        body = {"model": "m", "input": ["a", "b"], "dimensions": 8}
        floats = (await post(sim, "/v1/embeddings", body)).json()
        packed = (await post(sim, "/v1/embeddings", {**body, "encoding_format": "base64"})).json()
        for one, other in zip(floats["data"], packed["data"], strict=True):
            assert struct.unpack("<8f", base64.b64decode(other["embedding"])) == pytest.approx(one["embedding"])
        assert floats["usage"]["prompt_tokens"] == 2
        assert (await post(sim, "/v1/embeddings", {"input": "a", "dimensions": 99_999})).status_code == 400


async def test_tokenize_and_back() -> None:
    async with serving() as sim:
        made = (await post(sim, "/tokenize", {"prompt": "hello world"})).json()
        assert made["tokens"] == token_ids(b"hello world")
        assert (made["count"], made["max_model_len"]) == (3, 16_384 * 16)
        assert (await post(sim, "/detokenize", {"tokens": made["tokens"]})).json() == {"prompt": "hello world"}
        assert (await post(sim, "/detokenize", {"tokens": [7]})).status_code == 400


# -- refusals ---------------------------------------------------------------------------------------------------------


async def test_refusals_have_vllms_shape() -> None:
    async with serving(sizes=Sizes(kv_blocks=4, block_tokens=4)) as sim:
        unknown = await post(sim, "/v1/chat/completions", {"model": "other", "messages": HELLO})
        assert unknown.status_code == 404
        assert unknown.json() == {
            "error": {
                "message": "The model `other` does not exist.",
                "type": "NotFoundError",
                "param": "model",
                "code": 404,
            }
        }
        broken = await post(sim, "/v1/chat/completions", b"{")
        assert (broken.status_code, broken.json()["error"]["type"]) == (400, "BadRequestError")
        long = await post(sim, "/v1/completions", {"prompt": "x", "max_tokens": 16, "stream": True})
        assert (long.status_code, "16 tokens" in long.json()["error"]["message"]) == (400, True)
        assert (await post(sim, "/v1/completions", {"prompt": "x", "max_tokens": 15})).status_code == 200
        anthropic = (await post(sim, "/v1/messages", {"max_tokens": 1, "model": "other", "messages": HELLO})).json()
        assert (anthropic["type"], anthropic["error"]["type"]) == ("error", "not_found_error")


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"GET /health HTTP/1.1\r\n\r\n",
        b"NONSENSE\r\n\r\n",
        b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\nzz\r\n",
    ],
)
async def test_what_is_no_http_is_refused_and_closed(request_bytes: bytes) -> None:
    async with serving() as sim:
        stream = await trio.open_tcp_stream("127.0.0.1", sim.port)
        await stream.send_all(request_bytes)
        answer = b"".join([part async for part in stream])
        assert answer.startswith(b"HTTP/1.1 400 ") and b"connection: close" in answer


# -- connections ------------------------------------------------------------------------------------------------------


async def test_pipelined_requests_are_answered_in_order() -> None:
    async with serving() as sim:
        stream = await trio.open_tcp_stream("127.0.0.1", sim.port)
        bodies = [json.dumps({"prompt": f"word{n}"}).encode() for n in range(5)]
        whole = b"".join(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
            for body in bodies
        )
        await stream.send_all(whole + b"GET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n")
        answer = b"".join([part async for part in stream]).decode()
        places = [answer.index(f"You said: word{n}") for n in range(5)]
        assert places == sorted(places)
        assert answer.count("HTTP/1.1 200") == 6


async def test_bodies_in_chunks_and_after_a_question() -> None:
    async with serving() as sim:
        stream = await trio.open_tcp_stream("127.0.0.1", sim.port)
        await stream.send_all(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\nexpect: 100-continue\r\n\r\n"
        )
        assert await stream.receive_some() == b"HTTP/1.1 100 Continue\r\n\r\n"
        for part in (
            b'5\r\n{"pro\r\n',
            b'b\r\nmpt":"hi"}\n',
            b"\r\n0\r\n\r\nGET /health HTTP/1.1\r\nhost: x\r\nconnection: close\r\n\r\n",
        ):
            await stream.send_all(part)
        answer = b"".join([part async for part in stream]).decode()
        assert "You said: hi" in answer and answer.count("HTTP/1.1 200") == 2


async def test_an_idle_connection_is_closed_after_the_keep_alive(autojump_clock: trio.testing.MockClock) -> None:
    async with serving(keepalive_s=5.0) as sim:
        stream = await trio.open_tcp_stream("127.0.0.1", sim.port)
        await stream.send_all(b"GET /health HTTP/1.1\r\nhost: x\r\n\r\n")
        assert (await stream.receive_some()).startswith(b"HTTP/1.1 200")
        begun = trio.current_time()
        assert await stream.receive_some() == b""
        assert 5.0 <= trio.current_time() - begun < 6.0

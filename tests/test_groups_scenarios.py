"""What upstream's own tests show of announced groups and their router, shown of ours from outside: a router as a
process, daemons, engines and tool servers at real sockets, and whatever a client of it would notice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest
import trio

from tests.fake_daemon import fake_daemon, free_udp_port
from tests.fake_engine import (
    CHAT,
    DONE,
    LAST,
    STREAM_HEAD,
    Asked,
    Peer,
    chunk,
    event,
    fake_engine,
    says,
    streamed,
    whole,
)
from tests.groups_outside import outside, restartable, url_of
from tests.lan import free_port
from tests.mcp_door_scene import at
from tests.raw_client import Client, chat
from tests.toolservers.scripted import Server

SHAPES = ("seed", "mid", "new")
DAEMON_KEYS = {"connected", "age_s", "error", "node_id", "seed", "alternates"}


@pytest.mark.parametrize("shape", SHAPES)
async def test_announced_services_appear_in_the_status_and_the_daemon_is_connected(shape: str, tmp_path: Path) -> None:
    async with fake_engine() as engine, fake_daemon(shape=shape) as daemon, at(Server()) as tools:
        daemon.group("glm", openai=url_of(engine), mcp=tools, actors=["running"], gpus=1, provider="vllm")
        async with outside(tmp_path, daemon.address) as door:
            await door.serves("llama")
            shown = await door.status()
            row = shown["daemons"][daemon.address]
            assert row.keys() == DAEMON_KEYS
            assert (row["connected"], row["error"], row["node_id"], row["seed"]) == (True, None, "N1", True)
            glm = shown["groups"]["glm"]
            assert (glm["openai"], glm["openai_candidates"], glm["mcp"]) == (url_of(engine), [url_of(engine)], tools)
            assert (glm["agents_alive"], glm["actors_running"], glm["daemon"]) == (1, 1, daemon.address)
            assert (glm["healthy"], glm["why_not"], glm["models"]) == (True, None, ["llama"])
            assert glm["provider"] == ("" if shape == "seed" else "vllm")  # the oldest documents name none
            assert (shown["models"]["llama"]["group"], shown["models"]["llama"]["url"]) == ("glm", url_of(engine))
            for path in ("/", "/healthz"):
                same = (await door.http.get(door.base + path)).json()
                assert same["groups"]["glm"]["openai"] == url_of(engine)


async def test_our_own_agent_publishes_its_services_in_the_newer_shape(tmp_path: Path) -> None:
    listen = f"127.0.0.1:{free_port()}"
    async with fake_engine() as engine, at(Server()) as tools:
        said = {
            "MENTAT_GROUP": "glm",
            "MENTAT_OPENAI_API": f"{engine.port}/v1",
            "MENTAT_MCP_API": tools,
            "MENTAT_MODEL_PROVIDER": "VLLM",
            "APPLIANCE_AGENT__LISTEN": listen,
            "APPLIANCE_AGENT__ADDRESS": "127.0.0.1",
        }
        async with outside(tmp_path, listen) as door, trio.open_nursery() as nursery:
            env = {**os.environ, **said, "RUNTIME_DIRECTORY": str(tmp_path / "run"), "APPLIANCE_CONFIG": os.devnull}
            command = [sys.executable, "-m", "appliance", "agent", "register"]
            nursery.start_soon(partial(trio.run_process, command, env=env, stderr=subprocess.DEVNULL))
            await door.serves("llama")
            document = (await door.http.get(f"http://{listen}/status")).json()
            ((agent, row),) = document["groups"]["glm"]["agents"].items()
            assert agent.startswith("glm@")
            host, _, rest = tools.removeprefix("http://").partition(":")
            assert row["services"] == {
                "openai": {"host": "", "port": engine.port, "path": "/v1", "provider": "vllm", "note": ""},
                "mcp": {"host": host, "port": int(rest.partition("/")[0]), "path": "/mcp", "provider": "", "note": ""},
            }
            shown = await door.status()
            assert shown["daemons"][listen]["connected"] is True
            assert shown["groups"]["glm"]["openai"] == url_of(engine)
            assert await door.call("glm__add") == (False, '["add", {}]')
            nursery.cancel_scope.cancel()


@pytest.mark.parametrize("shape", SHAPES)
async def test_without_an_actor_older_documents_list_nothing_and_newer_ones_go_by_the_probe(
    shape: str, tmp_path: Path
) -> None:
    async with fake_engine() as engine, fake_daemon(shape=shape) as daemon, at(Server()) as tools:
        daemon.group("glm", openai=url_of(engine), mcp=tools, gpus=1)
        async with outside(tmp_path, daemon.address) as door:
            if shape == "new":
                await door.serves("llama")
                assert (await door.chat("llama")).status_code == 200
                return
            assert await door.gated("glm", "no") == "no running actors"
            await door.until("it was probed all the same", lambda _: engine.connections > 1)
            assert await door.models() == []
            answer = await door.chat("llama")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
            assert answer.json()["error"]["message"] == "the model 'llama' is not ready: no running actors"
            assert (await door.chat("nobody's")).status_code == 404
            assert [tool["name"] for tool in await door.tools()] == ["serve_status", "glm__add"]
            assert await door.call("glm__add", a=1) == (False, '["add", {"a": 1}]')


@pytest.mark.parametrize("shape", SHAPES)
async def test_models_appear_with_their_actors_and_route_apart(shape: str, tmp_path: Path) -> None:
    async with fake_engine() as one, fake_engine() as two, fake_daemon(shape=shape) as daemon:
        one.models, two.models = ("zeta",), ("alpha",)
        first = daemon.group("one", openai=url_of(one), actors=["spawning"], gpus=1)
        daemon.group("two", openai=url_of(two), actors=["running"], gpus=1)
        async with outside(tmp_path, daemon.address) as door:
            await door.serves("alpha")
            await door.gated("one", "no running actors")
            first.actors = ["dead (exit 1)", "running"]
            await daemon.tell()
            await door.serves("alpha", "zeta")
            for model, engine, other in (("zeta", one, two), ("alpha", two, one)):
                before = len(other.asked)
                answer = await door.chat(model, seed=7)
                assert answer.status_code == 200, answer.text
                assert answer.json() == CHAT
                assert engine.asked[-1].json() == {"model": model, "messages": [], "seed": 7}
                assert len(other.asked) == before
            answer = await door.chat("neither")
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
            assert answer.json()["error"]["message"].endswith("; available: alpha, zeta")
            # a path of the engine's root goes where its model is, and nowhere without one
            for path in ("/tokenize", "/what/an/engine/adds"):
                assert (await door.post(path, {"model": "zeta", "prompt": "x"})).status_code == 200
                assert one.asked[-1].target == path
                answer = await door.post(path, {"prompt": "x"})
                assert (answer.status_code, answer.json()["error"]["code"]) == (400, "model_missing")


async def test_the_first_frame_of_a_stream_comes_before_the_second_is_made(tmp_path: Path) -> None:
    seen = trio.Event()

    async def script(asked: Asked, peer: Peer) -> None:
        await peer.send(STREAM_HEAD, chunk(event("first")))
        await seen.wait()
        await peer.send(chunk(event("second")), chunk(DONE), LAST)

    async with fake_engine(script) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, daemon.address) as door:
            await door.serves("llama")
            async with door.stream("llama") as answer:
                assert answer.status_code == 200
                text = ""
                async for piece in answer.aiter_text():
                    text += piece
                    if "first" in text:
                        assert seen.is_set() or "second" not in text
                        seen.set()  # only now does the engine make the second
            assert text.index("first") < text.index("second") < text.index("data: [DONE]")


@pytest.mark.parametrize("how", ["answers", "fails", "breaks off", "ends without its marker"])
async def test_a_slow_prefill_has_its_head_and_comments_early(how: str, tmp_path: Path) -> None:
    """Then the data; or status 200 and an error event, since the status is given away. Unlike upstream we add no end of
    our own after an error: `[DONE]` is what clients take for success."""
    go_on = trio.Event()

    async def script(asked: Asked, peer: Peer) -> None:
        await go_on.wait()
        match how:
            case "answers":
                await peer.send(*streamed(event("a"), DONE))
            case "fails":
                await peer.send(whole(500, {"error": {"message": "out of memory"}}))
            case "breaks off":
                await peer.reset()
            case _:
                await peer.send(*streamed(event("a")))

    async with fake_engine(script) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, daemon.address, SSE_KEEPALIVE_S="0.1") as door:
            await door.serves("llama")
            client = Client(await trio.open_tcp_stream("127.0.0.1", door.process.door))
            await client.send(chat(stream=True))
            head = await client.until(b"\r\n\r\n")
            assert head.startswith(b"HTTP/1.1 200 ")
            assert b"text/event-stream" in head.lower()
            comments = await client.until(b": ping\n\n") + await client.until(b": ping\n\n")
            assert b"data:" not in comments
            go_on.set()
            if how == "answers":
                told = await client.until(b"\r\n0\r\n\r\n")
                assert told.index(b'"content": "a"') < told.index(b"data: [DONE]")
                assert b'"error"' not in told
            else:
                told, _ = await client.rest()
                assert told.count(b'data: {"error":{') == 1
                assert b"[DONE]" not in told
                assert not told.endswith(b"0\r\n\r\n")  # aborted, so that nobody takes it for whole
                assert (b"out of memory" in told) == (how == "fails")
            await client.close()


async def test_a_call_of_a_tool_reaches_its_container_by_its_plain_name(tmp_path: Path) -> None:
    one, two = Server(tools=["restart", "logs"]), Server("modern", ["restart"])
    async with fake_engine() as engine, fake_daemon() as daemon, at(one) as first, at(two) as second:
        daemon.group("one", openai=url_of(engine), mcp=first)
        daemon.group("two", mcp=second)
        async with outside(tmp_path, daemon.address) as door:
            await door.serves("llama")
            names = [tool["name"] for tool in await door.tools()]
            assert names == ["serve_status", "one__restart", "one__logs", "two__restart"]
            assert await door.call("two__restart", rank=3) == (False, '["restart", {"rank": 3}]')
            assert await door.call("one__logs") == (False, '["logs", {}]')
            assert [(asked["name"], asked["arguments"]) for asked in two.ran] == [("restart", {"rank": 3})]
            assert [asked["name"] for asked in one.ran] == ["logs"]
            failed, text = await door.call("serve_status")
            assert not failed
            assert '"llama"' in text
            assert json.loads(text)["groups"] == (await door.status())["groups"]
            for name in ("one__nothing_like_it", "three__restart", "restart_all"):
                failed, text = await door.call(name)
                assert failed == (name != "one__nothing_like_it"), text  # that one its own server refuses, or not
            assert "There is no tool restart_all. Tools: serve_status, one__restart" in text


async def test_flat_names_are_listed_once_and_want_their_group(tmp_path: Path) -> None:
    one, two = Server(tools=["restart", "logs"]), Server(tools=["restart"])
    async with fake_daemon() as daemon, at(one) as first, at(two) as second:
        daemon.group("one", mcp=first)
        daemon.group("two", mcp=second)
        async with outside(tmp_path, daemon.address, config='[groups]\nmcp_naming = "flat"\n') as door:
            await door.until("both are known", lambda shown: len(shown["groups"]) == 2)
            restart = next(tool for tool in await door.tools() if tool["name"] == "restart")
            assert [tool["name"] for tool in await door.tools()] == ["serve_status", "restart", "logs"]
            assert restart["inputSchema"]["properties"]["__group"]["enum"] == ["one", "two"]
            assert restart["inputSchema"]["required"] == ["__group"]
            failed, text = await door.call("restart", rank=3)
            assert (failed, text) == (True, "restart is offered by several groups: set __group to one of one, two")
            failed, text = await door.call("restart", rank=3, __group="three")
            assert (failed, text) == (True, "restart is offered by one, two; __group must be one of these")
            assert not one.ran and not two.ran
            assert await door.call("restart", rank=3, __group="two") == (False, '["restart", {"rank": 3}]')
            assert await door.call("logs") == (False, '["logs", {}]')  # one group alone has it
            assert await door.call("two__restart") == (False, '["restart", {}]')  # both spellings, always
            assert [asked["arguments"] for asked in two.ran] == [{"rank": 3}, {}]


@pytest.mark.parametrize("shape", SHAPES)
async def test_killing_a_driver_closes_its_group_alone(shape: str, tmp_path: Path) -> None:
    async with fake_engine() as one, fake_engine() as two, fake_daemon(shape=shape) as daemon:
        two.models = ("other",)
        killed = daemon.group("one", openai=url_of(one), actors=["running"], gpus=1)
        daemon.group("two", openai=url_of(two), actors=["running"], gpus=1)
        async with outside(tmp_path, daemon.address) as door:
            await door.serves("llama", "other")
            killed.actors = ["dead" if shape == "new" else "dead (driver gone)"]
            await daemon.tell()
            await door.serves("other")
            assert (await door.group("one"))["why_not"] == "no running actors"
            assert (await door.group("two"))["healthy"] is True
            assert (await door.chat("llama")).status_code == 503
            assert (await door.chat("other")).status_code == 200
            assert len(one.asked) == 0


async def test_an_engine_that_stops_is_told_as_a_failed_probe(tmp_path: Path) -> None:
    async with restartable() as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, daemon.address) as door:
            await door.serves("llama")
            engine.stop()
            why = await door.gated("glm", "endpoint probe failed: ")
            assert why == f"endpoint probe failed: {url_of(engine)}: cannot connect: Connection refused"
            await door.serves()
            answer = await door.chat("llama")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
            # a client is told which gate is shut, its operator also where and why
            assert answer.json()["error"]["message"] == "the model 'llama' is not ready: endpoint probe failed"
            record = await door.ctl("explain", "request", answer.headers["x-request-id"])
            assert record["message"] == f"the model 'llama' is not ready: {why}"
            assert why in await door.ctl_says("explain", "model", "llama")
            assert why in door.log


async def test_a_refusal_comes_after_the_wait_and_typing_errors_do_not_wait(tmp_path: Path) -> None:
    async with restartable() as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, daemon.address, MODEL_WAIT_S="1") as door:
            await door.serves("llama")
            engine.stop()
            await door.gated("glm", "endpoint probe failed")
            begun = trio.current_time()
            assert (await door.chat("lama")).status_code == 404
            answer = await door.chat("llama")
            assert trio.current_time() - begun >= 1
            told = answer.json()["error"]
            assert (answer.status_code, told["code"]) == (503, "model_not_ready")
            wanted = "llama is not ready after 1 s: endpoint probe failed (deadline: groups.model_wait_s). Try again in"
            assert told["message"].startswith(wanted)
            record = await door.ctl("explain", "request", answer.headers["x-request-id"])
            assert f"endpoint probe failed: {url_of(engine)}: " in record["message"]
            (model,) = (await door.ctl("models"))["models"]
            assert f"endpoint probe failed: {url_of(engine)}: " in model["why"]


@pytest.mark.parametrize("noticed", [True, False])
@pytest.mark.parametrize("stream", [True, False])
async def test_a_request_sent_during_an_outage_succeeds_when_the_engine_is_back(
    noticed: bool, stream: bool, tmp_path: Path
) -> None:
    """Also where no probe has noticed yet that it is gone: nothing was sent on a refused connection."""
    environ = {"MODEL_WAIT_S": "20", "PROBE_INTERVAL_S": "0.1" if noticed else "3", "PROBE_FRESH_S": "30"}
    async with restartable() as engine, fake_daemon() as daemon:
        engine.script = says(*(streamed(event("back"), DONE) if stream else (whole(200, CHAT),)))
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, daemon.address, **environ) as door:
            await door.serves("llama")
            engine.stop()
            if noticed:
                await door.gated("glm", "endpoint probe failed")
            answers = []

            async def ask() -> None:
                answers.append(await door.chat("llama", stream=stream))

            async with trio.open_nursery() as nursery:
                nursery.start_soon(ask)
                await door.until("it waits", lambda shown: shown["requests_running"] == 1 or answers)
                await door.gated("glm", "endpoint probe failed")
                assert not answers
                await engine.start()
            assert answers[0].status_code == 200, answers[0].text
            assert ("back" in answers[0].text) == stream
            assert len(engine.asked) == 1


@pytest.mark.parametrize("noticed", [True, False])
async def test_a_stream_has_comments_while_it_waits_for_its_engine(noticed: bool, tmp_path: Path) -> None:
    environ = {"MODEL_WAIT_S": "20", "PROBE_INTERVAL_S": "0.1" if noticed else "3", "PROBE_FRESH_S": "30"}
    async with restartable() as engine, fake_daemon() as daemon:
        engine.script = says(*streamed(event("back"), DONE))
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, daemon.address, SSE_KEEPALIVE_S="0.1", **environ) as door:
            await door.serves("llama")
            engine.stop()
            if noticed:
                await door.gated("glm", "endpoint probe failed")
            client = Client(await trio.open_tcp_stream("127.0.0.1", door.process.door))
            await client.send(chat(stream=True))
            assert (await client.until(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
            await client.until(b": ping\n\n")
            await client.until(b": ping\n\n")
            await engine.start()
            told = await client.until(b"data: [DONE]")
            assert b'"content": "back"' in told
            assert b'"error"' not in told
            await client.close()


async def test_a_refused_connection_counts_as_a_failed_probe(tmp_path: Path) -> None:
    """Without a wait the first request finds it out, and those after it are told why."""
    async with restartable() as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, daemon.address, PROBE_INTERVAL_S="3600", PROBE_FRESH_S="9999") as door:
            await door.serves("llama")
            engine.stop()
            answer = await door.chat("llama")
            assert (answer.status_code, answer.json()["error"]["code"]) == (502, "upstream_failed")
            answer = await door.chat("llama")
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "model_not_ready")
            await door.gated("glm", "endpoint probe failed")


async def test_a_peer_of_the_one_seed_is_found(tmp_path: Path) -> None:
    async with fake_engine() as engine, fake_daemon(node_id="N2") as second, fake_daemon() as first:
        second.group("glm", openai=url_of(engine))
        here = {"node_ip": "127.0.0.1", "link_ip": "127.0.0.1", "addrs": ["127.0.0.1"]}
        first.peers = {"N2": {**here, "http_port": second.port, "alive": True}}
        async with outside(tmp_path, first.address) as door:
            await door.serves("llama")
            shown = await door.status()
            assert {address: row["seed"] for address, row in shown["daemons"].items()} == {
                first.address: True,
                second.address: False,
            }
            assert shown["groups"]["glm"]["daemon"] == second.address
            assert (await door.chat("llama")).status_code == 200


@pytest.mark.parametrize("form", ["v1", "v2", "proto"])
async def test_with_no_seeds_announcements_alone_lead_there(form: str, tmp_path: Path) -> None:
    port = free_udp_port()
    key = "" if form == "v1" else "hunter2"
    async with fake_engine() as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, MENTAT_ANNOUNCE_PORT=str(port), MENTAT_SECRET=key) as door:
            assert (await door.status())["daemons"] == {}
            daemon.announce_as(form, port, key.encode())
            await door.serves("llama")
            row = (await door.status())["daemons"][daemon.address]
            assert (row["connected"], row["seed"]) == (True, False)
            assert (await door.chat("llama")).status_code == 200


@pytest.mark.parametrize("shape", SHAPES)
async def test_a_registered_group_is_served_retires_and_returns(shape: str, tmp_path: Path) -> None:
    """No GPUs and no actors: the probe alone decides. Beside it a group with nothing but tools."""
    async with restartable() as engine, fake_daemon(shape=shape) as daemon, at(Server()) as tools:
        daemon.group("glm", openai=url_of(engine))
        only = daemon.group("only-tools", mcp=tools)
        async with outside(tmp_path, daemon.address, MODEL_TTL_S="1") as door:
            await door.serves("llama")
            engine.stop()
            await door.gated("glm", "endpoint probe failed")
            shown = await door.until("it is retired", lambda shown: "glm" not in shown["groups"])
            assert (await door.chat("llama")).status_code == 404
            # nothing has served for longer than that, and yet it stays, since its agent lives
            assert shown["groups"]["only-tools"]["why_not"] == "no announced OpenAI endpoint"
            assert [tool["name"] for tool in await door.tools()] == ["serve_status", "only-tools__add"]
            assert await door.call("only-tools__add") == (False, '["add", {}]')
            await engine.start()
            await door.serves("llama")
            assert (await door.chat("llama")).status_code == 200
            assert (await door.group("only-tools"))["mcp"] == tools
            only.alive = False
            await daemon.tell()
            await door.until("it goes with its agent", lambda shown: "only-tools" not in shown["groups"])


async def test_a_foreign_universe_leaves_no_line_and_a_wrong_key_one(tmp_path: Path) -> None:
    port = free_udp_port()
    environ = {"MENTAT_ANNOUNCE_PORT": str(port), "MENTAT_SECRET": "hunter2", "MENTAT_UNIVERSE": "blue"}
    async with fake_engine() as engine, fake_daemon() as daemon, fake_daemon(node_id="N2") as other:
        daemon.group("glm", openai=url_of(engine))
        async with outside(tmp_path, **environ) as door:
            before = len(door.process.log)
            for form in ("v1", "v2", "proto"):
                for key in (b"hunter2", b"wrong", b""):
                    other.announce_as(form, port, key, universe="red")
            daemon.announce_as("proto", port, b"hunter2", universe="blue")  # behind them, so they have been read
            await door.serves("llama")
            events = [line.partition(" event=")[2] for line in door.process.log[before:]]
            assert not [told for told in events if told.startswith("announce") or "red" in told], events
            assert other.reads == 0
            for form in ("v2", "proto", "v1", "v2"):
                other.announce_as(form, port, b"wrong", universe="blue")
            other.announce_as("proto", port, b"hunter2", universe="blue")
            await door.until("those have been read too", lambda shown: other.address in shown["daemons"])
            assert door.log.count("event=announce_rejected") == 1

"""Announced groups in a router that is a process: handed to the next one, warned of at the start, read by ctl."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import trio

from tests.fake_daemon import fake_daemon, free_udp_port
from tests.fake_engine import DONE, event, fake_engine, says, streamed
from tests.processes import until
from tests.raw_client import Client, chat
from tests.serve_process import Router, processes


async def ask(router: Router) -> int:
    client = Client(await trio.open_tcp_stream("127.0.0.1", router.door))
    await client.send(chat(stream=True))
    answer = await client.answer("POST")
    await client.close()
    return answer.status


async def test_a_router_that_takes_over_has_the_groups_at_once(tmp_path: Path) -> None:
    """It has heard no announcement yet: the daemons are handed over with the sockets."""
    env = {"MENTAT_DAEMONS": "", "MENTAT_ANNOUNCE_PORT": str(free_udp_port()), "PROBE_INTERVAL_S": "0.2"}
    async with fake_engine(says(*streamed(event("a"), DONE))) as engine, fake_daemon() as daemon:
        daemon.group("glm", openai=f"http://127.0.0.1:{engine.port}/v1")
        async with processes(tmp_path) as routers:
            routers.configure("")
            first = await routers.start(env=env)
            daemon.announce(int(env["MENTAT_ANNOUNCE_PORT"]))
            await first.logged('event="group serves"')
            assert await ask(first) == 200
            second = await routers.start("--takeover", env=env)
            assert await ask(second) == 200
            await first.logged("event=stopped")
            assert 'event="group is gone"' not in "\n".join(first.log)
            assert any("believed without a signature" in line for line in second.log)
            daemon.groups.clear()
            await daemon.tell()
            await second.logged('event="group is gone"')
            assert await second.stop() == 0


async def test_timings_that_do_not_fit_are_told_at_the_start(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("")
        router = await routers.start(env={"PROBE_FRESH_S": "4", "MENTAT_DAEMONS": "127.0.0.1:9"})
        await until(lambda: any("advice=" in line for line in router.log), "the advice is logged")
        assert any("groups.probe_fresh_s: 4 s is less than an interval and a timeout" in line for line in router.log)
        assert await router.stop() == 0


def ctl(folder: Path, *words: str, **environ: str) -> subprocess.CompletedProcess[str]:
    file = folder / "appliance.toml"
    file.write_text("")
    env = {name: value for name, value in os.environ.items() if not name.startswith(("APPLIANCE_", "MENTAT_"))}
    command = [sys.executable, "-m", "appliance", "ctl", "config", *words]
    return subprocess.run(
        command, env=env | {"APPLIANCE_CONFIG": str(file)} | environ, capture_output=True, text=True, check=False
    )


def test_config_check_and_show(tmp_path: Path) -> None:
    done = ctl(tmp_path, "check", PROBE_FRESH_S="4", MENTAT_SECRET="hunter2")
    assert (done.returncode, "advice: groups.probe_fresh_s" in done.stderr) == (0, True)
    done = ctl(tmp_path, "check", "--json", PROBE_FRESH_S="4")
    assert len(json.loads(done.stdout)["advice"]) == 1
    done = ctl(tmp_path, "show", "--json", MENTAT_SECRET="hunter2")
    assert "hunter2" not in done.stdout
    rows = {row["path"]: (row["value"], row["origin"]) for row in json.loads(done.stdout)["values"]}
    assert rows["groups.secret"] == ("***", "environment MENTAT_SECRET")


@pytest.mark.parametrize("environ", [{"MENTAT_SECRET_FILE": "/nowhere"}, {"POLL_INTERVAL_S": "soon"}])
async def test_a_start_that_is_refused(tmp_path: Path, environ: dict[str, str]) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("")
        (line,) = await routers.refused(env=environ)
        assert next(iter(environ)) in line


async def test_ctl_says_which_groups_cannot_serve_and_why(tmp_path: Path) -> None:
    env = {"MENTAT_ANNOUNCE_PORT": "0", "PROBE_INTERVAL_S": "0.2"}
    async with fake_daemon() as daemon, processes(tmp_path) as routers:
        daemon.group("glm", openai="http://127.0.0.1:1/v1")
        routers.configure("")
        router = await routers.start(env={**env, "MENTAT_DAEMONS": daemon.address})

        def ctl_says(word: str) -> subprocess.CompletedProcess[str]:
            command = [sys.executable, "-m", "appliance", "ctl", word, "--admin", str(router.admin)]
            return subprocess.run(command, capture_output=True, text=True, check=False)

        while "endpoint probe failed" not in (told := await trio.to_thread.run_sync(ctl_says, "status")).stdout:
            assert router.alive, router.log
        assert "0 of 1 healthy" in told.stdout
        assert "group glm: endpoint probe failed: http://127.0.0.1:1/v1: " in told.stdout
        told = await trio.to_thread.run_sync(ctl_says, "doctor")
        assert told.returncode == 1 and "glm: endpoint probe failed" in told.stdout
        assert "no announced group can serve" in told.stdout
        told = await trio.to_thread.run_sync(ctl_says, "endpoints")
        assert "'ctl status' says" in told.stdout
        assert await router.stop() == 0

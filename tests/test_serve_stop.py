"""How a router starts, is refused, and ends: what an operator sees of it from outside."""

from __future__ import annotations

import os
import resource
import signal
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest
import trio

from tests.engines import sim_engine
from tests.processes import until
from tests.raw_client import Client, chat, request
from tests.serve_load import LongStream, text_of
from tests.serve_process import endpoint, processes


@pytest.fixture(scope="module")
def sim() -> Iterator[sim_engine.Process]:
    with sim_engine.running("--decode-tokens-per-second", "20") as process:
        yield process


async def connect(port: int) -> Client:
    return Client(await trio.open_tcp_stream("127.0.0.1", port))


# -- stop ------------------------------------------------------------------------------------------------------------


async def test_a_stop_is_staged(tmp_path: Path, sim: sim_engine.Process) -> None:
    """No at once for balancers and newcomers, whole answers for whoever is served, and an end without an error."""
    async with processes(tmp_path) as routers, trio.open_nursery() as nursery:
        routers.configure(endpoint("a", sim.url), drain_s=25)
        router = await routers.start()
        kept, silent, checks = [await connect(port) for port in (router.door, router.door, router.metrics)]
        for client in (kept, silent):
            await client.send(chat(model="m", max_tokens=1))
            answer = await client.answer("POST")
            assert (answer.status, answer.closes) == (200, False)
        await checks.send(request("GET", "/readyz"))
        assert (await checks.answer()).status == 200
        stream = LongStream(router.door, 140)
        nursery.start_soon(stream.run)
        await stream.begun.wait()

        router.send(signal.SIGTERM)
        await router.logged("event=stopping requests=1 drain_s=25")
        await checks.send(request("GET", "/readyz"))
        answer = await checks.answer()
        assert (answer.status, answer.fields["x-appliance-reason"]) == (503, "draining")
        with pytest.raises(OSError, match="all attempts to connect"):
            await connect(router.door)
        await kept.send(request("GET", "/readyz"))
        answer = await kept.answer()
        assert (answer.status, answer.fields["x-appliance-reason"], answer.closes) == (503, "draining", True)
        assert await silent.rest() == (b"", "closed")
        assert stream.answer is None, "the idle connection was closed long before the end of the stream"

        assert await router.ended() == 0
        assert stream.complete
        assert not router.admin.exists()


async def test_whoever_waits_in_the_queue_at_a_stop_is_served(tmp_path: Path, sim: sim_engine.Process) -> None:
    """Closing a listener resets them, though the kernel has accepted them in the router's name. The connection that
    brings nothing gets 5 s, not `drain_s`."""
    async with processes(tmp_path) as routers:
        routers.configure(endpoint("a", sim.url), drain_s=60)
        router = await routers.start()
        router.send(signal.SIGSTOP)
        clients = [await connect(router.door) for _ in range(200)]
        for client in clients[1:]:
            await client.send(chat(model="m", max_tokens=1))
        router.send(signal.SIGTERM)
        router.send(signal.SIGCONT)
        answers = [await client.answer("POST") for client in clients[1:]]
        assert {(answer.status, text_of(answer)) for answer in answers} == {(200, b"You")}
        assert await clients[0].rest() == (b"", "closed")
        assert await router.ended() == 0


async def test_a_second_signal_stops_now(tmp_path: Path, sim: sim_engine.Process) -> None:
    async with processes(tmp_path) as routers, trio.open_nursery() as nursery:
        routers.configure(endpoint("a", sim.url), drain_s=600)
        router = await routers.start()
        stream = LongStream(router.door, 2000)
        nursery.start_soon(stream.run)
        await stream.begun.wait()
        router.send(signal.SIGINT)
        await router.logged("event=stopping")
        router.send(signal.SIGTERM)
        assert await router.ended() == 0
        await router.logged("stopping now, running requests are cut")
        await until(lambda: stream.error, "the stream was cut, and does not look like a success")


async def test_what_outlasts_drain_s_is_cut(tmp_path: Path, sim: sim_engine.Process) -> None:
    async with processes(tmp_path) as routers, trio.open_nursery() as nursery:
        routers.configure(endpoint("a", sim.url), drain_s=0.3)
        router = await routers.start()
        stream = LongStream(router.door, 2000)
        nursery.start_soon(stream.run)
        await stream.begun.wait()
        assert await router.stop() == 0
        await until(lambda: stream.error, "the stream was cut, and does not look like a success")


# -- start -----------------------------------------------------------------------------------------------------------


async def test_a_port_in_use_names_its_setting(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        with socket.create_server(("127.0.0.1", 0)) as holder:
            taken = f"127.0.0.1:{holder.getsockname()[1]}"
            for setting in ("listen", "metrics_listen"):
                routers.configure("", **{setting: taken})
                (line,) = await routers.refused()
                assert line == (
                    f"appliance serve: server.{setting}: {taken} is in use by another process; stop that one or choose"
                    " another address"
                )
        routers.configure("", listen="192.0.2.1:0")
        (line,) = await routers.refused()
        assert line == "appliance serve: server.listen: cannot listen on 192.0.2.1:0: Cannot assign requested address"


async def test_every_fault_of_the_configuration_is_told_at_once(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        routers.configure(
            'listn = "x"\n[deadlines]\ndial_s = 0\n' + endpoint("a", "http://127.0.0.1:1") + endpoint("a", "nonsense")
        )
        lines = await routers.refused()
        paths = [line.removeprefix("appliance serve: ").partition(": ")[0] for line in lines]
        assert sorted(paths) == ["deadlines.dial_s", "endpoints[1].id", "endpoints[1].url", "server.listn"]
        assert not routers.lock.exists(), "nothing was begun"


async def test_ready_means_that_a_model_can_be_asked_for(tmp_path: Path, sim: sim_engine.Process) -> None:
    """An endpoint that names its models itself has not done so yet: a request would be told to come back."""
    async with processes(tmp_path) as routers:
        with socket.create_server(("127.0.0.1", 0)) as silent:
            lost = endpoint("a", f"http://127.0.0.1:{silent.getsockname()[1]}", models=None)
            routers.configure(lost)
            router = await routers.start()
            checks = await connect(router.metrics)
            await checks.send(request("GET", "/readyz"))
            answer = await checks.answer()
            assert (answer.status, answer.fields["x-appliance-reason"]) == (503, "model_not_ready")
            routers.configure(lost + endpoint("b", sim.url))
            router.send(signal.SIGHUP)
            await router.logged("configuration reloaded")
            await checks.send(request("GET", "/readyz"))
            assert (await checks.answer()).status == 200, "one that can is enough"
            assert await router.stop() == 0


async def test_a_door_for_everybody_is_told(tmp_path: Path) -> None:
    """While there are no keys, an open door is a warning; one that only this machine reaches is none."""
    async with processes(tmp_path) as routers:
        for listen, told in (("0.0.0.0:0", 1), ("127.0.0.1:0", 0), (["127.0.0.1:0", "[::]:0"], 1)):
            routers.configure("", listen=listen)
            router = routers.begin()
            await router.logged("event=serving")
            assert await router.stop() == 0
            warned = [line for line in router.log if "the door has no keys" in line and "level=warning" in line]
            assert len(warned) == told, router.log


async def test_one_process_owns_a_state_directory(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("")
        router = await routers.start()
        assert routers.lock.read_text() == f"{router.pid}\n"
        (line,) = await routers.refused(env={"RUNTIME_DIRECTORY": f"{tmp_path}/appliance-other"})
        assert f"{tmp_path}/appliance-state is in use by another appliance serve (pid {router.pid})" in line
        other = await routers.start(
            env={"RUNTIME_DIRECTORY": f"{tmp_path}/appliance-other", "STATE_DIRECTORY": f"{tmp_path}/appliance-second"}
        )
        assert await other.stop() == 0
        assert await router.stop() == 0


async def test_a_state_directory_that_cannot_be_made(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    async with processes(tmp_path) as routers:
        routers.configure("")
        where = f"{tmp_path}/file/appliance"
        (line,) = await routers.refused(env={"STATE_DIRECTORY": where})
        assert line == (
            f"appliance serve: the state directory {where} cannot be made: Not a directory; set STATE_DIRECTORY (or"
            " XDG_STATE_HOME) to a folder that this user can write"
        )


async def test_a_killed_router_hinders_nobody(tmp_path: Path, sim: sim_engine.Process) -> None:
    """What it leaves (its sockets' files, its name in the lock) is seen to be dead."""
    async with processes(tmp_path) as routers:
        routers.configure(endpoint("a", sim.url))
        router = await routers.start()
        client = Client(await trio.open_unix_socket(router.admin))
        await client.send(request("GET", "/status"))
        assert (await client.answer()).status == 200, "the management API has its private socket now"
        router.send(signal.SIGKILL)
        await router.ended()
        left = {path.name for path in router.admin.parent.iterdir()}
        assert left == {"admin.sock", f"admin-{router.pid}.sock"}
        routers.configure(endpoint("a", sim.url), listen=f"127.0.0.1:{router.door}")
        after = await routers.start()
        assert routers.lock.read_text() == f"{after.pid}\n"
        client = Client(await trio.open_unix_socket(after.admin))
        await client.send(request("GET", "/status"))
        assert (await client.answer()).json()["pid"] == after.pid
        assert {path.name for path in after.admin.parent.iterdir()} == {"admin.sock", f"admin-{after.pid}.sock"}
        assert await after.stop() == 0
        assert list(after.admin.parent.iterdir()) == []


async def test_the_limit_of_open_files_is_raised(tmp_path: Path) -> None:
    """The usual soft limit would end 1,024 clients' patience; the hard one is the operator's word."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    async with processes(tmp_path) as routers:
        routers.configure("")
        router = await routers.start(limit=256)
        assert resource.prlimit(router.pid, resource.RLIMIT_NOFILE) == (hard, hard)
        assert await router.stop() == 0


# -- a supervisor ----------------------------------------------------------------------------------------------------


async def test_a_supervisor_hears_how_it_is(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers, trio.open_nursery() as nursery:
        routers.configure("")
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as heard:
            heard.bind(f"{tmp_path}/notify")
            heard.setblocking(False)
            words: list[str] = []

            async def listen() -> None:
                # All the time: ten words that nobody has read are all that the kernel keeps, and the next one is lost.
                while True:
                    await trio.lowlevel.wait_readable(heard)
                    words.append(heard.recv(4096).decode())

            async def next_word(beside: str = "WATCHDOG=1") -> str:
                while True:
                    await until(lambda: words, "the supervisor is told something")
                    if (word := words.pop(0)) != beside:
                        return word

            nursery.start_soon(listen)
            env = {"NOTIFY_SOCKET": f"{tmp_path}/notify", "WATCHDOG_USEC": "200000"}
            router = await routers.start(env=env)
            assert await next_word() == "READY=1"
            for _ in range(3):
                assert await next_word(beside="") == "WATCHDOG=1"
            router.send(signal.SIGHUP)
            assert (await next_word()).startswith("RELOADING=1\nMONOTONIC_USEC=")
            assert await next_word() == "READY=1"
            (line,) = await routers.refused("--takeover")
            assert "must restart it too (systemctl restart)" in line
            router.send(signal.SIGTERM)
            assert await next_word() == "STOPPING=1"
            assert await router.ended() == 0
            nursery.cancel_scope.cancel()


async def test_a_supervisor_that_is_gone_costs_nothing(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("")
        env = {"NOTIFY_SOCKET": "@appliance-nobody", "WATCHDOG_USEC": "100000", "WATCHDOG_PID": "1"}
        assert await (await routers.start(env=env)).stop() == 0


async def test_a_socket_that_cannot_be_a_door(tmp_path: Path) -> None:
    async with processes(tmp_path) as routers:
        routers.configure("")
        with socket.socket(socket.AF_UNIX) as sock, (tmp_path / "file").open("w") as file:
            sock.bind(f"{tmp_path}/sock")
            sock.listen()
            (line,) = await routers.refused(passed=[sock.fileno()])
            assert "descriptor 3 is no listening TCP socket; give its unit ListenStream=PORT and Accept=no" in line
            (line,) = await routers.refused(passed=[file.fileno()])
            assert "descriptor 3 is no socket" in line


async def test_sockets_for_somebody_else_are_left_alone(tmp_path: Path) -> None:
    """A child of a socket-activated process inherits its variables; the pid says that they are not meant."""
    async with processes(tmp_path) as routers:
        routers.configure("")
        router = await routers.start(env={"LISTEN_FDS": "1", "LISTEN_PID": str(os.getpid())})
        assert await router.stop() == 0

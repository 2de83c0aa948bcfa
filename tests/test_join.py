"""`ctl init` and `agent join`, as commands and as processes, against the port that agents call."""

from __future__ import annotations

import json
import os
import socket
import ssl
import time
import tomllib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path

import attrs
import h11
import pytest
import trio
from click.testing import CliRunner
from structlog.testing import capture_logs

from appliance.agent import home
from appliance.cli import agent_join, rootcall
from appliance.cli.config import places
from appliance.cli.main import run
from appliance.control import pki
from appliance.control.joining import TOKEN_S, Joining
from appliance.facts.address import Address
from appliance.store.papers import Papers
from appliance.store.store import Store, open_store
from appliance.wire import certificates
from appliance.wire.tls import link_server_context
from tests.processes import APPLIANCE


@attrs.define
class Done:
    status: int
    out: str
    err: str

    @property
    def line(self) -> str:
        """What a failed command said, which must be one line."""
        (line,) = self.err.splitlines()
        return line


@attrs.frozen
class Machine:
    """A folder that stands for a machine."""

    folder: Path

    @property
    def config(self) -> Path:
        return self.folder / "etc" / "appliance.toml"

    @property
    def papers(self) -> Papers:
        return Papers.of(str(self.folder / "appliance"))

    @property
    def environment(self) -> dict[str, str | None]:
        own: dict[str, str | None] = {name: None for name in os.environ if name.startswith("APPLIANCE_")}
        return own | {"STATE_DIRECTORY": str(self.folder / "appliance"), "APPLIANCE_CONFIG": str(self.config)}

    async def run(self, *words: str) -> Done:
        """The command in a thread, while the control plane answers in this one."""

        def work() -> Done:
            with CliRunner().isolation(env=self.environment) as (out, err, _):
                status = run(list(words))
            return Done(status, out.getvalue().decode(), err.getvalue().decode())

        return await trio.to_thread.run_sync(work)

    async def start(self, *words: str) -> Done:
        """The command as a process."""
        environment = {name: value for name, value in {**os.environ, **self.environment}.items() if value is not None}
        done = await trio.run_process(
            [*APPLIANCE, *words], env=environment, capture_stdout=True, capture_stderr=True, check=False
        )
        return Done(done.returncode, done.stdout.decode(), done.stderr.decode())

    def exists(self, path: str) -> bool:
        return os.path.lexists(path)

    def written(self) -> dict[str, bytes]:
        """Every file of this machine."""
        return {str(path): path.read_bytes() for path in self.folder.rglob("*") if path.is_file()}


def content(path: str) -> bytes:
    return Path(path).read_bytes()


def machine(folder: Path, name: str) -> Machine:
    (folder / name).mkdir()
    return Machine(folder / name)


@attrs.frozen
class Cluster:
    """A control plane of which there is nothing but the port that agents call."""

    box: Machine
    store: Store
    joining: Joining

    async def invite(self, node: str, **changed: str) -> list[str]:
        """The words after `appliance` of an invitation, with other values of some options."""
        words = (await self.joining.add(node, "root")).command.split()[1:]
        for option, value in changed.items():
            words[words.index(f"--{option}") + 1] = value
        return words


@asynccontextmanager
async def serving(joining: Joining, papers: Papers) -> AsyncIterator[None]:
    """The port that agents call, for HTTP alone."""
    context = link_server_context(papers.server, papers.server_key, papers.root)

    async def talk(stream: trio.SocketStream) -> None:
        secure = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        try:
            with trio.fail_after(10):
                await answer(secure)
        except (trio.BrokenResourceError, h11.RemoteProtocolError):
            return
        finally:
            await trio.aclose_forcefully(secure)

    async def answer(secure: trio.SSLStream[trio.SocketStream]) -> None:
        parser, body, request = h11.Connection(h11.SERVER), b"", None
        while True:
            match parser.next_event():
                case h11.NEED_DATA:
                    parser.receive_data(await secure.receive_some())
                case h11.Request() as request:
                    pass
                case h11.Data(data=data):
                    body += bytes(data)
                case _:
                    break
        if not isinstance(request, h11.Request):
            return
        given = await joining.answer(request.method.decode(), request.target.decode(), body, "127.0.0.1")
        head = [("content-type", given.content_type), ("content-length", str(len(given.body))), *given.headers]
        await secure.send_all(parser.send(h11.Response(status_code=given.status, headers=head)) or b"")
        await secure.send_all(
            (parser.send(h11.Data(data=given.body)) or b"") + (parser.send(h11.EndOfMessage()) or b"")
        )
        await secure.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        joining.listen = (Address("127.0.0.1", listeners[0].socket.getsockname()[1]),)
        nursery.start_soon(trio.serve_listeners, talk, listeners)
        yield
        nursery.cancel_scope.cancel()


@pytest.fixture
async def cluster(tmp_path: Path) -> AsyncIterator[Cluster]:
    box = machine(tmp_path, "box")
    authority = pki.create(box.papers, time.time())
    authority.keep_server(["box"], time.time())
    async with open_store("", str(box.folder / "appliance")) as store:
        joining = Joining(store, authority, ())
        # what the control plane logs is not what the command says
        with capture_logs():
            async with serving(joining, box.papers):
                yield Cluster(box, store, joining)


# -- init --------------------------------------------------------------------------------------------------------------


async def test_init_makes_what_a_control_plane_needs_and_says_what_comes_next(tmp_path: Path) -> None:
    box = machine(tmp_path, "box")
    done = await box.start("ctl", "init", "--host", "box.example.org")
    assert (done.status, done.err) == (0, "")
    assert pki.load(box.papers, time.time()).fingerprint in done.out
    assert pki.load(box.papers, time.time()).chosen_names(time.time()) == ["box.example.org"]
    for told in (box.papers.root, box.papers.root_key, str(box.config), "appliance serve", "ctl node add"):
        assert told in done.out
    assert "PRIVATE" not in done.out
    assert {
        name: os.stat(Path(box.papers.folder) / name).st_mode & 0o777 for name in os.listdir(box.papers.folder)
    } == {
        "root.pem": 0o644,
        "root.key": 0o600,
        "server.pem": 0o644,
        "server.key": 0o600,
    }
    link_server_context(box.papers.server, box.papers.server_key, box.papers.root)
    assert (await box.run("ctl", "config", "check")).status == 0


async def test_init_changes_nothing_that_is_there(tmp_path: Path) -> None:
    box = machine(tmp_path, "box")
    box.config.parent.mkdir()
    box.config.write_text('[server]\nlisten = "127.0.0.1:0"\n[control]\nlisten = "127.0.0.7:7000"\n')
    done = await box.run("ctl", "init")
    assert done.status == 0
    assert "was there, not changed" in done.out
    assert "127.0.0.7" in done.out
    before = box.written()
    again = await box.run("ctl", "init")
    assert again.status == 1
    assert again.line == (
        f"appliance: {box.papers.root_key} is there already; nothing was changed. To begin anew, after which every node"
        f" must join again, move {box.papers.folder} away first"
    )
    assert box.written() == before


async def test_init_with_a_broken_configuration_names_its_faults_and_makes_nothing(tmp_path: Path) -> None:
    box = machine(tmp_path, "box")
    box.config.parent.mkdir()
    box.config.write_text("[control]\nlisten = 7\n[nonsense]\n")
    done = await box.run("ctl", "init")
    assert done.status == 1
    assert len(done.err.splitlines()) == 2
    assert "appliance ctl init: control.listen: expected" in done.err
    assert "appliance ctl init: nonsense: " in done.err
    assert not box.exists(box.papers.folder)


async def test_init_where_nothing_can_be_written_says_so(tmp_path: Path) -> None:
    box = machine(tmp_path, "box")
    (box.folder / "etc").write_text("in the way")
    done = await box.run("ctl", "init")
    assert done.status == 1
    assert "name another file with --config" in done.line
    assert not box.exists(box.papers.folder)
    done = await box.run("ctl", "init", "--host", "a:1", "--config", str(box.folder / "x.toml"))
    assert done.status == 2
    assert "expected a host name or an address, without a port" in done.line


# -- join --------------------------------------------------------------------------------------------------------------


async def test_a_machine_joins_and_has_all_that_its_agent_needs(cluster: Cluster, tmp_path: Path) -> None:
    node = machine(tmp_path, "node")
    done = await node.start(*await cluster.invite("node-a"))
    assert (done.status, done.err) == (0, "")
    papers = node.papers
    assert sorted(os.listdir(papers.folder)) == ["node.key", "node.pem", "root.pem"]
    assert os.stat(papers.node_key).st_mode & 0o777 == 0o600
    pem = content(papers.node)
    assert certificates.details(pem).name == "node-a"
    assert certificates.belong(content(papers.node_key), pem)
    assert certificates.signed_by(pem, content(papers.root))
    assert content(papers.root) == content(cluster.box.papers.root)
    url = f"wss://127.0.0.1:{cluster.joining.listen[0].port}"
    assert tomllib.loads(node.config.read_text()) == {"agent": {"control_url": url, "node": "node-a"}}
    for told in (
        "KillMode=process",
        f"--config {node.config}",
        f"STATE_DIRECTORY={node.folder}/appliance",
        "ctl nodes",
    ):
        assert told in done.out
    assert "PRIVATE" not in done.out
    (row,) = await cluster.store.certificates()
    assert row.serial == certificates.details(pem).serial


async def test_a_configuration_that_is_there_keeps_every_other_byte(cluster: Cluster, tmp_path: Path) -> None:
    node = machine(tmp_path, "node")
    node.config.parent.mkdir()
    before = "# ours\n[agent] # this node\nlabels = { rack = 'a' }\n\n[logging]\nlevel = 'debug'  # loud\n"
    node.config.write_text(before)
    node.config.chmod(0o640)
    assert (await node.run(*await cluster.invite("node-a"))).status == 0
    after = node.config.read_text().splitlines()
    assert [line for line in after if not line.startswith(("control_url", "node ="))] == before.splitlines()
    assert tomllib.loads(node.config.read_text())["agent"]["node"] == "node-a"
    assert node.config.stat().st_mode & 0o777 == 0o640


async def test_a_configuration_that_only_a_person_can_extend_is_left_alone(cluster: Cluster, tmp_path: Path) -> None:
    node = machine(tmp_path, "node")
    node.config.parent.mkdir()
    node.config.write_text("agent = { labels = { rack = 'a' } }\n")
    done = await node.run(*await cluster.invite("node-a"))
    assert done.status == 1
    assert node.config.read_text() == "agent = { labels = { rack = 'a' } }\n"
    assert "joined, but" in done.err
    assert f'control_url = "wss://127.0.0.1:{cluster.joining.listen[0].port}"' in done.err
    assert node.papers.joined()


async def test_a_unit_is_written_where_it_is_asked_for(cluster: Cluster, tmp_path: Path) -> None:
    node = machine(tmp_path, "node")
    file = node.folder / "systemd" / "appliance-agent.service"
    done = await node.run(*await cluster.invite("node-a"), "--unit", str(file))
    assert done.status == 0
    assert "KillMode=process" in file.read_text()
    assert "systemctl daemon-reload" in done.out
    other = machine(tmp_path, "other")
    (other.folder / "systemd").write_text("in the way")
    done = await other.run(*await cluster.invite("node-b"), "--unit", str(other.folder / "systemd" / "x.service"))
    assert done.status == 1
    assert "joined, but" in done.err
    assert "KillMode=process" in done.err


async def test_the_unit_finds_what_was_written(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where only a variable of this shell says where that is, which a service does not have."""
    node = machine(tmp_path, "node")
    monkeypatch.setattr(Machine, "environment", {**node.environment, "APPLIANCE_CONFIG": None, "HOME": str(tmp_path)})
    monkeypatch.setattr(agent_join, "places", partial(places, uid=4242))
    done = await node.run(*await cluster.invite("node-a"))
    assert done.status == 0, done
    assert (tmp_path / ".config" / "appliance" / "appliance.toml").exists()
    assert " agent\n" in next(each + "\n" for each in done.out.splitlines() if each.startswith("ExecStart="))
    monkeypatch.setattr(Machine, "environment", Machine.environment | {"XDG_CONFIG_HOME": str(tmp_path / "elsewhere")})
    done = await node.run(*await cluster.invite("node-a"), "--replace")
    file = tmp_path / "elsewhere" / "appliance" / "appliance.toml"
    assert file.exists()
    assert f" agent --config {file}\n" in done.out


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a folder to another user")
async def test_root_joins_for_the_user_whose_folder_it_is(cluster: Cluster, tmp_path: Path) -> None:
    node = machine(tmp_path, "node")
    state = Path(node.papers.folder).parent
    state.mkdir(parents=True)
    os.chown(state, 4242, 4242)
    done = await node.run(*await cluster.invite("node-a"))
    assert done.status == 0, done
    assert "\nUser=4242\n" in done.out
    written = [Path(each) for each in (node.papers.folder, node.papers.node, node.papers.node_key, node.papers.root)]
    assert [each.stat().st_uid for each in written] == [4242] * 4
    assert written[2].stat().st_mode & 0o777 == 0o600


async def refused(node: Machine, words: Sequence[str]) -> str:
    """What a machine is told that may not join; nothing of it is changed."""
    before = node.written()
    done = await node.run(*words)
    assert done.status == 1, done
    assert done.out == ""
    assert node.written() == before
    return done.line


async def test_each_reason_not_to_join_is_one_line_with_the_next_step(cluster: Cluster, tmp_path: Path) -> None:
    node = machine(tmp_path, "node")
    invite = cluster.invite
    again = "run 'appliance ctl node add node-a' on the control plane for another one"

    line = await refused(node, await invite("node-a", token="0" * 40))
    assert "says no (token_invalid): this is no join token of this control plane: run 'appliance ctl node add'" in line
    line = await refused(node, await invite("node-a", name="node-b"))
    assert "(name_mismatch): this join token is for node-a, not for node-b: join with --name node-a" in line
    line = await refused(node, await invite("node-a", root="sha256:" + "0" * 64))
    assert f"has the root {cluster.joining.authority.fingerprint}, and --root says sha256:0000" in line
    assert "if they still differ, something stands in between" in line

    words = await invite("node-a")
    await cluster.joining.revoke("node-a", "root")
    assert f"(token_used): this join token was used or taken back; {again}" in await refused(node, words)
    words = await invite("node-a")
    cluster.joining._clock = lambda: time.time() + TOKEN_S + 1
    assert f"(token_expired): this join token has expired; {again}" in await refused(node, words)


async def test_a_control_plane_that_is_not_there_is_told_from_one_that_is_something_else(
    cluster: Cluster, tmp_path: Path
) -> None:
    node = machine(tmp_path, "node")
    with socket.socket() as nobody:
        nobody.bind(("127.0.0.1", 0))
        closed = f"127.0.0.1:{nobody.getsockname()[1]}"
        line = await refused(node, await cluster.invite("node-a", control=f"wss://{closed}"))
    assert f"cannot reach {closed}: Connection refused; is 'appliance serve' running there" in line
    line = await refused(node, await cluster.invite("node-a", control="wss://nobody.invalid:6384"))
    assert "nobody.invalid is no host that this machine knows: look at --control" in line

    async def plain(stream: trio.SocketStream) -> None:
        await stream.receive_some()
        await stream.send_all(b"HTTP/1.1 400 Bad Request\r\ncontent-length: 0\r\n\r\n")
        await stream.aclose()

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, plain, listeners)
        port = listeners[0].socket.getsockname()[1]
        line = await refused(node, await cluster.invite("node-a", control=f"wss://127.0.0.1:{port}"))
        nursery.cancel_scope.cancel()
    assert "what answers there does not speak TLS; look at --control" in line


@asynccontextmanager
async def stranger(
    folder: Path, talk: Callable[[trio.SSLStream[trio.SocketStream]], Awaitable[None]]
) -> AsyncIterator[int]:
    """Somebody with a root of their own, who talks to each caller: the port."""
    other = pki.create(Papers.of(str(folder / "other" / "appliance")), time.time())
    other.keep_server(["box"], time.time())
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(other.papers.server, other.papers.server_key)

    async def called(stream: trio.SocketStream) -> None:
        secure = trio.SSLStream(stream, context, server_side=True, https_compatible=True)
        try:
            await talk(secure)
        except trio.BrokenResourceError:
            return
        finally:
            await trio.aclose_forcefully(secure)

    async with trio.open_nursery() as nursery:
        listeners = await trio.open_tcp_listeners(0, host="127.0.0.1")
        nursery.start_soon(trio.serve_listeners, called, listeners)
        yield listeners[0].socket.getsockname()[1]
        nursery.cancel_scope.cancel()


async def test_the_token_goes_to_nobody_who_only_shows_the_right_root(cluster: Cluster, tmp_path: Path) -> None:
    """Somebody in between can pass the root on, which is public, but has no certificate of it."""
    heard: list[bytes] = []

    async def between(secure: trio.SSLStream[trio.SocketStream]) -> None:
        heard.append(await secure.receive_some())
        root = cluster.joining.authority.pem
        await secure.send_all(b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%s" % (len(root), root))

    async with stranger(tmp_path, between) as port:
        words = await cluster.invite("node-a", control=f"wss://127.0.0.1:{port}")
        line = await refused(machine(tmp_path, "node"), words)
    assert "the certificate of the other side was not accepted" in line
    assert [piece.split(b" ")[:2] for piece in heard] == [[b"GET", b"/root"]]


@pytest.mark.parametrize(
    ("first", "then"),
    [
        (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
        (b"HTTP/1.1 200 OK\r\n", b"x: y\r\n"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b"-"),
        (b"", b""),
    ],
)
async def test_who_answers_without_end_is_not_heard_for_ever(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bytes, then: bytes
) -> None:
    monkeypatch.setattr(rootcall, "ANSWER_S", 0.4)

    async def drip(secure: trio.SSLStream[trio.SocketStream]) -> None:
        await secure.receive_some()
        await secure.send_all(first)
        while True:
            await secure.send_all(then)
            await trio.sleep(0.05)

    async with stranger(tmp_path, drip) as port:
        with trio.fail_after(8):
            words = await cluster.invite("node-a", control=f"wss://127.0.0.1:{port}")
            line = await refused(machine(tmp_path, "node"), words)
    assert f"no answer from 127.0.0.1:{port} within 0.4 s: is the port open" in line


async def test_a_folder_that_is_another_machines_is_no_place_to_join(
    cluster: Cluster, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A home folder on a file server, or a clone: with --replace it would take the other one's papers away."""
    node = machine(tmp_path, "node")
    assert (await node.run(*await cluster.invite("node-a"))).status == 0
    shards = Path(node.papers.folder).parent / "shards"
    shards.mkdir()
    home.settle(shards)
    assert (await node.run(*await cluster.invite("node-a"), "--replace")).status == 0
    monkeypatch.setattr(home, "this_host", lambda: home.Host("another boot", "another board", "0" * 32))
    note = json.loads((shards / "home").read_text())
    note["host"] |= {"board": "a board", "machine": "1" * 32}
    (shards / "home").write_text(json.dumps(note))
    line = await refused(node, [*await cluster.invite("node-b"), "--replace"])
    assert "is another machine's, with its name and records: where it is shared with that one, set STATE" in line


async def test_what_an_earlier_join_left_is_replaced_only_when_asked(cluster: Cluster, tmp_path: Path) -> None:
    node = machine(tmp_path, "node")
    assert (await node.run(*await cluster.invite("node-a"))).status == 0
    words = await cluster.invite("node-a")
    assert words[-1] == "--replace"
    line = await refused(node, words[:-1])
    assert "this machine has joined already as node-a (certificate until " in line
    assert line.endswith("to join again as node-a, add --replace to this line")
    key = content(node.papers.node_key)
    assert (await node.run(*words)).status == 0
    assert content(node.papers.node_key) != key
    assert len(await cluster.store.certificates("node-a")) == 2
    # under another name: the file says who it was
    assert (await node.run(*await cluster.invite("node-b"), "--replace")).status == 0
    assert tomllib.loads(node.config.read_text())["agent"]["node"] == "node-b"


async def test_a_node_joins_again_after_the_control_plane_was_made_anew(cluster: Cluster, tmp_path: Path) -> None:
    node = machine(tmp_path, "node")
    assert (await node.run(*await cluster.invite("node-a"))).status == 0
    anew = machine(tmp_path, "anew")
    authority = pki.create(anew.papers, time.time())
    authority.keep_server(["box"], time.time())
    async with open_store("", str(anew.folder / "appliance")) as store:
        joining = Joining(store, authority, ())
        async with serving(joining, anew.papers):
            words = await Cluster(anew, store, joining).invite("node-a")
            assert "from another root): to join again as node-a, add --replace" in await refused(node, words)
            assert (await node.run(*words, "--replace")).status == 0
    assert content(node.papers.root) == authority.pem
    assert certificates.signed_by(content(node.papers.node), authority.pem)


async def test_a_configuration_that_points_elsewhere_is_not_turned_round_unasked(
    cluster: Cluster, tmp_path: Path
) -> None:
    node = machine(tmp_path, "node")
    node.config.parent.mkdir()
    node.config.write_text('[agent]\ncontrol_url = "wss://other:6384" # theirs\n')
    words = await cluster.invite("node-a")
    assert "says agent.control_url = wss://other:6384, and this would be wss://127.0.0.1:" in await refused(node, words)
    assert (await node.run(*words, "--replace")).status == 0
    assert "other" not in node.config.read_text()


async def test_a_broken_configuration_costs_no_token(cluster: Cluster, tmp_path: Path) -> None:
    node = machine(tmp_path, "node")
    node.config.parent.mkdir()
    node.config.write_text("[agent\n")
    words = await cluster.invite("node-a")
    assert "mend it first, 'appliance ctl config check' says more" in await refused(node, words)
    node.config.write_text("[agent]\nnonsense = 1\n")
    done = await node.run(*words)
    assert done.status == 1
    assert "agent.nonsense" in done.err
    assert "joined, but the agent cannot start with this configuration" in done.err


async def test_a_control_plane_does_not_join_another_cluster_in_the_same_folder(
    cluster: Cluster, tmp_path: Path
) -> None:
    other = machine(tmp_path, "other")
    assert (await other.run("ctl", "init")).status == 0
    line = await refused(other, await cluster.invite("node-a"))
    assert "this machine is the control plane of another cluster" in line
    # its own agent may: the root is the same
    assert (await cluster.box.run(*await cluster.invite("box"))).status == 0


@pytest.mark.parametrize(
    ("option", "value"),
    [
        *(("control", value) for value in ("https://box:1", "box", "wss://[::1", "")),
        *(("name", value) for value in ("a b", "")),
        *(("root", value) for value in ("sha256:12", "")),
    ],
)
async def test_options_that_are_no_options_are_wrong_usage(
    cluster: Cluster, tmp_path: Path, option: str, value: str
) -> None:
    node = machine(tmp_path, "node")
    done = await node.run(*await cluster.invite("node-a", **{option: value}))
    assert done.status == 2
    wanted = {"control": "wss://host:port", "name": "at most 63 letters", "root": "sha256: and 64 hexadecimal"}
    assert f"--{option}: expected {wanted[option]}" in done.line
    assert node.written() == {}

"""`ctl node`: an operator invites, looks and revokes, against a router with the certificates of a cluster."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import attrs
import pytest
import trio
from click.testing import CliRunner
from structlog.testing import capture_logs

from appliance.admin.running import Running
from appliance.cli.main import run
from appliance.cli.operations import Operations
from appliance.control import pki
from appliance.control.joining import Joining
from appliance.facts.address import Address
from appliance.store.failed import StoreFailed
from appliance.store.papers import Papers
from appliance.store.store import Store, open_store
from appliance.wire import certificates
from tests.processes import environment
from tests.routers import router


@attrs.frozen
class Operator:
    """Somebody who types ctl."""

    folder: Path
    joining: Joining
    store: Store

    async def types(self, *words: str) -> tuple[int, str, str]:
        """Exit status, standard output, standard error."""

        def work() -> tuple[int, str, str]:
            with CliRunner().isolation(env=environment(self.folder)) as (out, err, _):
                status = run(["ctl", "node", *words])
            return status, out.getvalue().decode(), err.getvalue().decode()

        return await trio.to_thread.run_sync(work)

    async def joins(self, node: str) -> str:
        """A machine does what `node add` said; the serial of its certificate."""
        _, line, _ = await self.types("add", node)
        token = line.split()[line.split().index("--token") + 1]
        csr = certificates.signing_request(certificates.new_key(), node)
        body = json.dumps({"token": token, "name": node, "csr": csr}).encode()
        answer = await self.joining.answer("POST", "/join", body, "10.0.0.9")
        assert answer.status == 200, answer
        return certificates.details(json.loads(answer.body)["certificate"].encode()).serial


@asynccontextmanager
async def operating(folder: Path, monkeypatch: pytest.MonkeyPatch, initialised: bool = True) -> AsyncIterator[Operator]:
    real: Callable[[Operations], Running] = Operations._running
    authority = pki.create(Papers.of(str(folder / "cluster")), time.time())
    authority.keep_server(["box"], time.time())
    async with open_store("", str(folder / "cluster")) as store:
        joining = Joining(store, authority, [Address("10.0.0.1", 6384)])

        def running(self: Operations) -> Running:
            return attrs.evolve(real(self), joining=lambda: joining if initialised else None)

        monkeypatch.setattr(Operations, "_running", running)
        async with router(folder):
            with capture_logs():  # what the router logs is not what ctl says
                yield Operator(folder, joining, store)


async def test_add_prints_the_one_line_and_nothing_else(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with operating(tmp_path, monkeypatch) as operator:
        status, out, err = await operator.types("add", "node-a")
        assert status == 0
        (line,) = out.splitlines()
        assert line.startswith("appliance agent join --control wss://10.0.0.1:6384 --name node-a --token ")
        assert line.endswith(f" --root {operator.joining.authority.fingerprint}")
        assert err == "run this line on node-a, within 60 min; it is good once\n"
        _, out, _ = await operator.types("add", "node-a", "--host", "box.example.org")
        assert "--control wss://box.example.org:6384 " in out
        for words, told in (
            (("add", "a b"), "a b: expected at most 63 letters, digits and . _ -"),
            (("add", "a", "--host", "x:1"), "--host x:1: expected a host name or an address, without a port"),
        ):
            status, out, err = await operator.types(*words)
            assert (status, out) == (2, "")
            assert told in err


async def test_list_says_who_may_call_and_until_when(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with operating(tmp_path, monkeypatch) as operator:
        assert (await operator.types("list"))[1].startswith("no node has joined: 'appliance ctl node add NAME'")
        serial = await operator.joins("node-a")
        await operator.types("add", "node-b")
        head, first, second = (await operator.types("list"))[1].splitlines()
        assert head.split() == ["NODE", "STATE", "CERTIFICATE", "ENDS", "TOKEN", "SERIAL"]
        ends = time.strftime("%Y-%m-%d", time.localtime(time.time() + pki.NODE_S))
        assert first.split()[:3] == ["node-a", "joined", ends]
        assert first.endswith(serial)
        assert second.split() == ["node-b", "invited", "-", "open", "for", "60", "min", "-"]
        status, out, _ = await operator.types("list", "--json")
        assert status == 0
        assert [(node["name"], node["state"], node["serial"]) for node in json.loads(out)["nodes"]] == [
            ("node-a", "joined", serial),
            ("node-b", "invited", None),
        ]


async def test_revoke_takes_back_and_says_what_that_does_not_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with operating(tmp_path, monkeypatch) as operator:
        serial = await operator.joins("node-a")
        status, out, _ = await operator.types("revoke", "node-a")
        assert (status, out.splitlines()[0]) == (0, f"node-a: revoked certificate {serial}")
        assert "let it back in with 'appliance ctl node add node-a'" in out
        assert not (await operator.store.certificates("node-a"))[0].good(time.time())
        assert "no certificate that was still good" in (await operator.types("revoke", "node-a"))[1]
        status, _, err = await operator.types("revoke", "node-x")
        assert (status, err) == (
            1,
            "appliance: no certificate was given to node-x; those who have one: node-a\n",
        )
        actions = [(entry.action, entry.target) for entry in await operator.store.entries()]
        assert actions == [("revoke node", "node-a"), ("node joined", "node-a"), ("add node", "node-a")]
        # a name that comes back is told that it takes somebody's place only if there is somebody
        assert "before" not in (await operator.types("add", "node-a"))[2]


async def test_a_name_that_is_in_use_is_told_of(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with operating(tmp_path, monkeypatch) as operator:
        await operator.joins("node-a")
        _, out, err = await operator.types("add", "node-a")
        assert out.endswith(" --replace\n")
        assert "A machine has joined as node-a before: 'appliance ctl node revoke node-a' first, if it is lost" in err


async def test_without_a_cluster_it_says_what_is_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with operating(tmp_path, monkeypatch, initialised=False) as operator:
        for words in (("add", "node-a"), ("list",), ("revoke", "node-a")):
            status, out, err = await operator.types(*words)
            assert (status, out) == (1, "")
            assert "this router runs no control plane: no model has a profile" in err
            assert len(err.splitlines()) == 1


async def test_a_database_that_fails_fails_the_action(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async with operating(tmp_path, monkeypatch) as operator:

        async def full(*args: object) -> None:
            raise StoreFailed("the database x cannot be written, because the disk is full; free some room")

        with monkeypatch.context() as patched:
            patched.setattr(operator.store, "add_token", full)
            status, out, err = await operator.types("add", "node-a")
        assert (status, out) == (1, "")
        assert err == "appliance: the database x cannot be written, because the disk is full; free some room\n"

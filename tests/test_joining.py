"""A token is changed for a certificate: who gets one, who does not, and what each is told."""

from __future__ import annotations

import json
import os
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import attrs
import pytest
import trio
from hypothesis import given
from hypothesis import strategies as st

from appliance.control import pki, whereabouts
from appliance.control.guesses import ALLOWED, MOST_PEERS, WITHIN_S, Guesses
from appliance.control.joining import TOKEN_S, Answer, Joining
from appliance.facts.address import Address
from appliance.facts.errors import Refusal
from appliance.store.failed import StoreFailed
from appliance.store.papers import Papers
from appliance.store.store import Store, open_store
from appliance.wire import certificates

T = time.time()


@attrs.define
class Clock:
    at: float = T

    def __call__(self) -> float:
        return self.at


@attrs.frozen
class Scene:
    store: Store
    joining: Joining
    clock: Clock

    async def invited(self, node: str, **options: Any) -> str:
        """A token for `node`."""
        words = (await self.joining.add(node, "root", **options)).command.split()
        return words[words.index("--token") + 1]

    async def join(self, token: str, name: str, csr: str | None = None, peer: str = "10.0.0.9") -> Answer:
        key = certificates.new_key()
        body = {"token": token, "name": name, "csr": certificates.signing_request(key, name) if csr is None else csr}
        return await self.joining.answer("POST", "/join", json.dumps(body).encode(), peer)


@pytest.fixture
async def scene(tmp_path: Path) -> AsyncIterator[Scene]:
    clock = Clock()
    authority = pki.create(Papers.of(str(tmp_path)), T)
    authority.keep_server(["box"], T, ["box.example.org"])
    async with open_store("", str(tmp_path)) as store:
        yield Scene(store, Joining(store, authority, [Address("0.0.0.0", 6384)], clock, clock), clock)


def told(answer: Answer) -> tuple[int, str, str]:
    error = json.loads(answer.body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert "\n" not in error["message"]
    return answer.status, error["code"], error["message"]


async def test_a_machine_with_a_token_becomes_a_node(scene: Scene) -> None:
    answer = await scene.join(await scene.invited("node-a"), "node-a")
    assert (answer.status, answer.content_type) == (200, "application/json")
    document = json.loads(answer.body)
    root = (await scene.joining.answer("GET", "/root", b"", "10.0.0.9")).body
    assert document["root"].encode() == root
    assert certificates.fingerprint(root) == scene.joining.authority.fingerprint
    details = certificates.details(document["certificate"].encode())
    (row,) = await scene.store.certificates()
    assert (row.node, row.serial, row.not_after) == (details.name, details.serial, details.not_after)
    assert [(entry.by, entry.action, entry.target) for entry in await scene.store.entries()] == [
        ("machine at 10.0.0.9", "node joined", "node-a"),
        ("root", "add node", "node-a"),
    ]


async def test_each_refusal_has_its_word_and_says_what_to_do(scene: Scene) -> None:
    again = "run 'appliance ctl node add node-a' on the control plane for another one"
    token = await scene.invited("node-a")
    assert told(await scene.join("0" * 40, "node-a")) == (
        403,
        "token_invalid",
        "this is no join token of this control plane: run 'appliance ctl node add' there, and the line that it prints"
        " here",
    )
    assert told(await scene.join(token, "node-b")) == (
        403,
        "name_mismatch",
        "this join token is for node-a, not for node-b: join with --name node-a",
    )
    other = certificates.signing_request(certificates.new_key(), "node-b")
    assert told(await scene.join(token, "node-a", other))[:2] == (400, "name_mismatch")
    assert told(await scene.join(token, "node-a", "rubbish"))[:2] == (400, "invalid_csr")
    # none of those used it up
    assert (await scene.join(token, "node-a")).status == 200
    assert told(await scene.join(token, "node-a")) == (
        403,
        "token_used",
        f"this join token was used or taken back; {again}",
    )
    late = await scene.invited("node-a")
    scene.clock.at += TOKEN_S
    assert told(await scene.join(late, "node-a")) == (403, "token_expired", f"this join token has expired; {again}")
    assert len(await scene.store.certificates()) == 1


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"\xff\xfe",
        b'{"token": 1}',
        b'{"token": "a", "name": "b"}',
        b"[" * 5000,
        b'{"token":"\\ud800","name":"a","csr":""}',
    ],
)
async def test_a_body_that_is_none_is_refused(scene: Scene, body: bytes) -> None:
    answer = await scene.joining.answer("POST", "/join", body, "10.0.0.9")
    assert answer.status in (400, 403)
    assert told(answer)[1] in ("invalid_request", "token_invalid")
    assert told(await scene.joining.answer("POST", "/join", b"x" * 20000, "10.0.0.9"))[:2] == (413, "too_large")


async def test_other_paths_and_methods_say_what_there_is(scene: Scene) -> None:
    answer = await scene.joining.answer("GET", "/join", b"", "10.0.0.9")
    assert told(answer)[:2] == (405, "method_not_allowed")
    assert answer.headers == (("Allow", "POST"),)
    assert told(await scene.joining.answer("DELETE", "/root", b"", "10.0.0.9"))[0] == 405
    assert told(await scene.joining.answer("GET", "/v1/models", b"", "10.0.0.9"))[:2] == (404, "not_found")
    assert (await scene.joining.answer("GET", "/root?x=1", b"", "10.0.0.9")).status == 200


async def test_guessing_ends_after_a_few_tries_for_that_machine_alone(scene: Scene) -> None:
    token = await scene.invited("node-a")
    for number in range(ALLOWED):
        assert told(await scene.join(f"{number}", "node-a"))[1] == "token_invalid"
    answer = await scene.join(token, "node-a")
    assert told(answer)[:2] == (429, "too_many_tries")
    assert dict(answer.headers) == {"Retry-After": f"{WITHIN_S:.0f}"}
    assert (await scene.join(token, "node-a", peer="10.0.0.8")).status == 200
    scene.clock.at += WITHIN_S
    assert told(await scene.join("x", "node-a"))[1] == "token_invalid"


async def test_one_token_asked_for_by_many_at_once_makes_one_node(scene: Scene) -> None:
    token = await scene.invited("node-a")
    codes: list[int] = []

    async def join(number: int) -> None:
        codes.append((await scene.join(token, "node-a", peer=f"10.0.0.{number}")).status)

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(join, number)
    assert sorted(codes) == [200] + [403] * 7
    assert len(await scene.store.certificates()) == 1


async def test_a_database_that_fails_is_told_and_the_token_stays_good(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    token = await scene.invited("node-a")

    async def full(*args: object, **named: object) -> bool:
        raise StoreFailed("the database x cannot be written, because the disk is full")

    with monkeypatch.context() as patched:
        patched.setattr(scene.store, "redeem", full)
        answer = await scene.join(token, "node-a")
    assert told(answer)[:2] == (503, "store_unavailable")
    assert dict(answer.headers) == {"Retry-After": "5"}
    assert (await scene.join(token, "node-a")).status == 200


# -- for operators -----------------------------------------------------------------------------------------------------


async def test_an_invitation_is_one_line_to_run(scene: Scene) -> None:
    invitation = await scene.joining.add("node-a", "root")
    words = invitation.command.split()
    assert words[:3] == ["appliance", "agent", "join"]
    options = dict(zip(words[3::2], words[4::2], strict=True))
    assert options["--control"] == "wss://box.example.org:6384"
    assert options["--name"] == "node-a"
    assert options["--root"] == scene.joining.authority.fingerprint
    assert len(bytes.fromhex(options["--token"])) == 20
    assert (invitation.expires_at, invitation.known) == (T + TOKEN_S, False)
    assert options["--token"] not in repr(invitation)
    scene.joining.listen = (Address("::", 7000),)
    assert "wss://[2001:db8::7]:7000 " in (await scene.joining.add("node-b", "root", "2001:db8::7")).command
    assert "wss://box:7000 " in (await scene.joining.add("node-b", "root", "box")).command


async def test_what_is_kept_of_a_token_does_not_let_anybody_join(scene: Scene) -> None:
    token = await scene.invited("node-a")
    (kept,) = await scene.store.tokens(T)
    assert token not in str(kept)
    assert told(await scene.join(kept.sha256, "node-a"))[1] == "token_invalid"


async def test_a_name_that_has_joined_is_invited_to_replace(scene: Scene) -> None:
    await scene.join(await scene.invited("node-a"), "node-a")
    invitation = await scene.joining.add("node-a", "root")
    assert invitation.known
    assert invitation.command.endswith(" --replace")
    await scene.joining.revoke("node-a", "root")
    invitation = await scene.joining.add("node-a", "root")
    assert not invitation.known
    assert invitation.command.endswith(" --replace")  # the machine still has what it was given


@pytest.mark.parametrize("name", ["", "a b", "-a", "ü", "a" * 64, "a;reboot", "control.appliance", "a\n"])
async def test_names_that_no_node_can_have_are_refused(scene: Scene, name: str) -> None:
    with pytest.raises(Refusal) as refused:
        await scene.joining.add(name, "root")
    assert refused.value.code == "bad_name"


@pytest.mark.parametrize("host", ["a b", "box:6384", "wss://box", "10.0.0", "$(reboot)", "-box", "a..b"])
async def test_hosts_that_cannot_be_called_are_refused(scene: Scene, host: str) -> None:
    with pytest.raises(Refusal) as refused:
        await scene.joining.add("node-a", "root", host)
    assert refused.value.code == "bad_host"


async def test_the_list_says_where_each_node_stands(scene: Scene) -> None:
    for node in ("node-a", "node-b", "node-c"):
        await scene.join(await scene.invited(node), node)
    await scene.invited("node-d")
    await scene.joining.revoke("node-b", "root")
    scene.clock.at += 10
    assert {node["name"]: node["state"] for node in await scene.joining.nodes()} == {
        "node-a": "joined",
        "node-b": "revoked",
        "node-c": "joined",
        "node-d": "invited",
    }
    scene.clock.at += 100 * 86400
    states = {node["name"]: node["state"] for node in await scene.joining.nodes()}
    assert states == {"node-a": "expired", "node-b": "revoked", "node-c": "expired"}


async def test_revoking_takes_what_there_is_and_names_who_is_known(scene: Scene) -> None:
    token = await scene.invited("node-a")
    assert await scene.joining.revoke("node-a", "root") == []
    assert told(await scene.join(token, "node-a"))[1] == "token_used"
    await scene.join(await scene.invited("node-b"), "node-b")
    (serial,) = await scene.joining.revoke("node-b", "root")
    assert [each.serial for each in await scene.store.certificates("node-b")] == [serial]
    with pytest.raises(Refusal, match="no certificate was given to node-x; those who have one: node-b") as refused:
        await scene.joining.revoke("node-x", "root")
    assert refused.value.status == 404


async def test_a_certificate_is_renewed_for_its_own_name_while_it_is_good(scene: Scene) -> None:
    key = certificates.new_key()
    csr = certificates.signing_request(key, "node-a")
    assert "has no certificate that is good" in (await scene.joining.renew("node-a", csr)).reason
    await scene.join(await scene.invited("node-a"), "node-a", csr)
    renewed = await scene.joining.renew("node-a", csr)
    assert certificates.belong(key, renewed.certificate.encode())
    assert [row.node for row in await scene.store.certificates()] == ["node-a", "node-a"]
    refused = await scene.joining.renew("node-a", certificates.signing_request(key, "node-b"))
    assert refused.certificate == ""
    assert "node-b" in refused.reason
    await scene.joining.revoke("node-a", "root")
    assert (await scene.joining.renew("node-a", csr)).certificate == ""
    assert len(await scene.store.certificates()) == 2


async def test_the_control_planes_own_certificate_is_renewed_before_it_ends(
    scene: Scene, autojump_clock: trio.testing.MockClock
) -> None:
    server = scene.joining.authority.papers.server
    await scene.joining.renew_own()

    def ends() -> float:
        return certificates.details(Path(server).read_bytes()).not_after

    first = ends()
    with trio.move_on_after(3 * 86400 + 60):
        await scene.joining.keep_certificate()
    assert ends() == first
    scene.clock.at += 300 * 86400
    with trio.move_on_after(86400 + 60):
        await scene.joining.keep_certificate()
    assert ends() == pytest.approx(first + 300 * 86400, abs=2)
    # what cannot be renewed today is tried again tomorrow
    os.unlink(server)
    os.mkdir(server)
    with trio.move_on_after(86400 + 60):
        await scene.joining.keep_certificate()
    os.rmdir(server)
    with trio.move_on_after(86400 + 60):
        await scene.joining.keep_certificate()
    assert ends() > 0


# -- the parts ---------------------------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.sampled_from(["10.0.0.1", "2001:db8::1", "x"]), st.floats(0, 200)), max_size=60))
def test_no_machine_is_looked_at_more_often_than_allowed(tries: list[tuple[str, float]]) -> None:
    guesses = Guesses()
    looked: list[tuple[str, float]] = []
    for peer, now in sorted(tries, key=lambda each: each[1]):
        wait_s = guesses.wait_s(peer, now)
        if not wait_s:
            guesses.wrong(peer, now)
            looked.append((peer, now))
        recent = [at for who, at in looked if who == peer and at > now - WITHIN_S]
        assert len(recent) <= ALLOWED
        assert 0 <= wait_s <= WITHIN_S
        if wait_s:  # nobody is held up for less than that
            assert len(recent) == ALLOWED


def test_one_network_of_ipv6_counts_as_one_machine_and_memory_is_bounded() -> None:
    guesses = Guesses()
    for number in range(ALLOWED):
        guesses.wrong(f"2001:db8::{number}", 0.0)
    assert guesses.wait_s("2001:db8::ffff:1", 1.0) == WITHIN_S - 1
    assert guesses.wait_s("2001:db8:0:1::1", 1.0) == 0
    for number in range(MOST_PEERS + 10):
        guesses.wrong(f"peer-{number}", 1.0)
    assert len(guesses._wrong) == MOST_PEERS
    assert guesses.wait_s("2001:db8::1", 1.0) == 0
    for _ in range(ALLOWED):
        guesses.wrong("::ffff:10.0.0.1", 2.0)
    assert guesses.wait_s("10.0.0.1", 2.0) > 0


def test_a_node_is_told_to_call_the_one_address_that_is_listened_at() -> None:
    assert whereabouts.best([Address("10.1.2.3", 6384)]) == "10.1.2.3"
    assert whereabouts.is_host(whereabouts.best([Address("0.0.0.0", 6384)]))
    found = whereabouts.names([Address("127.0.0.1", 6384), Address("::", 6384)])
    assert "127.0.0.1" in found
    assert "::" not in found
    assert len(set(found)) == len(found)

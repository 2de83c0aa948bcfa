"""Operators' decisions: what is kept, what one call changes, and what a second one finds."""

from __future__ import annotations

import sqlite3
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import trio

from appliance.store.failed import StoreFailed
from appliance.store.rows import Certificate, JoinToken
from appliance.store.store import Store, open_store

T = 1_800_000_000.0
YEAR = 365 * 86400.0


@pytest.fixture
async def store(tmp_path: Path) -> AsyncIterator[Store]:
    async with open_store("", str(tmp_path)) as store:
        yield store


def certificate(node: str, serial: str, issued_at: float = T) -> Certificate:
    return Certificate(node, serial, issued_at + YEAR, issued_at)


async def actions(store: Store) -> list[tuple[str, str, str]]:
    return [(entry.by, entry.action, entry.target) for entry in reversed(await store.entries())]


async def test_a_cordon_is_kept_by_its_first_author_until_it_is_taken_back(store: Store, tmp_path: Path) -> None:
    assert await store.cordon("node-a", "root", T)
    assert not await store.cordon("node-a", "anna", T + 5)
    assert await store.cordon("node-b", "anna", T + 6)
    kept = await store.cordons()
    assert [(each.node, each.at, each.by) for each in kept.values()] == [
        ("node-a", T, "root"),
        ("node-b", T + 6, "anna"),
    ]
    async with open_store("", str(tmp_path)) as again:
        assert await again.cordons() == kept
    assert await store.uncordon("node-a", "anna", T + 9)
    assert not await store.uncordon("node-a", "anna", T + 10)
    assert list(await store.cordons()) == ["node-b"]
    # what changed nothing is no entry
    assert await actions(store) == [
        ("root", "cordon", "node-a"),
        ("anna", "cordon", "node-b"),
        ("anna", "uncordon", "node-a"),
    ]


async def test_a_token_is_good_once_for_one_name_and_for_its_time(store: Store) -> None:
    await store.add_token(JoinToken("d1", "node-a", T + 3600), "root", T)
    assert await store.tokens(T) == (JoinToken("d1", "node-a", T + 3600),)
    assert await store.token("d2") is None
    assert not await store.redeem("d2", certificate("node-a", "1"), "node-a")
    assert not await store.redeem("d1", certificate("node-b", "2"), "node-b")
    assert not await store.redeem("d1", certificate("node-a", "3", T + 3600), "node-a")
    assert await store.certificates() == ()
    assert await store.redeem("d1", certificate("node-a", "4", T + 10), "node-a")
    assert not await store.redeem("d1", certificate("node-a", "5", T + 11), "node-a")
    assert await store.certificates() == (certificate("node-a", "4", T + 10),)
    assert await store.tokens(T) == ()
    assert await store.token("d1") == JoinToken("d1", "node-a", T + 3600, T + 10)
    assert await actions(store) == [("root", "add node", "node-a"), ("node-a", "node joined", "node-a")]


async def test_two_who_use_one_token_at_one_time_get_one_certificate(store: Store) -> None:
    await store.add_token(JoinToken("d1", "node-a", T + 3600), "root", T)
    got: list[bool] = []

    async def join(serial: str) -> None:
        got.append(await store.redeem("d1", certificate("node-a", serial), "node-a"))

    async with trio.open_nursery() as nursery:
        for number in range(8):
            nursery.start_soon(join, f"{number}")
    assert sorted(got) == [False] * 7 + [True]
    assert len(await store.certificates()) == 1


async def test_a_new_token_ends_the_one_before_it(store: Store) -> None:
    await store.add_token(JoinToken("d1", "node-a", T + 3600), "root", T)
    await store.add_token(JoinToken("d2", "node-a", T + 3700), "root", T + 100)
    assert [token.sha256 for token in await store.tokens(T)] == ["d2"]
    assert not await store.redeem("d1", certificate("node-a", "1"), "node-a")


async def test_old_tokens_are_forgotten(store: Store) -> None:
    await store.add_token(JoinToken("d1", "node-a", T + 3600), "root", T)
    await store.add_token(JoinToken("d2", "node-b", T + YEAR), "root", T + 60 * 86400)
    assert await store.token("d1") is None


async def test_revoking_takes_certificates_and_open_tokens_of_that_node_alone(store: Store) -> None:
    for number, node in enumerate(("node-a", "node-b")):
        await store.add_token(JoinToken(f"d{number}", node, T + 3600), "root", T)
        assert await store.redeem(f"d{number}", certificate(node, f"{number}"), node)
        await store.add_token(JoinToken(f"e{number}", node, T + 3600), "root", T)
    gone = await store.revoke("node-a", "anna", T + 50)
    assert [(each.serial, each.revoked_at) for each in gone] == [("0", T + 50)]
    assert await store.revoke("node-a", "anna", T + 60) == ()
    assert {each.node: each.good(T + 60) for each in await store.certificates()} == {"node-a": False, "node-b": True}
    assert [token.node for token in await store.tokens(T)] == ["node-b"]
    assert (await store.entries(1))[0].action == "revoke node"
    # a node that was thrown out may be let in again
    await store.add_token(JoinToken("f", "node-a", T + 3600), "root", T + 100)
    assert await store.redeem("f", certificate("node-a", "9", T + 101), "node-a")
    assert [each.good(T + 102) for each in await store.certificates("node-a")] == [False, True]


async def joined(store: Store, node: str, serial: str, at: float = T) -> None:
    await store.add_token(JoinToken(f"token-{serial}", node, at + 3600), "root", at)
    assert await store.redeem(f"token-{serial}", certificate(node, serial, at), node)


async def test_a_new_certificate_drops_those_of_the_node_that_are_over(store: Store) -> None:
    await joined(store, "node-a", "1")
    await joined(store, "node-b", "2")
    assert await store.renew_certificate(certificate("node-a", "3", T + YEAR - 9), "node-a")
    assert [each.serial for each in await store.certificates()] == ["1", "3", "2"]
    assert await store.renew_certificate(certificate("node-a", "4", T + YEAR + 9), "node-a")
    assert [each.serial for each in await store.certificates()] == ["3", "4", "2"]
    assert not certificate("node-a", "1").good(T + YEAR)


async def test_only_who_has_a_good_certificate_gets_another(store: Store) -> None:
    await joined(store, "node-a", "1")
    assert not await store.renew_certificate(certificate("node-a", "2", T + YEAR), "node-a")
    assert not await store.renew_certificate(certificate("node-b", "2"), "node-b")
    await store.revoke("node-a", "root", T + 5)
    assert not await store.renew_certificate(certificate("node-a", "2", T + 6), "node-a")
    assert [each.serial for each in await store.certificates()] == ["1"]


async def test_the_audit_is_read_newest_first_and_page_by_page(store: Store) -> None:
    for number in range(5):
        await store.audit("root", "scale", f"model-{number}", "2 replicas", T + number)
    first = await store.entries(2)
    assert [entry.target for entry in first] == ["model-4", "model-3"]
    assert [entry.target for entry in await store.entries(9, before=first[-1].id)] == ["model-2", "model-1", "model-0"]


async def test_a_failing_write_leaves_nothing_of_itself(store: Store) -> None:
    await joined(store, "node-a", "1")
    await store.add_token(JoinToken("d1", "node-a", T + 3600), "root", T)
    with pytest.raises(StoreFailed):  # the serial is taken
        await store.redeem("d1", certificate("node-a", "1"), "node-a")
    assert (await store.tokens(T))[0].used_at is None
    assert await store.redeem("d1", certificate("node-a", "2"), "node-a")


async def test_urls_name_files_from_the_state_folder_or_from_the_root(tmp_path: Path) -> None:
    state = tmp_path / "state"
    for url, file in (
        ("", state / "appliance.db"),
        ("sqlite:///other.db", state / "other.db"),
        (f"sqlite:///{tmp_path}/there.db", tmp_path / "there.db"),
    ):
        async with open_store(url, str(state)) as store:
            assert store.path == str(file)
            await store.cordon("node-a", "root", T)
        assert sqlite3.connect(file).execute("SELECT count(*) FROM cordons").fetchone() == (1,)
        assert file.stat().st_mode & 0o777 == 0o600

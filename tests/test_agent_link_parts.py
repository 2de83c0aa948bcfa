"""What a connection has said, how long to wait, a log that is read on, a certificate that is renewed."""

from __future__ import annotations

import time
from pathlib import Path
from random import Random

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent import credentials as own
from appliance.agent import following, logs
from appliance.agent.credentials import Credentials, NoCertificate
from appliance.agent.following import Following
from appliance.agent.redial import LASTED_S, LONGEST_S, REFUSED_LONGEST_S, REFUSED_S, Redial
from appliance.agent.said import Said
from appliance.facts.report import Report
from tests.agent_scene import NODE
from tests.caller_scene import shard
from tests.link_papers import DAY_S, Cluster

STATES = ("starting", "loading", "ready", "failed")


# -- what was said -----------------------------------------------------------------------------------------------------


@given(st.lists(st.dictionaries(st.sampled_from("abcd"), st.sampled_from(STATES), max_size=4), min_size=1))
def test_news_lead_from_what_was_registered_to_what_is(steps: list[dict[str, str]]) -> None:
    def reports(step: dict[str, str]) -> dict[str, Report]:
        return {f"{name}/0": Report(shard(name), state, 0.0) for name, state in step.items()}  # type: ignore[arg-type]

    there = reports(steps[0])
    said = Said(NODE, there, 0.0)
    for step in steps:
        now = reports(step)
        news = said.news(now)
        assert (news is None) == (there == now)
        if news is not None:
            assert all(there.get(each.shard.id) != each for each in news.reports), "said what was known"
            there |= {each.shard.id: each for each in news.reports}
            for shard_id in news.gone:
                del there[shard_id]
        assert there == now
        assert said.news(now) is None, "said twice"


def test_what_is_denied_is_said_once_although_it_was_never_there() -> None:
    said = Said(NODE, {}, 0.0)
    said.deny("x/0")
    news = said.news({})
    assert news is not None and news.gone == ("x/0",)
    assert said.news({}) is None


# -- how long to wait --------------------------------------------------------------------------------------------------


@given(st.lists(st.sampled_from(["lost", "lasted", "failed", "refused"]), max_size=60), st.integers())
def test_waits_are_bounded_and_begin_anew_after_what_lasted(ends: list[str], seed: int) -> None:
    redial = Redial(Random(seed))
    for end in ends:
        match end:
            case "lost":
                assert 0.1 < redial.lost(0.0) <= LONGEST_S
            case "lasted":
                assert 0.1 < redial.lost(LASTED_S) <= 0.25
            case "failed":
                assert 0.1 < redial.failed() <= LONGEST_S
            case "refused":
                assert REFUSED_S <= redial.refused() <= REFUSED_LONGEST_S


def test_many_agents_do_not_come_together() -> None:
    waits = sorted(Redial(Random(seed)).lost(100.0) for seed in range(200))
    assert waits[-1] - waits[0] > 0.1


# -- a log that is read on ---------------------------------------------------------------------------------------------


def reader(log: Path, n: int = 0) -> Following:
    made = Following(str(log), lambda: ("secret",))
    made.last(n)
    return made


@given(st.lists(st.text(alphabet="ab\n\rä", max_size=20), max_size=8))
def test_every_whole_line_is_given_once(tmp_path_factory: pytest.TempPathFactory, pieces: list[str]) -> None:
    log = tmp_path_factory.mktemp("log") / "log"
    log.write_bytes(b"")
    made = reader(log)
    found: list[str] = []
    for piece in pieces:
        with log.open("ab") as file:
            file.write(piece.encode())
        found += made.more()
    text = "".join(pieces)
    whole = text[: max(text.rfind("\n"), text.rfind("\r")) + 1]
    assert found == logs.lines_of(whole)


def test_reading_on_begins_where_the_last_lines_ended(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\nthr")
    made = Following(str(log), lambda: ())
    assert made.last(1) == ["two"]
    log.write_text("one\ntwo\nthree\n")
    assert made.more() == ["three"]
    assert made.more() == []


def test_a_cut_log_says_so_and_goes_on(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\ntwo\n")
    made = reader(log)
    with logs._Held(str(log)) as held:
        held.cut(str(log), 4)
    with log.open("a") as file:
        file.write("half\nfour\nfive\n")
    assert made.more() == ["[the log was cut here; some lines may be missing]", "four", "five"]


def test_a_new_start_is_read_from_its_beginning(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("one\n")
    made = reader(log)
    logs.begin(str(log))
    log.write_text("first\n")
    assert made.more() == ["first"]
    log.unlink()
    assert made.more() == []


def test_no_secret_is_shown_however_long_its_line(tmp_path: Path) -> None:
    log = tmp_path / "log"
    log.write_text("")
    made = reader(log)
    most = following.READ_BYTES
    for before in (0, 7_997, most - 3, most - 1):
        with log.open("a") as file:
            file.write("x" * before + "secret" + "y" * 10 + "\n")
        with log.open("a") as file:
            file.write("next\n")
        found: list[str] = []
        while "next" not in found:
            found += made.more()
        assert not any("sec" in line or "ret" in line for line in found), before
    assert all(len(line) <= following.LINE_CHARS for line in found)


# -- the certificate ---------------------------------------------------------------------------------------------------


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    return Cluster(tmp_path / "plane")


def test_what_is_shown_names_everything_an_operator_compares(tmp_path: Path, cluster: Cluster) -> None:
    papers = cluster.join(tmp_path / "node", "node-a")
    found = Credentials(papers).read()
    assert found.name == "node-a"
    assert found.signed
    text = str(found)
    for part in ("node-a", found.serial, cluster.root.fingerprint, "good until 2"):
        assert part in text


def test_it_is_renewed_for_the_same_key_and_name(tmp_path: Path, cluster: Cluster) -> None:
    papers = cluster.join(tmp_path / "node", "node-a")
    made = Credentials(papers)
    before = made.read()
    key = Path(papers.node_key).read_bytes()
    later = cluster.root.sign_csr(made.request(), "node-a", time.time() + DAY_S).pem
    after = made.renew(later)
    assert after.ends > before.ends
    assert after.serial != before.serial
    assert Path(papers.node_key).read_bytes() == key
    made.context()
    assert sorted(each.name for each in Path(papers.folder).iterdir()) == ["node.key", "node.pem", "root.pem"]


def test_a_certificate_that_would_not_do_changes_nothing(tmp_path: Path, cluster: Cluster) -> None:
    papers = cluster.join(tmp_path / "node", "node-a")
    other = Cluster(tmp_path / "elsewhere")
    made, stranger = Credentials(papers), Credentials(cluster.join(tmp_path / "b", "node-b"))
    before = Path(papers.node).read_bytes()
    later = time.time() + DAY_S
    for pem, why in (
        (cluster.root.sign_csr(stranger.request(), "node-b", later).pem, "for node-b, and this is node-a"),
        (cluster.fresh("node-a", later), "for another key"),
        (other.root.sign_csr(made.request(), "node-a", later).pem, "not signed by the root"),
        (cluster.root.sign_csr(made.request(), "node-a", later - 2 * DAY_S).pem, "ends no later"),
        ("nonsense", "what came is not one certificate in PEM"),
    ):
        with pytest.raises(NoCertificate, match=why):
            made.renew(pem)
    assert Path(papers.node).read_bytes() == before


def test_what_is_missing_is_named_with_the_next_step(tmp_path: Path, cluster: Cluster) -> None:
    papers = cluster.join(tmp_path / "node", "node-a")
    made = Credentials(papers)
    elsewhere = cluster.join(tmp_path / "other", "node-a")
    Path(papers.node_key).write_bytes(Path(elsewhere.node_key).read_bytes())
    with pytest.raises(NoCertificate, match=r"cannot be used together .*ctl node add"):
        made.context()
    Path(papers.root).write_text("x")
    with pytest.raises(NoCertificate, match=r"root\.pem: expected one certificate in PEM; run 'appliance ctl node add"):
        made.read()
    Path(papers.node).unlink()
    for method in (made.read, made.context):
        with pytest.raises(NoCertificate, match=r"there is no .*node\.pem; run"):
            method()


def test_it_is_time_when_a_third_is_left() -> None:
    certificate = own.Certificate("a", "1", 0.0, 90.0, "sha256:x")
    assert certificate.renew_at() == 60.0
    assert attrs.evolve(certificate, begins=60.0).renew_at() == 80.0

"""Names to members: what the file says, what endpoints report, and what a reload keeps."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.choice import Outcome
from appliance.facts.endpoint import Endpoint
from appliance.facts.errors import Refusal
from appliance.facts.settings import Model, Prefix
from appliance.rules.scheduling.pipeline import Policy, choose, not_ready
from appliance.rules.scheduling.table import Table

RNG = Random(1)


def endpoint(name: str, *models: str, port: int = 8000, **more: object) -> Endpoint:
    return Endpoint(name, "10.0.0.1", port, models=models or None, **more)


def table(endpoints: list[Endpoint], models: list[Model] | None = None) -> Table:
    made = Table(Prefix())
    made.replace(endpoints, models or [])
    return made


def served_by(table: Table, name: str) -> list[str]:
    return [member.id for member in table.resolve(name).members]


def test_aliases_mean_their_model() -> None:
    names = table([endpoint("a", "llama")], [Model("llama", aliases=("chat", "default"))])
    assert names.resolve("chat") is names.resolve("llama") is names.resolve("default")
    assert names.resolve("chat").name == "llama"
    assert names.available() == ["chat", "default", "llama"]


def test_an_endpoint_that_names_an_alias_serves_the_model_under_its_own_name() -> None:
    names = table([endpoint("a", "chat"), endpoint("b", "llama")], [Model("llama", aliases=("chat",))])
    entry = names.resolve("llama")
    assert served_by(names, "llama") == ["a", "b"]
    assert [entry.upstream_name(member) for member in entry.members] == ["chat", "llama"]


def test_an_unknown_name_lists_what_there_is() -> None:
    names = table([endpoint("a", "llama", "qwen")])
    with pytest.raises(Refusal) as caught:
        names.resolve("gpt")
    refusal = caught.value
    assert (refusal.status, refusal.code, refusal.param) == (404, "model_not_found", "model")
    assert "llama, qwen" in refusal.message and "gpt" in refusal.message


def test_the_list_shows_a_caller_only_what_it_may_know_of_and_has_an_end() -> None:
    names = table([endpoint("a", *[f"m{number:03}" for number in range(100)], "secret")])
    message = names.unknown("x", visible=lambda name: name != "secret").message
    assert "secret" not in message and "and 80 more" in message
    assert len(names.unknown("y" * 100_000).message) < 1000


def test_a_model_without_endpoints_exists_and_is_not_ready() -> None:
    names = table([], [Model("llama")])
    refusal = not_ready(names.resolve("llama"), 0.0)
    assert (refusal.status, refusal.code) == (503, "model_not_ready")
    assert refusal.retry_after_s is not None


def test_reported_names_join_and_leave() -> None:
    names = table([endpoint("a", "llama"), endpoint("b")])
    member = names.members["b"]
    assert names.learn_names(member, ["llama", "qwen"]) == ()
    assert served_by(names, "llama") == ["a", "b"]
    assert served_by(names, "qwen") == ["b"]
    assert not names.resolve("qwen").configured and names.resolve("llama").configured
    names.learn_names(member, ["llama"])
    assert names.find("qwen") is None


def test_an_alias_in_the_file_beats_a_reported_name() -> None:
    names = table([endpoint("a", "llama"), endpoint("b")], [Model("llama", aliases=("chat",))])
    assert names.learn_names(names.members["b"], ["chat", "other"]) == ("chat",)
    assert served_by(names, "chat") == ["a"]
    assert served_by(names, "other") == ["b"]


def test_names_reported_by_an_endpoint_that_has_some_in_the_file_change_nothing() -> None:
    names = table([endpoint("a", "llama")])
    names.learn_names(names.members["a"], ["something-else"])
    assert names.find("something-else") is None
    assert names.members["a"].heard == ("something-else",)


def test_before_an_endpoint_was_heard_a_name_may_yet_appear() -> None:
    names = table([endpoint("a", "llama"), endpoint("b")])
    assert names.unknown("qwen").status == 503
    names.members["b"].set_failing("unreachable")
    assert names.unknown("qwen").status == 404
    names.members["b"].set_failing("")
    names.learn_names(names.members["b"], [])
    assert names.unknown("qwen").status == 404


def test_fallbacks_that_exist_come_in_order() -> None:
    models = [Model("a", fallbacks=("gone", "c", "b", "a")), Model("b"), Model("c")]
    names = table([], models)
    assert [entry.name for entry in names.chain(names.resolve("a"))] == ["c", "b"]


def test_a_reload_keeps_the_live_state_of_what_is_still_there() -> None:
    names = table([endpoint("a", "m"), endpoint("b", "m"), endpoint("c", "m")])
    entry = names.resolve("m")
    kept, moved, gone = (names.members[name] for name in "abc")
    lease = kept.begin(0.0)
    for _ in range(5):
        kept.begin(0.0).finish(Outcome.FAILURE, 0.0, RNG)
    endpoints = [endpoint("a", "m", capacity=8), endpoint("b", "m", port=9000), endpoint("d", "m")]
    change = names.replace(endpoints, [Model("m", aliases=("x",))])
    assert names.members["a"] is kept and kept.in_flight == 1 and not kept.up
    assert kept.capacity == 8
    assert {member.id for member in change.added} == {"b", "d"}
    assert set(change.removed) == {moved, gone}
    assert change.changed == (kept,)
    assert names.resolve("x") is entry, "prefixes and sessions survive"
    assert served_by(names, "m") == ["a", "b", "d"]
    lease.finish(Outcome.SUCCESS, 1.0, RNG)
    assert kept.in_flight == 0


def test_another_engine_at_the_same_address_is_another_endpoint() -> None:
    names = table([endpoint("a", "m", engine="vllm")])
    before = names.members["a"]
    names.replace([endpoint("a", "m", engine="sglang")], [])
    assert names.members["a"] is not before


def test_the_same_settings_again_change_nothing() -> None:
    endpoints = [endpoint("a", "m"), endpoint("b")]
    names = table(endpoints, [Model("m")])
    names.learn_names(names.members["b"], ["m", "n"])
    change = names.replace(endpoints, [Model("m")])
    assert (change.added, change.removed, change.changed) == ((), (), ())
    assert served_by(names, "n") == ["b"]


def test_sessions_and_response_ids_of_a_removed_endpoint_are_forgotten() -> None:
    names = table([endpoint("a", "m"), endpoint("b", "m")])
    entry = names.resolve("m")
    entry.sessions.put("s", "a")
    entry.sessions.put("t", "b")
    names.responses.put("resp_1", "a")
    names.replace([endpoint("b", "m")], [])
    assert (entry.sessions.get("s"), entry.sessions.get("t"), names.responses.get("resp_1")) == ("", "b", "")


def test_pools_come_highest_number_first() -> None:
    names = table(
        [
            endpoint("a", "m", pool="spill", pool_priority=0),
            endpoint("b", "m", pool="main", pool_priority=10),
            endpoint("c", "m", pool="main", pool_priority=10),
        ]
    )
    assert [(pool.name, pool.ids) for pool in names.resolve("m").pools] == [("main", ("b", "c")), ("spill", ("a",))]


NAMES = st.sampled_from(["m", "n", "o", "alias"])
ENDPOINTS = st.lists(
    st.builds(
        endpoint,
        st.sampled_from("abcd"),
        st.just("m"),
        port=st.integers(8000, 8002),
        pool=st.sampled_from(["p", "q"]),
        pool_priority=st.integers(0, 1),
    ),
    max_size=4,
    unique_by=lambda one: one.id,
)


@given(st.lists(st.tuples(ENDPOINTS, st.booleans()), min_size=1, max_size=6))
def test_after_any_reloads_every_member_is_in_one_pool_of_its_models_and_leases_return(
    reloads: list[tuple[list[Endpoint], bool]],
) -> None:
    names = Table(Prefix())
    leases = []
    known: dict[int, int] = {}
    for endpoints, with_model in reloads:
        before = dict(names.members)
        change = names.replace(endpoints, [Model("m", aliases=("alias",))] if with_model else [])
        assert set(names.members) == {one.id for one in endpoints}
        assert set(change.removed) == set(before.values()) - set(names.members.values())
        assert set(change.added) == set(names.members.values()) - set(before.values())
        entry = names.find("m")
        if entry is None:
            assert not endpoints and not with_model
            continue
        placed = [member for pool in entry.pools for member in pool.members]
        assert len(placed) == len(set(placed)) and set(placed) == set(names.members.values())
        assert [pool.priority for pool in entry.pools] == sorted((pool.priority for pool in entry.pools), reverse=True)
        member, _ = choose(entry, Policy(), 0.0, RNG)
        assert (member is None) == (not endpoints)
        if member is not None:
            leases.append(member.begin(0.0))
            known[id(member)] = known.get(id(member), 0) + 1
            assert member.in_flight == known[id(member)], "a kept member lost its leases"
    for lease in leases:
        lease.finish(Outcome.SUCCESS, 0.0, RNG)
    assert all(lease.member.in_flight == 0 for lease in leases)


def group(name: str, *models: str) -> Endpoint:
    return Endpoint(f"group:{name}", "10.0.0.9", 8000, models=models, announced=True, retries=False)


def test_groups_serve_names_that_nobody_has() -> None:
    names = table([group("a", "m", "n"), group("b", "m")])
    assert served_by(names, "m") == ["group:a", "group:b"]  # balanced
    assert served_by(names, "n") == ["group:a"]
    assert names.available() == ["m", "n"]
    assert names.withheld == {}


def test_a_group_takes_no_name_of_the_file() -> None:
    models = [Model("configured", aliases=("alias",)), Model("empty")]
    thief = group("thief", "configured", "alias", "empty", "listed", "heard", "own")
    silent = endpoint("asked")
    names = table([thief, endpoint("named", "configured", "listed"), silent], models)
    names.learn_names(names.members["asked"], ["heard"])
    assert served_by(names, "configured") == served_by(names, "listed") == ["named"]
    assert served_by(names, "alias") == ["named"]
    assert served_by(names, "empty") == []
    assert served_by(names, "heard") == ["asked"]
    assert served_by(names, "own") == ["group:thief"]
    assert names.withheld == {"group:thief": ("configured", "alias", "empty", "listed", "heard")}


def test_a_group_joins_a_model_that_lets_it() -> None:
    models = [Model("open", aliases=("alias",), groups=True), Model("shut")]
    names = table([endpoint("a", "open"), group("g", "alias", "shut")], models)
    entry = names.resolve("open")
    assert served_by(names, "open") == ["a", "group:g"]
    assert [entry.upstream_name(member) for member in entry.members] == ["open", "alias"]
    assert served_by(names, "shut") == []
    names.replace([endpoint("a", "open"), group("g", "open")], [Model("open")])
    assert served_by(names, "open") == ["a"]


def test_a_name_that_is_claimed_and_not_served_is_told_why() -> None:
    names = table([group("a", "m")])
    names.gated = {"glm": "no running actors"}
    with pytest.raises(Refusal) as refused:
        names.resolve("glm")
    assert (refused.value.status, refused.value.code) == (503, "model_not_ready")
    assert refused.value.message == "the model 'glm' is not ready: no running actors"
    assert names.available() == ["m"]
    with pytest.raises(Refusal) as refused:
        names.resolve("other")
    assert refused.value.status == 404


def test_a_name_that_was_served_before_can_be_waited_for_and_is_not_listed() -> None:
    names = table([group("a", "m")], [Model("c")])
    names.missed = {"glm": "endpoint probe stale", "c": "never"}
    names.replace([group("a", "m")], [Model("c")])
    assert names.resolve("glm").waking == "endpoint probe stale"
    assert served_by(names, "glm") == []
    assert names.available() == ["c", "m"]
    names.missed = {}
    names.replace([group("a", "m"), group("b", "glm")], [Model("c")])
    assert served_by(names, "glm") == ["group:b"]
    assert names.resolve("glm").waking == ""


@given(
    st.lists(st.sampled_from("abcdef"), unique=True),
    st.lists(st.sampled_from("abcdef"), unique=True),
    st.lists(st.sampled_from("abcdef"), unique=True, min_size=1),
)
def test_no_group_ever_serves_what_the_file_keeps(models: list[str], listed: list[str], claimed: list[str]) -> None:
    file = [endpoint("e", *listed)] if listed else []
    names = table([group("g", *claimed), *file], [Model(name) for name in models])
    for name in claimed:
        serves = "group:g" in served_by(names, name)
        assert serves == (name not in {*models, *listed})

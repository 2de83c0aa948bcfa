"""The metric contract: what is read from each engine's text, what counts as broken, and how often that is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.rules.engines.metrics import NO_TEXT, TABLE, Contract, read, scraped

VLLM = """\
# HELP vllm:num_requests_running Number of requests in model execution batches.
# TYPE vllm:num_requests_running gauge
vllm:num_requests_running{engine="0",model_name="tiny"} 3.0
# TYPE vllm:num_requests_waiting gauge
vllm:num_requests_waiting{engine="0",model_name="tiny"} 2.0
# TYPE vllm:num_requests_waiting_by_reason gauge
vllm:num_requests_waiting_by_reason{engine="0",model_name="tiny",reason="capacity"} 90.0
# TYPE vllm:kv_cache_usage_perc gauge
vllm:kv_cache_usage_perc{engine="0",model_name="tiny"} 0.25
# TYPE vllm:prefix_cache_queries_total counter
vllm:prefix_cache_queries_total{engine="0",model_name="tiny"} 104.0
vllm:prefix_cache_queries_created{engine="0",model_name="tiny"} 1.795959543948941e+09
# TYPE vllm:prefix_cache_hits_total counter
vllm:prefix_cache_hits_total{engine="0",model_name="tiny"} 40.0
# TYPE vllm:prompt_tokens_total counter
vllm:prompt_tokens_total{engine="0",model_name="tiny"} 104.0
# TYPE vllm:generation_tokens_total counter
vllm:generation_tokens_total{engine="0",model_name="tiny"} 123.0
"""
SGLANG = """\
# TYPE sglang:num_running_reqs gauge
sglang:num_running_reqs{engine_type="unified",model_name="tiny",tp_rank="0"} 1.0
sglang:num_running_reqs{engine_type="unified",model_name="tiny",tp_rank="1"} 4.0
# TYPE sglang:num_queue_reqs gauge
sglang:num_queue_reqs{engine_type="unified",model_name="tiny",tp_rank="0"} 2.0
sglang:num_grammar_queue_reqs{engine_type="unified",model_name="tiny",tp_rank="0"} 1.0
sglang:num_decode_transfer_queue_reqs{engine_type="unified",model_name="tiny",tp_rank="0"} 5.0
# TYPE sglang:token_usage gauge
sglang:token_usage{engine_type="unified",model_name="tiny",tp_rank="0"} 0.2
sglang:token_usage{engine_type="unified",model_name="tiny",tp_rank="1"} 0.6
"""
SGLANG_USED = (
    SGLANG
    + """\
sglang:cached_tokens_total{cache_source="device",model_name="tiny"} 70.0
sglang:cached_tokens_total{cache_source="host",model_name="tiny"} 5.0
sglang:prompt_tokens_total{is_streaming="false",model_name="tiny"} 107.0
sglang:prompt_tokens_total{is_streaming="true",model_name="tiny"} 26.0
sglang:generation_tokens_total{is_streaming="true",model_name="tiny"} 3.0
"""
)
LLAMACPP = """\
# TYPE llamacpp:prompt_tokens_total counter
llamacpp:prompt_tokens_total 44
llamacpp:prompt_tokens_cached_total 43
llamacpp:tokens_predicted_total 1047
llamacpp:requests_processing 2
llamacpp:requests_deferred 1
"""


def test_vllm() -> None:
    reading = read("vllm", VLLM)
    assert (reading.running, reading.waiting, reading.kv) == (3, 2, 0.25)
    assert (reading.prefix_hits, reading.prefix_queries) == (40.0, 104.0)
    assert reading.violations == ()


def test_sglang_joins_ranks_queues_and_sources() -> None:
    reading = read("sglang", SGLANG_USED.encode())
    assert (reading.running, reading.waiting) == (5, 8)
    assert reading.kv == pytest.approx(0.4), "a share is averaged over ranks, not summed"
    assert (reading.prefix_hits, reading.prefix_queries) == (75.0, 133.0)
    assert reading.violations == ()


def test_sglang_before_its_first_request_breaks_nothing() -> None:
    reading = read("sglang", SGLANG)
    assert reading.violations == ()
    assert reading.prefix_hits is None and reading.prefix_queries is None


def test_llamacpp_publishes_no_kv_and_counts_computed_tokens_apart() -> None:
    reading = read("llamacpp", LLAMACPP)
    assert (reading.running, reading.waiting) == (2, 1)
    assert reading.kv is None
    assert (reading.prefix_hits, reading.prefix_queries) == (43.0, 87.0)
    assert reading.violations == ()


def test_the_sim_tells_its_capacity() -> None:
    reading = read("sim", VLLM + 'sim:max_num_seqs{model_name="tiny"} 8.0\n')
    assert reading.capacity == 8
    assert Contract("sim", "a").take(VLLM + "sim:max_num_seqs 8.0\n", 1.0).sample.capacity == 8


def test_openai_is_never_scraped() -> None:
    assert not scraped("openai")
    assert all(scraped(engine) for engine in ("vllm", "sglang", "llamacpp", "sim"))


def test_engines_of_one_endpoint_are_summed() -> None:
    text = VLLM + 'vllm:num_requests_running{engine="1",model_name="tiny"} 4.0\n'
    text += 'vllm:kv_cache_usage_perc{engine="1",model_name="tiny"} 0.75\n'
    reading = read("vllm", text)
    assert reading.running == 7
    assert reading.kv == 0.5


def test_the_old_spelling_is_read_and_reported() -> None:
    text = VLLM.replace("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
    reading = read("vllm", text)
    assert reading.kv == 0.25 and reading.violations == ()
    assert reading.spelled["kv"] == "vllm:gpu_cache_usage_perc"


def test_the_new_spelling_wins_where_both_are_there() -> None:
    reading = read("vllm", VLLM + "vllm:gpu_cache_usage_perc 0.9\n")
    assert reading.kv == 0.25 and reading.spelled["kv"] == "vllm:kv_cache_usage_perc"


def test_names_are_matched_whole() -> None:
    text = "# TYPE x gauge\nvllm:num_requests_running_ever 7\nmy_vllm:num_requests_running 7\n"
    reading = read("vllm", text)
    assert reading.running is None
    assert "vllm:num_requests_running is missing" in reading.violations


def test_labels_may_hold_braces_spaces_and_quotes_and_a_time_may_follow() -> None:
    text = VLLM.replace('{engine="0",model_name="tiny"} 3.0', '{model_name="a } 9 \\" b",engine="0"} 3.0 1795959543948')
    assert read("vllm", text).running == 3


@pytest.mark.parametrize("name", ["vllm:num_requests_running", "vllm:num_requests_waiting"])
def test_without_a_mandatory_name_there_is_no_sample(name: str) -> None:
    verdict = Contract("vllm", "a").take(VLLM.replace(name + "{", name + "_v2{"), 1.0)
    assert verdict.sample is None
    assert f"{name} is missing" in verdict.warning


def test_a_missing_optional_name_is_unknown_and_a_violation() -> None:
    contract = Contract("vllm", "a")
    verdict = contract.take(VLLM.replace("vllm:kv_cache_usage_perc{", "vllm:kv_usage{"), 1.0)
    assert verdict.sample is not None and verdict.sample.kv is None
    assert contract.violations == ("vllm:kv_cache_usage_perc is missing",)


@pytest.mark.parametrize(
    ("value", "fault"),
    [
        ("-1.0", "is negative"),
        ("NaN", "no number"),
        ("+Inf", "no number"),
        ("many", "no number"),
        ("", "no number"),
        ("1e308", "beyond"),
        ("1e16", "beyond"),
    ],
)
def test_impossible_values_are_unknown(value: str, fault: str) -> None:
    text = VLLM.replace('num_requests_running{engine="0",model_name="tiny"} 3.0', f"num_requests_running {value}")
    verdict = Contract("vllm", "a").take(text, 1.0)
    assert verdict.sample is None
    assert fault in verdict.warning


@pytest.mark.parametrize("engine", TABLE)
def test_sums_beyond_all_numbers_are_none(engine: str) -> None:
    names = {name for figure in TABLE[engine] for name in (*figure.names, *figure.also)}
    for value in ("1e308", "9007199254740992"):
        text = "".join(f'{name}{{rank="{rank}"}} {value}\n' for name in sorted(names) for rank in range(3))
        Contract(engine, "a").take(text, 1.0)


def test_a_kv_figure_in_percent_is_not_believed() -> None:
    verdict = Contract("vllm", "a").take(VLLM.replace("} 0.25", "} 25.0"), 1.0)
    assert verdict.sample is not None and verdict.sample.kv is None
    assert "above 1" in verdict.warning


@pytest.mark.parametrize("text", [b"", b"<html>It works!</html>", b'{"detail":"Not Found"}', b"\xff\x00", b"\n" * 50])
def test_what_is_no_metrics_text_is_one_violation(text: bytes) -> None:
    assert read("vllm", text).violations == (NO_TEXT,)


def test_one_warning_when_it_starts_and_one_line_when_it_clears() -> None:
    contract = Contract("vllm", "a")
    broken = VLLM.replace("vllm:kv_cache_usage_perc{", "vllm:kv_usage{")
    said = [contract.take(text, at) for at, text in enumerate([VLLM, broken, broken, broken, VLLM, VLLM])]
    assert [bool(verdict.warning) for verdict in said] == [False, True, False, False, False, False]
    assert [bool(verdict.notice) for verdict in said] == [False, False, False, False, True, False]
    assert said[1].warning.startswith("endpoint a: ")


def test_a_second_violation_is_told_alone_and_the_all_clear_waits_for_both() -> None:
    contract = Contract("vllm", "a")
    one = VLLM.replace("vllm:kv_cache_usage_perc{", "vllm:kv_usage{")
    two = one.replace("vllm:prefix_cache_hits_total{", "vllm:prefix_hits{")
    assert "kv_cache_usage_perc" in contract.take(one, 1.0).warning
    second = contract.take(two, 2.0)
    assert "prefix_cache_hits_total" in second.warning and "kv_cache_usage_perc" not in second.warning
    third = contract.take(one, 3.0)
    assert not third.warning and not third.notice
    assert contract.take(VLLM, 4.0).notice


def test_a_late_name_is_missed_only_once_it_was_seen() -> None:
    contract = Contract("sglang", "a")
    assert contract.take(SGLANG, 1.0).warning == ""
    assert contract.take(SGLANG_USED, 2.0).warning == ""
    assert "sglang:cached_tokens_total is missing" in contract.take(SGLANG, 3.0).warning


def test_a_page_that_is_switched_off_names_the_flag() -> None:
    contract = Contract("llamacpp", "a")
    verdict = contract.unavailable(501)
    assert verdict.sample is None and "--metrics" in verdict.warning
    assert contract.unavailable(501).warning == ""
    assert contract.take(LLAMACPP, 2.0).notice
    assert "--enable-metrics" in Contract("sglang", "b").unavailable(404).warning


def test_counters_that_shrank_are_a_new_engine() -> None:
    contract = Contract("vllm", "a")
    assert contract.take(VLLM, 1.0).sample.generation == 0
    restarted = contract.take(VLLM.replace(" 123.0", " 4.0"), 2.0)
    assert restarted.restarted and restarted.sample.generation == 1
    after = contract.take(VLLM, 3.0)
    assert not after.restarted and after.sample.generation == 1


def test_a_restart_behind_a_broken_page_is_still_noticed() -> None:
    contract = Contract("vllm", "a")
    contract.take(VLLM, 1.0)
    contract.take(b"<html>", 2.0)
    assert contract.take(VLLM.replace(" 104.0", " 3.0"), 3.0).restarted


def test_a_later_process_start_is_a_new_engine_even_when_nothing_was_counted() -> None:
    contract = Contract("sim", "a")
    texts = [VLLM + f"process_start_time_seconds {start}\n" for start in (50.0, 50.0, 90.0, 90.0)]
    assert [contract.take(text, 1.0).restarted for text in texts] == [False, False, True, False]
    # Two processes behind one port answer in turn: neither is new again.
    assert not contract.take(VLLM + "process_start_time_seconds 50.0\n", 2.0).restarted
    assert not contract.take(VLLM + "process_start_time_seconds 90.0\n", 3.0).restarted


@given(st.sampled_from(sorted(TABLE)), st.binary(max_size=300))
def test_no_text_raises(engine: str, text: bytes) -> None:
    contract = Contract(engine, "a")
    verdict = contract.take(text, 1.0)
    assert verdict.sample is None or not contract.violations or verdict.sample.running >= 0


@given(
    st.lists(st.integers(0, 10_000), min_size=1, max_size=6),
    st.lists(st.integers(0, 10_000), min_size=1, max_size=6),
    st.randoms(use_true_random=False),
)
def test_sums_hold_in_any_order_of_lines(running: list[int], waiting: list[int], rng) -> None:
    lines = [f'sglang:num_running_reqs{{dp_rank="{rank}"}} {value}' for rank, value in enumerate(running)]
    lines += [f'sglang:num_queue_reqs{{dp_rank="{rank}"}} {value}.0' for rank, value in enumerate(waiting)]
    lines += ["# TYPE sglang:num_running_reqs gauge", 'sglang:token_usage{dp_rank="0"} 0.5', 'other{a="b"} 4']
    rng.shuffle(lines)
    reading = read("sglang", "\n".join(lines))
    assert (reading.running, reading.waiting) == (sum(running), sum(waiting))
    assert reading.violations == ()

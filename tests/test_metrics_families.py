"""The road's counters as Prometheus families."""

from __future__ import annotations

import random
import time
from collections.abc import Iterator

import attrs
import pytest
from prometheus_client.parser import text_string_to_metric_families

from appliance.admin.families import Families
from appliance.admin.metrics import Scrapes
from appliance.facts.call import Ask, Call, Caller, Route
from appliance.facts.choice import SCORERS, Outcome
from appliance.facts.endpoint import Endpoint
from appliance.facts.settings import Settings
from appliance.gateway.service import Gateway
from appliance.nursery.sleeper import Sleeper
from appliance.rules.engines.metrics import Contract
from appliance.rules.scheduling.pipeline import choose
from appliance.wire.line import Poller

Samples = dict[tuple[str, tuple[tuple[str, str], ...]], float]
SETTINGS = Settings(
    endpoints=(
        Endpoint("a", "127.0.0.1", 1, models=("llama",), capacity=4),
        Endpoint("b", "127.0.0.1", 2, models=("llama", "small"), pool_priority=-1),
    )
)


@pytest.fixture
def gateway() -> Iterator[Gateway]:
    poller = Poller()
    made = Gateway(SETTINGS, poller, random.Random(1))
    yield made
    made.close()
    poller.close()


def scraped(gateway: Gateway) -> Samples:
    """Every sample by name and labels. Fails where one stands twice, which Prometheus refuses as a whole."""
    text, content_type = Scrapes(gateway)("text/plain")
    assert content_type.startswith("text/plain")
    samples: Samples = {}
    for family in text_string_to_metric_families(text.decode()):
        for sample in family.samples:
            key = (sample.name, tuple(sorted(sample.labels.items())))
            assert key not in samples, key
            samples[key] = sample.value
    return samples


def labels(**named: str) -> tuple[tuple[str, str], ...]:
    return tuple(sorted(named.items()))


def test_the_names_of_the_contract(gateway: Gateway) -> None:
    gateway.meters.model("llama").requests["silver", 200] = 1
    gateway.meters.rejections["silver", "model_not_found"] = 1
    gateway.meters.filter_drops["breaker"] = 1
    gateway.meters.prefix["hit"] = 1
    names = {name for name, _ in scraped(gateway)}
    assert {
        "appliance_requests_total",
        "appliance_request_duration_seconds_bucket",
        "appliance_time_to_first_token_seconds_sum",
        "appliance_inter_token_seconds_count",
        "appliance_tokens_total",
        "appliance_rejections_total",
        "appliance_pool_saturation",
        "appliance_endpoint_inflight",
        "appliance_endpoint_breaker",
        "appliance_filter_drops_total",
        "appliance_prefix_hits_total",
        "appliance_scorer_value_count",
        "process_resident_memory_bytes",
    } <= names
    assert all(name.startswith(("appliance_", "process_", "python_")) for name in names)


def test_counters_and_histograms_say_what_was_counted(gateway: Gateway) -> None:
    model = gateway.meters.model("llama")
    model.requests["silver", 200] = 3
    model.requests["gold", 499] = 2
    model.prompt_tokens, model.cached_tokens, model.completion_tokens = 100, 40, 7
    for value in (0.04, 0.2, 0.2, 5000.0):
        model.duration.observe(value)
    model.inter_token.observe(0.02, 10)
    samples = scraped(gateway)
    assert samples["appliance_requests_total", labels(model="llama", band="silver", code="200")] == 3
    assert samples["appliance_requests_total", labels(model="llama", band="gold", code="499")] == 2
    assert samples["appliance_tokens_total", labels(model="llama", kind="prompt")] == 100
    assert samples["appliance_tokens_total", labels(model="llama", kind="cached")] == 40
    assert samples["appliance_tokens_total", labels(model="llama", kind="completion")] == 7
    name = "appliance_request_duration_seconds"
    bucket = f"{name}_bucket"
    assert samples[bucket, labels(model="llama", le="0.05")] == 1
    assert samples[bucket, labels(model="llama", le="0.25")] == 3
    assert samples[bucket, labels(model="llama", le="1800.0")] == 3
    assert samples[bucket, labels(model="llama", le="+Inf")] == 4
    assert samples[f"{name}_count", labels(model="llama")] == 4
    assert samples[f"{name}_sum", labels(model="llama")] == pytest.approx(5000.44)
    assert samples["appliance_inter_token_seconds_count", labels(model="llama")] == 10
    assert samples["appliance_inter_token_seconds_sum", labels(model="llama")] == pytest.approx(0.2)


def test_scorers_show_what_they_gave_the_picked_one_of_several(gateway: Gateway) -> None:
    alike = [attrs.evolve(endpoint, pool_priority=0) for endpoint in SETTINGS.endpoints]
    gateway.configure(attrs.evolve(SETTINGS, endpoints=tuple(alike)))
    entry, now = gateway.table.entries["llama"], time.monotonic()
    text = b'[{"role":"user","content":"' + b"the same head " * 200
    picked = []
    for _ in range(3):
        member, choice = choose(entry, gateway.policy, now, random.Random(1), text)
        assert member is not None and len(choice.candidates) == 2
        gateway.meters.chose(choice)
        picked.append([scores[choice.picked] for scores in choice.scores])
    assert picked[0][3] == 0 and picked[1][3] > 0, "the head is known from the second on"
    samples = scraped(gateway)
    for place, name in enumerate(SCORERS):
        assert samples["appliance_scorer_value_count", labels(scorer=name)] == 3
        expected = sum(scores[place] for scores in picked)
        assert samples["appliance_scorer_value_sum", labels(scorer=name)] == pytest.approx(expected)


def test_endpoints_show_load_and_breaker(gateway: Gateway) -> None:
    now = time.monotonic()
    first, second = gateway.table.members.values()
    for _ in range(2):
        first.begin(now)
    for _ in range(5):
        second.begin(now).finish(Outcome.FAILURE, now, random.Random(1))
    samples = scraped(gateway)
    assert samples["appliance_endpoint_inflight", labels(endpoint="a")] == 2
    assert samples["appliance_endpoint_breaker", labels(endpoint="a")] == 0
    assert samples["appliance_endpoint_up", labels(endpoint="a")] == 1
    assert samples["appliance_endpoint_breaker", labels(endpoint="b")] == 2
    assert samples["appliance_endpoint_up", labels(endpoint="b")] == 0
    later = {metric.name: metric for metric in Families(gateway, lambda: now + 100).collect()}
    assert [sample.value for sample in later["appliance_endpoint_breaker"].samples] == [0, 1]


def admitted(gateway: Gateway, count: int) -> None:
    """So many requests for llama, let in and sent."""
    entry, now = gateway.table.entries["llama"], time.monotonic()
    for _ in range(count):
        call = Call(b"x", b"POST", b"/v1/x", Route("chat"), {}, b"", Ask(), "llama", False, Caller(), now)
        ticket = gateway.gate.ask(entry, call, Sleeper(), now)
        assert ticket.load is not None
        gateway.gate.dispatched(ticket, gateway.table.members[ticket.load.id], now)


def test_a_pool_name_at_two_priorities_is_one_series(gateway: Gateway) -> None:
    admitted(gateway, 2)
    samples = scraped(gateway)
    assert samples["appliance_pool_saturation", labels(model="llama", pool="main")] == pytest.approx(0.5)
    assert samples["appliance_pool_saturation", labels(model="small", pool="main")] == 0


def test_the_queue_by_band(gateway: Gateway) -> None:
    only = attrs.evolve(SETTINGS, endpoints=SETTINGS.endpoints[:1])
    gateway.configure(only)
    admitted(gateway, 3)
    entry, now = gateway.table.entries["llama"], time.monotonic()
    call = Call(b"x", b"POST", b"/v1/x", Route("chat"), {}, b"", Ask(), "llama", False, Caller(band="bronze"), now)
    assert gateway.gate.ask(entry, call, Sleeper(), now).state == "waiting"
    gateway.meters.waited("silver", 0.2)
    gateway.meters.waited("silver", 400.0)
    samples = scraped(gateway)
    depths = {dict(key)["band"]: value for (name, key), value in samples.items() if name == "appliance_queue_depth"}
    assert depths == {"platinum": 0, "gold": 0, "silver": 0, "bronze": 1}
    assert samples["appliance_queue_wait_seconds_bucket", labels(band="silver", le="0.25")] == 1
    assert samples["appliance_queue_wait_seconds_count", labels(band="silver")] == 2


def test_broken_metric_contracts_are_counted(gateway: Gateway) -> None:
    contract = gateway.contracts["a"] = Contract("vllm", "a")
    contract.take("", time.monotonic())
    samples = scraped(gateway)
    assert samples["appliance_scrape_contract_violations", labels(endpoint="a")] == len(contract.violations) > 0
    assert ("appliance_scrape_contract_violations", labels(endpoint="b")) not in samples


def test_what_is_gone_takes_its_series_along(gateway: Gateway) -> None:
    gateway.meters.model("small").requests["silver", 200] = 1
    gateway.meters.model("unknown").requests["silver", 404] = 1
    before = scraped(gateway)
    assert any(("endpoint", "b") in key for _, key in before)
    gateway.configure(attrs.evolve(SETTINGS, endpoints=SETTINGS.endpoints[:1]))
    after = scraped(gateway)
    assert not any(("endpoint", "b") in key or ("model", "small") in key for _, key in after)
    assert after["appliance_requests_total", labels(model="unknown", band="silver", code="404")] == 1


def test_openmetrics_where_it_is_asked_for(gateway: Gateway) -> None:
    text, content_type = Scrapes(gateway)("application/openmetrics-text; version=1.0.0")
    assert content_type.startswith("application/openmetrics-text")
    assert text.endswith(b"# EOF\n")


def test_a_name_that_would_break_the_format_is_quoted(gateway: Gateway) -> None:
    gateway.meters.model('a"b\\c\nd').requests["silver", 200] = 1
    samples = scraped(gateway)
    assert samples["appliance_requests_total", labels(model='a"b\\c\nd', band="silver", code="200")] == 1

"""What an operator is told of bands and waits: ctl, metrics and the management API of a router at work."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.client import HTTPConnection
from pathlib import Path
from typing import Any

import pytest

from appliance.facts.bands import AdmissionSettings
from appliance.facts.endpoint import Endpoint
from appliance.rules.admission.outlook import outlook
from appliance.rules.admission.queue import Admission
from appliance.rules.admission.ticket import Ticket
from tests.engines import sim_engine
from tests.operator_router import Router, router

WITHIN_S = 20.0


@contextmanager
def busy(folder: Path) -> Iterator[tuple[Router, list[str]]]:
    """A router whose only engine has 4 slots, of which silver holds 3; 5 bronze and 2 silver requests wait."""
    with sim_engine.running("--max-num-seqs", "4", "--decode-tokens-per-second", "2", model="llama") as sim:
        config = f'[[endpoints]]\nid = "a"\nurl = "{sim.url}/v1"\nmodels = ["llama"]\nengine = "sim"\ncapacity = 4\n'
        with router(folder, config) as up:
            asked: list[HTTPConnection] = []
            names: list[str] = []
            try:
                for count, band, session in ((3, "silver", "holds"), (5, "bronze", "job"), (2, "silver", "person")):
                    for number in range(count):
                        names.append(f"{session}-{number}")
                        asked.append(ask(up, names[-1], band, session))
                        until(lambda: figure(up, "appliance_requests_running") == len(asked))
                yield up, names
            finally:
                for connection in asked:
                    connection.close()
            until(lambda: figure(up, "appliance_requests_running") == 0)


def ask(up: Router, request_id: str, band: str, session: str) -> HTTPConnection:
    """A request that is not waited for."""
    connection = HTTPConnection("127.0.0.1", up.door, timeout=20)
    body = {"model": "llama", "messages": [{"role": "user", "content": "one two"}], "user": session, "max_tokens": 200}
    fields = {"content-type": "application/json", "x-request-id": request_id, "x-appliance-band": band}
    connection.request("POST", "/v1/chat/completions", json.dumps({**body, "ignore_eos": True}), fields)
    return connection


def figure(up: Router, series: str) -> float:
    """A series of the metrics page."""
    (line,) = [line for line in up.get("/metrics")[2].splitlines() if line.startswith(f"{series} ")]
    return float(line.split()[-1])


def until(holds: Any) -> None:
    give_up = time.monotonic() + WITHIN_S
    while not holds():
        assert time.monotonic() < give_up
        time.sleep(0.02)


def test_everything_that_tells_of_waiting_tells_the_same(tmp_path: Path) -> None:
    with busy(tmp_path) as (up, _):
        bands = {band["name"]: band for band in up.read("bands")["bands"]}
        assert list(bands) == ["platinum", "gold", "silver", "bronze"]
        assert {name: band["waiting"] for name, band in bands.items()} == {
            "platinum": 0, "gold": 0, "silver": 2, "bronze": 5,
        }  # fmt: skip
        assert bands["bronze"]["models"] == {"llama": 5}
        assert bands["bronze"]["oldest_s"] >= bands["silver"]["oldest_s"] > 0
        assert (bands["bronze"]["ceiling"], bands["bronze"]["capacity"], bands["bronze"]["ttl_s"]) == (0.7, 1024, 300)

        text = up.ctl("bands").stdout.splitlines()
        assert text[0].split() == ["BAND", "WAITING", "OF", "OLDEST", "LIMIT", "CEILING", "ENDED", "WAITED", "REFUSED",
                                   "WAITING", "FOR"]  # fmt: skip
        assert text[4].split()[:3] == ["bronze", "5", "1,024"] and text[4].split()[-2:] == ["llama", "5"]

        _, _, metrics = up.get("/metrics")
        assert 'appliance_queue_depth{band="silver"} 2.0' in metrics
        assert 'appliance_queue_depth{band="platinum"} 0.0' in metrics
        assert 'appliance_pool_saturation{model="llama",pool="main"} 0.75' in metrics

        # one that waits, and one that did not have to
        place = up.read("explain", "request", "job-4")["places"][0]
        assert (place["band"], place["state"], place["ahead"]) == ("bronze", "waiting", 4)
        assert place["blocker"] == "saturation"
        assert (place["saturation"], place["ceiling"]) == (0.75, 0.7) and place["work"] > 100
        told = up.ctl("explain", "request", "job-4").stdout
        assert "Waiting for a place for" in told and "tenant" in told and "job" in told
        assert "its pool was 75% full, and bronze is let in up to 70%, itself counted; 4 ahead of it" in told
        assert "waited     not at all" in up.ctl("explain", "request", "holds-0").stdout
        assert up.read("explain", "request", "person-1")["tenant"] == "person"

        # what a request would meet now
        prospects = {each["band"]: each for each in up.read("explain", "model", "llama")["outlook"]}
        assert [each["room"] for each in prospects.values()] == [True, True, False, False]
        assert [each["ahead"] for each in prospects.values()] == [0, 0, 2, 7]
        told = up.ctl("explain", "model", "llama").stdout
        assert "gets a place at once" in told
        assert "waits, 7 ahead of it: the pool is 75% full, and with it would be above the 70% of its band" in told


def test_waits_and_refusals_are_counted(tmp_path: Path) -> None:
    config = (
        '[admission]\nqueue_capacity_total = 1\n[[endpoints]]\nid = "a"\nurl = "{}/v1"\nmodels = ["llama"]\n'
        'engine = "openai"\ncapacity = 1\n'
    )
    with (
        sim_engine.running("--max-num-seqs", "1", "--decode-tokens-per-second", "40", model="llama") as sim,
        router(tmp_path, config.format(sim.url)) as up,
    ):
        answers: dict[str, int] = {}

        def run(name: str) -> None:
            answers[name] = up.chat(name, max_tokens=160, ignore_eos=True)[0]

        threads = [threading.Thread(target=run, args=(name,)) for name in ("runs", "waits", "over")]
        threads[0].start()
        until(lambda: figure(up, "appliance_requests_running") == 1)
        threads[1].start()
        until(lambda: figure(up, 'appliance_queue_depth{band="silver"}') == 1)
        threads[2].start()
        for thread in threads:
            thread.join()
        assert answers == {"runs": 200, "waits": 200, "over": 503}
        silver = up.read("bands")["bands"][2]
        assert (silver["ended"], silver["waited"], silver["refused"]) == (3, 1, 1)
        _, _, metrics = up.get("/metrics")
        assert 'appliance_rejections_total{band="silver",reason="queue_full"} 1.0' in metrics
        assert 'appliance_queue_wait_seconds_count{band="silver"} 1.0' in metrics
        assert 'appliance_requests_total{band="silver",code="503",model="llama"} 1.0' in metrics


# -- the outlook -------------------------------------------------------------------------------------------------------


def admission(capacity: int = 8) -> Admission:
    subject = Admission(AdmissionSettings())
    subject.table({"m": [Endpoint("e", "h", 1, capacity=capacity)]}, 0.0)
    return subject


@pytest.mark.parametrize("running", range(12))
def test_the_outlook_is_what_a_request_would_meet(running: int) -> None:
    for band in ("platinum", "gold", "silver", "bronze"):
        subject = admission()
        for _ in range(running):
            ticket = Ticket("m", "platinum")
            subject.ask(ticket, 0.0)
            if ticket.state == "granted":
                subject.dispatched(ticket, "e", 0.0)
        (expected,) = [each for each in outlook(subject, "m") if each.band == band]
        ticket = Ticket("m", band)
        subject.ask(ticket, 1.0)
        assert (ticket.state == "granted") == expected.room
        assert (ticket.blocker, ticket.ahead) == (expected.blocker, expected.ahead)


def test_the_outlook_changes_nothing() -> None:
    subject = admission(0)
    for _ in range(4):
        subject.ask(Ticket("m", "silver"), 0.0)
    before = (subject.lines.count, len(subject.leased), subject.loads["e"].leased)
    assert [each.room for each in outlook(subject, "m")] == [False] * 4
    assert outlook(subject, "m")[2].waiting == 2
    assert {each.blocker for each in outlook(subject, "m")} == {"unproven"}
    assert (subject.lines.count, len(subject.leased), subject.loads["e"].leased) == before


def test_a_model_without_an_endpoint_has_no_outlook() -> None:
    subject = admission()
    assert outlook(subject, "unknown") == []
    subject.table({}, 1.0)
    assert outlook(subject, "m") == []
    subject.table({}, 1.0, waking=["m"])
    assert [(each.room, each.blocker) for each in outlook(subject, "m")] == [(False, "loading")] * 4


# -- the doctor --------------------------------------------------------------------------------------------------------


def test_the_doctor_names_an_endpoint_of_which_nothing_can_be_known(tmp_path: Path) -> None:
    table = '[[endpoints]]\nid = "{}"\nurl = "{}/v1"\nmodels = ["llama"]\n{}\n'
    with sim_engine.running(model="llama") as sim:
        config = "".join(
            table.format(id, sim.url, more)
            for id, more in (("blind", ""), ("told", "capacity = 8"), ("heard", 'engine = "sim"'))
        )
        with router(tmp_path, config) as up:
            found = [each for each in up.read("doctor")["findings"] if each["check"] == "capacity"]
            limits = {each["id"]: each["limit"] for each in up.read("endpoints")["endpoints"]}
    assert [each["text"] for each in found] == [
        "nothing tells how many requests blind can run at once (2 for now): name its engine, or set its capacity"
    ]
    assert (limits["blind"], limits["told"]) == (2, 8)

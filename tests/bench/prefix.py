"""Row `prefix`: caches too small for the working set; hits with affinity, without it, and of an oracle.

Three sims whose prefix caches hold a third of the preambles each (rounded up, and a tenth for the questions). Every
request is one of P long preambles, picked at random, and a question that was never asked before. The oracle sends
preamble number i to sim i mod 3 and needs no router; without affinity our router runs with the weight of the prefix
score at 0. Hits are what the sims themselves counted: prompt tokens found in their caches, of those looked up.

The cost of a lookup is CPU time in this process: match, votes and record of a prompt of 4 KiB with a known head, in a
tree that has seen 20,000 prompts.
"""

from __future__ import annotations

import http.client
import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from itertools import count
from random import Random

from appliance.rules.scheduling.prefixes import Prefixes
from tests.bench.native import MODEL, Engine
from tests.bench.plan import Plan
from tests.bench.routers import running
from tests.bench.sims import metric, sims

_SIMS, _CLIENTS, _ASKED_OF_EACH, _ANSWER_TOKENS = 3, 6, 15, 8
_PREAMBLE_BYTES, _BLOCK_BYTES = 4096, 64  # a block of the sim: 16 tokens of 4 bytes
_WITHOUT = "[scheduling]\nweights = { prefix = 0.0, session = 0.0 }"
_OF_THE_ORACLE, _LOOKUP_US = 0.9, 20.0


def measure(plan: Plan) -> None:
    report = plan.report
    report.conditions(
        plan.cores,
        [],
        sims=_SIMS,
        clients=_CLIENTS,
        asked_of_each=plan.amount(_ASKED_OF_EACH, 4),
        preamble_bytes=_PREAMBLE_BYTES,
        cache="a third of the preambles, rounded up, and a tenth",
        engine="sim, scraped",
    )
    for preambles in (8,) if plan.quick else (8, 24, 64):
        oracle = _hits(plan, preambles, "oracle", None)
        affinity = _hits(plan, preambles, "affinity", "")
        none = _hits(plan, preambles, "none", _WITHOUT)
        if affinity is None or none is None or oracle is None:
            return
        report.figure("hits", "share", "oracle", oracle, preambles=preambles)
        report.figure("hits", "share", "appliance", affinity, preambles=preambles, of_the_oracle=affinity / oracle)
        report.figure("hits", "share", "appliance without", none, preambles=preambles, of_the_oracle=none / oracle)
        report.target(
            f"{preambles} preambles: at least 0.9 of the oracle's hits",
            affinity / oracle,
            affinity / oracle >= _OF_THE_ORACLE,
        )
    cost = _lookup_us(plan)
    report.figure("lookup", "us", "appliance", cost)
    report.target("a lookup at most 20 us", cost, cost <= _LOOKUP_US)


def _preamble(number: int) -> str:
    rng = Random(number)
    words = " ".join(f"{rng.randrange(1 << 32):x}" for _ in range(_PREAMBLE_BYTES // 6))
    return f"Handbook. {words}"[:_PREAMBLE_BYTES]


def _hits(plan: Plan, preambles: int, mode: str, settings: str | None) -> float | None:
    """Share of prompt tokens found in a cache; None when our router could not be started."""
    rng = Random(preambles)
    asked = [rng.randrange(preambles) for _ in range(preambles * plan.amount(_ASKED_OF_EACH, 4))]
    blocks = math.ceil(preambles / _SIMS) * _PREAMBLE_BYTES // _BLOCK_BYTES * 11 // 10
    folder = plan.folder / f"{mode}-{preambles}"
    folder.mkdir()
    with ExitStack() as stack:
        options = ("--prefix-cache-blocks", str(blocks), "--max-num-seqs", "16")
        engines = stack.enter_context(sims(_SIMS, plan.cores.rest, folder, *options))
        ports = [engine.port for engine in engines]
        if settings is not None:
            up, skipped = stack.enter_context(
                running(("appliance",), engines, plan.cores, folder, engine="sim", settings=settings)
            )
            plan.report.skipped(skipped)
            if not up:
                return None
            ports = [up[0].port]
        before = _counted(engines)
        with ThreadPoolExecutor(_CLIENTS) as pool:
            lots = [asked[lot::_CLIENTS] for lot in range(_CLIENTS)]
            failed = sum(pool.map(lambda lot: _ask_all(lot[1], ports, f"{mode} {lot[0]}"), enumerate(lots)))
        hits, queries = (now - then for now, then in zip(_counted(engines), before, strict=True))
    plan.report.check(f"{mode}, {preambles} preambles: every request was answered with 200", not failed, failed=failed)
    return hits / queries


def _counted(engines: list[Engine]) -> tuple[float, float]:
    names = ("vllm:prefix_cache_hits_total", "vllm:prefix_cache_queries_total")
    hits, queries = (sum(metric(engine.port, name) for engine in engines) for name in names)
    return hits, queries


def _ask_all(asked: list[int], ports: list[int], client: str) -> int:
    """One client: its questions one after the other, each on its preamble. How many were not answered with 200."""
    failed = 0
    lines = {port: http.client.HTTPConnection("127.0.0.1", port, timeout=30) for port in ports}
    numbers = count(1)
    for preamble in asked:
        line = lines[ports[preamble % len(ports)]]
        body = {
            "model": MODEL,
            "max_tokens": _ANSWER_TOKENS,
            "messages": [
                {"role": "system", "content": _preamble(preamble)},
                {"role": "user", "content": f"Question {next(numbers)} of {client}: what does the handbook say?"},
            ],
        }
        line.request("POST", "/v1/chat/completions", json.dumps(body), {"content-type": "application/json"})
        answer = line.getresponse()
        answer.read()
        failed += answer.status != 200
    for line in lines.values():
        line.close()
    return failed


def _lookup_us(plan: Plan) -> float:
    tree = Prefixes()
    heads = [_preamble(number).encode() for number in range(64)]
    rng = Random(1)
    identities = list(range(_SIMS))

    def look(number: int) -> None:
        match = tree.match(heads[rng.randrange(len(heads))] + b"Question %d." % number)
        tree.votes(match, identities, _SIMS)
        tree.record(match, number % _SIMS)

    for number in range(plan.amount(20_000, 500)):
        look(number)
    looked = plan.amount(5_000, 500)
    began = time.process_time()
    for number in range(looked):
        look(20_000 + number)
    return (time.process_time() - began) / looked * 1e6

"""The documents of `/requests/{id}` and `/models/{name}` as a newcomer reads them.

Layout only: every judgement in it comes from the router.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import Any

from rich.text import Text

from .screen import (
    Column,
    ago,
    console,
    count,
    counted,
    print_lines,
    print_pairs,
    print_table,
    seconds,
    share,
    styled,
)

Document = dict[str, Any]
INDENT = 3
MOST_CANDIDATES = 8
"""Of more, the best are shown: the story is to fit on a screen."""
SCORES = "Scores: 0 to 1, higher is better. Total: their sum by scheduling.weights, less penalties."


# -- a request ---------------------------------------------------------------------------------------------------------


def tell_request(document: Document) -> None:
    out = console()
    out.print(Text.assemble((document["id"], "bold"), "  ", styled(document["outcome"])))
    print_lines([_headline(document)])
    out.print()
    print_pairs(_facts(document))
    for number, one in enumerate(document["rounds"], 1):
        out.print()
        _tell_round(number, one, document)
    if any(len(one["candidates"]) > 1 for one in document["rounds"]):
        out.print()
        print_lines([Text(SCORES, style="dim")])
    after = list(_aftermath(document))
    if after:
        out.print()
        print_pairs(after)


def _headline(document: Document) -> str:
    took, code, message = seconds(document["duration_s"]), document["code"], document["message"]
    match document["outcome"]:
        case "running" if document["places"] and document["places"][-1]["state"] == "waiting":
            return f"Waiting for a place for {seconds(document['places'][-1]['wait_s'])}."
        case "running":
            due = document["deadline_next"]
            strikes = f"; {due['name']} strikes in {seconds(max(0.0, due['in_s']))}" if due else ""
            return f"Running for {took}{strikes}."
        case "ok":
            return f"Answered with {code} in {took}."
        case "refused":
            return f"Refused with {code} {document['reason']} after {took}: {message}."
        case "failed" if document["reason"] == "engine_error":
            return f"Failed after {took}: the client got the engine's own error, {code}."
        case "failed" if document["reason"] == "error_event":
            return f"Failed after {took}: the engine's stream held an error event."
        case "cut":
            return f"Cut off after {took}, in the middle of the answer: {message}."
        case "client left":
            return f"The client left after {took}."
        case "failed":
            return f"Failed with {code} {document['reason']} after {took}: {message}."
        case _:
            return f"Ended after {took}: {message or 'the router stopped'}."


def _facts(document: Document) -> Iterator[tuple[str, str]]:
    asked, model = document["asked_for"], document["model"]
    if model is None:
        name = f"{asked}, which nobody here serves"
    else:
        name = asked if asked == model else f"{asked}, an alias of {model}"
    yield "asked for", name
    yield "route", f"{document['route']}, {'streamed' if document['stream'] else 'not streamed'}"
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(document["began_at"]))
    yield "when", f"{when}, {ago(document['began_at'])} ago"
    yield "band", document["band"]
    yield "tenant", document["tenant"] or "unknown"
    waits = [place for place in document["places"] if place["told"]]
    for place in waits:
        whose = "" if place["model"] == document["model"] else f" for {place['model']}"
        yield "waited", f"{seconds(place['wait_s'])}{whose}: {place['told']}"
    if not waits:
        yield "waited", "not at all"


def _tell_round(number: int, one: Document, document: Document) -> None:
    instead = "" if one["model"] == document["model"] else f", the fallback {one['model']}"
    picked = one["picked"]
    if picked is None:
        title = f"{number}. Looked for an endpoint{instead}, and found none"
    else:
        among = len(one["candidates"])
        title = f"{number}. Chose {picked}{instead}{f' among {among}' if among > 1 else ', the only candidate'}"
    console().print(Text(title, style="bold"))
    if len(one["candidates"]) > 1:
        _print_scores(one)
    told = one["told"][len(one["candidates"]) + 1 :] if one["candidates"] else one["told"]
    print_lines([Text(line, style="dim") for line in told], indent=INDENT)
    print_pairs(((_moment(attempt), _sentence(attempt)) for attempt in one["attempts"]), indent=INDENT)


def _print_scores(one: Document) -> None:
    ranked = sorted(
        one["candidates"], key=lambda candidate: (candidate["endpoint"] != one["picked"], -candidate["total"])
    )
    shown = ranked[:MOST_CANDIDATES]
    scorers = list(shown[0]["scores"])
    penalties = any(candidate["penalty"] for candidate in one["candidates"])
    titles = [*scorers, *(["penalty"] if penalties else []), "total"]
    print_table(
        [Column("endpoint", long=True), *(Column(title, right=True) for title in titles), Column("")],
        [
            [
                candidate["endpoint"],
                *(f"{candidate['scores'][scorer]:.2f}" for scorer in scorers),
                *([f"{candidate['penalty']:.2f}"] if penalties else []),
                f"{candidate['total']:.2f}",
                "<- chosen" if candidate["endpoint"] == one["picked"] else " ",
            ]
            for candidate in shown
        ],
        indent=INDENT,
    )
    if len(ranked) > len(shown):
        print_lines([f"and {len(ranked) - len(shown)} more with lower totals"], indent=INDENT)


def _moment(attempt: Document) -> str:
    return "now" if attempt["kind"] == "running" else f"at {seconds(attempt['ended_after_s'])}"


def _sentence(attempt: Document) -> str:
    then = attempt["next_told"]
    return f"{attempt['endpoint']}: {attempt['told']}{f'; {then}' if then else ''}."


def _aftermath(document: Document) -> Iterator[tuple[str, str]]:
    first, tokens = document["first_token_s"], document["tokens"]
    if document["stream"] and first is not None:
        yield "first token", f"after {seconds(first)}"
    if tokens is not None and (tokens["prompt"] or tokens["completion"]):
        yield "tokens", _tokens(document, tokens)
    if document["deadlines"]:
        told = [f"{name} {limit:g}" for name, limit in document["deadlines"].items() if limit]
        yield "deadlines", ", ".join(told)


def _tokens(document: Document, tokens: Document) -> str:
    first, took = document["first_token_s"], document["duration_s"]
    told = []
    if tokens["prompt"]:
        told.append(f"{tokens['prompt']:,} prompt")
        if tokens["cached"]:
            told[-1] += f" ({tokens['cached']:,} of them cached)"
    told.append(f"{tokens['completion']:,} completion")
    if tokens["reasoning"]:
        told[-1] += f" ({tokens['reasoning']:,} of them reasoning)"
    if document["stream"] and first is not None and tokens["completion"] > 1 and took > first:
        told.append(f"{(tokens['completion'] - 1) / (took - first):.0f} a second")
    if document["outcome"] == "running":
        return ", ".join(told) + " so far"
    return ", ".join(told) + (" (estimated: the engine reported none)" if tokens["estimated"] else "")


# -- a model -----------------------------------------------------------------------------------------------------------


def tell_model(document: Document) -> None:
    out = console()
    at_zero = document["replicas"] is not None and document["replicas"]["at_zero"]
    state = "ready" if document["ready"] else "at zero" if at_zero else "not ready"
    out.print(Text.assemble((document["name"], "bold"), "  ", styled(state)))
    print_lines([_now(document)])
    out.print()
    print_pairs(_about(document))
    if document["outlook"]:
        out.print()
        print_table(
            [Column("BAND"), Column("WAITING", right=True), Column("A REQUEST NOW", long=True)],
            [(each["band"], count(each["waiting"]), each["told"]) for each in document["outlook"]],
        )
    for pool in document["pools"]:
        out.print()
        full = "" if pool["saturation"] is None else f", {share(pool['saturation'])} full"
        head = f"Pool {pool['name']}, priority {pool['priority']}{full}"
        out.print(Text(head, style="bold"))
        members = [member for member in document["members"] if member["id"] in pool["endpoints"]]
        print_table(
            [
                Column("ENDPOINT", long=True),
                Column("STATE"),
                Column("RUNNING", right=True),
                Column("WAITING", right=True),
                Column("FULL", right=True),
                Column("KNOWN THERE AS", long=True, spare=1),
                Column("URL", spare=2),
            ],
            [
                (
                    member["id"],
                    member["state"],
                    count(member["in_flight"]),
                    count(member["waiting"]),
                    share(member["saturation"]),
                    member["known_as"],
                    member["url"],
                )
                for member in members
            ],
            indent=INDENT,
        )
        print_lines([f"{member['id']}: {member['why']}" for member in members if member["why"]], indent=INDENT)


def _now(document: Document) -> str:
    if document["ready"]:
        up, known = document["endpoints_up"], document["endpoints"]
        if up == known:
            return f"A request would be sent to {'its endpoint' if known == 1 else f'one of {known} endpoints'}."
        return f"A request would be sent to one of {counted(up, 'endpoint')}; {known - up} cannot take any."
    ready = [other["name"] for other in document["chain"] if other["ready"]]
    if ready:
        woken = ", and the model is started" if document["waking"] else ""
        return f"A request would be sent to its fallback {ready[0]}{woken}: {document['why']}."
    if document["waking"]:
        return f"A request would wait for the model to be started: {document['waking']}."
    return f"A request would be refused with 503 model_not_ready: {document['why']}."


def _about(document: Document) -> Iterator[tuple[str, str]]:
    if document["asked_for"] != document["name"]:
        yield "asked for", f"{document['asked_for']}, an alias"
    yield "aliases", ", ".join(document["aliases"]) or "none"
    fallbacks = [f"{other['name']} ({'ready' if other['ready'] else 'not ready'})" for other in document["chain"]]
    yield "fallbacks", ", ".join(fallbacks) or "none"
    yield "named by", "the configuration" if document["configured"] else "an endpoint's own list"
    if document["context_tokens"]:
        yield "context", f"{document['context_tokens']:,} tokens"

"""The document of `/placement/{model}` as a newcomer reads it. Layout only: every reason comes from the router."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from rich.text import Text

from .screen import (
    Column,
    ago,
    console,
    counted,
    print_lines,
    print_pairs,
    print_table,
    styled,
    whole_seconds,
)

Document = dict[str, Any]
INDENT = 3


def tell_placement(document: Document) -> None:
    out = console()
    out.print(Text.assemble((document["model"], "bold"), "  ", styled(document["state"])))
    print_lines(document["told"])
    out.print()
    print_pairs(_about(document))
    if document["replicas"]:
        out.print()
        print_table(
            [Column("REPLICA", long=True), Column("STATE"), Column("SINCE", right=True), Column("PROFILE", long=True),
             Column("NODES", long=True)],
            [
                (
                    replica["id"],
                    replica["state"],
                    ago(replica["since"]) if replica["since"] is not None else "",
                    replica["profile"],
                    ", ".join(replica["nodes"]),
                )
                for replica in document["replicas"]
            ],
        )  # fmt: skip
        print_lines([Text(f"{each['id']}: {each['why']}") for each in document["replicas"] if each["why"]])
    for number, profile in enumerate(document["profiles"], 1):
        out.print()
        _tell_profile(number, profile)


def _about(document: Document) -> Iterator[tuple[str, str]]:
    if document["asked_for"] != document["model"]:
        yield "asked for", f"{document['asked_for']}, an alias"
    yield "wanted", f"{counted(document['wanted'], 'replica')}: {document['wanted_because']}"
    yield "ready", f"{document['ready']:,}"
    for each in document["missing"]:
        yield "missing", f"{each['count']:,}: {each['reason']}"
    for failure in document["failures"]:
        yield "failed", f"{failure['replica']}, {whole_seconds(failure['ago_s'])} ago: {failure['told']}"


def _tell_profile(number: int, profile: Document) -> None:
    title = f"{number}. {profile['name']}, priority {profile['priority']}: {profile['needs']}"
    console().print(Text(title, style="bold"), soft_wrap=True)
    print_lines([Text(profile["told"], style="green" if profile["place"] else "yellow")], indent=INDENT)
    print_pairs(((each["candidate"], each["reason"]) for each in profile["rejections"]), indent=INDENT)

"""`appliance ctl explain`: one request's story, what a request for a model would meet now, why a model runs where it
does."""

from __future__ import annotations

import click

from . import placement as placements
from . import story
from .asking import ask, reads
from .screen import print_json


@click.group()
def explain() -> None:
    """Why a request went as it did; what a request for a model would meet now; why a model runs where it does."""


@explain.command(short_help="Tell the story of one request.")
@click.argument("request_id", metavar="ID")
@reads
def request(request_id: str, as_json: bool) -> None:
    """Tell the story of a request: every choice, every attempt, and why the next step was taken.

    ID is what the client got as x-request-id, and `ctl requests` lists.
    """
    document = ask("requests", request_id)
    if as_json:
        print_json(document)
    else:
        story.tell_request(document)


@explain.command(short_help="Say what a request for a model would meet now.")
@click.argument("name", metavar="NAME")
@reads
def model(name: str, as_json: bool) -> None:
    """Say what a name means, and what a request for it would meet now."""
    document = ask("models", name)
    if as_json:
        print_json(document)
    else:
        story.tell_model(document)


@explain.command(short_help="Say where a model runs, and why nowhere else.")
@click.argument("name", metavar="MODEL")
@reads
def placement(name: str, as_json: bool) -> None:
    """Say how many replicas of MODEL are wanted and where they run, and for each profile what speaks against each node.

    A profile that fits somewhere now names the node it would be started on. Nothing is changed by asking.
    """
    document = ask("placement", name)
    if as_json:
        print_json(document)
    else:
        placements.tell_placement(document)

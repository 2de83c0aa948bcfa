"""One question to a running router, over its admin socket.

The standard library's HTTP client, because ctl is typed by people and a second spent on importing a better one is a
second they wait.
"""

from __future__ import annotations

import contextlib
import http.client
import json
import os
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeVar
from urllib.parse import quote, urlencode

import click

from ..config import admin_sockets

ANSWER_S = 60.0
"""How long an answer may take. The first question to a router imports its management API, a second or two."""
PATIENCE_S = 2.0
"""After this much silence a person is told what is being waited for."""
_META = "appliance.admin"

Command = TypeVar("Command", bound=Callable[..., Any])


class Refused(click.ClickException):
    """The router's answer was no. `document` is what it said, `status` its HTTP status."""

    def __init__(self, status: int, document: Any) -> None:
        error = document.get("error") if isinstance(document, dict) else None
        super().__init__(error["message"] if isinstance(error, dict) else f"the router answered with {status}")
        self.status = status
        self.document = document


class Misused(Refused):
    """The router says that what was typed cannot be: it knows the form of a name, and ctl need not know it too."""

    exit_code = 2


def admin_option(**known: Any) -> Callable[[Command], Command]:
    """`--admin`: on the group and on each command, since people write it at either place; the later one counts."""

    def keep(ctx: click.Context, _: click.Parameter, value: str | None) -> None:
        if value:
            ctx.meta[_META] = value

    return click.option(
        "--admin", metavar="PATH", expose_value=False, callback=keep, help="Admin socket of the router.", **known
    )


def reads(command: Command) -> Command:
    """The options of every command that reads: `--json` (passed as `as_json`) and `--admin`."""
    as_json = click.option("--json", "as_json", is_flag=True, help="Print the answer as JSON.")
    return as_json(admin_option()(command))


def ask(*path: str, method: str = "GET", **query: str | int) -> Any:
    """The router's answer to a path of the management API, given as segments. Raises Refused, or a ClickException when
    no router can be reached."""
    target = _target(path, query)
    connection = _connection()
    try:
        with _patience():
            connection.request(method, target, headers={"accept": "application/json"})
            answer = connection.getresponse()
            body = answer.read()
    except (OSError, http.client.HTTPException) as error:
        raise _silent(connection, error) from None
    finally:
        connection.close()
    document = _document(connection, body)
    if answer.status >= 400:
        raise _no(answer.status, document)
    return document


def stream(*path: str, **query: str | int) -> Iterator[Any]:
    """The documents of an answer that holds one a line, each as it comes, however long that takes. Ends where the
    answer does, or breaks off. Raises as `ask` does."""
    connection = _connection()
    sock = connection.sock
    try:
        try:
            with _patience():
                connection.request("GET", _target(path, query), headers={"accept": "application/x-ndjson"})
                answer = connection.getresponse()
            if answer.status >= 400:
                raise _no(answer.status, _document(connection, answer.read()))
        except (OSError, http.client.HTTPException) as error:
            raise _silent(connection, error) from None
        sock.settimeout(None)
        while True:
            try:
                line = answer.readline()
            except (OSError, http.client.HTTPException):
                return
            if not line.endswith(b"\n"):
                return
            yield _document(connection, line)
    finally:
        connection.close()


def _no(status: int, document: Any) -> Refused:
    return Misused(status, document) if status == 400 else Refused(status, document)


def _target(path: Iterable[str], query: Mapping[str, str | int]) -> str:
    segments = list(path)
    if not all(segment.strip() for segment in segments):
        raise click.UsageError(
            "a name is empty; 'ctl nodes', 'ctl replicas', 'ctl models' and 'ctl requests' list those there are"
        )
    target = "/" + "/".join(quote(segment, safe="") for segment in segments)
    return f"{target}?{urlencode(query)}" if query else target


def _document(connection: _UnixConnection, body: bytes) -> Any:
    try:
        return json.loads(body)
    except ValueError:
        raise click.ClickException(f"{connection.path} is no admin socket of 'appliance serve'") from None


def _silent(connection: _UnixConnection, error: Exception) -> click.ClickException:
    reason = str(error) or type(error).__name__
    return click.ClickException(f"{connection.path} gave no answer: {reason}; look at the router's log")


class _UnixConnection(http.client.HTTPConnection):
    def __init__(self, path: str) -> None:
        super().__init__("admin", timeout=ANSWER_S)
        self.path = path

    def connect(self) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self.path)


def _connection() -> _UnixConnection:
    """To the socket that was named, or to the first of the usual ones behind which somebody answers."""
    named = click.get_current_context().meta.get(_META)
    places = (named,) if named else admin_sockets(None, os.environ)
    forbidden = ""
    for place in places:
        connection = _UnixConnection(place)
        try:
            connection.connect()
        except PermissionError:
            forbidden = forbidden or place
        except OSError as error:
            if "too long" in str(error):
                raise click.ClickException(f"{place} is too long for the name of a socket") from None
        else:
            return connection
        connection.close()
    if forbidden:
        raise click.ClickException(
            f"cannot use {forbidden}: permission denied; run ctl as the user or in the group of 'appliance serve'"
        )
    raise click.ClickException(
        f"cannot reach {' or '.join(places)}: is 'appliance serve' running? name its socket with --admin"
    )


@contextlib.contextmanager
def _patience() -> Iterator[None]:
    """Tell a person at a terminal that something goes on, once it has taken `PATIENCE_S`."""
    if not sys.stderr.isatty():
        yield
        return
    from rich.console import Console

    status = Console(stderr=True).status("Waiting for the router ...")
    timer = threading.Timer(PATIENCE_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()

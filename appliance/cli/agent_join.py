"""`appliance agent join`: this machine becomes a node.

Everything that can be wrong here is looked at before the token is used up, and nothing that is there already is changed
before the certificate has come. The key is made here and stays here.
"""

from __future__ import annotations

import contextlib
import os
import pwd
import stat
import time
import tomllib
from collections.abc import Callable, Mapping
from pathlib import Path
from urllib.parse import urlsplit

import click
from attrs import field, frozen

from ..store.papers import PUBLIC, Papers, make_folder, put
from .config import ConfigError, load, places
from .config.forms import Mismatch, control_url, word
from .config.written import lines_of, with_keys
from .program import own_argv
from .unit import FILE, NAME, unit

SECTION = "agent"


@frozen
class Plan:
    """What becomes of the configuration file: its whole new text, None where only a person can write it."""

    file: str
    values: Mapping[str, str]
    text: str | None = field(repr=False)
    there: bool


@click.command(short_help="Make this machine a node of a cluster.")
@click.option("--control", "url", required=True, metavar="URL", help="The control plane, wss://host:port.")
@click.option("--name", required=True, metavar="NAME", help="What this node is called.")
@click.option("--token", required=True, metavar="TOKEN", help="The token that was made for that name.")
@click.option("--root", "expected", required=True, metavar="FINGERPRINT", help="The cluster's root, sha256:...")
@click.option("--config", "config", metavar="FILE", help="Configuration file (default: as for the agent).")
@click.option("--replace", is_flag=True, help="Join again: what an earlier join left is replaced.")
@click.option(
    "--unit",
    "unit_file",
    is_flag=False,
    flag_value=FILE,
    metavar="[FILE]",
    help=f"Write the systemd unit as well (default: {FILE}).",
)
@click.pass_context
def join(
    ctx: click.Context,
    url: str,
    name: str,
    token: str,
    expected: str,
    config: str | None,
    replace: bool,
    unit_file: str | None,
) -> int:
    """Make this machine a node of a cluster: run what 'appliance ctl node add NAME' printed on the control plane."""
    from ..agent.home import NotOurs, check
    from ..wire import certificates
    from .rootcall import CannotJoin, Control, ask_to_sign, fetch_root

    url = _as_form("--control", control_url, url, "wss://host:port, as 'ctl node add' printed it")
    name = _as_form("--name", word, name, "at most 63 letters, digits and . _ -, a letter or digit first")
    if not certificates.is_fingerprint(expected.lower()):
        raise click.UsageError("--root: expected sha256: and 64 hexadecimal digits.")
    expected = expected.lower()
    parts = urlsplit(url)
    control = Control(parts.hostname or "", parts.port or 0)
    state_dir = places(os.environ).state_dir
    if not state_dir:
        raise click.ClickException("there is no state folder: set HOME, XDG_STATE_HOME or STATE_DIRECTORY")
    papers = Papers.of(state_dir)
    named = config or ctx.obj or os.environ.get("APPLIANCE_CONFIG") or ""
    try:
        check(Path(state_dir, "shards"))
        _look_for_earlier(papers, name, expected, replace)
        plan = _plan(named, {"control_url": url, "node": name}, replace)
        fresh = f"{papers.node_key}.joining"
        make_folder(papers.folder)
        root = fetch_root(control, expected)
        try:
            put(fresh, key := certificates.new_key())
            given = ask_to_sign(control, root, token, name, certificates.signing_request(key, name))
            _check(given.certificate, key, name, root)
            put(papers.root, root, PUBLIC)
            os.replace(fresh, papers.node_key)
            put(papers.node, given.certificate, PUBLIC)
        finally:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(fresh)
    except (CannotJoin, NotOurs) as why:
        raise click.ClickException(str(why)) from None
    except OSError as error:
        raise click.ClickException(
            f"{error.filename or papers.folder} cannot be written: {error.strerror}; run this as the user of 'appliance"
            " agent', and look whether the disk is full"
        ) from None
    ends = certificates.details(given.certificate).not_after
    click.echo(f"joined {control} as {name}; the certificate is good until {_day(ends)}, and the agent renews it")
    click.echo(f"  {papers.node}, {papers.node_key}, {papers.root}")
    written = _write(plan)
    return max(
        written,
        _tell_unit(unit_file, _named(named, plan.file), state_dir),
        _check_configuration(named) if written == 0 else 0,
    )


def _look_for_earlier(papers: Papers, name: str, expected: str, replace: bool) -> None:
    """Whether this machine is somebody already. Raises CannotJoin."""
    from ..wire import certificates
    from .rootcall import CannotJoin

    def root() -> str:
        with contextlib.suppress(OSError, certificates.BadPem), open(papers.root, "rb") as file:
            return certificates.fingerprint(file.read())
        return ""

    if papers.initialised() and root() != expected:
        raise CannotJoin(
            f"this machine is the control plane of another cluster ({papers.root_key}); set STATE_DIRECTORY to another"
            " folder for the agent"
        )
    if not papers.joined() or replace:
        return
    told = "this machine has joined already"
    with contextlib.suppress(OSError, certificates.BadPem), open(papers.node, "rb") as file:
        ours = certificates.details(file.read())
        told += f" as {ours.name} (certificate until {_day(ours.not_after)}"
        told += ")" if root() == expected else ", from another root)"
    raise CannotJoin(f"{told}: to join again as {name}, add --replace to this line")


def _plan(named: str, values: Mapping[str, str], replace: bool) -> Plan:
    """What is to be done about the configuration, before anything is. Raises CannotJoin, OSError."""
    from .rootcall import CannotJoin

    candidates = (named,) if named else places(os.environ).config_files
    file = next((each for each in candidates if os.path.lexists(each)), candidates[0])
    try:
        with open(file, encoding="utf-8", newline="") as opened:
            old = opened.read()
    except FileNotFoundError:
        return Plan(file, values, "\n".join(lines_of(SECTION, values)) + "\n", there=False)
    except UnicodeDecodeError:
        raise CannotJoin(f"{file}: expected UTF-8; mend it first") from None
    mark = "\ufeff" if old.startswith("\ufeff") else ""
    try:
        present = tomllib.loads(old.removeprefix(mark)).get(SECTION, {})
        new = with_keys(old.removeprefix(mark), SECTION, values)
    except tomllib.TOMLDecodeError as error:
        raise CannotJoin(f"{file}: {error}; mend it first, 'appliance ctl config check' says more") from None
    for key, value in values.items():
        other = present.get(key, "") if isinstance(present, dict) else ""
        if other not in ("", value) and not replace:
            raise CannotJoin(
                f"{file} says agent.{key} = {other}, and this would be {value}: add --replace to change it"
            )
    return Plan(file, values, None if new is None else mark + new, there=True)


def _check(certificate: bytes, key: bytes, name: str, root: bytes) -> None:
    """Raises CannotJoin."""
    from ..wire import certificates
    from .rootcall import CannotJoin

    try:
        good = (
            certificates.belong(key, certificate)
            and certificates.signed_by(certificate, root)
            and certificates.details(certificate).name == name
        )
    except certificates.BadPem:
        good = False
    if not good:
        raise CannotJoin(
            "the control plane sent a certificate that is not for this name and key; nothing was changed. Its version"
            " may differ from this one's: 'appliance version' on both says"
        )


def _write(plan: Plan) -> int:
    """Put the configuration in place, or say what to put there; an exit status."""
    why = "it cannot be extended line by line"
    if plan.text is not None:
        try:
            _put_text(plan.file, plan.text, plan.there)
        except OSError as error:
            why = f"it cannot be written: {error.strerror}"
        else:
            click.echo(f"  {plan.file} {'has' if plan.there else 'was made, with'} agent.control_url and agent.node")
            return 0
    click.echo(f"appliance: joined, but {plan.file} was not changed, since {why}; put these lines into it:", err=True)
    for line in lines_of(SECTION, plan.values):
        click.echo(f"    {line}", err=True)
    return 1


def _put_text(file: str, text: str, there: bool) -> None:
    if not there:
        make_folder(os.path.dirname(os.path.abspath(file)), 0o755)
        put(file, text.encode("utf-8"), PUBLIC)
        return
    real = os.path.realpath(file)
    before = os.stat(real)
    put(real, text.encode("utf-8"), stat.S_IMODE(before.st_mode))
    if os.geteuid() == 0:
        os.chown(real, before.st_uid, before.st_gid)


def _check_configuration(named: str) -> int:
    """Whether the agent will be able to start with it; an exit status."""
    try:
        load(named or None, os.environ)
    except ConfigError as error:
        for fault in error.faults:
            click.echo(f"appliance: {fault}", err=True)
        click.echo("appliance: joined, but the agent cannot start with this configuration: mend it first", err=True)
        return 1
    return 0


def _tell_unit(unit_file: str | None, named: str, state_dir: str) -> int:
    """Write or print the unit, and what comes next; an exit status."""
    argv = [*own_argv(), "agent", *(("--config", os.path.abspath(named)) if named else ())]
    text = unit(argv, _environment(state_dir), _user(state_dir))
    if unit_file is None:
        click.echo(
            f"\nas a service: put this into {FILE} (or join with --unit), then"
            f" 'systemctl daemon-reload && systemctl enable --now {NAME}'\n"
        )
        click.echo(text)
        click.echo("next: start 'appliance agent' (or restart the one that runs); 'appliance ctl nodes' shows it")
        return 0
    try:
        make_folder(os.path.dirname(os.path.abspath(unit_file)), 0o755)
        put(unit_file, text.encode("utf-8"), PUBLIC)
    except OSError as error:
        click.echo(
            f"appliance: joined, but {unit_file} cannot be written: {error.strerror}; as root, put this there:\n",
            err=True,
        )
        click.echo(text, err=True)
        return 1
    click.echo(f"  {unit_file} was written")
    click.echo(f"\nnext: systemctl daemon-reload && systemctl enable --now {NAME}; 'appliance ctl nodes' shows it")
    return 0


def _environment(state_dir: str) -> dict[str, str]:
    """The variables without which the service would look elsewhere than this command has written."""
    usual = places({"HOME": os.environ.get("HOME", "")}).state_dir
    found = {"STATE_DIRECTORY": state_dir} if state_dir != usual else {}
    if os.environ.get("RUNTIME_DIRECTORY"):
        found["RUNTIME_DIRECTORY"] = places(os.environ).runtime_dir
    return found


def _named(named: str, file: str) -> str:
    """What the service must be told of the configuration: nothing where it finds `file` by itself, without variables
    that are set only here."""
    usual = places({"HOME": os.environ.get("HOME", "")}).config_files
    return named or ("" if file == next((each for each in usual if os.path.lexists(each)), usual[0]) else file)


def _user(state_dir: str) -> str:
    """Who the agent is to run as: whoever joins, or, where that is root, the owner of the state folder."""
    uid = os.geteuid() or os.stat(state_dir).st_uid
    if uid == 0:
        return ""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _day(moment: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(moment))


def _as_form(option: str, form: Callable[[str], str], text: str, expected: str) -> str:
    """The value of an option that must not be empty. Raises UsageError."""
    try:
        value = form(text)
    except Mismatch as wrong:
        raise click.UsageError(f"{option}: expected {str(wrong) or expected}, got '{text[:80]}'.") from None
    if not value:
        raise click.UsageError(f"{option}: expected {expected}.")
    return value

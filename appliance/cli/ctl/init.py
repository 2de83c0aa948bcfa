"""`appliance ctl init`: the files of a new cluster. Needs no running router."""

from __future__ import annotations

import os
import time

import click

from ..config import ConfigError, example, load, places
from ..statelock import owner
from .screen import console, print_lines, print_pairs


@click.command()
@click.option("--config", "file", metavar="FILE", help="Configuration file (default: as for serve).")
@click.option(
    "--host",
    "hosts",
    multiple=True,
    metavar="HOST",
    help="Name or address under which nodes reach this machine (default: found out); may be repeated.",
)
def init(file: str | None, hosts: tuple[str, ...]) -> int:
    """Make a cluster: its root certificate, the control plane's own, and a configuration to begin with.

    Changes nothing that is there already. Nodes are then let in with 'ctl node add'.
    """
    from ...control import pki, whereabouts
    from ...store.papers import Papers

    for host in hosts:
        if not whereabouts.is_host(host):
            raise click.BadParameter(f"{host}: expected a host name or an address, without a port", param_hint="--host")
    state_dir = places(os.environ).state_dir
    if not state_dir:
        raise click.ClickException("there is no state folder: set HOME, XDG_STATE_HOME or STATE_DIRECTORY")
    papers = Papers.of(state_dir)
    try:
        # Only a look, so that the configuration is not touched where the rest is refused.
        for there in (papers.root_key, papers.root):
            if os.path.lexists(there):
                raise pki.taken(papers, there)
        config, made = _configuration(file)
        settings = load(config, os.environ).settings
        now = time.time()
        authority = pki.create(papers, now)
        names = whereabouts.names(settings.control.listen)
        authority.keep_server(names, now, hosts)
    except ConfigError as error:
        for fault in error.faults:
            click.echo(f"appliance ctl init: {fault}", err=True)
        return 1
    except pki.PkiFailed as failed:
        raise click.ClickException(str(failed)) from None
    except OSError as error:
        raise click.ClickException(
            f"{error.filename}: {error.strerror}; name another file with --config, or run this as a user who may"
            " write it"
        ) from None
    ends = time.strftime("%Y-%m-%d", time.gmtime(authority.certificate.not_valid_after_utc.timestamp()))
    print_pairs(
        [
            ("root", f"{papers.root}, good until {ends}"),
            ("", f"{authority.fingerprint}"),
            ("its key", f"{papers.root_key}: whoever has it can join; keep a copy of both where nobody else reads it"),
            ("certificate", f"{papers.server}, for {', '.join(dict.fromkeys((*hosts, *names)))}"),
            ("configuration", f"{config} ({'made, every key with its default' if made else 'was there, not changed'})"),
        ]
    )
    console().print("\nnext:")
    pid = owner(state_dir)
    start = f"restart 'appliance serve' (pid {pid})" if pid else "start 'appliance serve'"
    steps = [start, "for each machine: 'appliance ctl node add NAME', and run there the line it prints"]
    if not any(model.profiles for model in settings.models):
        wish = f"give a model a profile in {config} ([[models]] with [[models.profiles]])"
        steps.insert(0, f"{wish}: those are placed on nodes")
    print_lines([f"{number}. {step}" for number, step in enumerate(steps, 1)], indent=2)
    return 0


def _configuration(named: str | None) -> tuple[str, bool]:
    """The file that serve will read, and whether it was made now. Raises OSError."""
    from ...store.papers import PUBLIC, make_folder, put

    named = named or os.environ.get("APPLIANCE_CONFIG") or None
    candidates = (named,) if named else places(os.environ).config_files
    for file in candidates:
        if os.path.lexists(file):
            return file, False
    file = candidates[0]
    make_folder(os.path.dirname(os.path.abspath(file)), 0o755)
    put(file, example().encode("utf-8"), PUBLIC)
    return file, True

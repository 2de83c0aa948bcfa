"""The commands of `appliance ctl`; each is imported when it is called."""

from __future__ import annotations

import click

from ..main import LazyGroup
from .asking import admin_option

COMMANDS: dict[str, tuple[str, str]] = {
    "status": ("appliance.cli.ctl.status:status", "The router at a glance."),
    "doctor": ("appliance.cli.ctl.doctor:doctor", "Look for what is wrong, and say what to do."),
    "top": ("appliance.cli.ctl.top:top", "Load, endpoints and requests, again each second."),
    "endpoints": ("appliance.cli.ctl.endpoints:endpoints", "Engines: state, load, why one gets nothing."),
    "models": ("appliance.cli.ctl.models:models", "Names that clients may ask for; start, stop or scale one."),
    "nodes": ("appliance.cli.ctl.nodes:nodes", "Machines with hardware: state, what is free, why a GPU is not."),
    "replicas": ("appliance.cli.ctl.replicas:replicas", "Running instances of models, and what failed where."),
    "cordon": ("appliance.cli.ctl.cordon:cordon", "Place nothing new on a node."),
    "uncordon": ("appliance.cli.ctl.cordon:uncordon", "Let replicas be placed on a node again."),
    "drain": ("appliance.cli.ctl.drain:drain", "Move all that runs on a node elsewhere."),
    "logs": ("appliance.cli.ctl.logs:logs", "What an engine wrote last; -f goes on."),
    "audit": ("appliance.cli.ctl.audit:audit", "Who changed what."),
    "init": ("appliance.cli.ctl.init:init", "Make a new cluster: certificates and a configuration."),
    "node": ("appliance.cli.ctl.node:node", "Let a machine join, list who has, throw one out."),
    "bands": ("appliance.cli.ctl.bands:bands", "Who waits for a place, by priority."),
    "requests": ("appliance.cli.ctl.requests:requests", "Running and recent requests; cancel one."),
    "explain": ("appliance.cli.ctl.explain:explain", "Why a request, or a model's place, is as it is."),
    "engine-check": ("appliance.cli.ctl.engines:engine_check", "Whether installed engines take the flags we give."),
    "config": ("appliance.cli.ctl.config:config", "Check, show, write an example of, or reload the configuration."),
}
"""As in `cli/main.py`."""


@click.group(cls=LazyGroup, table=COMMANDS)
@admin_option(envvar="APPLIANCE_ADMIN", show_envvar=True)
def ctl() -> None:
    """See and change a running router, and ask it why.

    The router is found by its admin socket; every command that reads has --json.
    """

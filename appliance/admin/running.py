"""The running router, as its operator's side sees it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import attrs

from ..gateway.service import Gateway

if TYPE_CHECKING:
    from ..control.joining import Joining
    from ..control.plane import Plane


@attrs.frozen
class Running:
    """Made by the composition root, which alone knows all parts. `started_at` is wall-clock time in seconds.

    `listen` are the door's addresses as URLs, `loopback` tells whether nobody outside this machine reaches them, `keys`
    whether the door asks for keys. `configuration` gives the document of `/config`. `reload` takes the configuration as
    it is now and answers with "" or with why not. `plane` gives the control plane, None while no model has a profile;
    `joining` who may become a node, None while there is no control plane or 'ctl init' was not run. `groups` are the
    announced groups by name, each with why it gets no requests, "" where it does. `tool_troubles` are sentences about
    groups whose tools cannot be listed.
    """

    gateway: Gateway
    started_at: float
    listen: tuple[str, ...]
    metrics: tuple[str, ...]
    admin_socket: str
    keys: bool
    loopback: bool
    connections: Callable[[], int]
    draining: Callable[[], bool]
    configuration: Callable[[], dict[str, Any]]
    reload: Callable[[], str]
    plane: Callable[[], Plane | None] = lambda: None
    joining: Callable[[], Joining | None] = lambda: None
    groups: Callable[[], Mapping[str, str]] = dict
    tool_troubles: Callable[[], Sequence[str]] = tuple

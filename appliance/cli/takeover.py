"""`serve --takeover`: the sockets of the router that runs already, for the one that starts.

    this process                                   the running one
    connect to its admin socket, /takeover    ->   passes descriptors of its listening sockets and its lock
    match them with the configuration,
    start all parts, hear the endpoints            serves as before
    /takeover/done                            ->   stops listening everywhere, ends its control plane and its agent,
                                                   drains without a bound
    start the control plane, accept

The listening sockets are the same ones before, during and after: nobody who connects is refused or reset, and nobody is
accepted twice. `SO_REUSEPORT` would give this process sockets of its own, and closing the old ones would reset
whoever waits in their queues.

There are never two control planes: the old one has ended before `/takeover/done` is answered. The replicas that it
published come along with their keys, so that they serve until their agents have called here.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Sequence
from typing import Any

import msgspec

from ..admin import sockets as unix
from ..admin.handover import DONE, MOST_DESCRIPTORS, OFFER
from ..admin.sockets import UnixSocket
from ..facts.endpoint import Endpoint
from ..facts.settings import Address, Settings
from ..wire import head
from . import statelock
from .listening import Sockets, address_of, bind_all, match
from .startfailed import StartFailed

WITHIN_S = 5.0
"""How long the running process may take for each answer. A busy one needs milliseconds; one that cannot answer in this
time has no streams worth waiting for."""


class _BrokeOff(StartFailed):
    """The running process closed the connection."""


class Taken:
    """The running router's sockets, here; it still serves. `done` makes it stop listening, `close` without `done` ends
    the takeover and changes nothing for it. `sockets` belongs to the caller; `pid` is the other process, `replicas` are
    those that its control plane has published, `daemons` the addresses of those that it watches."""

    def __init__(
        self,
        link: socket.socket,
        sockets: Sockets,
        pid: int,
        replicas: tuple[Endpoint, ...] = (),
        daemons: tuple[str, ...] = (),
    ) -> None:
        self.sockets = sockets
        self.replicas = replicas
        self.daemons = daemons
        self.pid = pid
        self.running = 0
        self._link = link

    def done(self) -> None:
        """From now on only this process listens. Blocks, for WITHIN_S at most. Raises StartFailed."""
        with contextlib.suppress(_BrokeOff):  # it died: then nobody else listens, and giving up would leave nobody
            answer, _ = _exchange(self._link, DONE, self.pid)
            self.running = int(answer.get("requests", 0))
        self.sockets.claim()

    def close(self) -> None:
        self._link.close()


def take(settings: Settings) -> Taken:
    """Ask the router at `server.admin_socket` for its sockets; those that the configuration wants and it has not are
    bound here. Blocks, for WITHIN_S at most. Raises StartFailed with what to do; the running router is then as it
    was."""
    path = settings.server.admin_socket
    link = _connect(path, settings.state_dir)
    try:
        pid = unix.peer_of(link).pid
        about, descriptors = _exchange(link, OFFER, pid)
        sockets = _sorted(about, descriptors, settings)
    except BaseException:
        link.close()
        raise
    return Taken(link, sockets, pid, _replicas(about), _daemons(about))


def _connect(path: str, state_dir: str) -> socket.socket:
    try:
        link = unix.connect(path)
    except BlockingIOError:
        raise StartFailed(f"--takeover: the router at {path} accepts nobody; stop it, then start this one without"
                          " --takeover") from None  # fmt: skip
    except OSError as error:
        if isinstance(error, FileNotFoundError | ConnectionRefusedError):
            pid = statelock.owner(state_dir)
            if pid:
                raise StartFailed(
                    f"--takeover: nobody listens at {path}, but pid {pid} owns {state_dir}: it is stopping, or has"
                    " another server.admin_socket; stop it, then start this one without --takeover"
                ) from None
            raise StartFailed(
                f"--takeover: no router runs here (nobody listens at {path}); start this one without --takeover"
            ) from None
        raise StartFailed(
            f"--takeover: cannot connect to {path}: {error.strerror}; run it as the user of the running router"
        ) from None
    link.settimeout(WITHIN_S)
    return link


def _exchange(link: socket.socket, path: bytes, pid: int) -> tuple[dict[str, Any], list[int]]:
    """One request; the document of its answer and the descriptors that came with it. Raises StartFailed."""
    descriptors: list[int] = []
    data = b""
    try:
        link.sendall(b"POST %b HTTP/1.1\r\nhost: admin\r\ncontent-length: 0\r\n\r\n" % path)
        while (answer := _read(data)) is None:
            piece, fresh, flags, _ = socket.recv_fds(link, 65536, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
            descriptors += fresh
            if flags & socket.MSG_CTRUNC:
                raise StartFailed("--takeover: too few open files are allowed for the sockets; raise LimitNOFILE")
            if not piece:
                raise _BrokeOff(f"--takeover: pid {pid} broke off; see its log, or start this one without --takeover")
            data += piece
    except TimeoutError:
        _close(descriptors)
        raise StartFailed(
            f"--takeover: pid {pid} does not answer within {WITHIN_S:g} s: it is stuck or stopped; end it (kill -KILL"
            f" {pid}), then start this one without --takeover"
        ) from None
    except (OSError, head.BadHead) as error:
        _close(descriptors)
        raise _BrokeOff(
            f"--takeover: pid {pid} broke off ({error}); start this one without --takeover once it has ended"
        ) from None
    except StartFailed:
        _close(descriptors)
        raise
    status, document = answer
    if status != 200:
        _close(descriptors)
        if status == 404:
            why = "it is of a version that cannot hand over"
        else:
            why = str(document.get("error", {}).get("message", f"status {status}"))
        raise StartFailed(f"--takeover: pid {pid} refuses: {why}")
    return document, descriptors


def _read(data: bytes) -> tuple[int, dict[str, Any]] | None:
    """Status and document of the final answer in `data`, None while it is not whole. Raises BadHead."""
    while (end := head.end_of_head(data)) >= 0:
        answer = head.read_response(data[:end])
        data = data[end:]
        if answer.status < 200:
            continue
        length = answer.length or 0
        if len(data) < length:
            return None
        try:
            document = msgspec.json.decode(data[:length])
        except (msgspec.MsgspecError, RecursionError):
            document = None
        return answer.status, document if isinstance(document, dict) else {}
    return None


def _sorted(about: dict[str, Any], descriptors: list[int], settings: Settings) -> Sockets:
    """The descriptors by what they are, as the configuration of this process wants them. Raises StartFailed."""
    doors, metrics = about.get("door", 0), about.get("metrics", 0)
    if not isinstance(doors, int) or not isinstance(metrics, int) or len(descriptors) != doors + metrics + 2:
        _close(descriptors)
        raise StartFailed("--takeover: the running router passed other sockets than it says; stop it, then start"
                          " this one without --takeover")  # fmt: skip
    *listening, admin, lock = descriptors
    have = [socket.socket(fileno=descriptor) for descriptor in listening]
    listener = socket.socket(fileno=admin)
    try:
        sockets = Sockets(statelock.adopt(lock, settings.state_dir))
    except BaseException:
        for sock in (*have, listener):
            sock.close()
        raise
    server = settings.server
    try:
        sockets.admin = UnixSocket(server.admin_socket, listener, ours=False)
        _arrange(have[:doors], server.listen, sockets.door, "server.listen")
        _arrange(have[doors:], server.metrics_listen, sockets.metrics, "server.metrics_listen")
    except BaseException:
        sockets.close()
        raise
    return sockets


def _replicas(about: dict[str, Any]) -> tuple[Endpoint, ...]:
    """What another version says in another way is left out: the agents tell it all again."""
    try:
        return msgspec.convert(about.get("replicas", ()), tuple[Endpoint, ...])
    except msgspec.ValidationError:
        return ()


def _daemons(about: dict[str, Any]) -> tuple[str, ...]:
    """Those of another version are found by their announcements, a little later."""
    try:
        return msgspec.convert(about.get("daemons", ()), tuple[str, ...])
    except msgspec.ValidationError:
        return ()


def _arrange(have: Sequence[socket.socket], wanted: Sequence[Address], into: list[socket.socket], setting: str) -> None:
    """Those of `have` that are wanted go `into`, the others are closed; what is missing is bound. Raises
    StartFailed."""
    places = match(wanted, [address_of(sock) for sock in have])
    for number, sock in enumerate(have):
        if number in places:
            into.append(sock)
        else:
            sock.close()
    bind_all(into, [address for address, place in zip(wanted, places, strict=True) if place is None], setting)


def _close(descriptors: Sequence[int]) -> None:
    for descriptor in descriptors:
        with contextlib.suppress(OSError):
            os.close(descriptor)

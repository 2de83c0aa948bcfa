"""Where certificates and keys lie in the state folder, and how a file is put there: whole, or not at all.

    STATE/pki/root.pem     the cluster's root certificate, on the control plane and on nodes
    STATE/pki/root.key     its key, on the control plane alone
    STATE/pki/server.*     what the control plane shows to agents
    STATE/pki/node.*       what an agent shows to the control plane

Nothing here needs a library for certificates, so that whoever only asks whether they are there need not load one.
"""

from __future__ import annotations

import contextlib
import os
import secrets

from attrs import frozen

PRIVATE = 0o600
PUBLIC = 0o644


@frozen
class Papers:
    """The files of one state folder; `folder` is its `pki`."""

    folder: str

    @classmethod
    def of(cls, state_dir: str) -> Papers:
        return cls(os.path.join(state_dir, "pki"))

    @property
    def root(self) -> str:
        return os.path.join(self.folder, "root.pem")

    @property
    def root_key(self) -> str:
        return os.path.join(self.folder, "root.key")

    @property
    def server(self) -> str:
        return os.path.join(self.folder, "server.pem")

    @property
    def server_key(self) -> str:
        return os.path.join(self.folder, "server.key")

    @property
    def node(self) -> str:
        return os.path.join(self.folder, "node.pem")

    @property
    def node_key(self) -> str:
        return os.path.join(self.folder, "node.key")

    def initialised(self) -> bool:
        """Whether 'ctl init' was run here: this machine has a root of its own, be it whole or not."""
        return os.path.lexists(self.root_key)

    def joined(self) -> bool:
        """Whether 'agent join' was run here."""
        return os.path.lexists(self.node) and os.path.lexists(self.node_key)


def make_folder(path: str, mode: int = 0o750) -> None:
    """The folder, by itself for its owner and group alone, made with its parents where it is missing. Raises
    OSError."""
    parent = os.path.dirname(os.path.abspath(path))
    if not os.path.isdir(parent):
        make_folder(parent, mode)
    with contextlib.suppress(FileExistsError):
        os.mkdir(path, mode)
        _give(path, parent)


def put(path: str, data: bytes, mode: int = PRIVATE) -> None:
    """Put `data` into the file at `path`, in one step that a crash or a power cut leaves done or undone.

    Root gives it to the owner of the folder: 'ctl init' is often run by root for a service that is not. Raises OSError.
    """
    folder = os.path.dirname(os.path.abspath(path))
    fresh = os.path.join(folder, f".{os.path.basename(path)}.{secrets.token_hex(4)}")
    descriptor = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, PRIVATE)
    try:
        try:
            with open(descriptor, "wb", closefd=False) as file:
                file.write(data)
            os.fchmod(descriptor, mode)
            _give(descriptor, folder)
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
        os.replace(fresh, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(fresh)
        raise
    _sync_folder(folder)


def _give(what: int | str, folder: str) -> None:
    if os.geteuid() == 0:
        owner = os.stat(folder)
        os.chown(what, owner.st_uid, owner.st_gid)


def _sync_folder(folder: str) -> None:
    """The new name too survives a power cut. Some file systems do not know how; the file is whole on those as well."""
    with contextlib.suppress(OSError):
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

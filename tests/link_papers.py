"""Roots of clusters and nodes that joined them, without a control plane."""

from __future__ import annotations

import time
from pathlib import Path

from appliance.control import pki
from appliance.store.papers import Papers, make_folder, put
from appliance.wire import certificates

DAY_S = pki.DAY_S


class Cluster:
    """A root, made anew in a state folder, with a server's certificate beside it."""

    def __init__(self, state: Path) -> None:
        self.papers = Papers.of(str(state))
        self.root = pki.create(self.papers, time.time())
        self.root.keep_server(["127.0.0.1"], time.time())

    def join(self, state: Path, name: str, now: float | None = None) -> Papers:
        """The papers of a node in its state folder; signed at `now`, they are good for 90 days from then on."""
        papers = Papers.of(str(state))
        make_folder(papers.folder)
        key = certificates.new_key()
        signed = self.root.sign_csr(certificates.signing_request(key, name), name, now or time.time())
        put(papers.node_key, key)
        put(papers.node, signed.pem.encode())
        put(papers.root, self.root.pem)
        return papers

    def fresh(self, name: str, now: float) -> str:
        """A certificate for `name` and a key that nobody has."""
        return self.root.sign_csr(certificates.signing_request(certificates.new_key(), name), name, now).pem

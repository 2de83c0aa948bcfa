"""An address to listen on."""

from __future__ import annotations

import attrs


@attrs.frozen
class Address:
    """An address to listen on: `host` is numeric (IPv4 or IPv6, without brackets), `port` 0 lets the kernel choose."""

    host: str
    port: int

    def __str__(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

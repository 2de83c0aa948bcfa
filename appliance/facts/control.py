"""The `[control]` and `[store]` sections: what an operator may set about placing models on nodes."""

from __future__ import annotations

from attrs import field, frozen

from appliance.facts.address import Address
from appliance.facts.keys import about


@frozen
class ControlSettings:
    """The control plane, which runs inside `serve` when a model has a profile. Times are seconds."""

    listen: tuple[Address, ...] = field(
        default=(Address("0.0.0.0", 6384),),
        metadata=about(
            "Addresses that agents call, and where they join; they are opened once 'ctl init' was run.", live=False
        ),
    )
    settle_s: float = field(
        default=20.0,
        metadata=about(
            "After its start nothing is started or stopped for so long, so that agents can call first.", minimum=0
        ),
    )
    unreachable_after_s: float = field(
        default=20.0, metadata=about("Silence after which a node gets nothing new.", above=0)
    )
    lost_after_s: float = field(
        default=60.0,
        metadata=about("Silence after which what ran on a node is started elsewhere.", above=0),
    )
    drain_grace_s: float = field(
        default=600.0,
        metadata=about("How long a replica that must go waits for its replacement and its requests.", minimum=0),
    )
    wake_wait_s: float = field(
        default=120.0, metadata=about("How long a request waits for a model that is being started.", above=0)
    )


@frozen
class Store:
    """The database of operators' decisions: cordons, revocations, join tokens, and who did what."""

    url: str = field(
        default="",
        metadata=about(
            "SQLite database (sqlite:///path); empty: appliance.db in the state folder.",
            form="store_url",
            live=False,
            example="sqlite:////var/lib/appliance/appliance.db",
        ),
    )

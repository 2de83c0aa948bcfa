"""What an agent and its control plane say to each other. `wire/link.py` puts it into bytes.

Every message is a value of its own, without an answer: what came of a command is told by the next report. The agent
speaks first, with `Register`, and the control plane answers `Welcome` or `Refused`; a `Refused` ends the connection.
Times of day are seconds since 1970 by the sender's clock, durations are seconds.
"""

from __future__ import annotations

import attrs

from appliance.facts.hardware import Inventory
from appliance.facts.replica import Shard
from appliance.facts.report import Report

PROTOCOL = 1
"""Raised when an older peer would misunderstand. Further fields and messages need no new number: unknown fields are
passed over, and unknown messages are answered with `Trouble`."""


# -- from the agent ----------------------------------------------------------------------------------------------------


@attrs.frozen
class Register:
    """The first message of every connection: everything there is to know of the node, whatever was said before.

    `boot_id` is new at each start of the agent. `port_range` is the first and the last port engines may use.
    """

    protocol: int
    version: str
    node: str
    boot_id: str
    clock: float
    inventory: Inventory
    port_range: tuple[int, int]
    reports: tuple[Report, ...] = ()


@attrs.frozen
class Look:
    """The hardware has changed: the whole inventory as it is now."""

    inventory: Inventory


@attrs.frozen
class News:
    """Shards that changed since the last message, and ids of those that were forgotten."""

    reports: tuple[Report, ...] = ()
    gone: tuple[str, ...] = ()


@attrs.frozen
class LogLines:
    """Lines of a shard's log that were asked for. `ended`: no more come, because of `reason` ("": that was all)."""

    request: str
    lines: tuple[str, ...] = ()
    ended: bool = False
    reason: str = ""


@attrs.frozen
class Renew:
    """The certificate ends soon: a signing request in PEM, for the same name."""

    csr: str


# -- from the control plane --------------------------------------------------------------------------------------------


@attrs.frozen
class Welcome:
    """Registered. Both sides say something at least every `beat_s`, and give each other up after `silence_s`."""

    protocol: int
    version: str
    clock: float
    beat_s: float
    silence_s: float


@attrs.frozen
class Refused:
    """No: the connection ends. `code` is a stable word, `message` a sentence that names the certificate and the claim.

    Codes: `no_certificate`, `wrong_name`, `revoked`, `unknown`, `name_taken`, `protocol`, `malformed`.
    """

    code: str
    message: str


@attrs.frozen
class Start:
    """Have this shard run."""

    shard: Shard


@attrs.frozen
class Stop:
    """Stop a shard, because of `reason`; it may go on with the requests it has for `drain_s`."""

    shard_id: str
    drain_s: float = 0.0
    reason: str = ""


@attrs.frozen
class Forget:
    """The last report of this shard, which has ended, was taken note of."""

    shard_id: str


@attrs.frozen
class AskLog:
    """Send the last `lines` lines of a shard's log as `LogLines` of this `request`; with `follow` also later ones."""

    request: str
    shard_id: str
    lines: int
    follow: bool = False


@attrs.frozen
class EndLog:
    """Nobody reads the answers to this request any more."""

    request: str


@attrs.frozen
class Renewed:
    """A new certificate in PEM, or why there is none."""

    certificate: str = ""
    reason: str = ""


# -- from both ---------------------------------------------------------------------------------------------------------


@attrs.frozen
class Beat:
    """Still here."""

    clock: float


@attrs.frozen
class Trouble:
    """The last message was not understood, or could not be done."""

    message: str


Up = Register | Look | News | LogLines | Renew | Beat | Trouble
Down = Welcome | Refused | Start | Stop | Forget | AskLog | EndLog | Renewed | Beat | Trouble
Message = Up | Down

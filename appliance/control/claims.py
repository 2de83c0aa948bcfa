"""Who may register as which node. Plain functions; every refusal names the certificate and the claim."""

from __future__ import annotations

from collections.abc import Collection, Iterable

import attrs

from appliance.facts.link import PROTOCOL, Refused, Register
from appliance.store.rows import Certificate


@attrs.frozen
class Claim:
    """What the connection itself proves. `name` and `serial` are the certificate's, "" where none was shown; `peer` is
    the address it came from."""

    name: str
    serial: str
    peer: str = ""

    @property
    def sentence(self) -> str:
        return f"certificate says {self.name} (serial {self.serial})" if self.name else "no certificate was shown"


def no_certificate(claim: Claim, claimed: str) -> Refused:
    """For an agent that showed none. `claimed` "" where it has not said who it is."""
    claims = f"agent claims {claimed}" if claimed else "who the agent claims to be was not read"
    return Refused("no_certificate", f"{claim.sentence}, {claims}; let the node join: ctl node add {claimed or 'NAME'}")


def judge(
    register: Register,
    claim: Claim | None,
    known: Iterable[Certificate],
    revoked: Collection[str],
    wall: float,
) -> Refused | None:
    """Why the agent may not register, None where it may.

    `claim` None is a link within the process, which proves itself. `known` are the certificates that were given to the
    name in `claim`, `revoked` serials revoked since those were read, `wall` is the time of day.
    """
    says = f"{claim.sentence if claim else 'the agent of this process'}, agent claims {register.node}"
    if register.protocol != PROTOCOL:
        return Refused(
            "protocol",
            f"{says}; it speaks version {register.protocol} of the link, this control plane speaks {PROTOCOL}"
            f" (agent {register.version}): install the same version of appliance on both",
        )
    if claim is None:
        return None
    if claim.name != register.node:
        return Refused("wrong_name", f"certificate says {claim.name}, agent claims {register.node}")
    row = next((each for each in known if each.serial == claim.serial), None)
    if claim.serial in revoked or (row is not None and row.revoked_at is not None):
        return Refused("revoked", f"{says}; this certificate was revoked: ctl node add {claim.name}")
    if row is None:
        return Refused(
            "unknown",
            f"{says}; this control plane did not give out that certificate, or has forgotten it:"
            f" ctl node add {claim.name}",
        )
    if row.not_after <= wall:
        return Refused("unknown", f"{says}; this certificate has expired: ctl node add {claim.name}")
    return None


def taken(register: Register, claim: Claim | None, holder: str) -> Refused:
    """The name is in use by another agent, which is connected from `holder`."""
    says = claim.sentence if claim else "the agent of this process"
    return Refused(
        "name_taken",
        f"{says}, agent claims {register.node}; another agent is connected from {holder} under that name, and was not"
        " started together with this one",
    )

"""Bands: priority classes of requests, and what an operator may set about waiting for a place."""

from __future__ import annotations

import attrs
from attrs import field

from appliance.facts.errors import Fault
from appliance.facts.keys import about

FAIRNESS = ("work", "requests")
"""What the rotation over tenants charges: estimated tokens, or one for each request."""


@attrs.frozen
class Band:
    """A priority class. The list of bands is in order, the highest first.

    `ceiling` is the share of a pool's saturation (1.0 is the healthy limit) up to which this band is let in, `capacity`
    the number of its requests that may wait, over all models, and `ttl_s` how long one of them may wait.
    """

    name: str = field(metadata=about("The name keys and callers use.", form="name", example="silver"))
    ceiling: float = field(
        metadata=about(
            "Saturation of a pool up to which the band is let in; 1.0 is the healthy limit.", above=0, example=0.9
        )
    )
    capacity: int = field(
        metadata=about("Requests of the band that may wait, over all models.", minimum=1, example=512)
    )
    ttl_s: float = field(
        metadata=about("Longest wait, in seconds; after it: 504 queue_timeout.", above=0, example=60.0)
    )


BANDS = (
    Band("platinum", 1.2, 256, 30.0),
    Band("gold", 1.0, 256, 60.0),
    Band("silver", 0.9, 512, 60.0),
    Band("bronze", 0.7, 1024, 300.0),
)


@attrs.frozen
class AdmissionSettings:
    """The `[admission]` section. With `enabled` False everything is let in at once, and only counted."""

    enabled: bool = field(default=True, metadata=about("Hold requests back while their pool is saturated."))
    fairness: str = field(
        default="work",
        metadata=about(
            "What a tenant's turn is charged: work (estimated tokens) or requests (one each).", choices=FAIRNESS
        ),
    )
    default_band: str = field(default="silver", metadata=about("The band of callers that have none.", form="name"))
    queue_capacity_total: int = field(
        default=0,
        metadata=about("Requests that may wait in all; 0: half of all bands' capacity together.", minimum=0),
    )
    bands: tuple[Band, ...] = field(
        default=BANDS, metadata=about("The bands, the highest first; a list given here replaces all four.", minimum=1)
    )

    @property
    def total(self) -> int:
        """How many requests may wait in all."""
        return self.queue_capacity_total or max(1, sum(band.capacity for band in self.bands) // 2)


def faults(settings: AdmissionSettings, path: str = "admission") -> tuple[Fault, ...]:
    """What does not add up between the keys of the section; bounds of single keys are checked by the loader."""
    found: list[Fault] = []
    names = [band.name for band in settings.bands]
    for i, band in enumerate(settings.bands):
        if band.name in names[:i]:
            found.append(Fault(f"{path}.bands[{i}].name", f"{band.name} is named twice"))
        if i and band.ceiling > settings.bands[i - 1].ceiling:
            above = settings.bands[i - 1]
            found.append(
                Fault(
                    f"{path}.bands[{i}].ceiling",
                    f"{band.ceiling:g} is above the {above.ceiling:g} of {above.name}, which comes first: "
                    "the highest band is listed first and has the highest ceiling",
                )
            )
    if settings.default_band not in names:
        found.append(Fault(f"{path}.default_band", f"{settings.default_band} is none of {', '.join(names)}"))
    return tuple(found)

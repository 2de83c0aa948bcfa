"""What a request would meet now, band by band: for whoever asks why something waits. Changes nothing."""

from __future__ import annotations

import attrs

from appliance.rules.admission.queue import Admission
from appliance.rules.admission.ticket import Blocker


@attrs.frozen
class Outlook:
    """A request of this band that came now. `room`: it would get a place at once; otherwise it would wait behind
    `ahead` others, for what `blocker` names. `saturation` is that of the pool it would go to first."""

    band: str
    ceiling: float
    waiting: int
    room: bool
    ahead: int
    blocker: Blocker
    saturation: float


def outlook(admission: Admission, model: str) -> list[Outlook]:
    """One for each band, the highest first; none for a model that no endpoint may be asked for."""
    lane = admission.lanes.get(model)
    if lane is None or not (lane.pools or lane.wakes):
        return []
    blocker, saturation = lane.blocker()
    found: list[Outlook] = []
    for rank, line in enumerate(admission.lines.lines):
        band = line.band
        place = lane.place(band.ceiling) if admission.settings.enabled or not lane.pools else lane.anywhere()
        room = rank < lane.top and place is not None
        found.append(
            Outlook(
                band.name,
                band.ceiling,
                len(lane.rotations[rank]),
                room,
                0 if room else lane.ahead(rank),
                "" if room else blocker,
                saturation,
            )
        )
    return found

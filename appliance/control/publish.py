"""What the router is to know of the fleet, and when it has to look again."""

from __future__ import annotations

from collections.abc import Mapping

from appliance.facts.endpoint import Endpoint
from appliance.nursery.news import News


class Published:
    """The last thing that was said. `news` is told when there is another one.

    Sentences about progress count seconds, so that only a model that begins or ceases to wake counts as a change; who
    shows a sentence asks for it at that moment.
    """

    def __init__(self) -> None:
        self.news = News()
        self.endpoints: tuple[Endpoint, ...] = ()
        self.waking: Mapping[str, str] = {}

    def say(self, endpoints: tuple[Endpoint, ...], waking: Mapping[str, str]) -> bool:
        """Take over what holds now; whether the router must be told."""
        # By id: in which order replicas are listed is nothing to the router.
        ordered = tuple(sorted(endpoints, key=lambda each: each.id))
        changed = ordered != self.endpoints or waking.keys() != self.waking.keys()
        self.endpoints, self.waking = ordered, dict(waking)
        if changed:
            self.news.tell()
        return changed

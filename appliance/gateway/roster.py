"""Who can be asked: the endpoints of the file beside those of running replicas, and what is heard of them all.

Both kinds stand in one table and are treated alike; they differ in who says that they are there. The file does by
`configure`, the control plane by `publish`, and each call keeps what the other one said. What survives a call keeps its
live state (in flight, breaker, learnt capacity); requests on what does not are finished there.
"""

from __future__ import annotations

import ssl
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..facts.demand import Demand
from ..facts.endpoint import Endpoint, Sample
from ..facts.settings import Model, Settings
from ..rules.engines.metrics import Contract
from ..rules.scheduling.member import Member
from ..rules.scheduling.table import Change, Entry, Table
from ..wire.line import Poller
from .admission import Gate
from .meters import Meters
from .upstream import Upstream


class Roster:
    """All endpoints and models of a router, and the places at them.

    `wanted` is called with a model's name in the step in which a request asks for it that nobody can take, and that is
    worth waking it for. `why_not` answers why a model without an endpoint has none, as half a sentence for clients
    ("it is loading on node-a, since 40 s"), "" where it knows nothing. `refused` is called with the id of an announced
    endpoint that refused a request's connection, and brings the table up to date before it returns. They belong to
    whoever publishes, or announces.
    """

    def __init__(self, settings: Settings, poller: Poller) -> None:
        self.poller = poller
        self.table = Table(settings.scheduling.prefix)
        self.meters = Meters()
        self.upstreams: dict[str, Upstream] = {}
        self.listed: dict[str, dict[str, dict[str, Any]]] = {}
        """By endpoint id, then by name: the entries of the endpoint's own list of models."""
        self.listed_last: dict[str, dict[str, Any]] = {}
        """By model: what the last endpoint that is gone said of it, for models that nobody serves at the moment."""
        self.contracts: dict[str, Contract] = {}
        """By endpoint id: what it promised to publish about its load, and whether it does."""
        self.unanswered: dict[str, str] = {}
        """By endpoint id: what came of asking for its models last, where nothing answered. Requests may still go there:
        only they can tell whether it serves those that the file names."""
        self.wanted: Callable[[str], None] = _nobody_wakes
        self.refused: Callable[[str], None] = _nobody_wakes
        self.why_not: Callable[[str], str] = self._said_last
        self.unplaced: tuple[str, ...] = ()
        """Ids of published endpoints that are not in the table because the file gives their id to another one."""
        self._context: ssl.SSLContext | None = None
        self._models: tuple[Model, ...] = ()
        self._configured: tuple[Endpoint, ...] = ()
        self._published: tuple[Endpoint, ...] = ()
        self._announced: tuple[Endpoint, ...] = ()
        self._waking: Mapping[str, str] = {}
        self.gate = Gate(settings.admission, self.table, settings.control.wake_wait_s)

    # -- who is there ------------------------------------------------------------------------------------------------

    def publish(self, endpoints: Sequence[Endpoint], waking: Mapping[str, str]) -> Change:
        """Replicas that are ready now, and models whose requests may wait for one, each with what is being done about
        it. The watches must follow afterwards.

        A replica of a model that the file does not hold (any more) is left out, and so is one whose id the file gives
        to an endpoint of its own: `unplaced` names it.
        """
        published = tuple(endpoints)
        if published == self._published and waking.keys() == self._waking.keys():
            self._waking = dict(waking)
            self.table.wake(self._known(self._waking))  # only the words are new
            return Change()
        self._published, self._waking = published, dict(waking)
        change = self._lay()
        self.gate.publish()
        return change

    def announce(
        self,
        endpoints: Sequence[Endpoint],
        listed: Mapping[str, Mapping[str, Mapping[str, Any]]],
        gated: Mapping[str, str],
        missed: Mapping[str, str],
        wait_s: float = 0.0,
    ) -> Change:
        """Groups that answer now, and their own lists of models by endpoint id. `gated` are names that a group claims
        and none serves, with the reason; `missed` those of them that requests wait for, `wait_s` at most. The watches
        must follow afterwards."""
        known = (self._announced, self.table.gated, self.table.missed, self.gate.missed_wait_s)
        self._announced = tuple(endpoints)
        self.table.gated, self.table.missed, self.gate.missed_wait_s = dict(gated), dict(missed), wait_s
        # Engines date their lists anew each time they are asked for them: nothing else is new most of the time.
        same = known == (self._announced, self.table.gated, self.table.missed, wait_s)
        change = Change() if same else self._lay()
        for endpoint in self._announced:
            if endpoint.id in self.table.members:
                self.listed[endpoint.id] = {name: dict(row) for name, row in listed.get(endpoint.id, {}).items()}
        if not same:
            self.gate.publish()
        return change

    def why_absent(self, model: str) -> str:
        """Why a model that the file names has no endpoint, "" where nobody knows."""
        return self.why_not(model) or self.table.gated.get(model, "")

    def demand(self) -> dict[str, Demand]:
        """How much each configured model is asked for. An endpoint whose batch nobody knows yet is taken to be like
        the others of its model, since a sum that left it out would make them look fuller than they are."""
        now = time.monotonic()
        found: dict[str, Demand] = {}
        for model in self._models:
            entry = self.table.entries[model.name]
            batches = [member.batch for member in entry.members if self.gate.admits(member, now)]
            known = [batch for batch in batches if batch]
            slots = sum(known) * len(batches) // len(known) if known else 0
            running = sum(member.in_flight for member in entry.members)
            found[model.name] = Demand(self.gate.depth(model.name), running, slots, entry.asked_at)
        return found

    def published(self) -> tuple[Endpoint, ...]:
        """What was published last. The endpoints hold keys: nothing of this is shown."""
        return self._published

    def close(self) -> None:
        for upstream in self.upstreams.values():
            upstream.close()

    def _configure(self, settings: Settings) -> Change:
        """Take the endpoints and models of the file, and how requests are let in."""
        self._configured, self._models = settings.endpoints, settings.models
        change = self._lay()
        self.meters.keep_models(set(self.table.entries))
        self.gate.configure(settings.admission, settings.control.wake_wait_s)
        self.gate.publish()
        return change

    def _lay(self) -> Change:
        """Bring the table to what the file and the control plane say."""
        taken = {endpoint.id for endpoint in self._configured}
        names = {model.name for model in self._models}
        placed = [endpoint for endpoint in self._published if not names.isdisjoint(endpoint.models or ())]
        self.unplaced = tuple([endpoint.id for endpoint in placed if endpoint.id in taken])
        replicas = [endpoint for endpoint in placed if endpoint.id not in taken]
        self.table.waking = self._known(self._waking)
        taken.update(endpoint.id for endpoint in replicas)
        groups = [endpoint for endpoint in self._announced if endpoint.id not in taken]
        change = self.table.replace((*self._configured, *replicas, *groups), self._models)
        for member in (*change.removed, *change.changed):
            self.upstreams.pop(member.id).close()
        for member in change.removed:
            self.contracts.pop(member.id, None)
            self.unanswered.pop(member.id, None)
            for name, shown in self.listed.pop(member.id, {}).items():
                if name in names:
                    self.listed_last[name] = shown
        for name in self.listed_last.keys() - names:
            del self.listed_last[name]
        for member in (*change.added, *change.changed):
            self.upstreams[member.id] = self._upstream(member.endpoint)
        return change

    def _known(self, waking: Mapping[str, str]) -> dict[str, str]:
        return {model.name: waking[model.name] for model in self._models if model.name in waking}

    def _said_last(self, model: str) -> str:
        return self._waking.get(model, "")

    def _upstream(self, endpoint: Endpoint) -> Upstream:
        if endpoint.tls and self._context is None:
            from ..wire.tls import client_context

            self._context = client_context()
        return Upstream(endpoint, self.poller, self._context)

    # -- what is heard of endpoints ------------------------------------------------------------------------------------

    def entries_of(self, entry: Entry) -> Iterator[dict[str, Any]]:
        """What endpoints say of a model in their own lists: those that serve it, then the last that did."""
        for member in entry.members:
            listed = self.listed.get(member.id, {}).get(entry.upstream_name(member))
            if listed is not None:
                yield listed
        if entry.name in self.listed_last:
            yield self.listed_last[entry.name]

    def heard(self, member: Member, entries: dict[str, dict[str, Any]]) -> tuple[str, ...]:
        """The endpoint's own list of models; answers with the names that it cannot have."""
        self.listed[member.id] = entries
        before = self.table.entries
        refused = self.table.learn_names(member, entries)
        if self.table.entries is not before:
            self.gate.publish()
        return refused

    def failing(self, member: Member, word: str) -> None:
        """Whether the endpoint answers its probes; "" is good news."""
        if word != member.failing:
            member.set_failing(word)
            self.gate.health_changed(time.monotonic())

    def sampled(self, member: Member, sample: Sample, every_s: float) -> None:
        """Its metrics were read."""
        member.hear(sample, every_s)
        self.gate.sampled(member, sample)

    def unheard(self, member: Member) -> None:
        """Its metrics could not be read, or do not tell what they must."""
        self.gate.unheard(member)

    def told_capacity(self, member: Member, slots: int) -> None:
        """The engine's own word on how many requests it runs at once."""
        member.tell_capacity(slots)
        self.gate.told_capacity(member, slots)

    def pressed(self, member: Member) -> bool:
        """Whether requests wait for this endpoint."""
        return self.gate.pressed(member)

    # -- upkeep ------------------------------------------------------------------------------------------------------

    def drop_stale(self, now: float) -> None:
        """Close connections to engines that were idle for too long; called once a second."""
        for upstream in self.upstreams.values():
            upstream.drop_stale(now)


def _nobody_wakes(name: str) -> None:
    """Without a control plane, or without groups, there is nobody to tell."""

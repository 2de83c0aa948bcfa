"""Names to members: what a client's `model` means, and who can serve it.

Resolving is one dictionary look-up. Everything else happens when settings, discovery or health change.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import attrs

from ...facts.endpoint import Endpoint
from ...facts.errors import Refusal
from ...facts.settings import Model, Prefix
from ..groups.gate import for_clients
from .affinity import Remembered
from .member import Member
from .prefixes import Prefixes

MOST_LISTED = 20
"""Names in a refusal; a list of a thousand adapters helps nobody."""
SOON_S = 2.0
LATER_S = 5.0
"""Retry-After where nothing says when an endpoint will be back."""


class Pool:
    """The members of a model that share a pool name and priority."""

    __slots__ = ("ids", "members", "name", "priority")

    def __init__(self, name: str, priority: int, members: Sequence[Member]) -> None:
        self.name = name
        self.priority = priority
        self.members = tuple(members)
        self.ids = tuple(member.id for member in members)


class Entry:
    """A model. Kept for as long as its name is, so that a reload forgets neither prefixes nor sessions.

    `configured` names stand in the file; others were reported by endpoints and go when the last of these does. `pools`
    come highest priority first. `sessions` remembers where a session was served last. `asked_at` is when it was last
    asked for. `waking` says what is being done to have it served, where a request without an endpoint may wait for
    that; "" where none may.
    """

    __slots__ = (
        "_upstream",
        "aliases",
        "asked_at",
        "configured",
        "context_tokens",
        "fallbacks",
        "members",
        "name",
        "pools",
        "sessions",
        "tree",
        "waking",
    )

    def __init__(self, name: str, prefix: Prefix) -> None:
        self.name = name
        self.aliases: tuple[str, ...] = ()
        self.fallbacks: tuple[str, ...] = ()
        self.configured = False
        self.context_tokens = 0
        self.pools: tuple[Pool, ...] = ()
        self.members: tuple[Member, ...] = ()
        self.tree = Prefixes(prefix.max_bytes, prefix.max_nodes)
        self.sessions = Remembered()
        self.asked_at = -math.inf
        self.waking = ""
        self._upstream: dict[str, str] = {}

    def upstream_name(self, member: Member) -> str:
        """What `member` itself calls this model: the name to send to it."""
        return self._upstream.get(member.id, self.name)

    def place(self, members: Iterable[tuple[Member, str]]) -> None:
        """Set who serves it, each with the name it knows the model by."""
        pools: dict[tuple[int, str], list[Member]] = {}
        everybody: list[Member] = []
        self._upstream = {}
        for member, known_as in members:
            if member in everybody:
                continue
            everybody.append(member)
            pools.setdefault((-member.endpoint.pool_priority, member.endpoint.pool), []).append(member)
            if known_as != self.name:
                self._upstream[member.id] = known_as
        self.members = tuple(everybody)
        self.pools = tuple(Pool(name, -rank, group) for (rank, name), group in sorted(pools.items()))


@attrs.frozen
class Change:
    """What `Table.replace` did to the members. Live requests on a removed one run on: they hold their leases.

    `changed` are kept members whose settings (key, capacity, pool, names) are not what they were.
    """

    added: tuple[Member, ...] = ()
    removed: tuple[Member, ...] = ()
    changed: tuple[Member, ...] = ()


class Table:
    """All models and members. One owner changes it; requests only read.

    `members` is by endpoint id, `entries` by canonical name, `responses` remembers which endpoint made a response id.
    """

    __slots__ = (
        "_models",
        "_names",
        "_prefix",
        "entries",
        "gated",
        "members",
        "missed",
        "responses",
        "waking",
        "withheld",
    )

    def __init__(self, prefix: Prefix) -> None:
        self._prefix = prefix
        self._models: tuple[Model, ...] = ()
        self._names: dict[str, Entry] = {}
        self.entries: dict[str, Entry] = {}
        self.waking: Mapping[str, str] = {}
        """Models whose requests may wait although nobody serves them, each with what is being done about it."""
        self.gated: Mapping[str, str] = {}
        """Names that announced groups claim and nobody serves now, each with the reason. Only to say so."""
        self.missed: Mapping[str, str] = {}
        """Names that a group served before, whose requests may wait for it to come back."""
        self.withheld: dict[str, tuple[str, ...]] = {}
        """By endpoint id: names that an announced group says it serves and is not asked for, because they are the
        file's."""
        self.members: dict[str, Member] = {}
        self.responses = Remembered()

    # -- for every request -----------------------------------------------------------------------------------------

    def find(self, name: str) -> Entry | None:
        """The model behind a name or an alias."""
        return self._names.get(name)

    def resolve(self, name: str, visible: Callable[[str], bool] | None = None) -> Entry:
        """The same, or a Refusal: 404 that lists what is available, or 503 while an endpoint that names its models
        itself has not been heard yet. `visible` tells which canonical names this caller may know of."""
        entry = self._names.get(name)
        if entry is None:
            raise self.unknown(name, visible)
        return entry

    # -- names -----------------------------------------------------------------------------------------------------

    def unknown(self, name: str, visible: Callable[[str], bool] | None = None) -> Refusal:
        shown = name if len(name) <= 200 else name[:200] + "…"
        if any(
            member.endpoint.models is None and member.heard is None and not member.failing
            for member in self.members.values()
        ):
            # Just started: "does not exist" could be false in a moment, and clients do not ask twice after a 404.
            return Refusal(
                503,
                "model_not_ready",
                f"the model '{shown}' may yet appear: not every endpoint has said which models it serves",
                param="model",
                retry_after_s=SOON_S,
            )
        why = self.gated.get(name)
        if why is not None:
            told, detail = (f"the model '{shown}' is not ready: {each}" for each in (for_clients(why), why))
            return Refusal(503, "model_not_ready", told, param="model", retry_after_s=LATER_S, detail=detail)
        names = self.available(visible)
        if not names:
            listed = "no models are available"
        else:
            more = f" and {len(names) - MOST_LISTED} more" if len(names) > MOST_LISTED else ""
            listed = "available: " + ", ".join(names[:MOST_LISTED]) + more
        return Refusal(404, "model_not_found", f"the model '{shown}' does not exist; {listed}", param="model")

    def available(self, visible: Callable[[str], bool] | None = None) -> list[str]:
        """Names and aliases that clients may ask for, sorted."""
        return sorted(
            name
            for name, entry in self._names.items()
            if (entry.members or entry.configured) and (visible is None or visible(entry.name))
        )

    def chain(self, entry: Entry) -> Iterator[Entry]:
        """The fallbacks of a model in their order, without the model itself and without those that no longer exist."""
        for name in entry.fallbacks:
            other = self._names.get(name)
            if other is not None and other is not entry:
                yield other

    # -- changes ---------------------------------------------------------------------------------------------------

    def wake(self, waking: Mapping[str, str]) -> None:
        """Models that are being woken, or could be, each with what is being done about it; others are not."""
        for name in self.waking.keys() | waking.keys():
            entry = self.entries.get(name)
            if entry is not None:
                entry.waking = waking.get(name, "")
        self.waking = waking

    def replace(self, endpoints: Iterable[Endpoint], models: Iterable[Model]) -> Change:
        """New settings. A member survives with its live state when its id, address and engine are what they were."""
        self._models = tuple(models)
        before = self.members
        members: dict[str, Member] = {}
        added = []
        changed = []
        for endpoint in endpoints:
            member = before.get(endpoint.id)
            if member is None or _place(member.endpoint) != _place(endpoint):
                member = Member(endpoint)
                added.append(member)
            elif member.endpoint != endpoint:
                member.configure(endpoint)
                changed.append(member)
            members[endpoint.id] = member
        self.members = members
        removed = tuple(member for member in before.values() if members.get(member.id) is not member)
        self._rebuild()
        if removed:
            for places in (self.responses, *(entry.sessions for entry in self.entries.values())):
                for member in removed:
                    places.forget(member.id)
        return Change(tuple(added), removed, tuple(changed))

    def learn_names(self, member: Member, names: Iterable[str]) -> tuple[str, ...]:
        """What an endpoint says it serves. Matters where its settings name no models; is only kept otherwise.

        Answers with the names that it cannot have because an alias in the file means another model. Cheap when nothing
        changed, so that every probe may call it.
        """
        heard = tuple(names)
        if member.heard != heard:
            member.heard = heard
            if member.endpoint.models is None and self.members.get(member.id) is member:
                self._rebuild()
        if member.endpoint.models is not None:
            return ()
        aliases = {alias for model in self._models for alias in model.aliases}
        return tuple(name for name in heard if name in aliases)

    def _rebuild(self) -> None:
        """Names and pools from settings and from what was heard. The file wins: an alias in it never means a model that
        an endpoint happens to call so."""
        canonical = {alias: model.name for model in self._models for alias in model.aliases}
        serving: dict[str, list[tuple[Member, str]]] = {model.name: [] for model in self._models}
        configured = set(serving)
        for member in self.members.values():
            named = member.endpoint.models
            if member.endpoint.announced:
                continue
            for name in named if named is not None else member.heard or ():
                if named is None and name in canonical:
                    continue
                target = canonical.get(name, name)
                serving.setdefault(target, []).append((member, name))
                if named is not None:
                    configured.add(target)
        self._join_groups(canonical, serving)
        for name in self.missed:
            if name not in canonical:
                serving.setdefault(name, [])
        entries = {}
        for name, members in serving.items():
            entry = self.entries.get(name) or Entry(name, self._prefix)
            entry.aliases = entry.fallbacks = ()
            entry.context_tokens = 0
            entry.configured = name in configured
            entry.waking = self.waking.get(name, "") or self.missed.get(name, "")
            entry.place(members)
            entries[name] = entry
        for model in self._models:
            entry = entries[model.name]
            entry.aliases = model.aliases
            entry.fallbacks = model.fallbacks
            entry.context_tokens = model.context_tokens
        for name in self.entries.keys() - entries.keys():
            self.entries[name].place(())  # requests for it may still hold the entry: nobody serves it any more
        self.entries = entries
        self._names = {**entries, **{alias: entries[name] for alias, name in canonical.items()}}

    def _join_groups(self, canonical: Mapping[str, str], serving: dict[str, list[tuple[Member, str]]]) -> None:
        """Add the announced groups. What the file names, or an endpoint of the file serves, is not theirs to take,
        unless its model says so: anybody on the network can announce any name."""
        ours = {*canonical, *serving}
        shared = {name for model in self._models if model.groups for name in (model.name, *model.aliases)}
        self.withheld = {}
        for member in self.members.values():
            if not member.endpoint.announced:
                continue
            kept = []
            for name in member.endpoint.models or ():
                if name in ours and name not in shared:
                    kept.append(name)
                else:
                    serving.setdefault(canonical.get(name, name), []).append((member, name))
            if kept:
                self.withheld[member.id] = tuple(kept)


def _place(endpoint: Endpoint) -> tuple[str, int, bool, str, str]:
    """What makes it the same endpoint: another engine at the same address is not."""
    return (endpoint.host, endpoint.port, endpoint.tls, endpoint.base, endpoint.engine)

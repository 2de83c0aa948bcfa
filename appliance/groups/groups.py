"""All announced groups: one owner of what is known, and a task for each daemon and each group.

run
|- listen        UDP announcements; only where a port is set
|- watch         one per daemon
|- probe         one per group
'- look          time passes: documents and probes go stale, groups retire, daemons are forgotten

What daemons say ends in `_settle`, which is one synchronous step: it merges, judges, starts and ends tasks, and tells
whoever routes when that changes anything. It happens at once, or, where there is more to do than a tenth of the process
(`pace.py`), for several documents together. What a probe says is judged alone: it changes nothing about who there is.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from itertools import islice
from typing import Any, NoReturn

import attrs
import structlog
import trio

from ..facts.endpoint import Endpoint
from ..facts.groups import LOCAL_DAEMON, Announced, GroupsSettings, Told, View
from ..facts.mcp import Source
from ..nursery.news import News
from ..rules.groups import skim
from ..rules.groups.daemons import STALE_POLLS, Daemon, Daemons
from ..rules.groups.gate import Standing, why_not
from ..rules.groups.merge import merge
from ..rules.groups.published import Published, publish
from ..rules.groups.reception import Heard, Reception
from ..rules.groups.sources import Network, Sources
from ..wire import datagram
from ..wire.interfaces import networks
from .ask import Listening
from .listen import Listener
from .pace import Pace
from .probe import probe_in_order
from .telling import Telling, say
from .watch import PAUSE_S, Watch

LOOK_S = 1.0
NETWORKS_S = 1.0
"""How long the list of own networks is believed."""
MOST_GROUPS = 1024
MOST_NAMES = 10_000
"""Models of all groups together. Those that were there first stay: the table of names is laid anew with each change."""
MOST_ENTRY_BYTES = 16 << 20
LEAST_ENTRY_BYTES = 16 << 10
"""What is kept of all engines' entries, shared among the groups; and the share of each where there are many."""
MOST_STANDINGS = 2 * MOST_GROUPS
"""Groups that are remembered, those that are gone included."""

log = structlog.get_logger("groups")


class Prober:
    """The task of one group: its scope, and whether there is news of the group."""

    def __init__(self) -> None:
        self.scope = trio.CancelScope()
        self.news = trio.Event()


class Groups:
    """What is known of all groups. `published` is told when `endpoints`, `listed` or `gated` changed.

    `key` signs announcements, b"" for none; `handed` are daemons that another router has watched; `listening` the
    sockets of this one; `clock` is monotonic, `wall` in seconds since 1970, both for tests.
    """

    def __init__(
        self,
        settings: GroupsSettings,
        key: bytes = b"",
        *,
        clock: Callable[[], float] = time.monotonic,
        wall: Callable[[], float] = time.time,
        own: Callable[[], Sequence[Network]] = networks,
        handed: Sequence[str] = (),
        listening: Callable[[], Listening] = tuple,
    ) -> None:
        self.settings = settings
        self.published = News()
        self.daemons = Daemons(
            settings.daemons, Sources(settings.allowed_sources), clock(), peers=settings.discover_peers
        )
        for address in handed:
            self.daemons.announced(Heard("", (address,)), clock())
        self.listener = Listener(self._heard, self._oversize)
        self._sources = Sources(settings.allowed_sources)
        self._key = datagram.secret(key)
        self._listening = listening
        self._reception = Reception(
            settings.universes,
            self._sources,
            key=bool(self._key),
            verified=lambda claim: datagram.verified(claim, self._key),
        )
        self._clock = clock
        self._wall = wall
        self._read_networks = own
        self._own: Sequence[Network] = ()
        self._own_until = float("-inf")
        self._started_at = clock()
        self._groups: dict[str, Announced] = {}
        self._standings: dict[str, Standing] = {}
        self._why: dict[str, str] = {}
        self._published = Published()
        self._nursery: trio.Nursery | None = None
        self._watches: dict[Daemon, trio.CancelScope] = {}
        self._watching: dict[Daemon, Watch] = {}
        self._probers: dict[str, Prober] = {}
        self._pace = Pace()
        self._telling = Telling(clock, self._is_guessed)
        self._due = trio.Event()

    def configure(self, settings: GroupsSettings) -> None:
        """Take changed settings: times, and who may announce. The others stay as they were made. Daemons that are not
        allowed any more are let go of at once, groups that are due for a probe now are probed now."""
        if settings == self.settings:
            return
        if settings.allowed_sources != self.settings.allowed_sources:
            self._sources = Sources(settings.allowed_sources)
            self._reception.allow(self._sources)
            self.daemons.allow(self._sources, self._networks())
        self.settings = settings
        for prober in self._probers.values():
            prober.news.set()
        for watch in self._watching.values():
            watch.look()
        self._settle()

    # -- for whoever routes ------------------------------------------------------------------------------------------

    def endpoints(self) -> tuple[Endpoint, ...]:
        """One for each group that gets requests."""
        return self._published.endpoints

    def listed(self) -> Mapping[str, Mapping[str, Mapping[str, Any]]]:
        """The engines' own entries, by endpoint id and model."""
        return self._published.listed

    def gated(self) -> Mapping[str, str]:
        """Names that a group claims and none serves now, each with the reason."""
        return self._published.gated

    def missed(self) -> Mapping[str, str]:
        """Names that a group served before and none serves now, each with what is known of it; requests may wait for
        them. None where nobody waits."""
        if not self.settings.model_wait_s:
            return {}
        served = {model for endpoint in self._published.endpoints for model in endpoint.models or ()}
        return {
            model: self._why.get(name) or "its group is gone"
            for name, standing in sorted(self._standings.items())
            for model in standing.names
            if model not in served
        }

    def refused(self, name: str) -> None:
        """The address of a group refused a request's connection: as good as a failed probe, and another one is due."""
        standing, prober = self._standings.get(name), self._probers.get(name)
        if standing is None or prober is None or not standing.url:
            return
        standing.failed([(standing.url, "cannot connect: a request was refused")])
        prober.news.set()
        with self._pace.work():
            self._judge(self._clock())

    def allows(self, address: str) -> bool:
        """Whether an address passes `allowed_sources`."""
        return self._sources.allow(address, self._networks())

    def tool_servers(self) -> tuple[Source, ...]:
        """Where the groups' tools are. The gates do not matter for them: a server that tells how loading goes is worth
        most while its engine loads."""
        return tuple(Source(name, group.mcp) for name, group in sorted(self._groups.items()) if group.mcp)

    @property
    def heard_out(self) -> bool:
        """Whether every daemon has answered or failed, and every group was probed: what can be known by now is."""
        asked = all(daemon.view is not None or daemon.error for daemon in self.daemons)
        return (
            asked
            and not self._due.is_set()
            and all(
                standing.probed_at is not None or standing.error
                for name, standing in self._standings.items()
                if name in self._groups and self._groups[name].candidates
            )
        )

    def status(self) -> dict[str, Any]:
        """Daemons, groups and their models for the status document."""
        now = self._clock()
        models: dict[str, dict[str, str]] = {}
        for name, why in sorted(self._why.items()):
            if not why:
                for model in self._standings[name].names:
                    models.setdefault(model, {"group": name, "url": self._standings[name].url})
        return {
            "uptime_s": int(now - self._started_at),
            "verify": bool(self._key),
            "daemons": self.daemons.rows(now),
            "groups": {name: self._row(name) for name in sorted(self._why)},
            "models": models,
        }

    # -- tasks -------------------------------------------------------------------------------------------------------

    async def run(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> NoReturn:
        """Find groups until cancelled. Started once it listens."""
        async with trio.open_nursery() as nursery:
            self._nursery = nursery
            if self.settings.announce_port:
                if not self._key:
                    log.warning(
                        "announcements are believed without a signature: anybody on an allowed network can announce",
                        next="set groups.secret_file here and MENTAT_SECRET on the nodes",
                    )
                await nursery.start(self.listener.serve, self.settings.announce_port, name="announcements")
            self._settle()
            task_status.started()
            while True:
                with trio.move_on_after(LOOK_S):
                    await self._due.wait()
                await self._pace.turn()
                self._due = trio.Event()
                try:
                    self._settle()
                except Exception as fault:
                    self._telling.survived("a look at all groups", fault)
        raise AssertionError("it ends only by cancellation")

    async def _watch(self, daemon: Daemon, scope: trio.CancelScope) -> None:
        watch = self._watching[daemon] = Watch(
            daemon, lambda: self.settings.poll_interval_s, self._pace, self._took, self._lost
        )
        try:
            with scope:
                while True:
                    await trio.lowlevel.checkpoint_if_cancelled()
                    try:
                        await watch.run()
                    except Exception as fault:
                        self._telling.survived(f"daemon {daemon.address}", fault)
                    await trio.sleep(PAUSE_S)
        finally:
            del self._watching[daemon]

    async def _probe(self, name: str, prober: Prober) -> None:
        """Probe one group for ever: at once when daemons say something new of it, else at its interval."""
        with prober.scope:
            while True:
                await trio.lowlevel.checkpoint_if_cancelled()
                prober.news = trio.Event()  # from here on: what is heard while it probes is about the next probe
                try:
                    await self._probe_once(name)
                except Exception as fault:
                    self._telling.survived(f"group {name}", fault)
                with trio.move_on_after(self.settings.probe_interval_s):
                    await prober.news.wait()

    async def _probe_once(self, name: str) -> None:
        group = self._groups[name]
        order = self._standings[name].order(group, self._clock(), self.settings.promote_s)
        if not order:
            return
        share = min(skim.MOST_MODEL_BYTES, max(LEAST_ENTRY_BYTES, MOST_ENTRY_BYTES // max(1, len(self._groups))))
        found, errors = await probe_in_order(order, self.settings.probe_timeout_s, self._pace, self._listening(), share)
        group = self._groups.get(name, group)
        standing = self._standings[name]
        if found is not None and found.url in group.candidates:
            room = MOST_NAMES - sum(len(other.names) for other in self._standings.values() if other is not standing)
            if len(found.entries) > room:
                found = attrs.evolve(found, entries=dict(islice(found.entries.items(), max(0, room))))
            if room <= 0:
                standing.failed([(found.url, f"all groups together may name {MOST_NAMES} models, and do")])
                standing.names = ()
            else:
                standing.answered(group, found.url, found.entries, self._clock(), router=found.router)
        elif found is None and order[0] in group.candidates:
            standing.failed(errors)
        if self._pace.free:
            with self._pace.work():
                self._judge(self._clock())
        else:
            self._due.set()

    # -- what is heard -----------------------------------------------------------------------------------------------

    def _heard(self, data: bytes, source: str) -> None:
        try:
            self._hear(data, source)
        except Exception as fault:
            self._telling.survived("an announcement", fault)

    def _hear(self, data: bytes, source: str) -> None:
        found = self._reception.judge(datagram.read(data), source, self._networks(), self._wall())
        if isinstance(found, Told):
            say(found)
        elif isinstance(found, Heard):
            last = self.daemons.all[-1:]
            told = self.daemons.announced(found, self._clock())
            say(told)
            if self.daemons.all[-1:] != last:
                self._settle_soon()

    def _oversize(self, source: str) -> None:
        told = self._reception.too_large(source)
        say(told)

    def _took(self, daemon: Daemon, view: View) -> bool:
        taken = self.daemons.read(daemon, view, self._clock())
        if taken:
            self._telling.found(daemon, len(view.groups))
        elif daemon in self.daemons.all:
            self._telling.lost(daemon, daemon.address, daemon.error)
        self._settle_soon()
        return taken

    def _lost(self, daemon: Daemon, error: str) -> None:
        where = daemon.address
        self.daemons.failed(daemon, error)
        self._telling.lost(daemon, where, error)
        self._settle_soon()

    # -- one step ----------------------------------------------------------------------------------------------------

    def _settle_soon(self) -> None:
        if self._pace.free:
            self._settle()
        else:
            self._due.set()

    def _settle(self) -> None:
        with self._pace.work():
            self._settle_now()

    def _settle_now(self) -> None:
        now, own = self._clock(), self._networks()
        stale_s = STALE_POLLS * self.settings.poll_interval_s
        told = self.daemons.follow_peers(now, stale_s, own)
        say(told)
        self.daemons.forget(now, self.settings.model_ttl_s)
        self._follow_daemons()
        before = self._groups
        merged = merge(self.daemons.views(now, stale_s), self._sources, own)
        if len(merged) > MOST_GROUPS:  # those that were there first stay, whatever the newcomers are called
            merged = dict(sorted(merged.items(), key=lambda item: (item[0] not in before, item[0]))[:MOST_GROUPS])
        self._groups = merged
        for name, group in self._groups.items():
            standing = self._standings.get(name)
            if standing is None:
                standing = self._standings[name] = Standing(now)
            standing.seen(group, now)
        ttl_s = self.settings.model_ttl_s
        for name in [name for name, standing in self._standings.items() if now - standing.seen_at > ttl_s]:
            del self._standings[name]
        while len(self._standings) > MOST_STANDINGS:
            del self._standings[min(self._standings, key=lambda name: self._standings[name].seen_at)]
        self._follow_groups(before)
        self._judge(now)

    def _judge(self, now: float) -> None:
        why: dict[str, str] = {}
        for name, group in self._groups.items():
            standing = self._standings[name]
            reason = why_not(group, standing, now, self.settings.fresh_s)
            standing.judged(group, reason, now)
            if not standing.retired(now, self.settings.model_ttl_s):
                why[name] = reason
        self._why = why
        self._telling.judged(why, self._groups, self._standings)
        published = publish(self._groups, self._standings, why, self.settings.serving_timeout_s)
        if published != self._published:
            self._published = published
            self.published.tell()

    def _follow_daemons(self) -> None:
        """A watch for each daemon, and for no other."""
        if self._nursery is None:
            return
        wanted = set(self.daemons)
        for daemon in [each for each in self._watches if each not in wanted]:
            self._watches.pop(daemon).cancel()
        for daemon in wanted:
            if daemon not in self._watches:
                scope = self._watches[daemon] = trio.CancelScope()
                self._nursery.start_soon(self._watch, daemon, scope, name=f"daemon {daemon.address}")

    def _follow_groups(self, before: Mapping[str, Announced]) -> None:
        """A prober for each group; it is woken when what daemons say of its group has changed."""
        if self._nursery is None:
            return
        for name in [name for name in self._probers if name not in self._groups]:
            self._probers.pop(name).scope.cancel()
        for name, group in self._groups.items():
            if name not in self._probers:
                prober = self._probers[name] = Prober()
                self._nursery.start_soon(self._probe, name, prober, name=f"group {name}")
            elif before.get(name) != group:
                self._probers[name].news.set()

    # -- small steps -------------------------------------------------------------------------------------------------

    def _is_guessed(self, daemon: Daemon) -> bool:
        """Whether it is the local daemon, which is asked without anybody having said that there is one."""
        return daemon.seed and self.settings.daemons == (LOCAL_DAEMON,)

    def _networks(self) -> Sequence[Network]:
        now = self._clock()
        if now >= self._own_until:
            self._own, self._own_until = tuple(self._read_networks()), now + NETWORKS_S
        return self._own

    def _row(self, name: str) -> dict[str, Any]:
        group, standing, why = self._groups[name], self._standings[name], self._why[name]
        return {
            "daemon": group.daemon,
            "agents_alive": group.agents_alive,
            "actors_running": group.actors_running,
            "openai": standing.url or (group.candidates[0] if group.candidates else None),
            "openai_candidates": list(group.candidates) or None,
            "openai_note": group.note or None,
            "provider": group.provider,
            "mcp": group.mcp or None,
            "healthy": not why,
            "models": list(standing.names) if not why else None,
            "why_not": why or None,
        }

"""What is to be done about the fleet now: one pass, called after every change and when a wait is over.

    expire     nodes that were silent for too long
    judge      give up replicas that cannot go on, then sort the others by model
    scale      how many of each model are wanted
    act        stop what is not wanted any more, place what is missing
    commands   what agents have to be told that they were not told yet

Each looks at the world as it is and not at what has happened, so whatever got lost is seen by the next pass. A pass
in which nothing has changed looks at clocks and at demand only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from random import Random

from appliance.facts.catalog import Model
from appliance.facts.control import ControlSettings
from appliance.facts.demand import NO_DEMAND, Demand
from appliance.facts.endpoint import Endpoint
from appliance.rules.fleet import telling
from appliance.rules.fleet.actions import Actions, Command, Why
from appliance.rules.fleet.clashes import Clashes
from appliance.rules.fleet.commands import commands
from appliance.rules.fleet.expiry import expire
from appliance.rules.fleet.history import History
from appliance.rules.fleet.keeping import Leave, Team, leaves, may_make_way, places, teams, why_changed
from appliance.rules.fleet.members import Placed
from appliance.rules.fleet.reports import Trouble, drains, endpoint, is_cut, trouble
from appliance.rules.fleet.rooming import Plan, shards_on, spot_of
from appliance.rules.fleet.scaling import Scaler, begin, follow
from appliance.rules.fleet.starting import make
from appliance.rules.fleet.world import World
from appliance.rules.placement.rooms import by_priority

STALL_S = 5.0
"""A step that comes so much later than was asked for: the control plane itself was held up, and could hear nobody."""

LOOK_S = 1.0
"""How often a model is looked at whose number may follow from its load."""

EXPLAIN_S = 5.0
"""How old the reason may be for which a model has no place, when a pass finds none again: it costs a look at all
nodes."""

EXPLAINED = 16
"""How many reasons that are older than that one pass renews; the next ones follow at once. Two hundred models without a
place would hold up the requests of the others, which are served in the same thread."""

ROUNDS = 4
"""A pass whose decisions make others possible is followed by another one at once, up to so many."""


class Fleet:
    """Keeps the world as the configuration and the demand want it. Plain calls; one owner, the same as the world's.

    `now` is a clock that never steps, the one that `Demand.asked_at` is in. `rng` gives ids and the keys of engines, so
    in production it must be one that cannot be guessed. `started_at` is when the control plane started. By model are
    kept: the `history` of failures, `scalers`, `overrides` (an operator's word), `teams` (its replicas, as of the last
    step), `unplaced` (why it had no place at the last try, "" while room is about to be freed).
    """

    def __init__(self, world: World, settings: ControlSettings, started_at: float) -> None:
        self.world = world
        self.settings = settings
        self.started_at = started_at
        self.settled = False
        self.models: dict[str, Model] = {}
        self.history = History()
        self.scalers: dict[str, Scaler] = {}
        self.overrides: dict[str, int] = {}
        self.unplaced: dict[str, str] = {}
        self._explained: dict[str, float] = {}
        self._explains = 0
        self._ending = False
        self.teams: dict[str, Team] = {}
        self._plan = Plan()
        self._seen = -1
        self._due = -math.inf
        self._again_at = math.inf
        self._stepped_at = started_at
        self._drained: set[str] = set()
        self._clashes = Clashes()
        self._endpoints: tuple[int, tuple[Endpoint, ...]] = (-1, ())

    def configure(self, models: Iterable[Model], settings: ControlSettings) -> None:
        """Take a configuration over. A model that was changed is tried at once, whatever it did before."""
        new = {model.name: model for model in models if model.profiles}
        for name in [*self.models, *new]:
            if new.get(name) != self.models.get(name):
                self.history.forgive(name)
                self.unplaced.pop(name, None)
            if name not in new:
                self.history.forget(name)
                self.scalers.pop(name, None)
                self.overrides.pop(name, None)
        # An equal model keeps its identity, by which replicas that were compared with it are known.
        self.models = {name: model if (old := self.models.get(name)) != model else old for name, model in new.items()}
        self.settings = settings
        self._due = -math.inf

    def step(self, demand: Mapping[str, Demand], now: float, rng: Random) -> Actions:
        """Look at everything and say what to do now. Whatever it says is to be done at once, in its order."""
        if now > self._again_at + STALL_S:
            self.world.overslept(now - self._stepped_at, now)
        self._stepped_at = now
        due = expire(self.world, self.settings, now)
        said: list[tuple[str, Command]] = []
        if self._settle(now):
            changed = self.world.changes != self._seen or now >= self._due
            if changed:
                self._judge(now, rng)
            if self._scale(demand, now) or changed:
                said = self._pass(now, rng)
            due = min(due, self._due, now + LOOK_S if self._follows_load() else math.inf)
        else:
            # Nothing is decided by it yet; who asks is told of what has been heard of so far.
            self.teams = teams(self.world, self.models, self.settings.drain_grace_s)
            if now < self.started_at + self.settings.settle_s:
                due = min(due, self.started_at + self.settings.settle_s)
        self._again_at = due
        events, self.world.events = tuple(self.world.events), []
        return Actions(tuple(said), events, due)

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Replicas that take requests now."""
        if self._endpoints[0] != self.world.changes:
            found = (endpoint(self.world, placed) for placed in self.world.replicas.values())
            self._endpoints = self.world.changes, tuple(each for each in found if each is not None)
        return self._endpoints[1]

    def waking(self, now: float) -> Mapping[str, str]:
        """Models without an endpoint whose requests may wait for one, each with a sentence on how far it is."""
        return {name: sentence for name, sentence, _ in telling.absent(self, now) if sentence}

    def troubles(self, now: float) -> Mapping[str, str]:
        """Models that do not serve and cannot be started now, each with a sentence that says why."""
        return {name: reason for name, sentence, reason in telling.absent(self, now) if reason}

    def explain(self, model: str, now: float) -> Why:
        """Why each replica that is wanted of `model` is not there. Raises KeyError for a model without profiles."""
        return telling.explain(self, model, now)

    def stand(self, model: str, now: float) -> Why:
        """The same without what speaks against each place, so that it may be asked for every model at any time."""
        return telling.stand(self, model, now)

    def scale(self, model: str, replicas: int | None, now: float) -> None:
        """An operator's word on how many are to run, whatever the limits of scaling; None: by demand again. Raises
        KeyError for a model without profiles."""
        if model not in self.models:
            raise KeyError(model)
        before = self.wanted(model)
        if replicas is None:
            if self.overrides.pop(model, None) is not None and model in self.scalers:
                # What was wanted before an operator spoke is long over: it goes on from what there is.
                team = self.teams.get(model) or Team()
                self.scalers[model] = begin(self.models[model].scaling, team.alive, now)
        else:
            self.overrides[model] = replicas
        told = {"wanted": self.wanted(model), "before": before, "because": self.because(model)}
        self.world.tell("info", "scaled", model=model, **told)
        self._due = -math.inf

    def wanted(self, model: str) -> int:
        """How many replicas of a model are to run now."""
        return self.overrides[model] if model in self.overrides else self._scaler(model).wanted

    def because(self, model: str) -> str:
        """Why so many."""
        return "an operator said so" if model in self.overrides else self._scaler(model).because

    def _scaler(self, model: str) -> Scaler:
        """What is kept of a model, or what would be begun with now, since nothing is before we have settled."""
        team = self.teams.get(model) or Team()
        return self.scalers.get(model) or begin(self.models[model].scaling, team.alive, self._stepped_at)

    # -- settle and scale ----------------------------------------------------------------------------------------------

    def _settle(self, now: float) -> bool:
        """Whether enough is known to change anything. A node that is expected may have all that seems to be missing."""
        if not self.settled and now >= self.started_at + self.settings.settle_s:
            self.settled = all(node.state != "expected" for node in self.world.nodes.values())
            if self.settled:
                running = sum(placed.stage == "running" for placed in self.world.replicas.values())
                self.world.tell("info", "settled", nodes=len(self.world.nodes), replicas=running)
        return self.settled

    def _scale(self, demand: Mapping[str, Demand], now: float) -> bool:
        changed = False
        for name, model in self.models.items():
            team = self.teams.get(name) or Team()
            before = self.scalers.get(name)
            if before is None:
                # Followed at once: who asked while we settled waits already, and may be the last to wake us.
                before = begin(model.scaling, team.alive, now)
                changed = True
            asked = demand.get(name, NO_DEMAND)
            after = follow(before, model.scaling, asked, len(team.serving), team.alive, now)
            self.scalers[name] = after
            if after.wanted != before.wanted and name not in self.overrides:
                changed = True
                told = {"wanted": after.wanted, "before": before.wanted, "because": after.because}
                self.world.tell("info", "scaled", model=name, **told)
        return changed

    def _follows_load(self) -> bool:
        """Whether some model's number may change by the mere passing of time."""
        return any(
            self.wanted(name) > 0 and model.scaling.most > model.scaling.min_replicas
            for name, model in self.models.items()
        )

    # -- judge ---------------------------------------------------------------------------------------------------------

    def _judge(self, now: float, rng: Random) -> None:
        world = self.world
        self._clashes.settle(world, self._plan.renew(world))
        coming = any(node.may_come for node in world.nodes.values())
        for placed in world.replicas.values():
            if placed.stage == "stopping" and is_cut(world, placed):
                world.give_up(placed, placed.reason, now)
            if placed.stage != "running":
                continue
            if (found := trouble(world, placed, now)) is not None:
                self._give_up(placed, found, now, rng)
            elif not placed.complete and not coming:
                missing = sorted(set(range(placed.profile.nodes)) - set(placed.shards))
                ranks = ", ".join(map(str, missing))
                self._give_up(placed, Trouble(f"no node has its rank {ranks}"), now, rng)
            elif placed.adopted and drains(world, placed):
                world.stop(placed, "it was being stopped already", now, self.settings.drain_grace_s)
        self.teams = teams(world, self.models, self.settings.drain_grace_s)
        for team in self.teams.values():
            for name in team.serving:
                self._note_ready(world.replicas[name], now)

    def _give_up(self, placed: Placed, found: Trouble, now: float, rng: Random) -> None:
        name = placed.model
        self.world.give_up(placed, found.reason, now)
        model = self.models.get(name)
        told: dict[str, object] = {"model": name, "replica": placed.id, "reason": found.reason}
        if model is None or not found.fault:
            self.world.tell("warning", "replica_given_up", **told)
            return
        self.history.note(name, found.failures)
        ports = [failure for failure in found.failures if failure.refused_port]
        # Each is news once, so that this comes to an end where strangers have all of them.
        strangers = [self.world.refuse_port(each.node, each.refused_port, now) for each in ports]
        # What broke a profile that is going anyway says nothing of the new one.
        if not why_changed(model, placed):
            if any(strangers):
                backoff = self.history.wait_briefly(name, found.reason, now)
            else:
                nodes = [failure.node for failure in found.failures]
                backoff = self.history.wait(name, found.reason, nodes, now, rng)
            told["retry_in_s"] = round(backoff.until - now, 1)
        for failure in found.failures[:1]:
            told |= {"node": failure.node, "rank": failure.rank, "exit": failure.exit}
        self.world.tell("warning", "replica_failed", **told)

    def _note_ready(self, placed: Placed, now: float) -> None:
        if placed.ready_at is None:
            placed.ready_at = now
            if not placed.adopted:
                told = {"model": placed.model, "replica": placed.id, "nodes": ",".join(placed.nodes)}
                self.world.tell("info", "replica_ready", **told, after_s=round(now - placed.made_at, 1))

    # -- act -----------------------------------------------------------------------------------------------------------

    def _pass(self, now: float, rng: Random) -> list[tuple[str, Command]]:
        said: list[tuple[str, Command]] = []
        for _ in range(ROUNDS):
            before = self.world.changes
            self._act(now, rng)
            said += commands(self.world, now)
            self._seen = before
            if self.world.changes == before:
                break
            self._judge(now, rng)
        if self._seen != self.world.changes:
            self._due = now
        return said

    def _act(self, now: float, rng: Random) -> None:
        self._due = math.inf
        self._explains = EXPLAINED
        self._ending = any(placed.stage != "running" for placed in self.world.replicas.values())
        missing: dict[str, int] = {}
        for name in self.models:
            team = self.teams.get(name)
            if team is None:
                team = self.teams[name] = Team()
            wanted = self.wanted(name)
            for leave in leaves(self.world, team, wanted, self.because(name), self.settings.drain_grace_s, now):
                self._leave(leave, team, now)
            for old in team.moving:
                self._due = min(self._due, old.ends_at)
            self._recover(name, team, now)
            count = places(team, wanted)
            if wanted <= len(team.current):
                self.unplaced.pop(name, None)
            if count and (backoff := self.history.waiting(name, now)) is not None:
                self._due = min(self._due, backoff.until)
            elif count:
                missing[name] = count
        for name in [name for name in self.teams if name not in self.models]:
            for leave in leaves(self.world, self.teams[name], 0, "", self.settings.drain_grace_s, now):
                self._leave(leave, self.teams[name], now)
        # What each model must have comes before what the load asks for.
        for at_least in (True, False):
            for name, count in missing.items():
                self._place(self.models[name], self.teams[name], count, at_least, now, rng)
        self._tell_drained(now)

    def _leave(self, leave: Leave, team: Team, now: float) -> None:
        placed = leave.placed
        told: dict[str, object] = {"model": placed.model, "replica": placed.id, "reason": leave.reason}
        if leave.forced:
            told["no_replacement"] = telling.why_no_replacement(self, placed.model, team, now)
            self.world.tell("warning", "drain_grace_over", **told)
        else:
            self.world.tell("info", "replica_leaves", **told, drain_s=round(leave.drain_s, 1))
        if leave.drain_s > 0:
            self.world.stop(placed, leave.reason, now, leave.drain_s)
        else:
            self.world.give_up(placed, leave.reason, now)
        team.ending.append(placed)
        self._ending = True

    def _recover(self, name: str, team: Team, now: float) -> None:
        """A model may forget its failures once all that is wanted has served for a while. One replica that never
        failed says nothing of another one that always does."""
        ready = [placed.ready_at or now for placed in team.current if placed.id in team.serving]
        steady_at = self.history.steady_at(name, ready)
        if steady_at is None or not ready or len(ready) < max(len(team.current), self.wanted(name)):
            return
        if now >= steady_at:
            self.history.forgive(name)
        else:
            self._due = min(self._due, steady_at)

    def _place(self, model: Model, team: Team, count: int, at_least: bool, now: float, rng: Random) -> None:
        name = model.name
        if at_least:
            count = min(count, max(1, model.scaling.min_replicas) - len(team.current))
        else:
            count = min(count, places(team, self.wanted(name)))
        for _ in range(count):
            placement = self._plan.rooms.place(model, avoid=self.history.shunned(name))
            if placement is None:
                self._note_unplaced(model, team, now)
                return
            placed = make(self.world, model, placement, now, rng)
            self.world.book(placed)
            team.current.append(placed)
            told = {"model": name, "replica": placed.id, "nodes": ",".join(placed.nodes)}
            self.world.tell("info", "replica_placed", **told, profile=placed.profile.name, fabric=placement.fabric)
        if count > 0 and not places(team, self.wanted(name)):
            self.unplaced.pop(name, None)

    def _note_unplaced(self, model: Model, team: Team, now: float) -> None:
        for old in may_make_way(team):
            if self._fits_without(model, old.placed):
                reason = f"{old.reason}, and there is no room for both"
                self._leave(Leave(old.placed, reason, self.settings.drain_grace_s), team, now)
                team.changed.remove(old)
                team.serving.discard(old.placed.id)
                return
        before = self.unplaced.get(model.name)
        if self._ending:
            self.unplaced[model.name] = before or ""
        elif not before or (self._explains > 0 and now >= self._explained[model.name] + EXPLAIN_S):
            self._explains -= 1
            reason = telling.nowhere(self._plan.rooms, model, self.history.shunned(model.name))
            self.unplaced[model.name], self._explained[model.name] = reason, now
            if not before:
                wanted = self.wanted(model.name)
                self.world.tell("warning", "no_place", model=model.name, wanted=wanted, reason=reason)
        elif now > self._explained[model.name]:  # not in the very pass that found the reason
            self._due = min(self._due, max(now, self._explained[model.name] + EXPLAIN_S))

    def _fits_without(self, model: Model, placed: Placed) -> bool:
        """Whether one more would have a place if `placed` were gone."""
        nodes = [self.world.nodes[name] for name in dict.fromkeys(placed.nodes)]
        for node in nodes:
            self._plan.rooms.set(spot_of(node, without=placed.id))
        avoid = self.history.shunned(model.name)
        fits = any(self._plan.rooms.find(profile, avoid) is not None for profile in by_priority(model.profiles))
        for node in nodes:
            self._plan.rooms.set(spot_of(node))
        return fits

    def _tell_drained(self, now: float) -> None:
        for name, node in self.world.nodes.items():
            if node.draining_since is None:
                self._drained.discard(name)
            elif name not in self._drained and node.state == "ready" and not any(shards_on(node)):
                self._drained.add(name)
                self.world.tell("info", "node_drained", node=name)
                # Why nothing goes there is another reason from now on.
                self._explained.update(dict.fromkeys(self.unplaced, -math.inf))
                self._due = now if self.unplaced else self._due

"""What is to be done about the fleet now: one pass, called after every change and when a wait is over."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from random import Random

from appliance.facts.catalog import Model
from appliance.facts.control import ControlSettings
from appliance.facts.demand import Demand
from appliance.facts.endpoint import Endpoint
from appliance.rules.fleet.actions import Actions, Failure, Why
from appliance.rules.fleet.backoff import Backoff
from appliance.rules.fleet.world import World


class Fleet:
    """Keeps the world as the configuration and the demand want it. Plain calls; one owner, the same as the world's.

    `now` is a clock that never steps, the one that `Demand.asked_at` is in. `rng` gives ids and the keys of engines, so
    in production it must be one that cannot be guessed. `started_at` is when the control plane started. `backoffs` and
    `failures` are by model (the latest failure first).
    """

    def __init__(self, world: World, settings: ControlSettings, started_at: float) -> None:
        self.world = world
        self.settings = settings
        self.started_at = started_at
        self.settled = False
        self.models: dict[str, Model] = {}
        self.backoffs: dict[str, Backoff] = {}
        self.failures: dict[str, tuple[Failure, ...]] = {}

    def configure(self, models: Iterable[Model], settings: ControlSettings) -> None:
        """Take a configuration over. A model that was changed is tried at once, whatever it did before."""

    def step(self, demand: Mapping[str, Demand], now: float, rng: Random) -> Actions:
        """Look at everything and say what to do now. Whatever it says is to be done at once, in its order."""
        return Actions()

    def endpoints(self) -> tuple[Endpoint, ...]:
        """Replicas that take requests now."""
        return ()

    def waking(self, now: float) -> Mapping[str, str]:
        """Models without an endpoint whose requests may wait for one, each with a sentence on how far it is."""
        return {}

    def troubles(self, now: float) -> Mapping[str, str]:
        """Models that are wanted, do not serve and cannot be started now, each with a sentence that says why."""
        return {}

    def explain(self, model: str, now: float) -> Why:
        """Why each replica that is wanted of `model` is not there. Raises KeyError for a model without profiles."""
        raise KeyError(model)

    def scale(self, model: str, replicas: int | None, now: float) -> None:
        """An operator's word on how many are to run, whatever the limits of scaling; None: by demand again."""

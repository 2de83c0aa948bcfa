"""The hardware of this node as it is now: looked at once at the start, and again for ever.

What changes all the time (memory in use, load, free disk) is kept up to date and is no news. News are what decides
about placing: a GPU that is gone, hindered or free again, another address, another fabric.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NoReturn

import attrs
import structlog
import trio

from appliance.agent.discovery.gpus import GpuProbe
from appliance.agent.discovery.inventory import Place, gather
from appliance.agent.discovery.reading import Ours
from appliance.agent.discovery.writing import BadInventory
from appliance.agent.unanswered import Questions
from appliance.facts.hardware import Gpu, Inventory
from appliance.nursery.news import News

LOOK_S = 15.0
"""Seconds between two looks. NVML takes milliseconds; `nvidia-smi` starts three processes and wakes idle cards."""

log = structlog.get_logger("machine")


class Machine:
    """Made once; `look` before anything is placed, then `watch` in a nursery. `limit_s` bounds each probe."""

    def __init__(self, place: Place, probe: GpuProbe, ours: Callable[[], Ours], limit_s: float = 10.0) -> None:
        self.inventory = Inventory(node=place.node, address=place.address, labels=place.labels)
        self.changed = News()
        self._place = place
        self._probe = probe
        self._ours = ours
        self._probing = trio.Lock()
        self._questions = Questions()
        self._limit_s = limit_s
        self._notes: tuple[str, ...] = ()

    async def look(self) -> None:
        """Look at everything now. Raises `BadInventory` for an unusable inventory file."""
        before = self.inventory
        async with self._probing:
            found = await gather(
                self._place,
                self._probe,
                ours=self._ours(),
                previous=before.gpus,
                limit_s=self._limit_s,
                questions=self._questions,
            )
        self.inventory = found
        self._tell_notes(found.notes)
        if placing(found) != placing(before):
            _log_gpus(before, found)
            self.changed.tell()

    async def watch(self) -> NoReturn:
        """Look again and again. A file that was broken meanwhile leaves what was seen before, and so does a look that
        fails in a way nobody has thought of: engines that run must not be left alone for it."""
        faulty = ""
        while True:
            await trio.sleep(LOOK_S)
            try:
                await self.look()
            except BadInventory as wrong:
                if str(wrong) != faulty:
                    faulty = str(wrong)
                    log.error("inventory file cannot be used, the last one holds", reason=faulty)
            except Exception as fault:
                if repr(fault) != faulty:
                    faulty = repr(fault)
                    log.error("hardware cannot be looked at, what was seen last holds", exc_info=fault)
            else:
                faulty = ""

    async def read_gpus(self) -> tuple[Gpu, ...]:
        """The GPUs now, without judgement: how much memory of each is in use."""
        async with self._probing:
            return (await self._probe.read()).reading.gpus

    def _tell_notes(self, notes: tuple[str, ...]) -> None:
        for note in notes:
            if note not in self._notes:
                log.warning("inventory", note=note)
        for note in self._notes:
            if note not in notes:
                log.info("inventory: no longer so", note=note)
        self._notes = notes


def placing(inventory: Inventory) -> Inventory:
    """The inventory without what changes from look to look and decides nothing."""
    return attrs.evolve(
        inventory,
        memory=attrs.evolve(inventory.memory, available_bytes=None),
        disk=None,
        gpus=tuple(
            attrs.evolve(
                gpu,
                used_bytes=None,
                utilization=None,
                holders=None,
                hindrances=tuple(attrs.evolve(each, message="") for each in gpu.hindrances),
            )
            for gpu in inventory.gpus
        ),
    )


def _log_gpus(before: Inventory, now: Inventory) -> None:
    """One line per GPU that came, went, or changed between free and not free."""
    for gpu in now.gpus:
        old = before.gpu(gpu.uuid)
        codes = [each.code for each in gpu.hindrances]
        if old is not None and codes == [each.code for each in old.hindrances]:
            continue
        if gpu.hindrances:
            why = "; ".join(f"{each.code}: {each.message}" for each in gpu.hindrances)
            log.warning("GPU is not free", gpu=gpu.index, gpu_class=gpu.gpu_class, reason=why)
        elif old is not None:
            log.info("GPU is free again", gpu=gpu.index, gpu_class=gpu.gpu_class)
    for gpu in before.gpus:
        if now.gpu(gpu.uuid) is None:
            log.warning("GPU is gone", gpu=gpu.index, gpu_class=gpu.gpu_class)

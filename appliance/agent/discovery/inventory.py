"""The whole node in one value: gathered from the probes, or read from a file that stands in for all of them."""

from __future__ import annotations

import socket
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import attrs
import trio

from appliance.agent.discovery import cpus, fabrics, interfaces
from appliance.agent.discovery.gpus import Found, GpuProbe
from appliance.agent.discovery.reading import Ours, Reading, carry_over, judge
from appliance.agent.discovery.writing import BadInventory, read_inventory
from appliance.agent.unanswered import Questions, Unanswered
from appliance.agent.wording import visible
from appliance.facts.hardware import Cpus, Disk, Gpu, Interface, Inventory, Memory

T = TypeVar("T")


@attrs.frozen
class Place:
    """Where to look, and what is not found out but said.

    `node` "" is the host's name, `address` "" the first address that is not loopback; `fabric` names the node's fastest
    fabric, "" leaves it to the subnet prefix. `models` is the folder whose disk counts. `inventory_file` "" looks at
    the hardware. `root` is the root of the file system in which `/proc` and `/sys` are read; tests build one.
    """

    node: str = ""
    address: str = ""
    labels: Mapping[str, str] = attrs.field(factory=dict)
    fabric: str = ""
    models: str = "/var/lib/appliance/models"
    inventory_file: str = ""
    root: Path = Path("/")

    @property
    def infiniband(self) -> Path:
        return self.root / "sys/class/infiniband"


async def gather(
    place: Place,
    probe: GpuProbe,
    *,
    ours: Ours | None = None,
    previous: tuple[Gpu, ...] = (),
    limit_s: float = 10.0,
    questions: Questions | None = None,
) -> Inventory:
    """What the scheduler sees of this node now.

    `previous` are the GPUs of the last inventory, so that a card that fell off the bus is still told of. Each probe has
    `limit_s`; one that takes longer is left behind in its thread, and the inventory is partial and says so. Whoever
    looks again and again gives the same `questions`: they know which are left behind. Raises `writing.BadInventory` for
    an unusable file, and nothing else.
    """
    questions = questions or Questions()
    if place.inventory_file:
        return _placed(await _from_file(place, questions, limit_s), place)
    found: dict[str, Found] = {}
    notes: list[str] = []

    async def gpus() -> None:
        found["gpus"] = await probe.read()

    async with trio.open_nursery() as nursery:
        # Beside the others, because it alone may take long.
        nursery.start_soon(gpus)
        ask = _Asking(questions, limit_s, notes)
        processors = await ask("processors", lambda: cpus.cpus(place.root), Cpus())
        memory = await ask("memory", lambda: cpus.memory(place.root), Memory())
        disk = await ask(f"the disk of {place.models}", lambda: cpus.disk(Path(place.models)), Disk(place.models))
        nothing: dict[str, str | None] = {}
        tree = await ask("RDMA adapters", lambda: fabrics.read_tree(place.infiniband), nothing)
        nowhere: tuple[Interface, ...] = ()
        networks = await ask("interfaces", lambda: interfaces.interfaces(place.root), nowhere)
    adapters = fabrics.parse(tree)
    backend, reading = found["gpus"].backend, found["gpus"].reading
    return _placed(
        Inventory(
            cpus=processors,
            memory=memory,
            disk=disk,
            gpus=_judged(reading, memory.total_bytes, ours or Ours(), previous, place.root),
            gpu_backend=backend,
            adapters=adapters,
            fabrics=fabrics.fabrics(adapters, place.fabric),
            interfaces=networks,
            notes=tuple(map(visible, (*reading.notes, *notes))),
            partial=reading.partial or bool(notes),
        ),
        place,
    )


def _judged(
    reading: Reading, memory_bytes: int | None, ours: Ours, previous: tuple[Gpu, ...], root: Path
) -> tuple[Gpu, ...]:
    located = tuple(attrs.evolve(gpu, numa_node=cpus.numa_node_of(gpu.bus_id, root)) for gpu in reading.gpus)
    judged = tuple(judge(gpu, system_memory_bytes=memory_bytes, ours=ours) for gpu in located)
    return carry_over(previous, attrs.evolve(reading, gpus=judged))


def _placed(inventory: Inventory, place: Place) -> Inventory:
    """The inventory with what configuration says; it wins over a file, labels one by one."""
    return attrs.evolve(
        inventory,
        node=place.node or inventory.node or socket.gethostname(),
        address=place.address or inventory.address or interfaces.own_address(inventory.interfaces),
        labels={**inventory.labels, **place.labels},
    )


@attrs.frozen
class _Asking:
    """Probes one after the other, each with `limit_s`; one that does not answer leaves a note and is not joined by a
    second one."""

    questions: Questions
    limit_s: float
    notes: list[str]

    async def __call__(self, what: str, read: Callable[[], T], otherwise: T) -> T:
        try:
            return await self.questions.ask(what, read, self.limit_s)
        except Unanswered as silent:
            self.notes.append(str(silent))
        except OSError as broken:
            self.notes.append(f"{what}: {broken.strerror}")
        return otherwise


async def _from_file(place: Place, questions: Questions, limit_s: float) -> Inventory:
    path = Path(place.inventory_file)
    try:
        return await questions.ask(str(path), lambda: read_inventory(path, place.node), limit_s)
    except Unanswered as silent:
        raise BadInventory(str(silent)) from None

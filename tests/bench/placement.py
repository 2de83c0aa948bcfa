"""Row `placement`: what one pass costs that places all that is wanted in a large cluster.

A pass makes the index of all nodes and places 200 models, two replicas each. Half of the nodes are empty, the others
have some of their GPUs taken already; 32 nodes share a fabric; one GPU in 50 is ill; one node in 20 is cordoned. Of the
models one in four runs on two nodes, one in eight on four, and one in ten on CPUs; all but those have a second
profile, and about one in four wants a class that is nowhere. `index kept` is the same with the index of the last pass,
in which a tenth of the nodes has changed. All of it in this process and on one core, as time of the processor, with the
collector of cycles set as `serve` sets it.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable
from random import Random
from statistics import median

from appliance.cli.router import GC_THRESHOLDS
from appliance.facts.catalog import Model, Profile
from appliance.facts.hardware import GIB, Cpus, Disk, Fabric, Gpu, Hindrance, Inventory, Rail
from appliance.rules.placement.rooms import Rooms
from appliance.rules.placement.spots import Placement, Spot
from tests.bench import machine
from tests.bench.plan import Plan

NODES, LARGER, MODELS, REPLICAS = 1_000, 10_000, 200, 2
TARGET_MS, TARGET_RATIO = 50.0, 12.0
_GPUS, _PER_FABRIC = 8, 32
_CLASSES = ("h100-80g", "h100-80g", "h100-80g", "a100-80g")
_RAILS = tuple(Rail(f"mlx5_{number}", rate_gbps=400.0) for number in range(_GPUS))
_ILL = (Hindrance("ecc", "3 uncorrected memory errors"),)


def measure(plan: Plan) -> None:
    cores = plan.cores
    before, thresholds = os.sched_getaffinity(0), gc.get_threshold()
    os.sched_setaffinity(0, {cores.router})
    gc.set_threshold(*GC_THRESHOLDS)
    try:
        _measure(plan)
    finally:
        gc.set_threshold(*thresholds)
        os.sched_setaffinity(0, before)


def _measure(plan: Plan) -> None:
    report, cores = plan.report, plan.cores
    rounds, nodes = plan.times(9), plan.amount(NODES, 64)
    larger = nodes * (LARGER // NODES)
    models = catalog(plan.amount(MODELS, 16), Random(1))
    clusters = {count: cluster(count, Random(2)) for count in (nodes, larger)}
    report.line(
        conditions={
            **machine.conditions(cores),
            "nodes": list(clusters),
            "gpus_per_node": _GPUS,
            "models": len(models),
            "replicas": len(models) * REPLICAS,
            "rounds": rounds,
            "collector": gc.get_threshold(),
        }
    )
    made: dict[int, list[float]] = {count: [] for count in clusters}
    kept: dict[int, list[float]] = {count: [] for count in clusters}
    for _ in range(rounds):
        plan.patience.wait(cores)
        for count, spots in clusters.items():
            made[count].append(_cost_ms(lambda spots: _place(Rooms(spots), models), spots))
            rooms = Rooms(spots)
            kept[count].append(_cost_ms(lambda changed, rooms=rooms: _again(rooms, changed, models), spots[::10]))
    for count, spots in clusters.items():
        placed = _place(Rooms(spots), models)
        report.check("every seat is free, on one fabric and of one class", sound(spots, placed), nodes=count)
        for figure, samples in (("pass", made[count]), ("pass, index kept", kept[count])):
            least = round(min(samples), 1)
            report.figure(figure, "ms", "appliance", median(samples), nodes=count, placed=len(placed), least=least)
    once = median(made[nodes])
    report.target(f"at most {TARGET_MS:g} ms for {nodes:,} nodes and {len(models)} models", once, once <= TARGET_MS)
    ratio = median(many / few for many, few in zip(made[larger], made[nodes], strict=True))
    report.target(f"10x the nodes cost at most {TARGET_RATIO:g}x", ratio, ratio <= TARGET_RATIO)


def _cost_ms(work: Callable[[list[Spot]], object], spots: list[Spot]) -> float:
    gc.collect()
    began = time.process_time()
    work(spots)
    return (time.process_time() - began) * 1e3


def _place(rooms: Rooms, models: list[Model]) -> list[Placement]:
    found = [rooms.place(model) for model in models for _ in range(REPLICAS)]
    return [each for each in found if each is not None]


def _again(rooms: Rooms, changed: list[Spot], models: list[Model]) -> list[Placement]:
    for spot in changed:
        rooms.set(spot)
    return _place(rooms, models)


def cluster(count: int, rng: Random) -> list[Spot]:
    return [_spot(number, rng) for number in range(count)]


def _spot(number: int, rng: Random) -> Spot:
    name, address = f"node-{number:05}", f"10.{number >> 16}.{number >> 8 & 255}.{number & 255}"
    kind = _CLASSES[number // _PER_FABRIC % len(_CLASSES)]
    gpus = tuple(
        Gpu(
            uuid=f"GPU-{number:05}-{index}",
            index=index,
            name=kind,
            gpu_class=kind,
            memory_bytes=80 * GIB,
            nvlink_domain=index // 4,
            hindrances=_ILL if rng.random() < 0.02 else (),
        )
        for index in range(_GPUS)
    )
    used = rng.choice((0, 0, 0, 1, 2, 4))
    inventory = Inventory(
        node=name,
        address=address,
        cpus=Cpus(64),
        disk=Disk("/var/lib/appliance/models", 4_000 * GIB, 1_000 * GIB if rng.random() < 0.95 else GIB),
        gpus=gpus,
        fabrics=(Fabric(f"ib-{number // _PER_FABRIC}", "ib", _RAILS),),
    )
    return Spot(
        name,
        address,
        inventory,
        (20_000, 24_999),
        why_not="cordoned" if rng.random() < 0.05 else "",
        taken={gpu.uuid: f"m{number}.aaaaa" for gpu in gpus[:used]},
    )


def catalog(count: int, rng: Random) -> list[Model]:
    return [Model(f"m{number}", profiles=_profiles(number, rng)) for number in range(count)]


def _profiles(number: int, rng: Random) -> tuple[Profile, ...]:
    source = "org/name" if number % 2 else "/models/name"
    kind = rng.choice(("", "h100-80g", "a100-80g", "b200-180g"))
    if number % 10 == 9:
        return (Profile("cpu", "llamacpp", "/models/name.gguf", gpus_per_node=0),)
    nodes = 4 if number % 8 == 3 else 2 if number % 4 == 2 else 1
    count = 8 if nodes > 1 else rng.choice((1, 2, 4, 8))
    wide = Profile(
        "wide",
        "vllm",
        source,
        priority=10,
        nodes=nodes,
        gpus_per_node=count,
        tensor_parallel=count,
        pipeline_parallel=nodes,
        gpu_class=kind,
    )
    return (wide, Profile("narrow", "vllm", source, gpus_per_node=1, gpu_class=kind))


def sound(spots: list[Spot], placed: list[Placement]) -> bool:
    """Whether no GPU was given twice or was not to be had, and each replica is on one fabric and of one class."""
    by_name = {spot.name: spot for spot in spots}
    gone = {uuid for spot in spots for uuid in spot.taken}
    for each in placed:
        kinds = set()
        for seat in each.seats:
            spot = by_name[seat.node]
            gpus = [spot.inventory.gpu(uuid) for uuid in seat.gpus]
            if spot.why_not or len(gpus) != each.profile.gpus_per_node or gone & set(seat.gpus):
                return False
            if any(gpu is None or gpu.hindrances for gpu in gpus):
                return False
            if len(each.seats) > 1 and spot.inventory.fabric(each.fabric) is None:
                return False
            gone |= set(seat.gpus)
            kinds |= {gpu.gpu_class for gpu in gpus if gpu}
        if len(kinds) > 1 or len({seat.node for seat in each.seats}) != each.profile.nodes:
            return False
    return True

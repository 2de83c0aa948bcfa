"""What holds for any cluster and any catalog, beside a second opinion that looks at everything and is in no hurry."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from random import Random

import attrs
from hypothesis import given, settings
from hypothesis import strategies as st

from appliance.facts.catalog import Model, Profile
from appliance.facts.hardware import GIB, Cpus, Disk, Fabric, Gpu, Hindrance, Inventory, Rail
from appliance.rules.fleet.room import NoRoom, choose_gpus
from appliance.rules.placement.rooms import Rooms
from appliance.rules.placement.spots import Placement, Spot

BAD = (Hindrance("ecc", "3 uncorrected memory errors"),)
CLASSES = ("h100-80g", "l40s-45g")
AGES = {"h100-80g": (9, 0), "l40s-45g": (8, 9)}
NAMES = tuple("abcdefg")


@st.composite
def gpus(draw: st.DrawFn, node: str) -> tuple[Gpu, ...]:
    kind, mixed = draw(st.sampled_from((*CLASSES, CLASSES[0]))), draw(st.sampled_from((False, False, True)))
    ill = draw(st.sampled_from(((), (), BAD)))
    domains = draw(st.sampled_from([(None,), (0,), (0, 1), (0, 0, 0, 1)]))
    ages = draw(st.sampled_from([(AGES[kind],), (AGES[kind],), (None,), ((8, 0),), ((8, 0), None, (9, 0))]))
    return tuple(
        Gpu(
            uuid=f"{node}-{index}",
            index=index,
            name=kind,
            gpu_class=draw(st.sampled_from((kind, kind, *CLASSES, ""))) if mixed else kind,
            memory_bytes=draw(st.sampled_from([80 * GIB] * 5 + [None])) if mixed else 80 * GIB,
            nvlink_domain=domains[index % len(domains)],
            compute_cap=ages[index % len(ages)],
            hindrances=draw(st.sampled_from([(), (), ill])),
        )
        for index in draw(st.permutations(range(draw(st.sampled_from([8, 8, 4, 1, 0])))))
    )


FABRICS = st.lists(
    st.builds(
        lambda name, transport, rate: Fabric(name, transport, (Rail("mlx5_0", rate_gbps=rate),)),
        st.sampled_from(["ib-1", "ib-1", "ib-2", "ib-2", "x", ""]),
        st.sampled_from(["ib", "ib", "ib", "roce"]),
        st.sampled_from([None, 100.0, 400.0]),
    ),
    min_size=1,
    max_size=2,
).map(tuple) | st.just(())


@st.composite
def spots(draw: st.DrawFn, name: str) -> Spot:
    cards = draw(gpus(name))
    free = draw(st.sampled_from([None, 500 * GIB, 500 * GIB, 3 * GIB]))
    inventory = Inventory(
        node=name,
        address=f"addr-{name}",
        cpus=Cpus(draw(st.sampled_from([1, 4, 64]))),
        disk=Disk("/models", None, free) if draw(st.booleans()) else None,
        gpus=cards,
        fabrics=draw(FABRICS),
        partial=draw(st.booleans()),
    )
    held = draw(st.just([]) | st.lists(st.sampled_from(cards), unique=True, max_size=4)) if cards else []
    why_not = draw(st.sampled_from(["", "", "", "", "cordoned"]))
    taken = {gpu.uuid: "old.aaaaa" for gpu in held}
    return Spot(name, f"addr-{name}", inventory, (20000, 24999), why_not, taken, draw(st.integers(0, 2)))


CLUSTERS = st.sampled_from([7, 6, 5, 4, 3, 2, 1, 0]).flatmap(
    lambda count: st.tuples(*(spots(name) for name in NAMES[:count]))
)
PROFILES = st.builds(
    lambda nodes, count, kind, priority, source, quantization: Profile(
        f"{nodes}x{count}{kind}{priority}{source}{quantization}",
        "vllm",
        source,
        priority,
        nodes,
        count,
        count or 1,
        nodes,
        kind,
        quantization=quantization,
    ),
    st.sampled_from([2, 2, 1, 1, 3]),
    st.sampled_from([4, 1, 2, 8, 1, 0]),
    st.sampled_from(["", "", *CLASSES]),
    st.integers(0, 3),
    st.sampled_from(["/models/x", "org/x"]),
    st.sampled_from(["", "", "awq", "fp8"]),
)
MODELS = st.lists(
    st.builds(
        lambda name, profiles: Model(name, profiles=tuple(profiles)),
        st.sampled_from(["m", "n", "org/o"]),
        st.lists(PROFILES, min_size=1, max_size=3, unique_by=lambda profile: profile.name),
    ),
    min_size=1,
    max_size=3,
)
AVOID = st.frozensets(st.sampled_from(NAMES), max_size=3)


# -- the second opinion ------------------------------------------------------------------------------------------------


def may_have(gpu: Gpu, taken: Collection[str]) -> bool:
    return not gpu.hindrances and bool(gpu.memory_bytes) and bool(gpu.gpu_class) and gpu.uuid not in taken


def count_of(profile: Profile, spot: Spot, taken: Collection[str], kind: str) -> int:
    return sum(gpu.gpu_class == kind and may_have(gpu, taken) for gpu in spot.inventory.gpus)


def kinds_here(profile: Profile, spot: Spot, taken: Collection[str]) -> set[str]:
    """The classes of which a node has enough for a part; {""} on CPUs."""
    disk = spot.inventory.disk
    short = disk is not None and disk.free_bytes is not None and disk.free_bytes < 10 * GIB
    if spot.why_not or (short and not profile.source.startswith("/")):
        return set()
    if not profile.gpus_per_node:
        return {""} if spot.cpu_replicas < spot.inventory.cpus.count else set()
    wanted = {profile.gpu_class} if profile.gpu_class else set(CLASSES)
    return {
        kind
        for kind in wanted
        if count_of(profile, spot, taken, kind) >= profile.gpus_per_node and is_young(profile, spot, taken, kind)
    }


def is_young(profile: Profile, spot: Spot, taken: Collection[str], kind: str) -> bool:
    """None of those that could be had is known to be older than fp8."""
    there = [gpu.compute_cap for gpu in spot.inventory.gpus if gpu.gpu_class == kind and may_have(gpu, taken)]
    return profile.quantization != "fp8" or all(each is None or each >= (8, 9) for each in there)


def network(spot: Spot, name: str) -> tuple[str, str] | None:
    found = spot.inventory.fabric(name)
    return (found.name, found.transport) if found else None


def fits(profile: Profile, cluster: Sequence[Spot], taken: Collection[str]) -> bool:
    able = [(spot, kind) for spot in cluster for kind in kinds_here(profile, spot, taken)]
    if profile.nodes == 1:
        return bool(able)
    joined = [(network(spot, each.name), kind) for spot, kind in able for each in spot.inventory.fabrics]
    sets = {(where, kind) for where, kind in joined if where}
    return any(
        sum(network(spot, where[0]) == where and kind == other for spot, other in able) >= profile.nodes
        for where, kind in sets
    )


def is_sound(profile: Profile, placement: Placement, cluster: Sequence[Spot], taken: Collection[str]) -> None:
    by_name = {spot.name: spot for spot in cluster}
    seated = [by_name[seat.node] for seat in placement.seats]
    assert len(seated) == profile.nodes == len({spot.name for spot in seated})
    assert [seat.address for seat in placement.seats] == [spot.address for spot in seated]
    assert not any(spot.why_not for spot in seated)
    chosen = []
    for seat, spot in zip(placement.seats, seated, strict=True):
        assert len(set(seat.gpus)) == len(seat.gpus) == profile.gpus_per_node
        found = [spot.inventory.gpu(uuid) for uuid in seat.gpus]
        assert all(gpu is not None and may_have(gpu, taken) for gpu in found)
        chosen += [gpu for gpu in found if gpu]
        assert kinds_here(profile, spot, taken) >= {placement.gpu_class}
    assert {gpu.gpu_class for gpu in chosen} == ({placement.gpu_class} if profile.gpus_per_node else set())
    assert profile.gpu_class in ("", placement.gpu_class) or not profile.gpus_per_node
    if profile.nodes == 1:
        assert placement.fabric == ""
        return
    # On every node the fabric of that name is the one that is meant, so its adapters reach the others.
    assert placement.fabric
    assert len({network(spot, placement.fabric) for spot in seated}) == 1
    assert None not in {network(spot, placement.fabric) for spot in seated}


def is_together(placement: Placement, cluster: Sequence[Spot], taken: Collection[str]) -> None:
    """From one NVLink domain wherever one has enough free GPUs, else the lowest indices."""
    by_name = {spot.name: spot for spot in cluster}
    for seat in placement.seats:
        inventory = by_name[seat.node].inventory
        free = [gpu for gpu in inventory.gpus if gpu.gpu_class == placement.gpu_class and may_have(gpu, taken)]
        domains = {gpu.nvlink_domain for gpu in free} - {None}
        enough = [each for each in domains if sum(gpu.nvlink_domain == each for gpu in free) >= len(seat.gpus)]
        used = [gpu for gpu in free if gpu.uuid in seat.gpus]
        if seat.gpus and enough:
            assert len({gpu.nvlink_domain for gpu in used}) == 1
            assert used[0].nvlink_domain in enough
        else:
            assert {gpu.index for gpu in used} == set(sorted(gpu.index for gpu in free)[: len(used)])


def is_preferred(
    profile: Profile, placement: Placement, cluster: Sequence[Spot], taken: Collection[str], avoid: Collection[str]
) -> None:
    """Nodes to avoid only where nothing else does; one node: partly used first; several: never a fuller one."""
    able = {spot.name for spot in cluster if kinds_here(profile, spot, taken)}
    seats = [seat.node for seat in placement.seats]
    used = {spot.name for spot in cluster if any(uuid.startswith(f"{spot.name}-") for uuid in taken)}
    if profile.nodes == 1:
        assert seats[0] not in avoid or able <= set(avoid)
        alike = {name for name in able if (name in avoid) == (seats[0] in avoid)}
        if profile.gpus_per_node and seats[0] not in used:
            assert not alike & used
        return
    by_name = {spot.name: spot for spot in cluster}
    where = network(by_name[seats[0]], placement.fabric)
    for name in able - set(seats):
        spot = by_name[name]
        if network(spot, placement.fabric) != where or placement.gpu_class not in kinds_here(profile, spot, taken):
            continue
        assert name in avoid or not set(seats) & set(avoid)
        if profile.gpus_per_node and name not in avoid and name not in used:
            assert not (set(seats) - set(avoid)) & used


def is_explained(model: Model, rooms: Rooms, cluster: Sequence[Spot], avoid: Collection[str], taken: set[str]) -> None:
    told = rooms.explain(model, avoid=avoid)
    assert all(each.reason and each.reason == each.reason.strip() for each in told)
    assert len({(each.profile, each.candidate) for each in told}) == len(told)
    chosen = next((found for each in by_priority(model) if (found := rooms.find(each, avoid))), None)
    for profile in model.profiles:
        ours = chosen is not None and chosen.profile == profile
        seats = {seat.node for seat in chosen.seats} if ours and chosen else set()
        named = {each.candidate: each.reason for each in told if each.profile == profile.name}
        nodes = {name: reason for name, reason in named.items() if not name.startswith("fabric ")}
        assert set(nodes) == {spot.name for spot in cluster} - seats
        for spot in cluster:
            if spot.why_not and spot.name in nodes:
                assert nodes[spot.name] == spot.why_not
            elif spot.name in nodes and not kinds_here(profile, spot, taken):
                assert not nodes[spot.name].startswith("it would do")
            elif spot.name in nodes and profile.nodes == 1:
                assert nodes[spot.name].startswith("it would do, and ")
        if profile.nodes > 1:
            known = {network(spot, each.name) for spot in cluster for each in spot.inventory.fabrics} - {None}
            fabrics = [name for name in named if name.startswith("fabric ")]
            assert len(fabrics) == len(known) - bool(seats)


def by_priority(model: Model) -> list[Profile]:
    return sorted(model.profiles, key=lambda each: -each.priority)


# -- properties --------------------------------------------------------------------------------------------------------


@settings(max_examples=400, deadline=None)
@given(CLUSTERS, MODELS, st.lists(AVOID, min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_any_cluster_takes_any_catalog_as_it_must(
    cluster: tuple[Spot, ...], models: list[Model], avoids: list[frozenset[str]], rng: Random
) -> None:
    """Placed, some released on the way, and at last all: the index that is kept always agrees with a new one."""
    rooms, running = Rooms(cluster), list[Placement]()
    now = {spot.name: spot for spot in cluster}
    for turn in range(12):
        model, avoid = rng.choice(models), avoids[turn % len(avoids)]
        taken = {uuid for spot in now.values() for uuid in spot.taken}
        here = tuple(now.values())
        is_explained(model, rooms, here, avoid, taken)
        expected = next((each for each in by_priority(model) if fits(each, here, taken)), None)
        placed = rooms.place(model, avoid=avoid)
        assert placed == Rooms(now.values()).place(model, avoid=avoid)
        if expected is None:
            assert placed is None
            told = rooms.explain(model, avoid=avoid)
            assert rooms.why_nowhere(model, 3, avoid) == (told[:3], len(told))
        else:
            assert placed is not None and placed.profile == expected
            is_sound(expected, placed, here, taken)
            is_together(placed, here, taken)
            is_preferred(expected, placed, here, taken, avoid)
            running.append(placed)
            book(now, placed, f"{model.name}.{turn}")
            for seat in placed.seats if rng.random() < 0.5 else ():
                rooms.set(now[seat.node])
        if running and rng.random() < 0.3:
            gone = running.pop(rng.randrange(len(running)))
            book(now, gone, "")
            for seat in gone.seats:
                rooms.set(now[seat.node])
    while running:
        gone = running.pop()
        book(now, gone, "")
        for seat in gone.seats:
            rooms.set(now[seat.node])
    assert now == {spot.name: spot for spot in cluster}
    for model in models:
        assert rooms.place(model) == Rooms(cluster).place(model)
        rooms = Rooms(now.values())


def book(now: dict[str, Spot], placement: Placement, replica: str) -> None:
    """What the world does: a replica is written down on all of its nodes, or, without a name, taken off all."""
    for seat in placement.seats:
        spot = now[seat.node]
        taken = {uuid: holder for uuid, holder in spot.taken.items() if uuid not in seat.gpus}
        taken |= dict.fromkeys(seat.gpus, replica) if replica else {}
        more = 0 if seat.gpus else 1 if replica else -1
        now[seat.node] = attrs.evolve(spot, taken=taken, cpu_replicas=spot.cpu_replicas + more)


@settings(max_examples=100, deadline=None)
@given(spots("a"), PROFILES.filter(lambda each: each.nodes == 1 and each.source.startswith("/")))
def test_one_node_is_chosen_from_as_an_agent_by_itself_would(spot: Spot, profile: Profile) -> None:
    spot = attrs.evolve(spot, why_not="", cpu_replicas=0)
    rooms, model = Rooms([spot]), Model("m", profiles=(profile,))
    try:
        alone = choose_gpus(profile, spot.inventory, spot.taken)
    except NoRoom as none:
        assert [each.reason for each in rooms.explain(model)] == [str(none)]
        assert rooms.place(model) is None
        return
    placed = rooms.place(model)
    assert placed is not None
    assert placed.seats[0].gpus == tuple(gpu.uuid for gpu in alone)


@settings(max_examples=50, deadline=None)
@given(CLUSTERS, MODELS, st.randoms(use_true_random=False))
def test_the_order_in_which_nodes_became_known_does_not_matter(
    cluster: tuple[Spot, ...], models: list[Model], rng: Random
) -> None:
    shuffled = list(cluster)
    rng.shuffle(shuffled)
    one, other = Rooms(cluster), Rooms()
    for spot in shuffled:
        other.set(spot)
    for model in models:
        assert one.place(model) == other.place(model)
        assert one.explain(model) == other.explain(model)

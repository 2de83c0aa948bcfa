"""Where one replica goes, and the words for why not: cases that can be read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import attrs
import pytest

from appliance.facts.catalog import Model, Profile
from appliance.facts.hardware import GIB, Cpus, Disk, Fabric, Gpu, Hindrance, Inventory, Rail
from appliance.rules.placement.rooms import Rooms
from appliance.rules.placement.spots import Placement, Spot

ECC = (Hindrance("ecc", "3 uncorrected errors"),)


def gpu(node: str, index: int, kind: str = "h100-80g", **more: Any) -> Gpu:
    return attrs.evolve(Gpu(f"{node}-{index}", index, kind, kind, 80 * GIB), **more)


def fabric(name: str, rate_gbps: float | None = 400.0, transport: str = "ib") -> Fabric:
    return Fabric(name, transport, (Rail("mlx5_0", rate_gbps=rate_gbps),))


def spot(
    name: str,
    gpus: int | tuple[Gpu, ...] = 8,
    fabrics: str | tuple[Fabric, ...] = "ib-1",
    taken: Mapping[int, str] | None = None,
    why_not: str = "",
    cpu_replicas: int = 0,
    **inventory: Any,
) -> Spot:
    """A node; `fabrics` "" makes it an island, `taken` is by index."""
    cards = tuple(gpu(name, index) for index in range(gpus)) if isinstance(gpus, int) else gpus
    joined = (fabric(fabrics),) if isinstance(fabrics, str) else fabrics
    seen = Inventory(node=name, address=f"addr-{name}", gpus=cards, fabrics=joined, **inventory)
    held = {f"{name}-{index}": replica for index, replica in (taken or {}).items()}
    return Spot(name, f"addr-{name}", seen, (20000, 24999), why_not, held, cpu_replicas)


def profile(name: str = "p", gpus: int = 1, nodes: int = 1, **more: Any) -> Profile:
    made = Profile(name, "sim", gpus_per_node=gpus, nodes=nodes, tensor_parallel=gpus or 1, pipeline_parallel=nodes)
    return attrs.evolve(made, **more)


def model(*profiles: Profile) -> Model:
    return Model("llama", profiles=profiles)


def nodes(placement: Placement | None) -> list[str]:
    assert placement is not None
    return [seat.node for seat in placement.seats]


def indices(placement: Placement | None) -> list[int]:
    assert placement is not None
    return [int(uuid.rpartition("-")[2]) for seat in placement.seats for uuid in seat.gpus]


def lines(rooms: Rooms, *profiles: Profile, avoid: tuple[str, ...] = ()) -> list[str]:
    return [f"{each.candidate}: {each.reason}" for each in rooms.explain(model(*profiles), avoid=avoid)]


# -- one node ----------------------------------------------------------------------------------------------------------


def test_partly_used_nodes_are_filled_first_and_the_fullest_of_them() -> None:
    rooms = Rooms([spot("a"), spot("b", taken={0: "x"}), spot("c", taken={0: "x", 1: "x", 2: "x"}), spot("d", 2)])
    one = model(profile(gpus=4))
    assert [nodes(rooms.place(one)) for _ in range(4)] == [["c"], ["b"], ["a"], ["a"]]
    assert rooms.place(one) is None


def test_a_seat_says_where_and_what() -> None:
    placed = Rooms([spot("a", taken={0: "x"})]).place(model(profile(gpus=2)))
    assert placed is not None
    assert (placed.profile.name, placed.gpu_class, placed.fabric) == ("p", "h100-80g", "")
    assert placed.seats[0].address == "addr-a"
    assert placed.seats[0].gpus == ("a-1", "a-2")


def test_what_nvlink_joins_stays_together() -> None:
    cards = tuple(gpu("a", index, nvlink_domain=index // 4) for index in range(8))
    rooms = Rooms([spot("a", cards, taken={0: "x"})])
    assert indices(rooms.place(model(profile(gpus=4)))) == [4, 5, 6, 7]
    assert indices(rooms.place(model(profile(gpus=1)))) == [1]
    assert indices(rooms.place(model(profile(gpus=2)))) == [2, 3]


def test_without_a_class_the_scarcer_one_is_taken_and_never_a_mixture() -> None:
    cards = tuple(gpu("a", index, "l40s-45g" if index < 3 else "h100-80g") for index in range(8))
    rooms = Rooms([spot("a", cards)])
    assert [indices(rooms.place(model(profile(gpus=2)))) for _ in range(3)] == [[0, 1], [3, 4], [5, 6]]
    assert rooms.place(model(profile(gpus=2))) is None


def test_the_highest_priority_that_fits_is_taken() -> None:
    rooms = Rooms([spot("a", 4)])
    tried = model(profile("low", 1), profile("wide", 8, priority=9), profile("mid", 3, priority=5))
    assert [placed.profile.name for _ in range(2) if (placed := rooms.place(tried))] == ["mid", "low"]
    assert rooms.place(tried, profiles=[profile("other", 2)]) is None


def test_a_node_takes_one_cpu_replica_for_each_processor() -> None:
    rooms = Rooms([spot("a", 0, cpus=Cpus(2)), spot("b", 0, cpus=Cpus(1), cpu_replicas=1)])
    cpu = model(profile(gpus=0))
    assert [nodes(rooms.place(cpu)), nodes(rooms.place(cpu)), rooms.place(cpu)] == [["a"], ["a"], None]
    assert [(each.candidate, each.reason) for each in rooms.explain(cpu)] == [
        ("a", "it has 2 CPUs for the 2 replicas there that run on CPUs"),
        ("b", "it has 1 CPU for the replica there that runs on CPUs"),
    ]


def test_cpu_replicas_go_where_each_has_the_most_processors() -> None:
    rooms = Rooms([spot("a", 0, cpus=Cpus(8), cpu_replicas=1), spot("b", 0, cpus=Cpus(2)), spot("c", 0, cpus=Cpus(4))])
    assert [nodes(rooms.place(model(profile(gpus=0))))[0] for _ in range(5)] == ["a", "c", "a", "a", "b"]


def test_a_disk_that_is_too_full_gets_nothing_that_must_be_fetched() -> None:
    full, unknown = Disk("/models", None, 3 * GIB), Disk("/models")
    fetched = profile(engine="vllm", source="org/name")
    rooms = Rooms([spot("a", disk=full, taken={0: "x"})])
    assert rooms.place(model(fetched)) is None
    assert lines(rooms, fetched) == [
        "a: org/name must be fetched, and its disk has 3.0 GiB free at /models (at least 10 GiB must be)"
    ]
    for free in (profile(engine="vllm", source="/models/name"), profile(source="org/name"), profile()):
        assert nodes(rooms.place(model(free))) == ["a"]
    rooms.set(spot("b", disk=unknown))
    assert nodes(rooms.place(model(fetched))) == ["b"]


def test_nodes_to_avoid_are_tried_last() -> None:
    rooms = Rooms([spot("a", taken={0: "x"}), spot("b"), spot("c")])
    assert nodes(rooms.place(model(profile()), avoid=["a", "b"])) == ["c"]
    assert nodes(rooms.place(model(profile()), avoid=["a", "b", "c"])) == ["a"]
    rooms = Rooms([spot("a"), spot("b"), spot("c")])
    assert nodes(rooms.place(model(profile(gpus=8, nodes=2)), avoid=["a"])) == ["b", "c"]
    assert nodes(rooms.place(model(profile(gpus=8)), avoid=["a"])) == ["a"]
    rooms = Rooms([spot("a"), spot("b")])
    assert nodes(rooms.find(profile(nodes=2), avoid=["a"])) == ["b", "a"]
    assert nodes(rooms.find(profile(nodes=2))) == ["a", "b"]
    assert nodes(rooms.find(profile(nodes=2), avoid=["a"])) == ["b", "a"]


# -- several nodes -----------------------------------------------------------------------------------------------------


def test_the_emptiest_nodes_of_one_fabric_are_taken() -> None:
    rooms = Rooms([spot("a", taken={7: "x"}), spot("b"), spot("c"), spot("d", fabrics="ib-2")])
    placed = rooms.place(model(profile(gpus=4, nodes=2)))
    assert nodes(placed) == ["b", "c"]
    assert placed is not None and placed.fabric == "ib-1"


def test_a_replica_lands_on_each_fabric_and_the_third_nowhere() -> None:
    """The simulated cluster: four nodes, two fabrics, and a node that dies."""
    spots = {name: spot(name, fabrics=on) for name, on in zip("abcd", ("ib-1", "ib-1", "ib-2", "ib-2"), strict=True)}
    rooms, wide = Rooms(spots.values()), model(profile(gpus=8, nodes=2))
    assert [nodes(rooms.place(wide)) for _ in range(2)] == [["a", "b"], ["c", "d"]]
    assert rooms.place(wide) is None
    rooms.set(spots["a"])
    rooms.set(spots["c"])
    assert rooms.place(wide) is None
    rooms.remove("c")
    rooms.set(spots["b"])
    assert nodes(rooms.place(wide)) == ["a", "b"]


def test_of_fabrics_the_emptiest_comes_before_the_fastest() -> None:
    busy = [spot(name, fabrics=(fabric("fast", 400.0),), taken={0: "x"}) for name in "ab"]
    idle = [spot(name, fabrics=(fabric("slow", 100.0),)) for name in "cde"]
    assert nodes(Rooms([*busy, *idle]).place(model(profile(nodes=2)))) == ["c", "d"]


def test_of_equally_empty_fabrics_the_fastest_and_then_the_smallest_is_taken() -> None:
    slow, fast = fabric("slow", 100.0), fabric("fast", 400.0)
    both = [spot(name, fabrics=(slow, fast)) for name in "ab"]
    placed = Rooms([*both, spot("c", fabrics=(fast,))]).place(model(profile(nodes=2)))
    assert placed is not None and placed.fabric == "fast"
    larger = [spot(name, fabrics="ib-1") for name in "abc"]
    assert nodes(Rooms([*larger, *(spot(name, fabrics="ib-2") for name in "de")]).place(model(profile(nodes=2)))) == [
        "d",
        "e",
    ]


def test_a_node_of_two_fabrics_serves_on_either_but_joins_none_together() -> None:
    one, two = fabric("ib-1"), fabric("ib-2")
    spots = [spot("a", fabrics=(one,)), spot("b", fabrics=(one, two)), spot("c", fabrics=(two,))]
    assert Rooms(spots).place(model(profile(nodes=3))) is None
    rooms = Rooms(spots)
    rooms.set(attrs.evolve(spots[0], why_not="cordoned"))
    placed = rooms.place(model(profile(nodes=2)))
    assert nodes(placed) == ["b", "c"]
    assert placed is not None and placed.fabric == "ib-2"


def test_one_name_does_not_join_infiniband_and_roce() -> None:
    spots = [spot("a", fabrics=(fabric("x"),)), spot("b", fabrics=(fabric("x", transport="roce"),))]
    assert Rooms(spots).place(model(profile(nodes=2))) is None
    told = lines(Rooms(spots), profile(nodes=2))
    assert told[:2] == [
        "fabric x (ib): it needs 2 nodes with 1 free GPU of one class, and has 1 (a)",
        "fabric x (roce): it needs 2 nodes with 1 free GPU of one class, and has 1 (b)",
    ]


def test_islands_take_replicas_on_one_node_only() -> None:
    unnamed = (fabric(""),)
    rooms = Rooms([spot("a", fabrics=unnamed), spot("b", fabrics=unnamed), spot("c", fabrics=())])
    assert rooms.place(model(profile(nodes=2))) is None
    assert rooms.place(model(profile(gpus=0, nodes=2))) is None
    assert lines(rooms, profile(nodes=2)) == [
        f"{name}: it is on no named fabric, so it takes only replicas on one node" for name in "abc"
    ]
    assert nodes(rooms.place(model(profile()))) == ["a"]


def test_a_fabric_gives_nodes_of_one_class() -> None:
    other = tuple(gpu("b", index, "a100-80g") for index in range(8))
    rooms = Rooms([spot("a"), spot("b", other)])
    assert rooms.place(model(profile(gpus=8, nodes=2))) is None
    assert lines(rooms, profile(gpus=8, nodes=2))[0] == (
        "fabric ib-1: it needs 2 nodes with 8 free GPUs of one class,"
        " and has 1 of class a100-80g (b) and 1 of class h100-80g (a)"
    )
    rooms.set(spot("c", tuple(gpu("c", index, "a100-80g") for index in range(8))))
    placed = rooms.place(model(profile(gpus=8, nodes=2)))
    assert nodes(placed) == ["b", "c"]
    assert placed is not None and placed.gpu_class == "a100-80g"


# -- what may not be taken ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("card", "told"),
    [
        ({"hindrances": ECC}, "GPU 0: ecc: 3 uncorrected errors"),
        ({"memory_bytes": None}, "GPU 0: memory: how much memory it has is unknown"),
        ({"gpu_class": ""}, "GPU 0: memory: how much memory it has is unknown"),
    ],
)
def test_what_is_ill_or_unknown_is_not_taken(card: dict[str, Any], told: str) -> None:
    rooms = Rooms([spot("a", (gpu("a", 0, **card),))])
    assert rooms.place(model(profile())) is None
    assert lines(rooms, profile()) == [f"a: it needs 1 GPU, and 0 of 1 are free ({told})"]


def test_fp8_goes_to_no_gpu_that_is_known_to_be_too_old() -> None:
    old, new = {"compute_cap": (8, 0)}, {"compute_cap": (8, 9)}
    fp8 = profile(quantization="fp8")
    rooms = Rooms([spot("a", (gpu("a", 0, "a100-80g", **old),)), spot("b", (gpu("b", 0, "l40s-45g", **new),))])
    assert nodes(rooms.place(model(profile("plain", gpu_class="a100-80g")))) == ["a"]
    rooms.set(spot("a", (gpu("a", 0, "a100-80g", **old),)))
    assert nodes(rooms.place(model(fp8))) == ["b"]
    assert rooms.place(model(fp8)) is None
    assert lines(rooms, fp8) == [
        "a: fp8 needs compute capability 8.9, the GPUs have 8.0",
        "b: it needs 1 GPU, and 0 of 1 are free (GPU 0 has llama)",
    ]
    rooms = Rooms([spot("c", (gpu("c", 0, **new), gpu("c", 1, "a100-80g", **old), gpu("c", 2, "a100-80g", **old)))])
    assert indices(rooms.place(model(fp8))) == [0], "the class is chosen by it too"
    assert lines(rooms, fp8) == [
        "c: it needs 1 GPU, and 0 of 3 are free"
        " (GPU 0 has llama; GPUs 1-2: fp8 needs compute capability 8.9, the GPUs have 8.0)"
    ]
    assert nodes(Rooms([spot("d")]).place(model(fp8))) == ["d"], "what is unknown is not below anything"
    both = [spot("d", (gpu("d", 0),)), spot("e", (gpu("e", 0, **new),))]
    assert nodes(Rooms(both).place(model(fp8))) == ["e"], "and comes after what is known"
    assert nodes(Rooms([spot("a", (gpu("a", 0, **old),))]).place(model(profile(gpus=0, quantization="fp8")))) == ["a"]


def test_of_a_fabric_too_no_old_node_is_taken() -> None:
    cards = {name: tuple(gpu(name, index, compute_cap=age) for index in range(8)) for name, age in AGES.items()}
    rooms = Rooms([spot(name, there) for name, there in cards.items()])
    fp8 = profile(gpus=8, nodes=2, quantization="fp8")
    assert nodes(rooms.place(model(profile(gpus=8, nodes=2)))) == ["a", "b"], "what asks for nothing takes the oldest"
    for name, there in cards.items():
        rooms.set(spot(name, there))
    assert sorted(nodes(rooms.place(model(fp8)))) == ["b", "c"]
    assert lines(rooms, fp8) == [
        "fabric ib-1: it needs 2 nodes with 8 free GPUs of one class, and has none",
        "a: fp8 needs compute capability 8.9, the GPUs have 8.0",
        *(f"{name}: it needs 8 GPUs of one class, and 0 of 8 are free (GPUs 0-7 have llama)" for name in "bc"),
    ]


AGES = {"a": (8, 0), "b": (9, 0), "c": None}


def test_of_a_partial_inventory_what_is_listed_is_true() -> None:
    rooms = Rooms([spot("a", 2, partial=True)])
    assert lines(rooms, profile(gpus=3)) == [
        "a: it needs 3 GPUs of one class, and 2 of 2 are free, as far as could be seen"
    ]
    assert nodes(rooms.place(model(profile(gpus=2)))) == ["a"]


def test_a_node_that_may_take_nothing_says_why() -> None:
    rooms = Rooms([spot("a", why_not="cordoned"), spot("b", why_not="unreachable for 25 s")])
    assert rooms.place(model(profile(), profile("cpu", 0), profile("two", nodes=2))) is None
    assert lines(rooms, profile()) == ["a: cordoned", "b: unreachable for 25 s"]


def test_room_comes_back_with_the_next_word_about_the_node() -> None:
    rooms = Rooms([spot("a", 1)])
    assert nodes(rooms.place(model(profile()))) == ["a"]
    assert lines(rooms, profile()) == ["a: it needs 1 GPU, and 0 of 1 are free (GPU 0 has llama)"]
    rooms.set(spot("a", 1))
    assert nodes(rooms.place(model(profile()))) == ["a"]
    rooms.remove("a")
    rooms.remove("a")
    assert lines(rooms, profile()) == []


# -- what is told ------------------------------------------------------------------------------------------------------


def test_every_node_and_fabric_of_a_model_that_cannot_run_has_a_line() -> None:
    sick = tuple(gpu("node-a", index, hindrances=ECC if index == 5 else ()) for index in range(8))
    busy = {0: "llama.x7k2q", 1: "llama.x7k2q", 2: "qwen.aaaaa", 3: "qwen.aaaaa"}
    rooms = Rooms(
        [
            spot("node-a", sick, taken=busy),
            spot("node-b", fabrics="ib-2"),
            spot("node-c"),
            spot("node-d", fabrics=""),
            spot("node-e", 0),
            spot("node-f", tuple(gpu("node-f", index, "l40s-45g") for index in range(8))),
        ]
    )
    wide = profile(gpus=8, nodes=2, gpu_class="h100-80g")
    assert lines(rooms, wide) == [
        "fabric ib-1: it needs 2 nodes with 8 free GPUs of class h100-80g, and has 1 (node-c)",
        "fabric ib-2: it needs 2 nodes with 8 free GPUs of class h100-80g, and has 1 (node-b)",
        "node-a: it needs 8 GPUs of class h100-80g, and 3 of 8 are free (GPUs 0-1 have llama.x7k2q;"
        " GPUs 2-3 have qwen.aaaaa; GPU 5: ecc: 3 uncorrected errors)",
        "node-b: it has room for a part, and too few other nodes of fabric ib-2 have it too",
        "node-c: it has room for a part, and too few other nodes of fabric ib-1 have it too",
        "node-d: it is on no named fabric, so it takes only replicas on one node",
        "node-e: it needs 8 GPUs of class h100-80g, and this node has none",
        "node-f: it needs 8 GPUs of class h100-80g, and the GPUs here are l40s-45g",
    ]


def test_what_would_do_and_was_not_taken_says_what_was_preferred() -> None:
    rooms = Rooms([spot("a"), spot("b", taken={0: "x"}), spot("c", taken={0: "x", 1: "x"}), spot("d")])
    assert lines(rooms, profile()) == [
        "a: it would do, and c is partly used, so that whole nodes stay whole",
        "b: it would do, and c has fewer free GPUs to spare",
        "d: it would do, and c is partly used, so that whole nodes stay whole",
    ]
    assert lines(rooms, profile(gpus=8))[-1] == "d: it would do, and a does as well"
    assert lines(rooms, profile(), avoid=("b", "c"))[:2] == [
        "b: it would do, and is tried last, since the model failed here a moment ago",
        "c: it would do, and is tried last, since the model failed here a moment ago",
    ]
    assert lines(rooms, profile(gpus=0))[0] == "b: it would do, and a does as well"
    rooms = Rooms([spot("a", 0, cpus=Cpus(4)), spot("b", 0, cpus=Cpus(4), cpu_replicas=1)])
    assert lines(rooms, profile(gpus=0)) == ["b: it would do, and a has fewer replicas for its CPUs"]


def test_of_several_nodes_it_says_so_too() -> None:
    rooms = Rooms([spot("a"), spot("b"), spot("c"), spot("d", fabrics="ib-2"), spot("e", fabrics="ib-2")])
    assert lines(rooms, profile(gpus=8, nodes=2)) == [
        "fabric ib-1: it would do, and fabric ib-2 was preferred (d, e)",
        "a: it would do, and fabric ib-2 was preferred (d, e)",
        "b: it would do, and fabric ib-2 was preferred (d, e)",
        "c: it would do, and fabric ib-2 was preferred (d, e)",
    ]
    rooms = Rooms([spot("a"), spot("b"), spot("c")])
    assert lines(rooms, profile(gpus=8, nodes=2)) == ["c: it would do, and a, b are as empty or emptier"]
    assert lines(rooms, profile(gpus=8, nodes=2), avoid=("a",)) == [
        "a: it would do, and is tried last, since the model failed here a moment ago"
    ]


def test_profiles_of_less_priority_say_that_they_were_not_needed() -> None:
    rooms = Rooms([spot("a"), spot("b", 0)])
    assert [
        (each.profile, each.candidate, each.reason)
        for each in rooms.explain(model(profile("small"), profile("big", 8, priority=1)))
    ] == [
        ("big", "b", "it needs 8 GPUs of one class, and this node has none"),
        ("small", "a", "it would do, and profile big, which is tried first, fits on a"),
        ("small", "b", "it needs 1 GPU, and this node has none"),
    ]

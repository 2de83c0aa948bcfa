"""RDMA ports: which may be used, which reach the same peers, and what NCCL is told of them."""

from __future__ import annotations

import ipaddress
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent.discovery.fabrics import fabrics, parse, read_tree
from appliance.facts.hardware import Fabric, Rail, RdmaAdapter
from appliance.rules.engines.environment import ib_hca

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "infiniband"

Tree = dict[str, str | None]


def port(name: str, link: str = "InfiniBand", number: int = 1, **more: str) -> Tree:
    at = f"{name}/ports/{number}"
    files = {"state": "4: ACTIVE", "phys_state": "5: LinkUp", "rate": "400 Gb/sec (4X NDR)", "link_layer": link, **more}
    return {f"{at}/{file}": text for file, text in files.items()}


def gids(name: str, *entries: tuple[int, str, str | None], number: int = 1) -> Tree:
    at, tree = f"{name}/ports/{number}", {}
    for index, address, kind in entries:
        tree[f"{at}/gids/{index}"] = ipaddress.IPv6Address(address).exploded
        tree[f"{at}/gid_attrs/types/{index}"] = kind
        tree[f"{at}/gid_attrs/ndevs/{index}"] = f"net-{name}"
    return tree


def roce(name: str, *entries: tuple[int, str, str | None], **more: str) -> Tree:
    return port(name, "Ethernet", **more) | gids(name, *entries)


V4 = "::ffff:10.0.0.1"
TWO_RAILS = (
    port("mlx5_10") | port("mlx5_0") | gids("mlx5_0", (0, "fe80::1", None)) | gids("mlx5_10", (0, "fe80::2", None))
)
MIXED = (
    port("mlx5_0")
    | port("mlx5_1", "Ethernet")
    | port("mlx5_2", "Ethernet", state="1: DOWN")
    | port("mlx5_10")
    | port("mlx5_11", state="2: INIT")
)
ROCE = roce("rocep1", (0, "fe80::a1", "IB/RoCE v1"), (1, "fe80::a1", "RoCE v2"), (2, "::", None)) | gids(
    "rocep1", (3, V4, "IB/RoCE v1"), (4, V4, "RoCE v2")
)


def only(tree: Tree, configured: str = "") -> Fabric:
    (fabric,) = fabrics(parse(tree), configured)
    return fabric


def reasons(tree: Tree) -> dict[str, str]:
    return {adapter.name: port.why_not for adapter in parse(tree) for port in adapter.ports if port.why_not}


def test_two_rails_are_one_fabric_in_natural_order() -> None:
    fabric = only(TWO_RAILS)
    assert [rail.adapter for rail in fabric.rails] == ["mlx5_0", "mlx5_10"]
    assert (fabric.name, fabric.transport, fabric.gid_index, fabric.rate_gbps) == ("", "ib", None, 800)
    assert ib_hca(fabric) == "=mlx5_0,mlx5_10"


def test_adapters_are_in_the_order_of_their_numbers() -> None:
    names = [f"mlx5_{number}" for number in (10, 2, 1, 0, 11)] + ["bnxt_re0"]
    tree: Tree = {}
    for name in names:
        tree |= port(name)
    assert ib_hca(only(tree)) == "=bnxt_re0,mlx5_0,mlx5_1,mlx5_2,mlx5_10,mlx5_11"


def test_ethernet_and_ports_that_are_not_up_are_left_out_with_their_reasons() -> None:
    assert ib_hca(only(MIXED)) == "=mlx5_0,mlx5_10"
    assert reasons(MIXED) == {
        "mlx5_1": "Ethernet without a RoCE v2 address of its own",
        "mlx5_2": "state is down, not active",
        "mlx5_11": "state is init, not active",
    }


def test_roce_is_told_apart_and_its_gid_is_found() -> None:
    fabric = only(ROCE)
    assert (fabric.transport, fabric.gid_index, fabric.name) == ("roce", 4, "")
    assert fabric.rails == (Rail("rocep1", rate_gbps=400.0, netdev="net-rocep1"),)


@pytest.mark.parametrize(
    ("entries", "index"),
    [
        ([(1, "fe80::1", "RoCE v2"), (3, V4, "RoCE v2")], 3),
        ([(3, "2001:db8::1", "RoCE v2"), (5, V4, "RoCE v2")], 5),
        ([(3, "2001:db8::1", "RoCE v2")], 3),
        ([(2, V4, "RoCE v2"), (3, V4, "RoCE v2")], 2),
    ],
)
def test_an_address_that_reaches_the_peer_is_preferred(entries: list[tuple[int, str, str]], index: int) -> None:
    assert only(roce("a", *entries)).gid_index == index


@pytest.mark.parametrize("entries", [[], [(0, "fe80::1", "RoCE v2")], [(3, V4, "IB/RoCE v1")], [(3, V4, None)]])
def test_a_port_without_such_an_address_is_not_used(entries: list[tuple[int, str, str | None]]) -> None:
    assert fabrics(parse(roce("a", *entries))) == ()


def test_one_index_holds_for_all_rails_and_the_odd_one_is_left_out() -> None:
    tree = roce("a", (3, V4, "RoCE v2")) | roce("b", (3, V4, "RoCE v2"), (4, V4, "RoCE v2"))
    tree |= roce("c", (3, V4, "IB/RoCE v1"), (4, V4, "RoCE v2"), (5, V4, "RoCE v2"))
    fabric = only(tree)
    assert (ib_hca(fabric), fabric.gid_index) == ("=a,b", 3)
    assert "GID 3" in reasons(tree)["c"]


def test_iwarp_and_unknown_links_are_left_out() -> None:
    tree = port("a", "Ethernet") | gids("a", (3, V4, "RoCE v2")) | {"a/node_type": "4: RNIC"}
    tree |= port("b", link="") | port("c", state="") | port("d", phys_state="3: Disabled")
    assert fabrics(parse(tree)) == ()
    assert set(reasons(tree)) == {"a", "b", "c", "d"}
    assert "iWARP" in reasons(tree)["a"]


def test_a_node_without_adapters_is_an_island_and_no_error(tmp_path: Path) -> None:
    assert read_tree(tmp_path / "none") == {}
    assert parse({}) == ()
    assert fabrics(()) == ()


def test_names_come_from_configuration_or_from_a_prefix_that_somebody_chose() -> None:
    chosen = port("a") | gids("a", (0, "fec0:0:0:7::1", None))
    assert only(chosen).name == "ib-fec0000000000007"
    assert only(chosen, "blue").name == "blue"
    assert only(TWO_RAILS, "blue").name == "blue"
    assert only(ROCE, "blue").name == "blue"
    assert only(TWO_RAILS).name == only(ROCE).name == ""


def test_two_subnets_are_two_fabrics_and_configuration_names_the_fastest_native_one() -> None:
    tree = roce("r", (3, V4, "RoCE v2"), rate="800 Gb/sec (8X NDR)")
    tree |= port("a", rate="100 Gb/sec (4X EDR)") | gids("a", (0, "fec0:0:0:1::1", None))
    for name in ("b", "c"):
        tree |= port(name) | gids(name, (0, "fec0:0:0:2::1", None))
    found = fabrics(parse(tree), "blue")
    assert [(fabric.name, ib_hca(fabric)) for fabric in found] == [
        ("blue", "=b,c"),
        ("ib-fec0000000000001", "=a"),
        ("", "=r"),
    ]


def test_the_port_is_named_where_an_adapter_has_several() -> None:
    tree = port("mlx4_0") | port("mlx4_0", number=2, state="1: DOWN") | port("mlx5_1")
    assert ib_hca(only(tree)) == "=mlx4_0:1,mlx5_1"


STATES = ("", "4: ACTIVE", "1: DOWN", "5: LinkUp", "4:", "٤: ACTIVE", "4: RNIC", "InfiniBand", "Ethernet", "-1", "1")
ADDRESSES = (V4, "::", "fe80::1", "fec0:0:0:7::1", "RoCE v2", "IB/RoCE v1")
WORDS = st.sampled_from((*STATES, *ADDRESSES, "400 Gb/sec (4X NDR)", "999999999 Gb/sec", "\x00"))


@st.composite
def trees(draw: st.DrawFn) -> Tree:
    """Trees of plausible adapters, some of whose files are replaced, unreadable or gone."""
    tree: Tree = {}
    for name in draw(st.lists(st.sampled_from(["mlx5_0", "mlx5_1", "mlx5_10", "bnxt_re0"]), unique=True)):
        link = draw(st.sampled_from(["InfiniBand", "Ethernet"]))
        tree |= port(name, link) | ({f"{name}/node_type": "1: CA"} if draw(st.booleans()) else {})
        kinds = st.sampled_from(["IB/RoCE v1", "RoCE v2", None])
        entry = st.tuples(st.integers(0, 5), st.sampled_from([V4, "fe80::1", "fec0:0:0:7::1", "::"]), kinds)
        tree |= gids(name, *draw(st.lists(entry, max_size=4)))
    for path in draw(st.lists(st.sampled_from(sorted(tree) or ["x"]), max_size=5)):
        change = draw(st.none() | st.just("gone") | WORDS | st.text(max_size=8))
        if change == "gone":
            tree.pop(path, None)
        else:
            tree[path] = change
    return tree


@given(trees(), st.sampled_from(["", "blue"]))
def test_whatever_the_kernel_says_only_good_ports_are_on_a_fabric(tree: Tree, configured: str) -> None:
    adapters = parse(tree)
    found = fabrics(adapters, configured)
    rails = [(rail.adapter, rail.port) for fabric in found for rail in fabric.rails]
    assert len(set(rails)) == len(rails)
    for fabric in found:
        assert ib_hca(fabric)[0] == "="
        assert ib_hca(fabric)[1:].split(",") == [rail.adapter for rail in fabric.rails]
        assert fabric.name in ("", configured) or fabric.name == f"ib-{fabric.subnet}"
        for rail in fabric.rails:
            at = f"{rail.adapter}/ports/{rail.port}/"
            assert tree[at + "state"] == "4: ACTIVE"
            assert tree.get(at + "phys_state", "5: LinkUp") == "5: LinkUp"
            assert tree[at + "link_layer"] == ("InfiniBand" if fabric.transport == "ib" else "Ethernet")
            if fabric.transport == "roce":
                assert fabric.gid_index is not None
                assert tree[f"{at}gid_attrs/types/{fabric.gid_index}"] == "RoCE v2"
                address = ipaddress.IPv6Address(tree[f"{at}gids/{fabric.gid_index}"] or "")
                assert int(address) and not address.is_link_local
            else:
                assert fabric.gid_index is None
    used = set(rails)
    for adapter in adapters:
        for each in adapter.ports:
            assert ((adapter.name, each.number) in used) != bool(each.why_not)


def expand(tree: Tree, root: Path) -> Path:
    """The tree as files. A folder stands for a file that cannot be read: both fail with an OSError when read."""
    for path, text in tree.items():
        at = root / path
        at.parent.mkdir(parents=True, exist_ok=True)
        if text is None:
            at.mkdir()
        else:
            at.write_text(text + "\n")
    return root


@pytest.mark.parametrize("tree", [TWO_RAILS, MIXED, ROCE])
def test_reading_the_files_gives_what_was_written(tree: Tree, tmp_path: Path) -> None:
    (tmp_path / "mlx5_0").mkdir()
    (tmp_path / "mlx5_0" / "fw_ver").write_text("28.41\n")
    read = read_tree(expand(tree, tmp_path))
    assert read == tree
    assert fabrics(parse(read)) == fabrics(parse(tree))


def sample(name: str) -> Tree:
    lines = (SAMPLES / name).read_text().splitlines()
    pairs = (line.split("\t", 1) for line in lines if "\t" in line and not line.startswith("#"))
    return {path: None if text == "!EINVAL" else text for path, text in pairs}


@pytest.mark.skipif(not SAMPLES.exists(), reason="the samples are not beside the checkout")
@pytest.mark.parametrize(
    ("name", "hca", "transport", "gid_index"),
    [
        ("sysfs-ndr-two-rails.tsv", "=mlx5_0,mlx5_10", "ib", None),
        ("sysfs-mixed-ib-and-ethernet.tsv", "=mlx5_0,mlx5_10", "ib", None),
        ("sysfs-roce-head.tsv", "=rocep1s0f0", "roce", 4),
    ],
)
def test_samples(name: str, hca: str, transport: str, gid_index: int | None, tmp_path: Path) -> None:
    for adapters in (parse(sample(name)), parse(read_tree(expand(sample(name), tmp_path)))):
        (fabric,) = fabrics(adapters)
        assert (ib_hca(fabric), fabric.transport, fabric.gid_index, fabric.name) == (hca, transport, gid_index, "")


def test_values_are_values() -> None:
    (adapter,) = parse(port("a"))
    assert isinstance(adapter, RdmaAdapter)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        adapter.name = "b"  # type: ignore[misc]

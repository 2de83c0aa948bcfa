"""What an engine's processes find in their environment, and what they never do."""

from __future__ import annotations

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent.discovery.fabrics import fabrics, parse
from appliance.facts.hardware import Fabric, Rail
from appliance.rules.engines.environment import ib_hca, inherited
from appliance.rules.engines.plan import plan
from tests.shard_on_site import INVENTORY, LEADER, shard, site, two_nodes

BUNDLE = "/var/cache/appliance/0a1b2c"


def env_of(**changed: object) -> dict[str, str]:
    return dict(plan(two_nodes(**changed), site()).main.env)


def test_native_infiniband_is_named_exactly_and_without_an_index() -> None:
    env = env_of()
    assert env["NCCL_IB_HCA"] == "=mlx5_0,mlx5_10"
    assert "NCCL_IB_GID_INDEX" not in env and "NCCL_IB_DISABLE" not in env
    assert env["NCCL_SOCKET_IFNAME"] == "=eth0" and env["GLOO_SOCKET_IFNAME"] == "eth0"


def test_roce_has_the_index_of_this_node_and_the_port_where_it_matters() -> None:
    env = env_of(fabric="green")
    assert env["NCCL_IB_HCA"] == "=rocep1,mlx4_0:2"
    assert env["NCCL_IB_GID_INDEX"] == "4"


def test_the_first_index_is_an_index_too() -> None:
    fabric = Fabric("blue", "roce", (Rail("rocep1"),), gid_index=0)
    made = plan(two_nodes(), site(inventory=attrs.evolve(INVENTORY, fabrics=(fabric,))))
    assert made.main.env["NCCL_IB_GID_INDEX"] == "0"


def test_without_a_fabric_no_adapter_is_used_at_all() -> None:
    env = env_of(fabric="")
    assert env["NCCL_IB_DISABLE"] == "1"
    assert "NCCL_IB_HCA" not in env and "NCCL_IB_GID_INDEX" not in env


def test_one_node_needs_no_adapters() -> None:
    env = plan(shard(), site()).main.env
    assert not [name for name in env if name.startswith(("NCCL_", "GLOO_"))]


@pytest.mark.parametrize(
    ("tree", "hca", "index"),
    [
        ({"mlx5_0": "InfiniBand", "mlx5_10": "InfiniBand"}, "=mlx5_0,mlx5_10", None),
        ({"mlx5_0": "InfiniBand", "mlx5_1": "Ethernet", "mlx5_10": "InfiniBand"}, "=mlx5_0,mlx5_10", None),
        ({"rocep1": "roce", "rocep2": "roce"}, "=rocep1,rocep2", "3"),
        ({"mlx5_1": "roce", "mlx5_10": "InfiniBand"}, "=mlx5_10", None),
    ],
)
def test_from_the_kernels_tree_to_the_variable(tree: dict[str, str], hca: str, index: str | None) -> None:
    files: dict[str, str | None] = {}
    for name, link in tree.items():
        at = f"{name}/ports/1"
        files |= {f"{at}/state": "4: ACTIVE", f"{at}/rate": "400 Gb/sec (4X NDR)"}
        files[f"{at}/link_layer"] = "Ethernet" if link == "roce" else link
        if link == "roce":
            files |= {f"{at}/gids/3": "::ffff:10.0.0.1", f"{at}/gid_attrs/types/3": "RoCE v2"}
    found = fabrics(parse(files), "blue")
    inventory = attrs.evolve(INVENTORY, fabrics=found)
    env = plan(two_nodes(), site(inventory=inventory)).main.env
    assert env["NCCL_IB_HCA"] == hca
    assert env.get("NCCL_IB_GID_INDEX") == index


@given(
    st.lists(st.tuples(st.sampled_from(["mlx5_1", "mlx5_10", "mlx5_11", "a"]), st.booleans()), min_size=1, unique=True)
)
def test_the_form_is_exact_whatever_the_adapters(rails: list[tuple[str, bool]]) -> None:
    text = ib_hca(Fabric("f", "ib", tuple(Rail(name, 1, only) for name, only in rails)))
    assert text.startswith("=") and "=" not in text[1:]
    assert text[1:].split(",") == [name if only else f"{name}:1" for name, only in rails]


def test_devices_are_numbered_in_pci_order_as_placement_chose_them() -> None:
    env = plan(shard(gpus_per_node=2, tensor_parallel=2, gpus=("GPU-5", "GPU-3")), site()).main.env
    assert (env["CUDA_DEVICE_ORDER"], env["CUDA_VISIBLE_DEVICES"]) == ("PCI_BUS_ID", "5,3")
    assert plan(shard(gpus_per_node=0), site()).main.env["CUDA_VISIBLE_DEVICES"] == ""


def test_a_profile_adds_to_the_environment_and_may_choose_the_socket_interface() -> None:
    env = env_of(env={"VLLM_LOGGING_LEVEL": "DEBUG", "NCCL_SOCKET_IFNAME": "=bond0", "PATH": "/mine"})
    assert env["VLLM_LOGGING_LEVEL"] == "DEBUG" and env["NCCL_SOCKET_IFNAME"] == "=bond0" and env["PATH"] == "/mine"


OURS = {
    "LD_LIBRARY_PATH": f"{BUNDLE}/lib:/usr/local/cuda/lib64",
    "LD_LIBRARY_PATH_ORIG": "/usr/local/cuda/lib64",
    "LD_PRELOAD": "/somewhere.so",
    "PATH": f"{BUNDLE}/bin:/usr/bin",
    "SSL_CERT_FILE": f"{BUNDLE}/certifi/cacert.pem",
    "PYTHONPATH": "/ours",
    "PYTHONHOME": BUNDLE,
    "VIRTUAL_ENV": "/venv",
    "_MEIPASS2": BUNDLE,
    "_PYI_ARCHIVE_FILE": BUNDLE,
    "OPENSSL_MODULES": BUNDLE,
    "APPLIANCE_CONFIG": "/etc/appliance/appliance.toml",
    "APPLIANCE_AGENT__NODE": "a",
    "NOTIFY_SOCKET": "/run/systemd/notify",
    "LISTEN_FDS": "1",
    "CUDA_VISIBLE_DEVICES": "7",
    "NCCL_IB_GID_INDEX": "",
    "NCCL_IB_HCA": "mlx5",
    "VLLM_API_KEY": "of-another-engine",
    "LLAMA_ARG_PORT": "1",
    "HF_HOME": "/models/hf",
    "LC_ALL": "C.UTF-8",
    "https_proxy": "http://proxy:3128",
}


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp", "sim"])
def test_nothing_of_ours_reaches_an_engine(engine: str) -> None:
    made = plan(shard(engine, key=""), site(environment=OURS, bundle=BUNDLE))
    for command in made.commands:
        env = command.env
        assert not [name for name, text in env.items() if BUNDLE in text]
        assert set(env) - {"VLLM_HOST_IP", "VLLM_PORT", "VLLM_NO_USAGE_STATS"} == {
            *("PATH", "LD_LIBRARY_PATH", "HF_HOME", "LC_ALL", "https_proxy"),
            *("APPLIANCE_SHARD", "CUDA_DEVICE_ORDER", "CUDA_VISIBLE_DEVICES"),
        }
        assert env["LD_LIBRARY_PATH"] == "/usr/local/cuda/lib64" and env["CUDA_VISIBLE_DEVICES"] == "0"
        assert env["https_proxy"] == "http://proxy:3128"


@pytest.mark.parametrize(
    ("environment", "bundle", "path"),
    [
        ({"LD_LIBRARY_PATH": "/cuda"}, "", "/cuda"),
        ({"LD_LIBRARY_PATH": "/cuda"}, BUNDLE, "/cuda"),
        ({"LD_LIBRARY_PATH": BUNDLE}, BUNDLE, None),
        ({"LD_LIBRARY_PATH": f"{BUNDLE}/lib:/cuda"}, BUNDLE + "/", "/cuda"),
        ({"LD_LIBRARY_PATH": f"{BUNDLE}x:/cuda"}, BUNDLE, f"{BUNDLE}x:/cuda"),
        ({"LD_LIBRARY_PATH": BUNDLE, "LD_LIBRARY_PATH_ORIG": ""}, BUNDLE, None),
        ({"LD_LIBRARY_PATH": BUNDLE, "LD_LIBRARY_PATH_ORIG": "/cuda"}, "", "/cuda"),
    ],
)
def test_the_library_path_of_before_is_given_back(environment: dict[str, str], bundle: str, path: str | None) -> None:
    assert inherited(environment, bundle).get("LD_LIBRARY_PATH") == path


@given(st.dictionaries(st.sampled_from(sorted(OURS)), st.text(alphabet=":/=a", max_size=8) | st.just(f"{BUNDLE}/x")))
def test_whatever_the_agent_runs_in_no_value_is_empty_and_none_is_ours(environment: dict[str, str]) -> None:
    env = inherited(environment, BUNDLE)
    assert all(env.values())
    assert not [text for text in env.values() if BUNDLE in text.split(":") or f"{BUNDLE}/x" in text.split(":")]
    made = plan(two_nodes(fabric="green", key=""), site(environment=environment, bundle=BUNDLE)).main.env
    assert made["NCCL_IB_GID_INDEX"] == "4" and made["CUDA_VISIBLE_DEVICES"] == "0,1,2,3,4,5,6,7"
    assert made["PATH"].startswith("/opt/engines/bin") and made["VLLM_HOST_IP"] == LEADER

"""A shard and a node to plan it on, for the tests of launch plans: what a test does not say has these values."""

from __future__ import annotations

from typing import Any

from appliance.facts.catalog import Profile
from appliance.facts.hardware import GIB, Cpus, Fabric, Gpu, Hindrance, Interface, Inventory, Rail
from appliance.facts.replica import AdapterFiles, Shard
from appliance.rules.engines.engine import Site
from appliance.rules.engines.ports import PortPool

LEADER, WORKER = "10.0.0.1", "10.0.0.2"
RENDEZVOUS = 20007
KEY = "k3y-of-this-replica"
ADAPTERS = (AdapterFiles("legal", "/adapters/legal", rank=20), AdapterFiles("medical", "/adapters/medical"))


def gpu(number: int, name: str = "h100-80g", capability: tuple[int, int] | None = (9, 0), **more: Any) -> Gpu:
    return Gpu(f"GPU-{number}", number, name, name, 80 * GIB, compute_cap=capability, **more)


INVENTORY = Inventory(
    node="a",
    cpus=Cpus(count=64),
    gpus=(
        *(gpu(number) for number in range(8)),
        gpu(8, "a100-80g", (8, 0)),
        gpu(9, hindrances=(Hindrance("ecc", "2 uncorrected memory errors"),)),
        gpu(10, "a100-80g", None),
    ),
    fabrics=(
        Fabric("blue", "ib", (Rail("mlx5_0"), Rail("mlx5_10"))),
        Fabric("green", "roce", (Rail("rocep1"), Rail("mlx4_0", port=2, only_port=False)), gid_index=4),
    ),
    interfaces=(Interface("lo", ("127.0.0.1", "::1")), Interface("eth0", (LEADER, WORKER, "fd00::1"))),
)


def site(**changed: Any) -> Site:
    given: dict[str, Any] = {
        "inventory": INVENTORY,
        "ports": PortPool(20000, 24999),
        "folder": "/var/lib/appliance/shards/r1-0",
        "run_folder": "/run/appliance",
        "marker": "r1/0",
        "which": lambda name: name if name.startswith("/") else f"/opt/engines/bin/{name}",
        "exists": lambda path: True,
        "environment": {"PATH": "/usr/bin:/bin", "HOME": "/home/op"},
        "own_argv": ("/usr/local/bin/appliance",),
    }
    return Site(**(given | changed))


def shard(engine: str = "vllm", **changed: Any) -> Shard:
    """A shard of one node and one GPU. Fields of the profile and of the shard are told apart by their names."""
    of_profile = {field.name for field in Profile.__attrs_attrs__}
    given: dict[str, Any] = {"name": "p", "engine": engine, "source": "/models/llama"}
    profile = Profile(**(given | {name: value for name, value in changed.items() if name in of_profile}))
    several = profile.nodes > 1
    own: dict[str, Any] = {
        "replica": "r1",
        "model": "llama",
        "address": LEADER,
        "leader": LEADER if several else "",
        "rendezvous_port": RENDEZVOUS if several else 0,
        "gpus": tuple(f"GPU-{number}" for number in range(profile.gpus_per_node)),
        "key": KEY,
    }
    return Shard(profile=profile, **(own | {name: value for name, value in changed.items() if name not in of_profile}))


def two_nodes(engine: str = "vllm", rank: int = 0, **changed: Any) -> Shard:
    """One shard of a replica on two nodes with eight GPUs each, on the fabric `blue`."""
    given = {"nodes": 2, "gpus_per_node": 8, "tensor_parallel": 16, "fabric": "blue", "rank": rank}
    given["address"] = WORKER if rank else LEADER
    return shard(engine, **(given | changed))

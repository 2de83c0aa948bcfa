"""Reasons not to start a shard: each is found before anything runs, says what is wrong, and all come at once."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.facts.catalog import Profile
from appliance.facts.launch import LaunchPlan
from appliance.facts.replica import AdapterFiles, Shard
from appliance.rules.engines.engine import Site
from appliance.rules.engines.flags import flag_values, flags_in
from appliance.rules.engines.plan import ENGINES, CannotLaunch, plan
from appliance.rules.engines.ports import PortPool
from appliance.rules.engines.refuse import arithmetic
from tests.shard_on_site import RENDEZVOUS, shard, site, two_nodes


def reasons(each: Shard, at: Site | None = None) -> tuple[str, ...]:
    """Why `each` is not started; nothing when it is."""
    try:
        assert isinstance(plan(each, at or site()), LaunchPlan)
    except CannotLaunch as refused:
        assert str(refused) == "; ".join(refused.reasons)
        return refused.reasons
    return ()


@pytest.mark.parametrize(
    ("changed", "path", "told"),
    [
        ({"gpus_per_node": 8, "tensor_parallel": 3}, "tensor_parallel", "3 does not divide 8 GPUs"),
        ({"gpus_per_node": 8, "tensor_parallel": 4}, "pipeline_parallel", "4 x 1 makes 4, but nodes 1 x"),
        ({"gpus_per_node": 2, "tensor_parallel": 2, "pipeline_parallel": 2}, "pipeline_parallel", "makes 4"),
        ({"gpus_per_node": 0, "nodes": 2}, "tensor_parallel", "evenly over 2 nodes"),
        ({"nodes": 0}, "nodes", "at least 1"),
        ({"tensor_parallel": -1}, "tensor_parallel", "at least 1"),
        ({"gpus_per_node": -1}, "gpus_per_node", "0 (CPU) or more"),
        ({"launch_mode": "slurm"}, "launch_mode", "mp, ray"),
        ({"engine": "sglang", "launch_mode": "ray"}, "launch_mode", "vllm only"),
        ({"engine": "llamacpp", "nodes": 2, "tensor_parallel": 2}, "nodes", "one node"),
        ({"engine": "openai"}, "engine", "vllm, sglang, llamacpp, sim"),
    ],
)
def test_arithmetic_names_the_field(changed: dict[str, object], path: str, told: str) -> None:
    (fault,) = arithmetic(Profile(**{"name": "p", "engine": "vllm", **changed}))  # type: ignore[arg-type]
    assert fault.path == path and told in fault.message


@given(st.integers(1, 4), st.integers(0, 8), st.integers(1, 16), st.integers(1, 8))
def test_arithmetic_passes_exactly_what_adds_up(nodes: int, gpus: int, tensor: int, pipeline: int) -> None:
    profile = Profile("p", "vllm", nodes=nodes, gpus_per_node=gpus, tensor_parallel=tensor, pipeline_parallel=pipeline)
    adds_up = tensor * pipeline == nodes * gpus if gpus else tensor * pipeline % nodes == 0
    assert (arithmetic(profile) == []) == adds_up


ALL = "every engine"
CASES: list[tuple[str, Shard, str]] = [
    ("too few GPUs", shard(gpus=()), "0 GPUs were given, gpus_per_node is 1"),
    ("one GPU twice", shard(gpus_per_node=2, tensor_parallel=2, gpus=("GPU-0", "GPU-0")), "1 GPUs were given"),
    ("a stranger's GPU", shard(gpus=("GPU-x",)), "GPU GPU-x is not on this node"),
    ("a sick GPU", shard(gpus=("GPU-9",)), "GPU 9 is not free: ecc: 2 uncorrected"),
    (
        "mixed types",
        shard(gpus_per_node=2, tensor_parallel=2, gpus=("GPU-0", "GPU-8")),
        "mixed GPU types in one group: a100-80g, h100-80g",
    ),
    ("another class", shard(gpu_class="l40s-45g"), "the GPUs are h100-80g, the replica is made of l40s-45g"),
    (
        "fp8 on Ampere",
        shard(quantization="fp8", gpus=("GPU-8",)),
        "fp8 needs compute capability 8.9, the GPUs have 8.0",
    ),
    ("fp8 by another name", shard(quantization="w8a8_fp8", gpus=("GPU-8",)), "fp8 needs"),
    ("fp8 as dtype", shard("sglang", dtype="fp8", gpus=("GPU-8",)), "fp8 needs"),
    ("a rank too many", two_nodes(rank=2), "rank 2 is not one of 2"),
    ("no leader", two_nodes(leader=""), "needs its leader's address"),
    ("no rendezvous", two_nodes(rendezvous_port=0), "needs a rendezvous port"),
    ("a rendezvous elsewhere", two_nodes(rendezvous_port=29500), "rendezvous port 29500 is outside port_range"),
    ("a foreign address", shard(address="10.9.9.9"), "address 10.9.9.9 is on no interface"),
    ("a foreign fabric", two_nodes(fabric="red"), "fabric red is not here (fabrics of this node: blue, green)"),
    ("our flag", shard(args=("--max-num-seqs=4", "--port=1")), "--port is set by the agent; set agent.port_range"),
    ("our flag, spelt otherwise", shard(args=("--tensor_parallel_size", "2")), "set tensor_parallel instead"),
    ("our short flag", shard(args=("-tp", "2")), "-tp is set by the agent"),
    ("the key's flag", shard("llamacpp", args=("--api-key", "x")), "--api-key is set by the agent"),
    ("our variable", shard(env={"CUDA_VISIBLE_DEVICES": "3"}), "env: CUDA_VISIBLE_DEVICES is set by the agent"),
    ("our engine's variable", shard(env={"VLLM_API_KEY": "x"}), "env: VLLM_API_KEY is set"),
    ("the adapters' variable", two_nodes(env={"NCCL_IB_GID_INDEX": ""}), "env: NCCL_IB_GID_INDEX is set"),
    ("an empty variable", two_nodes(env={"NCCL_DEBUG": ""}), "env: NCCL_DEBUG must not be empty"),
    ("a name with a space", shard(model="my model"), "served name 'my model'"),
    ("a name like a flag", shard(model="-x"), "served name '-x'"),
    ("no name", shard(model=""), "served name ''"),
    ("a name with a colon", shard("sglang", model="base:red"), "takes what follows a colon for an adapter"),
    ("a name with a comma", shard("llamacpp", model="a,b"), "takes a comma"),
    (
        "an adapter like its model",
        shard(adapters=(AdapterFiles("llama", "/a"),)),
        "an adapter has the name of the model",
    ),
    ("a path with a comma", shard("llamacpp", adapters=(AdapterFiles("x", "/a,b"),)), "misreads a comma or colon"),
    ("a rank nobody takes", shard(adapters=(AdapterFiles("x", "/a", rank=1024),)), "rank 1024, vLLM takes 512"),
    ("a relative path", shard(source="models/deep/llama"), "expected an absolute path or a hub id"),
    ("no source", shard(source=""), "expected an absolute path or a hub id"),
    ("a hub id for llama.cpp", shard("llamacpp", source="org/name"), "needs a GGUF file on the node"),
    ("dtype of a GGUF", shard("llamacpp", dtype="half"), "dtype: a GGUF file has its own"),
    ("quantization of the sim", shard("sim", quantization="fp8"), "quantization: the sim has none"),
    ("Ray on loopback", shard(launch_mode="ray", address="127.0.0.1"), "Ray replaces 127.0.0.1"),
    (
        "data parallel",
        shard(args=("--data-parallel-size", "2")),
        "--data-parallel-size 2 needs 2 GPUs, the replica has 1",
    ),
    (
        "data parallel over Ray",
        two_nodes(launch_mode="ray", args=("--data-parallel-size=2",)),
        "over Ray on several nodes hangs",
    ),
    ("data parallel of SGLang", shard("sglang", args=("--dp-size", "2")), "--dp-size 2 needs 2 GPUs"),
]


@pytest.mark.parametrize(("each", "told"), [case[1:] for case in CASES], ids=[case[0] for case in CASES])
def test_refused_before_the_launch(each: Shard, told: str) -> None:
    found = reasons(each)
    assert [reason for reason in found if told in reason], found


@pytest.mark.parametrize(
    "each",
    [
        shard(quantization="fp8", gpus=("GPU-0",)),
        shard(quantization="awq", gpus=("GPU-8",)),
        # Whether fp8 works is unknown, not refused.
        shard(quantization="fp8", gpus=("GPU-10",)),
        shard("sglang", args=("--dp-size", "8", "--enable-dp-attention")),
        shard(args=("--data-parallel-size", "1")),
        shard(model="org/name:tag,x"),
        shard(source="org/name.with-dots"),
        shard(address="::1"),
        two_nodes(rank=1, rendezvous_port=29500),
    ],
)
def test_what_is_good_is_not_refused(each: Shard) -> None:
    assert reasons(each) == ()


@pytest.mark.parametrize("engine", ["vllm", "sglang", "llamacpp"])
def test_what_is_missing_on_the_node_is_named(engine: str) -> None:
    nothing = site(which=lambda name: None, exists=lambda path: False, executables={"sglang": "/venv/bin/sglang"})
    found = " / ".join(reasons(shard(engine, adapters=(AdapterFiles("x", "/adapters/x"),)), nothing))
    assert f"say in agent.executables.{engine} where it is" in found
    assert "source /models/llama is not on this node" in found
    assert "adapter x: /adapters/x is not on this node" in found


def test_both_programs_of_vllm_over_ray_have_to_be_there() -> None:
    without_ray = site(
        which=lambda name: None if name == "ray" else f"/x/{name}", exists=lambda path: "ray" not in path
    )
    assert [
        reason for reason in reasons(shard(launch_mode="ray"), without_ray) if "ray is not installed here" in reason
    ]
    assert reasons(shard(), without_ray) == ()


def test_the_sim_needs_no_files() -> None:
    assert reasons(shard("sim", source=""), site(exists=lambda path: False)) == ()


def test_a_folder_too_long_for_rays_sockets() -> None:
    assert [each for each in reasons(shard(launch_mode="ray"), site(run_folder="/" + "x" * 60)) if "too long" in each]


def test_a_rendezvous_that_another_shard_has() -> None:
    taken = site(ports=PortPool(20000, 24999, frozenset({RENDEZVOUS})))
    assert f"rendezvous port {RENDEZVOUS} is in use by another shard" in reasons(two_nodes(), taken)
    # On a worker's node that number is nobody's.
    assert reasons(two_nodes(rank=1), taken) == ()


def test_every_loopback_address_is_on_the_loopback_interface() -> None:
    there = site()
    assert reasons(shard(address="127.0.0.3"), there) == ()
    away = attrs.evolve(there.inventory, interfaces=there.inventory.interfaces[1:])
    assert reasons(shard(address="127.0.0.3"), attrs.evolve(there, inventory=away)) == (
        "address 127.0.0.3 is on no interface of this node",
    )


def test_without_known_interfaces_the_address_is_believed() -> None:
    bare = site()
    bare = attrs.evolve(bare, inventory=attrs.evolve(bare.inventory, interfaces=()))
    assert reasons(two_nodes(address="10.9.9.9"), bare) == ()


def test_all_reasons_come_at_once() -> None:
    found = reasons(shard(model="a b", gpus=("GPU-8",), gpu_class="h100-80g", quantization="fp8", args=("--port", "1")))
    assert len(found) == 4


def test_an_engine_nobody_can_start() -> None:
    assert reasons(shard("openai")) == ("engine: expected one of vllm, sglang, llamacpp, sim",)


@pytest.mark.parametrize("engine", ENGINES)
@given(
    model=st.text(max_size=12),
    args=st.lists(
        st.sampled_from(["--port", "--x=1", "-1", "--api_key", "", "-", "--", "--dp-size"]) | st.text(max_size=6)
    ),
    source=st.sampled_from(["", "/m", "org/name", "a/b/c", " "]) | st.text(max_size=8),
    gpus=st.lists(st.sampled_from(["GPU-0", "GPU-8", "GPU-x"]), max_size=3),
    tensor=st.integers(-1, 4),
)
def test_nothing_an_operator_writes_crashes(
    engine: str, model: str, args: list[str], source: str, gpus: list[str], tensor: int
) -> None:
    each = shard(
        engine,
        model=model,
        args=tuple(args),
        source=source,
        gpus=tuple(gpus),
        gpus_per_node=len(gpus),
        tensor_parallel=tensor,
    )
    if not reasons(each):
        argv = plan(each, site()).main.argv
        assert not {"--port", "--api-key"} & set(flags_in(args))
        assert argv[len(argv) - len(args) :] == tuple(args)


@pytest.mark.parametrize(
    ("args", "found"),
    [
        (("--a", "1", "--b=2", "-c", "-1", "--d"), {"--a": "1", "--b": "2", "-c": "-1", "--d": ""}),
        (("--a_b_c=x_y",), {"--a-b-c": "x_y"}),
        (("--a", "1", "--a", "2"), {"--a": "2"}),
        (("word", "--a"), {"--a": ""}),
        ((), {}),
    ],
)
def test_arguments_are_read_as_engines_read_them(args: tuple[str, ...], found: dict[str, str]) -> None:
    assert flag_values(args) == found


def test_plans_do_not_change_what_they_are_made_from() -> None:
    at, each = site(), two_nodes(launch_mode="ray")
    before: Callable[[], tuple[object, ...]] = lambda: (at.ports, each, at.inventory)  # noqa: E731
    first, was = plan(each, at), before()
    assert plan(each, at) == first and before() == was

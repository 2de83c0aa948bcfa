"""Launch plans: what is run, with which environment and ports, when it is ready and how it is stopped."""

from __future__ import annotations

import itertools
import json
from typing import Any

import attrs
import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.cli.sim import sim
from appliance.facts.launch import HttpReady, LaunchPlan, Listening, PortUse
from appliance.facts.replica import Shard
from appliance.llama_server import flags as llama_flags
from appliance.rules.engines.engine import MARKER
from appliance.rules.engines.plan import ENGINES, CannotLaunch, plan
from appliance.rules.engines.ports import NoPort, PortLease, PortPool
from tests.shard_on_site import ADAPTERS, KEY, LEADER, RENDEZVOUS, WORKER, shard, site, two_nodes


def value(argv: tuple[str, ...], flag: str) -> str:
    return argv[argv.index(flag) + 1]


def ports(made: LaunchPlan) -> dict[str, int]:
    return {use.name: use.port for use in made.ports}


def test_vllm_on_one_node() -> None:
    made = plan(shard(context_tokens=8192, dtype="bfloat16", quantization="awq", args=("--max-num-seqs=256",)), site())
    (command,) = made.commands
    assert command.argv == (
        *("/opt/engines/bin/vllm", "serve", "/models/llama", "--served-model-name", "llama"),
        *("--tensor-parallel-size", "1", "--pipeline-parallel-size", "1"),
        *("--max-model-len", "8192", "--dtype", "bfloat16", "--quantization", "awq"),
        *("--host", LEADER, "--port", "20000", "--enable-prompt-tokens-details", "--max-num-seqs=256"),
    )
    assert command.env == {
        "PATH": "/opt/engines/bin:/usr/bin:/bin",
        "HOME": "/home/op",
        "VLLM_HOST_IP": LEADER,
        "VLLM_PORT": "20001",
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_API_KEY": KEY,
        "CUDA_DEVICE_ORDER": "PCI_BUS_ID",
        "CUDA_VISIBLE_DEVICES": "0",
        MARKER: "r1/0",
    }
    assert made.ports == (PortUse("http", 20000), PortUse("inner", 20001, 16))
    assert made.ready == HttpReady(LEADER, 20000, "llama", key=KEY)
    assert made.awaits is None and made.files == () and command.until is None


def test_vllm_over_two_nodes_by_itself() -> None:
    leader, worker = plan(two_nodes(), site()), plan(two_nodes(rank=1), site())
    for made, rank in ((leader, "0"), (worker, "1")):
        argv = made.main.argv
        assert value(argv, "--nnodes") == "2" and value(argv, "--node-rank") == rank
        assert value(argv, "--master-addr") == LEADER and value(argv, "--master-port") == str(RENDEZVOUS)
        assert value(argv, "--distributed-executor-backend") == "mp"
        assert value(argv, "--tensor-parallel-size") == "16"
    assert "--headless" not in leader.main.argv and leader.serves and leader.awaits is None
    assert ports(leader)["rendezvous"] == RENDEZVOUS
    # It does not stand in its own way: the block of inner ports does not run over the rendezvous.
    assert PortUse("inner", 20008, 16) in leader.ports
    assert "--headless" in worker.main.argv and "--port" not in worker.main.argv
    assert not worker.serves and worker.awaits == Listening(LEADER, RENDEZVOUS, 600.0)
    assert "rendezvous" not in ports(worker) and "http" not in ports(worker)
    assert worker.main.env["VLLM_HOST_IP"] == WORKER and "VLLM_API_KEY" not in worker.main.env


def test_vllm_over_ray_starts_a_node_of_ray_first() -> None:
    made = plan(two_nodes(launch_mode="ray"), site())
    node, serve = made.commands
    assert made.sidecars == (node,) and made.main is serve
    assert node.argv[:3] == ("/opt/engines/bin/ray", "start", "--head")
    assert value(node.argv, "--port") == str(RENDEZVOUS) and value(node.argv, "--node-ip-address") == LEADER
    assert value(node.argv, "--num-gpus") == "8"
    assert "--include-dashboard=false" in node.argv and "--block" in node.argv and "--disable-usage-stats" in node.argv
    assert node.until == Listening(LEADER, RENDEZVOUS, 120.0)
    assert value(serve.argv, "--distributed-executor-backend") == "ray" and "--nnodes" not in serve.argv
    assert serve.env["RAY_ADDRESS"] == f"{LEADER}:{RENDEZVOUS}" and "RAY_ADDRESS" not in node.env
    # Ray starts the workers, so what they need has to be in its environment too.
    for name in ("NCCL_IB_HCA", "CUDA_VISIBLE_DEVICES", "VLLM_HOST_IP", MARKER):
        assert node.env[name] == serve.env[name]
    assert KEY not in node.env.values()
    assert node.stop[0].grace_s > 30.0
    assert made.directories == (value(node.argv, "--temp-dir"),) == (f"/run/appliance/ray-{RENDEZVOUS}",)


def test_a_worker_of_ray_only_joins() -> None:
    made = plan(two_nodes(rank=1, launch_mode="ray"), site())
    (node,) = made.commands
    assert node.argv[:4] == ("/opt/engines/bin/ray", "start", "--address", f"{LEADER}:{RENDEZVOUS}")
    assert value(node.argv, "--node-ip-address") == WORKER
    assert "--head" not in node.argv and "--include-dashboard=false" not in node.argv
    assert not made.serves and made.awaits == Listening(LEADER, RENDEZVOUS, 600.0) and node.until is None


def test_every_port_of_ray_is_given() -> None:
    argv = plan(two_nodes(launch_mode="ray"), site()).commands[0].argv
    given = [int(word) for flag, word in itertools.pairwise(argv) if flag.endswith("-port")]
    assert len(given) == len(set(given)) >= 7
    low, high = int(value(argv, "--min-worker-port")), int(value(argv, "--max-worker-port"))
    assert high - low == 99
    assert not [port for port in given if low < port < high]


def test_ray_on_one_node_meets_on_a_port_of_its_own() -> None:
    made = plan(shard(launch_mode="ray"), site())
    node, serve = made.commands
    assert value(node.argv, "--port") == str(ports(made)["rendezvous"])
    assert serve.env["RAY_ADDRESS"] == f"{LEADER}:{ports(made)['rendezvous']}"


def test_ray_is_taken_from_where_vllm_is() -> None:
    executables = {"vllm": "/venv/bin/vllm"}
    made = plan(shard(launch_mode="ray"), site(executables=executables))
    assert made.commands[0].argv[0] == "/venv/bin/ray"
    elsewhere = plan(shard(launch_mode="ray"), site(executables=executables, exists=lambda path: "ray" not in path))
    assert elsewhere.commands[0].argv[0] == "/opt/engines/bin/ray"
    said = plan(shard(launch_mode="ray"), site(executables=executables | {"ray": "/else/ray"}))
    assert said.commands[0].argv[0] == "/else/ray"


def test_sglang() -> None:
    made = plan(shard("sglang", context_tokens=4096), site())
    argv = made.main.argv
    assert argv[:6] == (
        "/opt/engines/bin/sglang",
        "serve",
        "--model-path",
        "/models/llama",
        "--served-model-name",
        "llama",
    )
    assert value(argv, "--tp-size") == "1" and value(argv, "--context-length") == "4096" and "--enable-metrics" in argv
    assert value(argv, "--nccl-port") == str(ports(made)["nccl"]) and value(argv, "--port") == str(ports(made)["http"])
    (file,) = made.files
    # Two words: the engine looks for `--config` alone.
    assert value(argv, "--config") == file.path == "/var/lib/appliance/shards/r1-0/engine.yaml"
    assert json.loads(file.text) == {"api-key": KEY} and file.mode == 0o600
    assert [(step.signal, step.target) for step in made.main.stop] == [("SIGTERM", "leader"), ("SIGKILL", "group")]


def test_sglang_on_two_nodes() -> None:
    leader, worker = plan(two_nodes("sglang"), site()), plan(two_nodes("sglang", rank=1), site())
    for made, rank in ((leader, "0"), (worker, "1")):
        assert value(made.main.argv, "--dist-init-addr") == f"{LEADER}:{RENDEZVOUS}"
        assert value(made.main.argv, "--node-rank") == rank and value(made.main.argv, "--nnodes") == "2"
    # A worker listens too, but what it answers means nothing.
    assert not worker.serves and value(worker.main.argv, "--port") == str(ports(worker)["dummy"])
    assert worker.awaits == Listening(LEADER, RENDEZVOUS, 600.0)
    six = plan(two_nodes("sglang", leader="fd00::1"), site())
    assert value(six.main.argv, "--dist-init-addr") == f"[fd00::1]:{RENDEZVOUS}"


def test_sglang_by_an_interpreter() -> None:
    made = plan(shard("sglang"), site(executables={"sglang": "/venv/bin/python3"}))
    assert made.main.argv[:3] == ("/venv/bin/python3", "-m", "sglang.launch_server")


def test_llamacpp() -> None:
    made = plan(shard("llamacpp", source="/models/tiny.gguf", context_tokens=2048), site())
    assert made.main.argv == (
        *("/opt/engines/bin/llama-server", "--model", "/models/tiny.gguf", "--alias", "llama"),
        *("--host", LEADER, "--port", "20000", "--metrics", "--ctx-size", "2048", "--threads", "32"),
        *("--api-key-file", "/var/lib/appliance/shards/r1-0/engine.key"),
    )
    assert [(file.text, file.mode) for file in made.files] == [(KEY + "\n", 0o600)]
    # The first SIGTERM is not enough while a request runs.
    assert [step.signal for step in made.main.stop] == ["SIGTERM", "SIGTERM", "SIGKILL"]
    assert [step.target for step in made.main.stop] == ["leader", "leader", "group"]


@pytest.mark.parametrize(
    ("args", "context"),
    [((), "2048"), (("-np", "4"), "8192"), (("--parallel=3",), "6144"), (("-np", "4", "--kv-unified"), "2048")],
)
def test_each_slot_of_llamacpp_gets_the_context_asked_for(args: tuple[str, ...], context: str) -> None:
    made = plan(shard("llamacpp", source="/m.gguf", context_tokens=2048, args=args), site())
    assert value(made.main.argv, "--ctx-size") == context


def test_llamacpp_on_processors() -> None:
    made = plan(shard("llamacpp", source="/m.gguf", gpus_per_node=0), site())
    assert value(made.main.argv, "--n-gpu-layers") == "0"
    assert made.main.env["CUDA_VISIBLE_DEVICES"] == ""
    assert value(plan(shard("llamacpp", gpus_per_node=0), site(llamacpp_threads=5)).main.argv, "--threads") == "5"
    own = plan(shard("llamacpp", gpus_per_node=0, args=("-t", "7", "-ngl", "1")), site()).main.argv
    assert "--threads" not in own and "--n-gpu-layers" not in own


def test_sim() -> None:
    leader, worker = plan(two_nodes("sim", args=("--load-s", "2")), site()), plan(two_nodes("sim", rank=1), site())
    assert leader.main.argv == (
        *("/usr/local/bin/appliance", "sim", "--host", LEADER, "--port", "20000", "--model", "llama"),
        *("--nnodes", "2", "--node-rank", "0", "--master-addr", LEADER, "--master-port", str(RENDEZVOUS)),
        *("--load-s", "2"),
    )
    assert leader.main.env["APPLIANCE_SIM_API_KEY"] == KEY and "APPLIANCE_SIM_API_KEY" not in worker.main.env
    assert not worker.serves and worker.ports == ()


@pytest.mark.parametrize("rank", [0, 1])
def test_the_sim_takes_what_is_planned_for_it(rank: int) -> None:
    argv = plan(two_nodes("sim", rank=rank), site()).main.argv
    with sim.make_context("sim", list(argv[2:])) as context:
        assert context.params["node_rank"] == rank and context.params["models"] == ("llama",)
    assert isinstance(sim, click.Command)


def test_the_wrapped_llama_server_takes_what_is_planned_for_it() -> None:
    made = plan(shard("llamacpp", source="/m.gguf", adapters=ADAPTERS, key=""), site())
    settings = llama_flags.parse(made.main.argv[1:])
    assert settings.model == "/m.gguf" and settings.hosts == (LEADER,) and settings.port == 20000
    assert [(each.path, each.scale) for each in settings.adapters] == [(each.path, 0.0) for each in ADAPTERS]


def test_adapters_are_there_from_the_start_and_applied_to_nobody() -> None:
    argv = plan(shard(adapters=ADAPTERS), site()).main.argv
    at = argv.index("--lora-modules")
    assert [json.loads(word) for word in argv[at + 1 : at + 3]] == [
        {"name": "legal", "path": "/adapters/legal"},
        {"name": "medical", "path": "/adapters/medical"},
    ]
    assert value(argv, "--max-loras") == "2" and value(argv, "--max-lora-rank") == "32"
    argv = plan(shard("sglang", adapters=ADAPTERS), site()).main.argv
    assert json.loads(value(argv, "--lora-paths"))["lora_name"] == "legal"
    assert value(argv, "--max-loras-per-batch") == "3" and "--lora-backend" not in argv
    argv = plan(shard("sglang", adapters=ADAPTERS, gpus_per_node=0), site()).main.argv
    assert value(argv, "--lora-backend") == "torch_native" and value(argv, "--device") == "cpu"
    argv = plan(shard("llamacpp", adapters=ADAPTERS), site()).main.argv
    assert value(argv, "--lora-scaled") == "/adapters/legal:0,/adapters/medical:0"


def shards_of_all_kinds(**changed: Any) -> list[Shard]:
    return [
        *(two_nodes("vllm", rank, launch_mode=mode, **changed) for mode in ("mp", "ray") for rank in (0, 1)),
        *(two_nodes(engine, rank, **changed) for engine in ("sglang", "sim") for rank in (0, 1)),
        *(shard(engine, **changed) for engine in ENGINES),
    ]


@pytest.mark.parametrize("each", shards_of_all_kinds(), ids=lambda each: f"{each.profile.engine}-{each.id}")
def test_no_key_on_a_command_line_and_every_plan_can_be_stopped(each: Shard) -> None:
    made = plan(each, site())
    for command in made.commands:
        assert not [word for word in command.argv if KEY in word]
        assert command.stop[-1].signal == "SIGKILL" and command.stop[-1].target == "group"
        assert command.env[MARKER] == "r1/0"
    assert all(command.until is not None for command in made.sidecars) and made.main.until is None
    assert KEY not in repr(made) and made.secrets == (KEY,)
    assert made.serves == each.leads
    if made.ready is not None:
        assert made.ready.key == KEY and made.ready.name == "llama" and made.ready.timeout_s > 1.0
        assert KEY in "".join([file.text for file in made.files] + list(made.main.env.values()))
    without_key = plan(shard(each.profile.engine, key=""), site())
    assert without_key.files == without_key.secrets == () and not [
        name for name in without_key.main.env if "API_KEY" in name
    ]


def test_a_hub_id_goes_to_the_engine_and_a_fetched_folder_wins() -> None:
    assert plan(shard(source="org/name"), site()).main.argv[2] == "org/name"
    fetched = shard(source="org/name")
    assert plan(shard(), site()).main.argv[2] == "/models/llama"
    assert plan(attrs.evolve(fetched, source="/fetched"), site()).main.argv[2] == "/fetched"
    assert value(plan(attrs.evolve(shard(), context_tokens=77), site()).main.argv, "--max-model-len") == "77"


def numbers(made: LaunchPlan) -> list[int]:
    return [port for use in made.ports for port in use.numbers]


@given(st.lists(st.sampled_from(shards_of_all_kinds()), max_size=20), st.sets(st.integers(20000, 24999), max_size=50))
def test_shards_on_one_node_never_share_a_port(several: list[Shard], taken: set[int]) -> None:
    pool = PortPool(20000, 24999, frozenset(taken))
    for each in several:
        if each.leads and each.profile.nodes > 1:
            # Whoever makes a replica chooses its rendezvous among what the leader's node has left.
            each = attrs.evolve(each, rendezvous_port=PortLease(pool).take("rendezvous"))
        made = plan(each, site(ports=pool))
        used = numbers(made)
        assert len(set(used)) == len(used)
        assert all(20000 <= port <= 24999 for port in used)
        assert not pool.taken & set(used)
        pool = pool.without(used)
        for word in made.main.argv:
            if word.isdecimal() and 20000 <= int(word) <= 24999:
                assert int(word) in used or not each.leads


def test_a_range_without_room_is_a_reason() -> None:
    with pytest.raises(CannotLaunch, match=r"no free port for http in port_range 20000-20000"):
        plan(shard("llamacpp"), site(ports=PortPool(20000, 20000, frozenset({20000}))))
    with pytest.raises(CannotLaunch, match=r"no 16 free ports in a row for inner"):
        plan(shard(), site(ports=PortPool(20000, 20040, frozenset({20010, 20026}))))


def test_ports_in_a_row() -> None:
    lease = PortLease(PortPool(10, 20, frozenset({12})))
    assert (lease.take("a"), lease.take("b", 3), lease.take("c")) == (10, 13, 11)
    lease.hold("d", 16)
    assert lease.take("e", 4) == 17
    with pytest.raises(NoPort):
        lease.take("f")
    assert lease.pool.taken == {12}

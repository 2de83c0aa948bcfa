"""`ctl explain placement` on a whole cluster: what it advises is done, and the replica is there."""

from __future__ import annotations

from pathlib import Path

from tests.cluster import cluster, inventory, sim_model

FP8 = (
    "[[models]]\nname = 'eight'\n[[models.profiles]]\nname = 'p'\nengine = 'vllm'\nsource = '/dev/null'\n"
    "quantization = 'fp8'\n"
)
WHOLE = sim_model("whole", profile="gpus_per_node = 2\ntensor_parallel = 2")


async def test_what_explain_advises_makes_room_and_old_gpus_are_named(tmp_path: Path) -> None:
    async with cluster(tmp_path) as made:
        made.configure(sim_model("small", replicas=1))
        await made.begin()
        cards = {node: inventory(node, 2, gpu="NVIDIA A100-SXM4-80GB") for node in ("a", "b")}
        for hardware in cards.values():
            hardware["gpus"] = [{**each, "compute_cap": [8, 0]} for each in hardware["gpus"]]
        await made.add("a", cards["a"])
        await made.ready("small")
        await made.control.run("ctl", "cordon", "a")
        await made.add("b", cards["b"])
        await made.reload(sim_model("small", replicas=2))
        await made.ready("small", 2)
        await made.control.run("ctl", "uncordon", "a")

        models = sim_model("small", replicas=2) + WHOLE
        await made.reload(models + FP8)
        await made.come(
            lambda: made.control.run("ctl", "explain", "placement", "whole"),
            lambda told: "no node has room for it" in told,
            "whole has no place",
        )
        told = " ".join((await made.control.run("ctl", "explain", "placement", "whole")).split())
        assert (
            "it fits nowhere now; it would on a if what runs there were elsewhere, and there is room for that:"
            " 'ctl drain a', and 'ctl uncordon' once that is done" in told
        ), told
        assert (await made.ctl("explain", "placement", "whole"))["profiles"][0]["drain"] == ["a"]

        eight = " ".join((await made.control.run("ctl", "explain", "placement", "eight")).split())
        assert "1 GPU of compute capability 8.9 or more" in eight, eight
        assert "a fp8 needs compute capability 8.9, the GPUs have 8.0" in eight, eight
        assert not await made.replicas("eight"), "it was sent nowhere"

        await made.control.run("ctl", "drain", "a")
        await made.control.run("ctl", "uncordon", "a")
        await made.ready("whole")
        await made.ready("small", 2)

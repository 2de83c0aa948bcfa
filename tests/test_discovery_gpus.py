"""What is understood of the texts of `nvidia-smi`, and what follows for a GPU: its class, and whether it is free."""

from __future__ import annotations

import re
from pathlib import Path

import attrs
import pytest
from hypothesis import given
from hypothesis import strategies as st

from appliance.agent.discovery import smi
from appliance.agent.discovery.classes import gpu_class, is_unified, is_virtual
from appliance.agent.discovery.reading import HELD_BYTES, Ours, Reading, carry_over, judge
from appliance.agent.wording import visible
from appliance.facts.hardware import GIB, MIB, Gpu, Hindrance, Holder

SAMPLES = Path(__file__).parents[2] / "shared" / "samples" / "nvidia-smi"

FIRST = "GPU-11111111-2222-3333-4444-555555555501"
SECOND = "GPU-11111111-2222-3333-4444-555555555502"
TWO_L40S = (
    f"0, {FIRST}, NVIDIA L40S, 46068, 3, 12, 8.9, 0, [N/A], 00000000:41:00.0\n"
    f"1, {SECOND}, NVIDIA L40S, 46068, 40000, 99, 8.9, 2, Disabled, 00000000:C1:00.0\n"
)
UNIFIED = f"0, {FIRST}, NVIDIA GB10, [N/A], [N/A], 3, 12.1, [N/A], [N/A], 0000000F:01:00.0\n"
MIG_PARENT = (
    f"0, {FIRST}, NVIDIA A100-SXM4-80GB, [Insufficient Permissions], [Insufficient Permissions], [N/A], 8.0, 0, "
    "Enabled, 00000000:07:00.0\n"
)
BROKEN = f"1, {SECOND}, NVIDIA A40, [Unknown Error], ERR!, ERR!, 8.6, [Unknown Error], [N/A], 00000000:22:00.0\n"
LOST = "Unable to determine the device handle for GPU0000:BA:00.0: Unknown Error\n"
NO_DRIVER = "The tool has failed because it couldn't communicate with the driver.\n"
TEXTS = ("", TWO_L40S, UNIFIED, MIG_PARENT, TWO_L40S.splitlines()[0] + "\n" + BROKEN, LOST + TWO_L40S, NO_DRIVER)

UNKNOWN_WORDS = ("[N/A]", "[Unknown Error]", "[Not Supported]", "[GPU requires reset]", "[Something new]", "ERR!", "")
FIELD_OF = {3: "memory_bytes", 4: "used_bytes", 5: "utilization", 6: "compute_cap", 7: "ecc_uncorrected", 8: "mig"}


def one(text: str) -> Gpu:
    (gpu,) = smi.parse_gpus(text).gpus
    return gpu


def judged(text: str, *, ours: Ours | None = None, memory_bytes: int | None = 128 * GIB) -> Gpu:
    return judge(one(text), system_memory_bytes=memory_bytes, ours=ours or Ours())


def codes(gpu: Gpu) -> set[str]:
    return {each.code for each in gpu.hindrances}


def test_a_whole_row_is_understood() -> None:
    reading = smi.parse_gpus(TWO_L40S)
    assert not reading.partial
    first, second = reading.gpus
    assert first == Gpu(
        uuid=FIRST,
        index=0,
        name="NVIDIA L40S",
        memory_bytes=46068 * MIB,
        used_bytes=3 * MIB,
        utilization=0.12,
        compute_cap=(8, 9),
        bus_id="0000:41:00.0",
        ecc_uncorrected=0,
        mig=None,
    )
    assert (second.ecc_uncorrected, second.mig, second.bus_id) == (2, False, "0000:c1:00.0")


@pytest.mark.parametrize("word", UNKNOWN_WORDS)
@pytest.mark.parametrize("field", FIELD_OF)
def test_what_the_tool_does_not_know_is_unknown_and_not_zero(word: str, field: int) -> None:
    fields = TWO_L40S.splitlines()[0].split(", ")
    whole = one(", ".join(fields))
    fields[field] = word
    gpu = one(", ".join(fields))
    assert getattr(gpu, FIELD_OF[field]) is None
    for name in set(FIELD_OF.values()) - {FIELD_OF[field]}:
        assert getattr(gpu, name) == getattr(whole, name)


@pytest.mark.parametrize("garbage", ["12O", "-1", "1.5", "0x10", "99999999999", "½", "9" * 30])
def test_a_figure_that_is_none_is_unknown(garbage: str) -> None:
    assert one(TWO_L40S.splitlines()[0].replace("46068", garbage)).memory_bytes is None


def test_no_memory_at_all_is_unknown_memory() -> None:
    assert one(TWO_L40S.splitlines()[0].replace("46068", "0")).memory_bytes is None


def test_a_cut_row_is_no_gpu_and_makes_the_reading_partial() -> None:
    first, second = TWO_L40S.splitlines()
    for end in range(1, len(second)):
        reading = smi.parse_gpus(f"\n{first}\n{second[:end]}")
        assert [gpu.uuid for gpu in reading.gpus] == [FIRST]
        assert reading.partial
        assert len(reading.notes) == 1


def test_a_lost_card_is_named_and_hides_no_other() -> None:
    reading = smi.parse_gpus(LOST + TWO_L40S)
    assert len(reading.gpus) == 2
    assert reading.lost == ("0000:ba:00.0",)
    assert reading.partial


def test_a_complaint_is_partial_and_an_empty_machine_is_not() -> None:
    assert smi.parse_gpus(NO_DRIVER).partial
    assert smi.parse_gpus("No devices were found\n") == Reading()
    assert smi.parse_gpus("") == Reading()


def test_one_identity_or_one_number_twice_is_one_gpu() -> None:
    first = TWO_L40S.splitlines()[0]
    assert len(smi.parse_gpus(f"{first}\n{first}\n").gpus) == 1
    assert smi.parse_gpus(f"{first}\n{first}\n").partial
    same_identity = smi.parse_gpus(TWO_L40S.replace(SECOND, FIRST))
    assert [gpu.index for gpu in same_identity.gpus] == [0]
    assert same_identity.partial
    same_number = smi.parse_gpus(TWO_L40S.replace(f"1, {SECOND}", f"0, {SECOND}"))
    assert [gpu.uuid for gpu in same_number.gpus] == [FIRST]
    assert same_number.partial


def test_a_control_character_is_no_part_of_a_figure_nor_of_an_identity() -> None:
    for odd in ("\x000, ", "0\x1b[31m, "):
        assert smi.parse_gpus(odd + TWO_L40S.removeprefix("0, ")).partial
    for odd in (f"{FIRST}\x00", FIRST[:9] + "\x1b[1m" + FIRST[9:]):
        assert [gpu.uuid for gpu in smi.parse_gpus(TWO_L40S.replace(FIRST, odd)).gpus] == [SECOND]
    assert [gpu.memory_bytes for gpu in smi.parse_gpus(TWO_L40S.replace("46068", "4\x006068")).gpus] == [None, None]
    assert smi.parse_gpus(TWO_L40S.replace("NVIDIA", "\x1b[1mNVI\x00DIA")).gpus[0].name == "NVIDIA L40S"


@st.composite
def mutations(draw: st.DrawFn) -> str:
    """One of the texts with things inserted, removed, doubled and cut off."""
    text = draw(st.sampled_from(TEXTS))
    for _ in range(draw(st.integers(0, 6))):
        at = draw(st.integers(0, len(text)))
        more = draw(st.integers(0, 40))
        piece = draw(
            st.sampled_from([*UNKNOWN_WORDS, ",", ", ", "\n", "0", "GPU-", FIRST, LOST, "\x00", "\u2028", "٣"])
        )
        text = draw(st.sampled_from([text[:at] + piece + text[at:], text[:at] + text[at + more :], text[:at]]))
    return text


@given(mutations())
def test_no_mutation_crashes_or_invents_anything(text: str) -> None:
    reading = smi.parse_gpus(text)
    rows = [[field.strip() for field in line.split(",")] for line in text.splitlines()]
    whole = [row for row in rows if len(row) == len(smi.GPU_FIELDS)]
    assert len({gpu.uuid for gpu in reading.gpus}) == len(reading.gpus)
    for gpu in reading.gpus:
        # The row it came from, field by field: known figures are the ones that stand there.
        (row,) = [row for row in whole if row[1] == gpu.uuid and row[0].isdecimal() and int(row[0]) == gpu.index][:1]
        assert gpu.name == visible(row[2]).strip()
        assert gpu.memory_bytes is None or gpu.memory_bytes == int(row[3]) * MIB > 0
        assert gpu.used_bytes is None or gpu.used_bytes == int(row[4]) * MIB
        assert gpu.utilization is None or gpu.utilization == int(row[5]) / 100 <= 1
        assert gpu.ecc_uncorrected is None or gpu.ecc_uncorrected == int(row[7])
        after = judge(gpu, system_memory_bytes=None, ours=Ours())
        assert after.memory_bytes == gpu.memory_bytes
        assert gpu.memory_bytes is not None or not after.placeable
    odd = [line for line, row in zip(text.splitlines(), rows, strict=True) if line.strip() and row not in whole]
    assert reading.partial or not odd


@given(mutations())
def test_holders_and_topology_never_crash(text: str) -> None:
    holders = smi.parse_holders(text)
    assert holders is None or all(uuid in text for uuid in holders)
    domains = smi.parse_nvlink(text)
    assert domains is None or set(domains) >= set(domains.values())


def test_holders_are_kept_by_gpu() -> None:
    text = f"{FIRST}, 100, 400\n{FIRST}, 101, [N/A]\n{SECOND}, 7, 90\n"
    assert smi.parse_holders(text) == {
        FIRST: (Holder(100, 400 * MIB), Holder(101, None)),
        SECOND: (Holder(7, 90 * MIB),),
    }
    assert smi.parse_holders("") == {}
    assert smi.parse_holders("nobody knows\n") is None
    assert smi.parse_holders(TWO_L40S) is None


MATRIX = """\t\x1b[4mGPU0\tGPU1\tGPU2\tGPU3\tNIC0\tCPU Affinity\tNUMA Affinity\x1b[0m
GPU0\t X \tNV18\tSYS\tSYS\tPIX\t0-31\t0
GPU1\tNV18\t X \tSYS\tPHB\tNODE\t0-31\t0
GPU2\tSYS\tSYS\t X \tNV4\tSYS\t32-63\t1
GPU3\tSYS\tPHB\tNV4\t X \tSYS\t32-63\t1
NIC0\tPIX\tNODE\tSYS\tSYS\t X
"""


def test_nvlink_domains_come_from_the_whole_matrix_only() -> None:
    assert smi.parse_nvlink(MATRIX) == {0: 0, 1: 0, 2: 2, 3: 2}
    lines = MATRIX.splitlines(keepends=True)
    assert smi.parse_nvlink("".join(lines[:3])) is None
    assert smi.parse_nvlink("".join(lines[:4]) + "GPU3\tSYS\tPHB") is None
    assert smi.parse_nvlink(MATRIX.replace("NV4", "???")) is None
    assert smi.parse_nvlink("") is None


@pytest.mark.parametrize(
    ("name", "gib", "expected"),
    [
        ("NVIDIA L40S", 44.99, "l40s-45g"),
        ("NVIDIA H100 80GB HBM3", 79.65, "h100-80g"),
        ("NVIDIA H100 PCIe", 79.65, "h100-80g"),
        ("NVIDIA H100 NVL", 93.58, "h100-94g"),
        ("A100-SXM4-80GB", 80, "a100-80g"),
        ("NVIDIA A100-SXM4-40GB", 40, "a100-40g"),
        ("NVIDIA A100 80GB PCIe", 80, "a100-80g"),
        ("NVIDIA A100-PCIE-40GB", 39.6, "a100-40g"),
        ("Tesla V100-SXM2-16GB", 16, "v100-16g"),
        ("Tesla T4", 15, "t4-15g"),
        ("NVIDIA A10G", 22.49, "a10g-22g"),
        ("NVIDIA H200", 140.4, "h200-140g"),
        ("NVIDIA B300 SXM6 AC", 268.6, "b300-269g"),
        ("NVIDIA GH200 480GB", 95.58, "gh200-96g"),
        ("NVIDIA GeForce RTX 4090", 23.99, "rtx-4090-24g"),
        ("NVIDIA RTX 6000 Ada Generation", 47.99, "rtx-6000-ada-48g"),
        ("NVIDIA RTX A6000", 47.99, "rtx-a6000-48g"),
        ("NVIDIA RTX PRO 6000 Blackwell Server Edition", 95.59, "rtx-pro-6000-96g"),
        ("NVIDIA H100L-2-24C", 24, "h100l-2-24c-24g"),
        ("NVIDIA Quaternion X9-SXM9-512GB", 511.6, "quaternion-x9-512g"),
        ("NVIDIA", 8, "gpu-8g"),
        ("NVIDIA L40S", None, "l40s"),
    ],
)
def test_class(name: str, gib: float | None, expected: str) -> None:
    assert gpu_class(name, None if gib is None else int(gib * GIB)) == expected


@pytest.mark.parametrize(("gib", "expected"), [(119.69, "gb10-128g"), (119.2, "gb10-128g"), (128, "gb10-128g")])
def test_equal_unified_machines_have_one_class(gib: float, expected: str) -> None:
    assert gpu_class("NVIDIA GB10", int(gib * GIB), unified=True) == expected


@given(st.text(max_size=60), st.none() | st.integers(1, 1 << 45), st.booleans())
def test_any_name_has_a_class_that_fits_into_a_configuration(name: str, memory: int | None, unified: bool) -> None:
    assert re.fullmatch(r"[a-z0-9.-]+", gpu_class(name, memory, unified=unified))


def test_names_that_say_more() -> None:
    assert is_unified("NVIDIA GB10") and is_unified("Orin (nvgpu)") and not is_unified("NVIDIA GB100")
    assert is_virtual("GRID V100D-8Q") and is_virtual("NVIDIA RTX Pro 6000 Blackwell DC-24C")
    assert not is_virtual("NVIDIA H20-3e") and not is_virtual("A100-SXM4-80GB") and not is_virtual("")


def test_a_unified_part_uses_the_systems_memory() -> None:
    gpu = judged(UNIFIED, memory_bytes=120 * GIB)
    assert (gpu.memory_bytes, gpu.unified, gpu.gpu_class, gpu.placeable) == (120 * GIB, True, "gb10-128g", True)
    assert gpu.bus_id == "000f:01:00.0"
    assert codes(judged(UNIFIED, memory_bytes=None)) == {"memory"}


def test_a_mig_parent_is_not_placed_on_whole() -> None:
    assert codes(judged(MIG_PARENT)) == {"mig"}


def test_unknown_memory_is_not_placed_on() -> None:
    assert codes(judged(BROKEN)) == {"memory"}


def test_uncorrected_errors_and_a_pending_reset_hinder() -> None:
    assert "ecc" in codes(judged(TWO_L40S.splitlines()[1]))
    assert codes(judged(TWO_L40S.splitlines()[0].replace("12, 8.9", "[GPU requires reset], 8.9"))) == {"reset"}


def holding(*holders: Holder, used_bytes: int | None = None) -> Gpu:
    gpu = attrs.evolve(one(TWO_L40S.splitlines()[0]), holders=holders)
    return gpu if used_bytes is None else attrs.evolve(gpu, used_bytes=used_bytes)


@pytest.mark.parametrize(
    ("gpu", "ours", "held"),
    [
        (holding(Holder(1, HELD_BYTES + 1)), Ours(), "pid 1"),
        (holding(Holder(1, HELD_BYTES // 2), Holder(2, HELD_BYTES // 2 + 1)), Ours(), "pid 1, pid 2"),
        (holding(Holder(1, HELD_BYTES)), Ours(), ""),
        (holding(Holder(1, 9 * HELD_BYTES)), Ours(lambda pid: pid == 1), ""),
        (holding(Holder(1, 9 * HELD_BYTES), Holder(2, 2 * HELD_BYTES)), Ours(lambda pid: pid == 1), "pid 2"),
        (holding(Holder(3, None), used_bytes=9 * HELD_BYTES), Ours(), "pid 3"),
        (holding(used_bytes=9 * HELD_BYTES), Ours(), "cannot see"),
        (holding(used_bytes=9 * HELD_BYTES), Ours(gpus={FIRST}), ""),
        (holding(used_bytes=HELD_BYTES), Ours(), ""),
    ],
)
def test_memory_of_strangers_hinders_and_names_them(gpu: Gpu, ours: Ours, held: str) -> None:
    after = judge(gpu, system_memory_bytes=None, ours=ours)
    assert codes(after) == ({"held"} if held else set())
    assert held in "".join(each.message for each in after.hindrances)


def test_a_card_that_disappears_is_remembered() -> None:
    before = tuple(attrs.evolve(gpu, holders=(Holder(1, 5),)) for gpu in smi.parse_gpus(TWO_L40S).gpus)
    lost = smi.parse_gpus(LOST.replace("BA", "C1") + TWO_L40S.splitlines()[0])
    kept = carry_over(before, lost)
    assert [gpu.uuid for gpu in kept] == [FIRST, SECOND]
    assert codes(kept[1]) == {"lost"}
    assert (kept[1].used_bytes, kept[1].holders) == (None, None)
    assert [codes(gpu) for gpu in carry_over(before, Reading(partial=True))] == [{"unseen"}, {"unseen"}]
    assert carry_over(before, Reading()) == ()
    again = carry_over(kept, smi.parse_gpus(TWO_L40S))
    assert [gpu.hindrances for gpu in again] == [(), ()]


def test_judging_twice_says_nothing_twice() -> None:
    gpu = attrs.evolve(one(TWO_L40S.splitlines()[1]), hindrances=(Hindrance("ecc", "said before"),), used_bytes=0)
    once = judge(gpu, system_memory_bytes=None, ours=Ours())
    assert once.hindrances == (Hindrance("ecc", "said before"),)
    assert judge(once, system_memory_bytes=None, ours=Ours()) == once


@pytest.mark.skipif(not SAMPLES.exists(), reason="the samples are not beside the checkout")
@pytest.mark.parametrize(
    ("name", "expected", "partial"),
    [
        ("01-h100x2-ok.csv", [("h100-80g", set()), ("h100-80g", {"held"})], False),
        ("02-gb10-unified.csv", [("gb10-128g", set())], False),
        ("05-mig-parent-unprivileged.csv", [("a100", {"mig"})], False),
        ("08-vgpu-mig-backed.csv", [("h100l-2-24c-24g", set())], False),
        ("09-unknown-error.csv", [("a40-45g", set()), ("a40", {"memory"})], False),
        ("12-lost-gpu-stdout.txt", [], True),
        ("15-no-driver.txt", [], True),
        ("17-blank-line-and-truncated-row.csv", [("l40s-45g", set())], True),
    ],
)
def test_samples(name: str, expected: list[tuple[str, set[str]]], partial: bool) -> None:
    reading = smi.parse_gpus((SAMPLES / name).read_text())
    after = [judge(gpu, system_memory_bytes=119 * GIB, ours=Ours()) for gpu in reading.gpus]
    assert [(gpu.gpu_class, codes(gpu)) for gpu in after] == expected
    assert reading.partial == partial


@pytest.mark.skipif(not SAMPLES.exists(), reason="the samples are not beside the checkout")
def test_sample_topology() -> None:
    assert smi.parse_nvlink((SAMPLES / "20-topo-m.txt").read_text()) == {0: 0, 1: 0, 2: 2, 3: 2}

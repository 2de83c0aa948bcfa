"""What `nvidia-smi` prints, understood without believing more than it says.

A row counts only with exactly the fields that were asked for, an identity and an address; everything the tool puts in
brackets, and `ERR!`, means unknown. A line that is none of the known ones makes the reading partial, because a card may
hide behind it: some versions print their complaint on standard output, with status 0, in the middle of the rows.
"""

from __future__ import annotations

import re

from appliance.agent.discovery.reading import Reading, short_bus_id
from appliance.agent.wording import visible
from appliance.facts.hardware import MIB, Gpu, Hindrance, Holder

GPU_FIELDS = (
    "index",
    "uuid",
    "name",
    "memory.total",
    "memory.used",
    "utilization.gpu",
    "compute_cap",
    "ecc.errors.uncorrected.volatile.total",
    "mig.mode.current",
    "pci.bus_id",
)
PROCESS_FIELDS = ("gpu_uuid", "pid", "used_memory")
FORMAT = "--format=csv,noheader,nounits"
GPU_QUERY = (f"--query-gpu={','.join(GPU_FIELDS)}", FORMAT)
PROCESS_QUERY = (f"--query-compute-apps={','.join(PROCESS_FIELDS)}", FORMAT)
TOPOLOGY_QUERY = ("topo", "-m")

_UUID = re.compile(r"GPU-[0-9a-fA-F]{8}(?:-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}")
_BUS_ID = re.compile(r"[0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F]")
_LOST = re.compile(r"device handle for GPU\s*([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2}\.[0-9a-fA-F])", re.I)
_NONE_FOUND = re.compile(r"no devices (were )?found", re.I)
_MAX_MIB = 1 << 24
"""16 TiB: a figure above it is a mistake, not a memory."""


def parse_gpus(text: str) -> Reading:
    """The answer to `GPU_QUERY`."""
    gpus: dict[str, Gpu] = {}
    lost: list[str] = []
    notes: list[str] = []
    for line in text.splitlines():
        if not line.strip() or _NONE_FOUND.search(line):
            continue
        gone = _LOST.search(line)
        if gone:
            lost.append(short_bus_id(gone[1]))
            notes.append(f"the GPU at {short_bus_id(gone[1])} is lost: {line.strip()[:200]}")
            continue
        row = _row(line)
        if row is None:
            notes.append(f"nvidia-smi said something that is no row of a GPU: {line.strip()[:200]!r}")
        elif row.uuid in gpus or any(row.index == other.index for other in gpus.values()):
            notes.append(f"nvidia-smi names GPU {row.index} ({row.uuid}) twice")
        else:
            gpus[row.uuid] = row
    return Reading(tuple(gpus.values()), tuple(lost), tuple(notes), partial=bool(notes))


def parse_holders(text: str) -> dict[str, tuple[Holder, ...]] | None:
    """The answer to `PROCESS_QUERY`: holders by GPU; None when it is not understood. A GPU without a row has none."""
    found: dict[str, tuple[Holder, ...]] = {}
    for line in text.splitlines():
        if not line.strip():
            continue
        fields = [field.strip() for field in line.split(",")]
        if len(fields) != len(PROCESS_FIELDS) or not _UUID.fullmatch(fields[0]) or _whole(fields[1]) is None:
            return None
        used = _mebibytes(fields[2])
        found[fields[0]] = (*found.get(fields[0], ()), Holder(int(fields[1]), used))
    return found


def parse_nvlink(text: str) -> dict[int, int] | None:
    """The answer to `TOPOLOGY_QUERY`: NVLink domain by GPU index, numbered by their lowest member; None when unknown.

    The matrix is believed only when it is whole: a row that is cut would make two domains out of one.
    """
    lines = [line.split() for line in re.sub(r"\x1b\[[0-9;]*m", "", text).splitlines() if line.split()]
    if not lines:
        return None
    columns = [int(word[3:]) for word in lines[0] if re.fullmatch(r"GPU[0-9]{1,4}", word)]
    rows = {
        int(line[0][3:]): line[1 : 1 + len(columns)] for line in lines[1:] if re.fullmatch(r"GPU[0-9]{1,4}", line[0])
    }
    if not columns or set(rows) != set(columns) or any(len(row) != len(columns) for row in rows.values()):
        return None
    domain = {index: index for index in columns}
    for index, row in rows.items():
        for other, how in zip(columns, row, strict=True):
            if how == "X" and index == other:
                continue
            if not re.fullmatch(r"NV[0-9]{1,3}|SYS|NODE|PHB|PXB|PIX", how):
                return None
            if how.startswith("NV"):
                low, high = sorted((domain[index], domain[other]))
                domain = {each: low if at == high else at for each, at in domain.items()}
    return domain


def _row(line: str) -> Gpu | None:
    fields = [field.strip() for field in line.split(",")]
    if len(fields) != len(GPU_FIELDS):
        return None
    # Only the name is made fit for a terminal. Figures and identities stay as printed: taking a control character out
    # of the middle of one would make another, believable one.
    index, uuid, name, total, used, busy, capability, ecc, mig, bus_id = fields
    name = visible(name).strip()
    at = _whole(index)
    if at is None or not _UUID.fullmatch(uuid) or not name or _unknown(name):
        return None
    # The last field also shows that the row is whole, so here nothing is not enough to mean unknown.
    if not _BUS_ID.fullmatch(bus_id) and not re.fullmatch(r"\[.+\]", bus_id):
        return None
    memory_bytes, used_bytes = _mebibytes(total) or None, _mebibytes(used)
    busy_percent = _whole(busy)
    major_minor = re.fullmatch(r"(\d{1,2})\.(\d{1,2})", capability)
    hindrances: tuple[Hindrance, ...] = ()
    if any("requires reset" in field.lower() for field in fields):
        hindrances = (Hindrance("reset", "the driver says that it needs a reset"),)
    return Gpu(
        uuid=uuid,
        index=at,
        name=name,
        memory_bytes=memory_bytes,
        used_bytes=None if used_bytes is None or used_bytes > (memory_bytes or used_bytes) else used_bytes,
        utilization=None if busy_percent is None or busy_percent > 100 else busy_percent / 100,
        compute_cap=(int(major_minor[1]), int(major_minor[2])) if major_minor else None,
        bus_id=short_bus_id(bus_id) if _BUS_ID.fullmatch(bus_id) else "",
        ecc_uncorrected=_whole(ecc),
        mig={"enabled": True, "disabled": False}.get(mig.lower()),
        hindrances=hindrances,
    )


def _unknown(field: str) -> bool:
    return field.startswith("[") or "ERR!" in field or field in ("", "N/A")


def _whole(field: str) -> int | None:
    return int(field) if re.fullmatch(r"[0-9]{1,18}", field) else None


def _mebibytes(field: str) -> int | None:
    figure = _whole(field)
    return None if figure is None or figure > _MAX_MIB else figure * MIB

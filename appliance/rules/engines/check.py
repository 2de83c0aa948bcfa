"""Whether the engines that are installed still take the flags we would give them.

Nothing is listed by hand: the widest commands (several nodes, adapters, a key, every setting of a profile) are planned
by the same code that plans real ones, and their flags are looked up in each program's own help. So a flag that an
engine drops is found before a model fails to start on it, without a GPU, and a flag that we drop is asked for no more.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Literal

import attrs

from appliance.facts.catalog import LAUNCHABLE, Profile
from appliance.facts.hardware import GIB, Cpus, Fabric, Gpu, Inventory, Rail
from appliance.facts.replica import AdapterFiles, Shard
from appliance.rules.engines.engine import Program, Site
from appliance.rules.engines.flags import flags_in
from appliance.rules.engines.plan import ENGINES, plan
from appliance.rules.engines.ports import PortPool

Level = Literal["error", "warning"]

PIPE_SIZES = frozenset(1 << power for power in range(12, 21))
"""Lengths at which a text was most likely cut by a buffer."""

FEW = 8
"""Every program asked here has more flags than this; a help text with fewer shows groups, or is cut."""

_WORD = r"--?[A-Za-z0-9][\w.-]*"


@attrs.frozen
class Finding:
    """One thing about one flag, or about the whole text (`flag` "")."""

    level: Level
    flag: str
    message: str


@attrs.frozen
class Question:
    """A program, its help to be read, and every flag we would ever give it."""

    program: Program
    flags: tuple[str, ...]


def questions(engine: str) -> tuple[Question, ...]:
    """What to ask for one engine, each program apart. Raises KeyError for an unknown engine."""
    found: dict[str, tuple[Program, list[str]]] = {}
    for shard in _widest(engine):
        made = plan(shard, _SITE)
        programs = {program.prefix(f"/{program.name}"): program for program in ENGINES[engine].programs(shard)}
        for command in made.commands:
            for prefix, program in programs.items():
                if command.argv[: len(prefix)] == prefix:
                    found.setdefault(program.name, (program, []))[1].extend(flags_in(command.argv[len(prefix) :]))
    return tuple(Question(program, tuple(dict.fromkeys(flags))) for program, flags in found.values())


def check(help_text: str, flags: Iterable[str]) -> list[Finding]:
    """What is wrong with `flags` according to a program's help; nothing means that all are declared there.

    A flag counts as declared where a line, or the usage in front, offers it; one that is only talked about does not,
    nor does one whose text says that it has been removed. From a text that looks cut nothing follows about flags that
    are not in it: then they are warnings.
    """
    declared = _declared(help_text)
    usage = _usage(help_text)
    cut = why_cut(help_text)
    findings = [Finding("warning", "", f"the help text looks cut: {cut}")] if cut else []
    for flag in flags:
        if flag in declared:
            text = declared[flag].lower()
            if re.match(r"[\s(]*(the argument )?has been removed", text):
                findings.append(Finding("error", flag, "has been removed"))
            elif re.match(r"[\s([]*deprecated", text):
                findings.append(Finding("warning", flag, "is deprecated"))
        elif flag not in usage:
            message = "is only mentioned, not offered" if _mentions(help_text, flag) else "is not in the help text"
            findings.append(Finding("warning" if cut else "error", flag, message))
    return findings


def why_cut(help_text: str) -> str:
    """Why a help text looks incomplete, "" if it does not."""
    if not help_text.strip():
        return "it is empty"
    if len(help_text.encode()) in PIPE_SIZES:
        return f"it ends after exactly {len(help_text.encode())} bytes"
    if not help_text.endswith("\n"):
        return "its last line has no end"
    declared = _declared(help_text)
    missing = [flag for flag in _usage(help_text) if flag not in declared]
    if missing:
        return f"its usage offers {missing[-1]}, which is described nowhere"
    if len(declared) < FEW:
        return f"it describes {len(declared)} flags"
    last = help_text.rstrip().rpartition("\n\n")[2]
    if last.count("(") > last.count(")"):
        return "its last sentence has no end"
    return ""


def _declared(help_text: str) -> dict[str, str]:
    """Flag -> what is said about it, for every flag that a line begins with.

    Such lines are hardly indented; their flags stand in front of the first gap after which something else follows.
    """
    found: dict[str, str] = {}
    names: list[str] = []
    for line in help_text.splitlines():
        stripped = line.strip()
        if re.match(_WORD, stripped) and len(line) - len(line.lstrip()) <= 4:
            parts = re.split(r"\s{2,}", stripped)
            head = []
            while parts and parts[0].startswith("-"):
                head.append(parts.pop(0))
            names = re.findall(rf"(?<![\w-]){_WORD}", " ".join(head))
            for name in names:
                found.setdefault(name.rstrip("."), " ".join(parts))
        elif stripped and line[0].isspace():
            for name in names:
                if len(found[name.rstrip(".")]) < 200:
                    found[name.rstrip(".")] += " " + stripped
        else:
            names = []
    return found


def _usage(help_text: str) -> list[str]:
    """The long flags in the usage in front of an argparse help, up to the first empty line."""
    head = help_text.partition("\n\n")[0]
    return re.findall(r"(?<![\w-])--[A-Za-z][\w-]*", head) if head.lower().startswith("usage:") else []


def _mentions(help_text: str, flag: str) -> bool:
    return re.search(rf"(?<![\w-]){re.escape(flag)}(?![\w-])", help_text) is not None


def _widest(engine: str) -> tuple[Shard, ...]:
    """Shards that between them make a planner give every flag it knows."""
    if engine not in LAUNCHABLE:
        raise KeyError(engine)
    several = engine != "llamacpp"
    profile = Profile(
        name="widest",
        engine=engine,
        source="/model",
        nodes=2 if several else 1,
        gpus_per_node=1,
        tensor_parallel=2 if several else 1,
        dtype="bfloat16" if engine in ("vllm", "sglang") else "",
        quantization="awq" if engine in ("vllm", "sglang") else "",
        context_tokens=4096,
    )
    adapters = () if engine == "sim" else (AdapterFiles("adapter", "/adapter", rank=16),)
    modes = ("mp", "ray") if engine == "vllm" else ("mp",)
    return tuple(
        Shard(
            replica="widest",
            model="model",
            profile=attrs.evolve(profile, launch_mode=mode, gpus_per_node=gpus, nodes=profile.nodes),
            rank=rank,
            address=f"192.0.2.{rank + 1}",
            leader="192.0.2.1",
            rendezvous_port=20000 if several else 0,
            gpus=("GPU-widest",)[:gpus],
            fabric="widest",
            key="key",
            adapters=adapters,
        )
        for mode in modes
        for rank in range(profile.nodes)
        for gpus in ((1, 0) if mode == "mp" and engine in ("llamacpp", "sglang") else (1,))
    )


_SITE = Site(
    inventory=Inventory(
        cpus=Cpus(count=8),
        gpus=(Gpu("GPU-widest", 0, "NVIDIA L40S", "l40s-45g", 45 * GIB, compute_cap=(8, 9)),),
        fabrics=(Fabric("widest", "ib", (Rail("mlx5_0"),)),),
    ),
    ports=PortPool(20000, 24999),
    folder="/shard",
    run_folder="/run/appliance",
    marker="widest",
    which=lambda name: f"/{name}",
    exists=lambda path: True,
    executables={name: name for engine in ENGINES.values() for name in (engine.name, "ray")},
    own_argv=("/sim",),
)

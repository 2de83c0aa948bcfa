"""`engine-check`: ask each installed engine for its help and look up every flag we would give it. No GPU needed."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence

import attrs

from appliance.agent.discovery.asking import ask
from appliance.rules.engines.check import Finding, Question, check, questions
from appliance.rules.engines.engine import locate

HELP_S = 180.0
"""vLLM and SGLang import torch before they print anything: 10 to 60 s from a cold disk."""


@attrs.frozen
class Checked:
    """What came of one program. `skipped` says why it was not asked, "" when it was; `path` is what was run."""

    program: str
    path: str
    flags: int
    findings: tuple[Finding, ...] = ()
    skipped: str = ""

    @property
    def failed(self) -> bool:
        """Whether a flag we would give is refused. Warnings and skipped programs are no failure."""
        return any(finding.level == "error" for finding in self.findings)


async def examine(
    engine: str, executables: Mapping[str, str], own_argv: Sequence[str], *, limit_s: float = HELP_S
) -> tuple[Checked, ...]:
    """Check every program of one engine. `executables` are the configured ones, `own_argv` starts this program again.

    Raises KeyError for an unknown engine and nothing for what the programs do.
    """
    return tuple([await _examine(question, executables, own_argv, limit_s) for question in questions(engine)])


async def _examine(
    question: Question, executables: Mapping[str, str], own_argv: Sequence[str], limit_s: float
) -> Checked:
    program, count = question.program, len(question.flags)
    path = locate(program, executables, own_argv, shutil.which, os.path.exists)
    if path is None:
        name = executables.get(program.name) or program.executable
        return Checked(program.name, name, count, skipped=f"{name} is not installed here")
    # We ourselves may take more than one word to start (`python -m ...`).
    prefix = program.prefix(path) if program.executable else (*own_argv, *program.before)
    answer = await ask([*prefix, *program.help], limit_s=limit_s, env=program.help_env)
    if answer.absent:
        return Checked(program.name, path, count, skipped=answer.trouble)
    text = answer.stdout if answer.stdout.strip() else answer.stderr
    trouble = answer.trouble or (f"exit status {answer.status}" if answer.status else "")
    findings = check(text, question.flags)
    if trouble:
        # What a failed program printed proves the flags that are in it, and nothing about the others.
        findings = [Finding("warning", "", f"asked for its help, it said: {trouble}")] + [
            attrs.evolve(finding, level="warning") for finding in findings
        ]
    return Checked(program.name, path, count, tuple(findings))

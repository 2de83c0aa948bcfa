"""Which GPUs this node has: NVML where it works, `nvidia-smi` where it does not, and never in silence.

The problem: both may hang for ever in a broken driver, and which of them works differs by machine (a container without
the library, a library newer than the driver, a vGPU guest without the tool). So NVML runs in a thread that may be left
behind, `nvidia-smi` as a process that is killed, and what was tried and why it failed stands in the notes. A thread
that was left behind is not joined by a second one: until it comes back, the tool is asked instead.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import attrs
import trio

from appliance.agent.discovery import nvml, smi
from appliance.agent.discovery.asking import Answer, ask
from appliance.agent.discovery.reading import Reading

BACKENDS = ("auto", "nvml", "nvidia-smi", "none")


@attrs.frozen
class Found:
    """A reading and the backend that gave it: `nvml`, `nvidia-smi` or `none`."""

    backend: str
    reading: Reading


@attrs.define
class GpuProbe:
    """Reads the GPUs, again and again. One owner; `read` is not called twice at once.

    `backend` is one of BACKENDS; `limit_s` bounds each of the steps, `tool` is the program asked where NVML does not
    work, `load` gives NVML's module and may raise `nvml.NoNvml`.
    """

    backend: str = "auto"
    limit_s: float = 10.0
    tool: str = "nvidia-smi"
    load: Callable[[], Any] = nvml.load
    _stuck: bool = attrs.field(default=False, init=False)

    async def read(self) -> Found:
        """What is there now. Takes at most a few times `limit_s`, whatever the driver does; raises nothing for it."""
        if self.backend == "none":
            return Found("none", Reading())
        if self.backend == "nvidia-smi":
            return await self._ask_tool("")
        try:
            return Found("nvml", await self._ask_library())
        except nvml.NoNvml as missing:
            if self.backend == "nvml":
                return Found("none", Reading(notes=(f"no GPUs: {missing}",), partial=True))
            return await self._ask_tool(str(missing))

    async def _ask_library(self) -> Reading:
        if self._stuck:
            raise nvml.NoNvml("an earlier call into NVML has not come back yet")
        done = False

        def read() -> Reading:
            nonlocal done
            try:
                return nvml.read(self.load())
            except nvml.NoNvml:
                raise
            except Exception as fault:
                # A library of another version than its module fails in ways that have nothing to do with NVML.
                raise nvml.NoNvml(f"NVML: {type(fault).__name__}: {fault}") from fault
            finally:
                done, self._stuck = True, False

        with trio.move_on_after(self.limit_s):
            return await trio.to_thread.run_sync(read, abandon_on_cancel=True)
        self._stuck = not done
        raise nvml.NoNvml(f"NVML did not answer within {self.limit_s:g} s")

    async def _ask_tool(self, why: str) -> Found:
        """`nvidia-smi`, asked because of `why` ("" when it was chosen)."""
        answer = await self._ask(smi.GPU_QUERY)
        if answer.absent:
            if not why:
                return Found("none", Reading(notes=(f"no GPUs: {answer.trouble}",), partial=True))
            # Neither a library nor a tool: a machine without the driver, which is no fault of it.
            return Found("none", Reading(notes=(f"no GPUs: {why}; {answer.trouble}",), partial=_suspicious(why)))
        reading = smi.parse_gpus(answer.stdout)
        notes = [f"{why}; {self.tool} is asked instead"] if why else []
        notes += reading.notes
        trouble = answer.trouble or (f"exit status {answer.status}" if answer.status else "")
        if not trouble and not answer.stdout.strip():
            # Without any GPU it says so in words.
            trouble = "it says nothing"
        if trouble:
            said = answer.stderr.strip() or answer.stdout.strip()
            notes.append(f"{self.tool}: {trouble}" + (f" ({said.splitlines()[-1][:200]})" if said else ""))
        reading = attrs.evolve(reading, notes=tuple(notes), partial=reading.partial or bool(trouble))
        if not reading.gpus:
            return Found("nvidia-smi" if reading.partial else "none", reading)
        if answer.trouble:
            # It hung, or did not stop talking: it is not asked more, each time up to the limit.
            return Found("nvidia-smi", reading)
        return Found("nvidia-smi", await self._complete(reading))

    async def _complete(self, reading: Reading) -> Reading:
        """Add who holds memory and who is joined by NVLink; what is not understood stays unknown, and is noted."""
        notes = list(reading.notes)
        processes = await self._ask(smi.PROCESS_QUERY)
        holders = None if processes.trouble or processes.status else smi.parse_holders(processes.stdout)
        if holders is None:
            notes.append(f"{self.tool} does not tell which processes use the GPUs")
        domains: dict[int, int] | None = None
        if len(reading.gpus) > 1:
            topology = await self._ask(smi.TOPOLOGY_QUERY)
            domains = None if topology.trouble or topology.status else smi.parse_nvlink(topology.stdout)
            if domains is None:
                notes.append(f"{self.tool} does not tell which GPUs are joined by NVLink")
        gpus = [
            attrs.evolve(
                gpu,
                holders=None if holders is None else holders.get(gpu.uuid, ()),
                nvlink_domain=None if domains is None else domains.get(gpu.index),
            )
            for gpu in reading.gpus
        ]
        return attrs.evolve(reading, gpus=tuple(gpus), notes=tuple(notes))

    async def _ask(self, arguments: tuple[str, ...]) -> Answer:
        # Without LC_ALL a decimal comma would make a field of its own.
        return await ask([self.tool, *arguments], limit_s=self.limit_s, env={"LC_ALL": "C"})


def _suspicious(why: str) -> bool:
    """Whether NVML failed in another way than by not being installed, so that GPUs may be there all the same."""
    return not any(word in why.lower() for word in ("not installed", "library not found", "shared library"))

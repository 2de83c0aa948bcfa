"""What an agent does before anything else: find what earlier ones left, and adopt it or kill it.

For every record of this state directory one of these holds:

    the engine's own process is there              adopted as what it was: loading, ready, on its way to a stop
    it is not                                      the shard failed while nobody looked; what is left of it is ended
    it was not started yet                         whatever carries the marker is killed, and the shard begins anew
    it had ended before                            told once more, since nobody may have heard

and a process that carries our word in its marker, but belongs to no such record, is killed: nobody could stop it later,
and it holds a GPU and ports. So is one that an agent of this directory left before records and word were removed
(`lost.py` says how that is known). Nothing else is touched.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from appliance.agent import procfs
from appliance.agent.lost import lost
from appliance.agent.process import GONE_S, Handle, adopt, kill_marked
from appliance.agent.records import Record, Store


@attrs.frozen
class Found:
    """A shard an earlier run left. `handles` are its processes in order, the engine's own last; empty when it begins
    anew, or had ended."""

    record: Record
    handles: tuple[Handle, ...] = ()


@attrs.frozen
class Sorted:
    """All that was found. `killed` are pids that nobody could describe, `lost` the ids of shards among them whose
    records are gone altogether; `troubles` are sentences for operators."""

    found: tuple[Found, ...]
    killed: tuple[int, ...] = ()
    lost: tuple[str, ...] = ()
    troubles: tuple[str, ...] = ()


def sort_out(store: Store, check: Callable[[], None] = lambda: None) -> Sorted:
    """Adopt or kill. Blocks; takes up to GONE_S seconds for those that do not die; `check` is called meanwhile and may
    raise. Raises OSError when processes cannot be looked at: an agent that cannot see what runs must not judge it; and
    StateInUse when another agent still runs on this directory, which was removed under it."""
    records, troubles = store.read_all()
    nobodys = lost(store.shards, store.word)
    found: list[Found] = []
    try:
        for record in records:
            found.append(_find(record, store))
        return _sort_out(store, found, nobodys, troubles, check)
    except BaseException:
        for handle in (handle for each in found for handle in each.handles):
            handle.close()
        raise


def _sort_out(
    store: Store, found: list[Found], nobodys: dict[str, str], troubles: list[str], check: Callable[[], None]
) -> Sorted:
    kept = {each.record.marker for each in found if each.handles}

    def is_undescribed(marker: str) -> bool:
        return marker not in kept and (marker in nobodys or marker.startswith(f"{store.word}."))

    killed: list[int] = []
    until = time.monotonic() + GONE_S
    while left := procfs.marked(is_undescribed):
        killed += [pid for pid, marker in left.items() if kill_marked(pid, marker) and pid not in killed]
        if time.monotonic() > until:
            troubles.append(f"not gone after SIGKILL: {', '.join(f'pid {pid}' for pid in left)}")
            break
        check()
        time.sleep(0.02)
    names = sorted(name for marker, name in nobodys.items() if marker not in kept)
    return Sorted(tuple(found), tuple(killed), tuple(names), tuple(troubles))


def _find(record: Record, store: Store) -> Found:
    if record.ended:
        return Found(record)
    if record.state != "stopping" and record.main is None:
        if record.wish == "stop":
            return Found(attrs.evolve(record, state="stopping"))
        # What was started of it is killed above; a plan made anew may choose other ports.
        again = attrs.evolve(store.new(record.shard, record.agent_id, record.since), used_bytes=record.used_bytes)
        return Found(again)
    handles = tuple(adopt(process, record, store.boot) for process in record.processes)
    if record.complete and handles[-1].ended and record.state != "stopping":
        # Said at once: nobody must take it for ready because it once was.
        record = attrs.evolve(record, state="stopping", reason="the engine ended while the agent was away")
    # Numbers that are, or may by now be, other processes' are not told of as ours.
    there = (
        process if handle.pidfd >= 0 else attrs.evolve(process, pid=0)
        for process, handle in zip(record.processes, handles, strict=True)
    )
    return Found(attrs.evolve(record, processes=tuple(there)), handles)

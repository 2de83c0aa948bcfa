"""`python -m tests.bench ROW [ROW ...]`, `python -m tests.bench all`, `python -m tests.bench install`."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import sys
import tempfile
from pathlib import Path

from tests.bench import install, machine, routers
from tests.bench.plan import Patience, Plan
from tests.bench.report import Report

ROWS = {
    "throughput": "requests per second and CPU per request, short answers",
    "stream_cost": "CPU per event of many streams",
    "added_latency": "what a router adds to an engine of 50 ms",
    "memory": "resident memory: idle, with idle connections, after many requests and prompts",
    "prefix": "cache hits with and without prefix affinity; what a lookup costs",
    "admission": "a person's latency beside a batch job, with admission and without",
    "admission_cost": "what admission costs a request that has room",
    "many_streams": "1,000 streams over 3 sims; every hang-up frees the engine",
    "placement": "one pass that places 200 models on 1,000 nodes, and on 10,000",
}


def _arguments() -> argparse.Namespace:
    rows = "\n".join(f"  {name:14} {what}" for name, what in ROWS.items())
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench",
        description="Measure the router beside its peers. One line of JSON per figure.",
        epilog=f"rows:\n{rows}\n  all            each in turn\n  install        get the peers (into .venv-bench)",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("rows", nargs="+", choices=[*ROWS, "all", "install"], metavar="ROW")
    parser.add_argument("--routers", default=",".join(routers.ALL), help="which, in order (also: direct)")
    parser.add_argument("--rounds", type=int, default=0, help="how often each is measured (0: as the row thinks best)")
    parser.add_argument("--quick", action="store_true", help="a few seconds, to see that it runs; figures mean little")
    parser.add_argument(
        "--patience", type=float, default=0.0, help="seconds a row may wait, in all, for a shared machine to fall quiet"
    )
    parser.add_argument("--out", type=Path, help="append the lines to this file as well as printing them")
    given = parser.parse_args()
    unknown = set(given.routers.split(",")) - {*routers.ALL, routers.DIRECT}
    if unknown:
        parser.error(f"unknown router {', '.join(sorted(unknown))}; known: {', '.join((*routers.ALL, routers.DIRECT))}")
    return given


class _Tee:
    """Standard output, and a file beside it."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("a")

    def write(self, text: str) -> int:
        self._file.write(text)
        return sys.stdout.write(text)

    def flush(self) -> None:
        self._file.flush()
        sys.stdout.flush()


def main() -> int:
    given = _arguments()
    if "install" in given.rows:
        return install.install()
    cores = machine.Cores.of_this_machine()
    os.sched_setaffinity(0, {cores.rest})
    status = 0
    for row in ROWS if "all" in given.rows else given.rows:
        with contextlib.ExitStack() as stack:
            report = Report(row, _Tee(given.out)) if given.out else Report(row)  # type: ignore[arg-type]
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="bench-")))
            plan = Plan(
                report=report,
                cores=cores,
                folder=folder,
                routers=tuple(given.routers.split(",")),
                rounds=given.rounds,
                quick=given.quick,
                patience=Patience(given.patience),
            )
            importlib.import_module(f"tests.bench.{row}").measure(plan)
            status = max(status, report.status)
    return status


if __name__ == "__main__":
    sys.exit(main())

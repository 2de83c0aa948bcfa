"""A batch job does not slow people down: measured, in both directions, with real processes.

This is row `admission` of `tests/bench` with fewer requests. The ratios are those of one run on one machine, and other
work on the machine only ever makes the first of them worse, so it is measured again when it is too high; an admission
that has regressed is too high every time.
"""

from __future__ import annotations

from pathlib import Path

from tests.bench import admission, admission_cost, machine

TRIES = 3


def test_500_bronze_requests_do_not_slow_platinum_ones_but_would_without_admission(tmp_path: Path) -> None:
    cores = machine.Cores.of_this_machine()
    for number in range(TRIES):
        folder = tmp_path / str(number)
        folder.mkdir()
        found = admission.run(cores, folder, each=12, rounds=1)
        if found.with_admission <= admission.MOST:
            break
    assert found.waiting > 400  # in the router
    assert found.in_engines <= 0.7 * 2 * admission.SLOTS
    assert found.with_admission <= admission.MOST
    assert found.without_admission >= admission.LEAST


def test_what_admission_costs_is_measured() -> None:
    """No figure is judged here: only that the row's calls are those of the road, and give everything back."""
    assert 0.0 < admission_cost.all_of_it(2, 200) < 1000.0

"""Bench harness: one command per row of the performance page, one line of JSON per figure.

`python -m tests.bench ROW` starts a small C engine, the routers that are to be compared, and a small C load
generator; measures them in turn; prints what it found and under which conditions. A router that cannot be installed
or started is reported as skipped, with the reason. Figures are counts and ratios within one run: nothing here fails
because a machine is slow, and everything fails when an answer was wrong.
"""

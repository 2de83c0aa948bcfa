"""Decisions: plain objects and functions; `now` and `rng` are arguments, nothing here waits or does I/O."""

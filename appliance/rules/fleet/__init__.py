"""Decisions about what runs: which replicas are wanted, which are started, stopped, or waited for."""

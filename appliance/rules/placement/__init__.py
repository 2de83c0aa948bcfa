"""Decisions about where a replica goes: which nodes, which GPUs, and why not elsewhere."""

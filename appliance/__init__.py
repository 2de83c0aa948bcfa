"""appliance: one executable that turns a few machines into a private LLM service."""

__version__ = "0.1.0"

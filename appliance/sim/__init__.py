"""The built-in engine: honest about time and memory, obliging about misbehaviour, and without a model."""

"""The agent: what runs on every node with hardware, and keeps its engines running."""

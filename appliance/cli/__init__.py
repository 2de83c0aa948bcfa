"""The terminal face: one module per command and mode, and the composition roots that know all floors."""

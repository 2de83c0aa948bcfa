"""The control plane: decides which models run where, and knows who may have a say in it."""

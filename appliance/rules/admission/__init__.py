"""Admission: who may proceed now. `queue.Admission` is the whole of its state; the other files are its parts."""

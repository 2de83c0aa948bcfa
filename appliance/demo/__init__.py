"""`make run`: a real engine with a real model, and the door in front of it, on this machine alone.

A program that starts the others as an operator would, so it stands outside the floors: it imports nothing of the rest
of the package, only runs its commands, and is no part of the frozen executable.
"""

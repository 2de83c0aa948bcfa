"""How each engine is launched, judged and stopped, and why one would rather not: one engine a file."""

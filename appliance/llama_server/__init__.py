"""llama.cpp's server as a program of its own, from the prebuilt wheel `xllamacpp` (extra `demo`).

An engine, not a part of the router: it stands outside the floors, imports nothing of the rest of the package and
nothing of Trio, and nothing of the package imports it. It is spoken to as every engine is, over HTTP.
"""

"""Chaos over a whole system of real processes: agents ask all the while, each process is killed in turn, the bus is
restarted and cut off, an engine hangs; then the books are read (docs/soak.md). ``python -m load.soak --json``.

`plan`, `conversations`, `attribution` and `books` are pure; `relay`, `house`, `agents`, `watch` and `run` do the I/O.
"""

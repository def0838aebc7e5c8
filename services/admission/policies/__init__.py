"""Scheduling policies, one module each; `registry` makes them by name from typed parameters."""

"""Hints lowered to what an engine can do today: pure, one module for each engine (docs/hints.md has the table)."""

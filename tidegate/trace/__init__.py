"""Recorded traces: read them, count what happened, write them as others' formats (docs/traces.md)."""

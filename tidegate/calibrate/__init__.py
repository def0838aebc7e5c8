"""Measures what it costs an engine to compute a prompt anew, over its HTTP API."""

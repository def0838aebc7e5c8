"""The bus: one conformance suite for both implementations, and what only a real server can show."""

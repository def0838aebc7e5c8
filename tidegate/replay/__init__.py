"""Recorded traffic played again, online, against any OpenAI-compatible endpoint (docs/replay.md)."""

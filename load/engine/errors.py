"""Errors of the simulated engine: each says whose fault it is."""

from __future__ import annotations


class EngineError(Exception):
    """Root of this package's errors. ``reason`` is stable."""

    reason = "engine_error"


class DuplicateRequestError(EngineError):
    """A request of this id is already in the engine (the caller's fault)."""

    reason = "duplicate_request"


class TooLargeError(EngineError):
    """The request can never fit: prompt and output need more blocks than there are (the caller's fault)."""

    reason = "request_too_large"

"""Everything that can go wrong in the bridge itself.

BridgeError
├── BadEndpointError   a ZeroMQ endpoint, configured or discovered, cannot be used (the operator's fault)
├── CheckpointError    what the bridge before left in the object store is not what it wrote (the store's fault)
└── ScrapeError        the engine did not answer a question, or not intelligibly (the engine's fault)
"""

from __future__ import annotations


class BridgeError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label, reply."""

    reason = "bridge_error"


class BadEndpointError(BridgeError):
    """``endpoint`` cannot be used, and why."""

    reason = "bad_endpoint"

    def __init__(self, endpoint: str, problem: str) -> None:
        super().__init__(f"KV event endpoint {endpoint!r}: {problem}")
        self.endpoint = endpoint


class CheckpointError(BridgeError):
    """The index that the bridge before left behind cannot be used."""

    reason = "checkpoint_damaged"


class ScrapeError(BridgeError):
    """The engine's HTTP side failed. ``reason`` says how: ``unreachable``, ``http_<status>``, ``bad_answer``."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

"""Everything that can go wrong in a replica itself.

ReplicaError
├── SnapshotError     a bridge's snapshot could not be had or used (``reason``: what the bridge or the store said)
└── BadQuestionError  a question that makes no sense (the asker's fault)
"""

from __future__ import annotations


class ReplicaError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label, reply."""

    reason = "replica_error"


BRIDGE_REASONS = frozenset(
    {
        "too_many_askers",
        "engine_unknown",
        "index_busy",
        "bus_down",
        "bus_timeout",
        "closed",
        "no_responders",
        "payload_too_large",
        "stream_error",
    }
)
"""What a bridge may say when it has no snapshot. Any other word of it is foreign text, and counted as ``other``."""

_TEXT_CHARACTERS = 200


class SnapshotError(ReplicaError):
    """No usable snapshot of ``worker``."""

    def __init__(self, worker: str, reason: str, text: str) -> None:
        super().__init__(f"snapshot of {worker}: {text[:_TEXT_CHARACTERS]}")
        self.worker = worker
        self.reason = reason


class BadQuestionError(ReplicaError):
    """The asker's question cannot be answered as it stands."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

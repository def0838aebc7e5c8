"""Everything that can go wrong in a replica itself.

ReplicaError
├── SnapshotError     a bridge's snapshot could not be had or used (``reason``: what the bridge or the store said)
└── BadQuestionError  a question that makes no sense (the asker's fault)
"""

from __future__ import annotations


class ReplicaError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label, reply."""

    reason = "replica_error"


class SnapshotError(ReplicaError):
    """No usable snapshot of ``worker``."""

    def __init__(self, worker: str, reason: str, text: str) -> None:
        super().__init__(f"snapshot of {worker}: {text}")
        self.worker = worker
        self.reason = reason


class BadQuestionError(ReplicaError):
    """The asker's question cannot be answered as it stands."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

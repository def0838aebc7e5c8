"""Everything that can go wrong in the indexer itself.

IndexerError
├── SnapshotError     a bridge's snapshot could not be had or used (``reason``: what the bridge or the store said)
└── BadQuestionError  a question that makes no sense (the asker's fault)
"""

from __future__ import annotations


class IndexerError(Exception):
    """Root of this package's errors. ``reason`` is stable: metric label, reply."""

    reason = "indexer_error"


class SnapshotError(IndexerError):
    """No usable snapshot of ``worker``."""

    def __init__(self, worker: str, reason: str, text: str) -> None:
        super().__init__(f"snapshot of {worker}: {text}")
        self.worker = worker
        self.reason = reason


class BadQuestionError(IndexerError):
    """The asker's question cannot be answered as it stands."""

    def __init__(self, reason: str, text: str) -> None:
        super().__init__(text)
        self.reason = reason

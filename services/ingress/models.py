"""``/v1/models``: what the workers serve together, each model once, readable by OpenAI's and by Anthropic's clients.

Of a model that several workers serve, a prompt must fit wherever it is sent: ``max_model_len`` is the smallest of
theirs. ``root`` and ``parent`` are as vLLM says them of an adapter.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from schemas.worker import WorkerState


def model_entry(model: str, workers: Sequence[WorkerState], created_s: int, created_at: str) -> dict[str, Any]:
    """One model, as served by ``workers``. ``created_s`` (Unix seconds) and ``created_at`` (RFC 3339) are one moment:
    when the front door began, for no engine says when a model was made."""
    profiles = [state.profile for state in workers]
    parents = sorted({profile.model for profile in profiles if model in profile.adapters})
    lengths = [profile.max_model_len for profile in profiles if profile.max_model_len is not None]
    entry: dict[str, Any] = {
        "id": model,
        "object": "model",
        "created": created_s,
        "owned_by": "tidegate",
        "root": model,
        "parent": parents[0] if parents else None,
        "type": "model",
        "display_name": model,
        "created_at": created_at,
    }
    return entry | ({"max_model_len": min(lengths)} if lengths else {})


def model_list(entries: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """All of them, on one page."""
    return {
        "object": "list",
        "data": list(entries),
        "has_more": False,
        "first_id": entries[0]["id"] if entries else None,
        "last_id": entries[-1]["id"] if entries else None,
    }

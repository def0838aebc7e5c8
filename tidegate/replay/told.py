"""What became of one request of a replay. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What became of a request. Times in ms of the run's clock; ``sent_ms``: handed to the HTTP client, body and all.
    ``reason`` is ``None`` when it went well. Tokens as the endpoint counted them (``None``: it did not say)."""

    sent_ms: float
    ended_ms: float
    first_ms: float | None = None
    last_ms: float | None = None
    reason: str | None = None
    detail: str = ""
    input_tokens: int | None = None
    output_tokens: int | None = None
    cached_tokens: int | None = None
    token_ids: list[int] | None = None

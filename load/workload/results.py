"""What a client of a workload saw of its requests."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class RequestResult:
    """What the client saw of one request. Tokens as the answer's usage says; times in ms.

    ``request_id``: the front door's id from its answer's headers. ``error``: what failed, ``timeout`` for a request
    that hung.
    """

    session_id: str
    turn: int
    request_id: str | None = None
    error: str | None = None
    input_tokens: int = 0
    cached_tokens: int = 0
    output_tokens: int = 0
    ttft_ms: float | None = None
    total_ms: float = 0.0

    @property
    def failed(self) -> bool:
        return self.error is not None

    @property
    def hung(self) -> bool:
        return self.error is not None and self.error.startswith("timeout")

"""``tg.v1.tool.{start,end,error}.<session>``: harness tool events (published by the recorder's intakes)."""

from __future__ import annotations

from typing import Literal

from schemas.base import Count, Fact
from schemas.session import SessionKey

ToolStatus = Literal["running", "succeeded", "error", "cancelled"]


class ToolEvent(Fact, frozen=True, kw_only=True, omit_defaults=True):
    """One tool call's start or end. ``tool_call_id`` is unique within its session only.

    ``inferred``: no harness said it; the call ran at most from the end of the turn that made it (``started_at_ms``) to
    the session's next turn (``ended_at_ms``), and its id is the recorder's.
    """

    session: SessionKey
    session_id: str
    event: Literal["start", "end", "error"]
    tool_call_id: str
    tool_class: str
    status: ToolStatus
    started_at_ms: Count | None = None
    ended_at_ms: Count | None = None
    duration_ms: float | None = None
    error_type: str | None = None
    inferred: bool = False

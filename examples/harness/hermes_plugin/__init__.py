"""Hermes says which session its requests belong to: a plugin of one middleware.

    ln -s $PWD/examples/harness/hermes_plugin ~/.hermes/plugins/tidegate_session
    hermes plugins enable tidegate_session

Sub-agents (``delegate_task``) have session ids of their own, and are sessions without a parent here.
"""

from typing import Any

HEADER = "x-tidegate-session-id"


def register(ctx: Any) -> None:
    """Called by Hermes once."""
    ctx.register_middleware("llm_request", with_session)


def with_session(request: dict[str, Any], session_id: str = "", **_: Any) -> dict[str, Any] | None:
    """The request with one more header; what is set elsewhere stays."""
    if not session_id:
        return None
    return {"request": request | {"extra_headers": {HEADER: session_id, **(request.get("extra_headers") or {})}}}

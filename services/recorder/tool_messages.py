"""Tool events as harnesses send them: three ZeroMQ frames or JSON, full or compact, and the rules that both must keep.

The peer's format (spec: identity-and-traces §2.7, oracles §8.3), so that its plug-ins work unchanged. The full form is
a trace row (``agent_context.session_id``, ``event_source``), the compact one has ``session_id`` at its top and no
source. Null counts as absent, unknown fields are ignored and not kept. Beyond the peer's rules a duration must not be
negative (nobody can learn from one), a time must be one that readers of traces take, and an event is at most
`MAX_EVENT_BYTES` long.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Literal

import msgspec

from schemas.base import UNDECODABLE, Count
from schemas.tool import ToolStatus
from schemas.trace import TRACE_SCHEMA, ToolRun
from services.recorder.errors import BadToolEventError

DEFAULT_TOPIC = "agent-tool-events"
MAX_EVENT_BYTES = 65_536
MAX_DURATION_MS = 2.0**49
MAX_TIME_MS = 2**49
"""Unix ms, some 17,800 years on. One row whose time, or time and duration together, reach 2^50 ends the reading of a
whole trace."""
MAX_PARENT_BYTES = 256
"""A longer parent id is dropped, as at the front door."""

SCHEMAS = frozenset({"dynamo.request.trace.v1", TRACE_SCHEMA})
FRAMES = 3

ToolEventType = Literal["tool_start", "tool_end", "tool_error"]
EVENT_TYPES: Mapping[str, ToolEventType] = {
    "tool_start": "tool_start",
    "tool_end": "tool_end",
    "tool_error": "tool_error",
}

STATUSES: Mapping[str, ToolStatus] = {
    "running": "running",
    "succeeded": "succeeded",
    "ok": "succeeded",
    "success": "succeeded",
    "error": "error",
    "failed": "error",
    "cancelled": "cancelled",
    "canceled": "cancelled",
    "timeout": "cancelled",
}
"""Every name of a status, and which it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ToolReport:
    """One tool event that keeps the rules, whichever form it came in. ``at_ms``: its own time, Unix ms."""

    event_type: ToolEventType
    at_ms: int
    session_id: str
    parent_session_id: str | None
    tool: ToolRun

    def fingerprint(self) -> bytes:
        """16 bytes that are the same for the same event, and (a call id being unique per session only) for no other."""
        said = (self.event_type, self.at_ms, self.session_id, self.parent_session_id, self.tool)
        return blake2b(msgspec.msgpack.encode(said), digest_size=16).digest()


class _Context(msgspec.Struct):
    session_id: str | None = None
    parent_session_id: str | None = None


class _Tool(msgspec.Struct):
    tool_call_id: str
    tool_class: str
    started_at_unix_ms: Count | None = None
    ended_at_unix_ms: Count | None = None
    status: str | None = None
    duration_ms: float | None = None
    output_tokens: Count | None = None
    output_bytes: Count | None = None
    tool_name_hash: str | None = None
    error_type: str | None = None


class _Sent(msgspec.Struct):
    """Both forms in one: what tells them apart is `agent_context`."""

    schema: str
    event_type: str
    event_time_unix_ms: Count
    event_source: str | None = None
    agent_context: _Context | None = None
    session_id: str | None = None
    parent_session_id: str | None = None
    tool: _Tool | None = None
    request: object = None
    payload: object = None


_msgpack = msgspec.msgpack.Decoder(_Sent)
_json = msgspec.json.Decoder(_Sent)


def read_frames(frames: Sequence[bytes], topic: str) -> ToolReport:
    """One ZeroMQ message: topic, number (not looked at: it has gaps where a harness drops), MessagePack map.

    ``topic``: the only one that is taken; empty: any. Raises `BadToolEventError` with the reasons ``bad_frames``,
    ``other_topic`` and those of `read_msgpack`.
    """
    if len(frames) != FRAMES:
        raise BadToolEventError("bad_frames", f"{len(frames)} frames, not topic, number and event")
    if topic and frames[0] != topic.encode():
        raise BadToolEventError("other_topic", f"the topic is {frames[0][:100]!r}, not {topic!r}")
    return read_msgpack(frames[2])


def read_msgpack(payload: bytes) -> ToolReport:
    """One event as MessagePack. Raises `BadToolEventError`: ``too_large``, ``undecodable`` and those of `_checked`."""
    return _read(_msgpack, payload)


def read_json(payload: bytes | msgspec.Raw) -> ToolReport:
    """One event as JSON. Raises as `read_msgpack`."""
    return _read(_json, bytes(payload))


def _read(decoder: msgspec.msgpack.Decoder[_Sent] | msgspec.json.Decoder[_Sent], payload: bytes) -> ToolReport:
    if len(payload) > MAX_EVENT_BYTES:
        raise BadToolEventError("too_large", f"{len(payload)} bytes, over {MAX_EVENT_BYTES}")
    try:
        sent = decoder.decode(payload)
    except UNDECODABLE as error:
        raise BadToolEventError("undecodable", f"no tool event: {error}") from error
    return _checked(sent)


def _checked(sent: _Sent) -> ToolReport:
    """The rules, each with its reason."""
    if sent.schema not in SCHEMAS:
        raise BadToolEventError("unknown_schema", f"schema is {sent.schema[:100]!r}, not one of {sorted(SCHEMAS)}")
    event_type = EVENT_TYPES.get(sent.event_type)
    if event_type is None:
        raise BadToolEventError(
            "bad_event_type", f"event_type is {sent.event_type[:100]!r}, not tool_start, tool_end or tool_error"
        )
    compact = sent.agent_context is None
    if sent.event_source != "harness" and not (compact and sent.event_source is None):
        raise BadToolEventError("bad_source", "event_source is not 'harness'")
    if sent.request is not None or sent.payload is not None:
        raise BadToolEventError("not_a_tool_row", "a tool event has neither request nor payload")
    context = sent.agent_context or _Context(sent.session_id, sent.parent_session_id)
    session_id = (context.session_id or "").strip()
    if not session_id:
        raise BadToolEventError("no_session", "neither agent_context.session_id nor session_id names a session")
    if sent.tool is None:
        raise BadToolEventError("no_tool", "tool is missing")
    times = (sent.event_time_unix_ms, sent.tool.started_at_unix_ms or 0, sent.tool.ended_at_unix_ms or 0)
    if max(times) > MAX_TIME_MS:
        raise BadToolEventError("bad_time", f"{max(times)} is no time in Unix ms")
    return ToolReport(
        event_type=event_type,
        at_ms=sent.event_time_unix_ms,
        session_id=session_id,
        parent_session_id=_parent(context.parent_session_id, session_id),
        tool=_checked_tool(sent.tool),
    )


def _parent(said: str | None, session_id: str) -> str | None:
    parent = (said or "").strip()
    return parent if parent and parent != session_id and len(parent.encode()) <= MAX_PARENT_BYTES else None


def _checked_tool(tool: _Tool) -> ToolRun:
    status = None if tool.status is None else STATUSES.get(tool.status)
    if tool.status is not None and status is None:
        raise BadToolEventError("bad_status", f"tool.status is {tool.status[:100]!r}, not one of {sorted(STATUSES)}")
    duration = tool.duration_ms
    if duration is not None and not 0 <= duration <= MAX_DURATION_MS:  # false for NaN, too
        raise BadToolEventError("bad_duration", f"tool.duration_ms is {duration}, not from 0 to 2^49")
    return ToolRun(
        tool_call_id=tool.tool_call_id,
        tool_class=tool.tool_class,
        started_at_unix_ms=tool.started_at_unix_ms,
        ended_at_unix_ms=tool.ended_at_unix_ms,
        status=status,
        duration_ms=duration,
        output_tokens=tool.output_tokens,
        output_bytes=tool.output_bytes,
        tool_name_hash=tool.tool_name_hash,
        error_type=tool.error_type,
    )

"""A trace as flat tables in Parquet, by pyarrow (extra ``parquet``): requests, tools, decisions.

One row a record, columns named and typed as in `schemas.trace`, with its prefix where two objects have the same field.
What is not known is null, never 0, and what is 0 is 0. Times are ``timestamp[ms, UTC]``, durations ms in floating
point, hashes lists of unsigned 64-bit numbers. Compressed with zstd; column statistics are written, so that readers
skip what they do not need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import islice
from typing import Any, BinaryIO, Literal, get_args

import msgspec

from schemas.decision import Candidate
from tidegate.errors import MissingPartError
from tidegate.trace.reading import Trace
from tidegate.trace.rows import Request, ToolSpan, ToolStart

Table = Literal["requests", "tools", "decisions"]
TABLES: tuple[Table, ...] = get_args(Table)
ROW_GROUP = 10_000
"""Rows that are turned into columns at once."""

_SMALLEST, _LARGEST = -(1 << 63), (1 << 63) - 1

Column = tuple[str, str, Callable[[Any], Any]]
"""Name, type (`_types`), and what of a record it is."""


def write_parquet(trace: Trace, table: Table, file: BinaryIO, done: Callable[[int], None]) -> int:
    """One table; returns how many rows it has. ``done`` is told how many are written.

    Raises `MissingPartError` where pyarrow is not installed.
    """
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise MissingPartError(f"Parquet needs pyarrow: pip install 'tidegate[parquet]' ({error})") from error
    columns, records = _table(trace, table)
    types = _types(pa)
    schema = pa.schema([pa.field(name, types[kind]) for name, kind, _ in columns], metadata={"tidegate.table": table})
    count = 0
    with pq.ParquetWriter(file, schema, compression="zstd") as writer:
        for part in _parts(records):
            arrays = [pa.array([_fitting(get(each)) for each in part], types[kind]) for _, kind, get in columns]
            writer.write_table(pa.Table.from_arrays(arrays, schema=schema), row_group_size=ROW_GROUP)
            count += len(part)
            done(count)
    return count


def _fitting(value: Any) -> Any:
    """A value without whole numbers of more than 64 bits, which others may put into rows: they become null."""
    if isinstance(value, int):
        return value if _SMALLEST <= value <= _LARGEST else None
    if isinstance(value, tuple) and value and isinstance(value[0], int):  # hashes
        return value if min(value) >= 0 and max(value) < 1 << 64 else None
    if isinstance(value, list):
        return [
            {key: _fitting(each) for key, each in item.items()} if isinstance(item, dict) else item for item in value
        ]
    return value


def records_of(trace: Trace, table: Table) -> int:
    """How many rows the table will have."""
    return len(_table(trace, table)[1])


def _parts(records: Sequence[Any]) -> Iterator[list[Any]]:
    left = iter(records)
    while part := list(islice(left, ROW_GROUP)):
        yield part


def _table(trace: Trace, table: Table) -> tuple[Sequence[Column], Sequence[Any]]:
    if table == "requests":
        return _REQUESTS, trace.requests
    if table == "tools":
        return _TOOLS, (*trace.tools, *trace.open_tools)
    sessions = {request.request_id: request.session for request in trace.requests}
    said: Column = ("session_id", "text", lambda row: sessions.get(row.decision.request_id))
    return (*_DECISIONS[:2], said, *_DECISIONS[2:]), trace.decisions


def _types(pa: Any) -> dict[str, Any]:
    text, whole, real, flag = pa.string(), pa.int64(), pa.float64(), pa.bool_()
    tool_call = [("choice_index", whole), ("tool_call_index", whole), ("id", text), ("name", text)]
    choice = [
        ("choice_index", whole),
        ("finish_reason", text),
        ("backend_finish_reason", text),
        ("stop_reason", text),
    ]
    candidate = [
        ("worker", text),
        ("rank", whole),
        ("cost", real),
        ("parts", pa.map_(text, real)),
        ("device_blocks", whole),
        ("host_blocks", whole),
        ("disk_blocks", whole),
        ("external_blocks", whole),
        ("open_grants", whole),
        ("health", text),
        ("health_reason", text),
        ("sticky", flag),
        ("excluded", text),
    ]
    policy = [
        ("policy", text),
        ("ask", text),
        ("outcome", text),
        ("took_ms", real),
        ("times", whole),
        ("reason", text),
    ]
    return {
        "text": text,
        # Few different values, many rows.
        "word": pa.dictionary(pa.int32(), text),
        "int": whole,
        "real": real,
        "flag": flag,
        "time": pa.timestamp("ms", "UTC"),
        "words": pa.list_(text),
        "hashes": pa.list_(pa.uint64()),
        "tool_calls": pa.list_(pa.struct(tool_call)),
        "choices": pa.list_(pa.struct(choice)),
        "candidates": pa.list_(pa.struct(candidate)),
        "policies": pa.list_(pa.struct(policy)),
    }


def _metric(name: str, kind: str) -> Column:
    return name, kind, lambda request: getattr(request.metrics, name)


def _context(name: str, kind: str) -> Column:
    return name, kind, lambda request: getattr(request.context, name, None)


def _turn(name: str, kind: str = "text") -> Column:
    return name, kind, lambda request: getattr(getattr(request.context, "turn", None), name, None)


def _compaction(name: str) -> Column:
    return (
        f"compaction_{name}",
        "word",
        lambda request: getattr(getattr(request.context, "compaction", None), name, None),
    )


def _tool(name: str, kind: str) -> Column:
    return name, kind, lambda tool: getattr(tool.fields, name)


def _decision(name: str, kind: str) -> Column:
    return name, kind, lambda row: getattr(row.decision, name)


def _finish(name: str, kind: str) -> Column:
    return name, kind, lambda request: getattr(request.metrics.finish_reason_metadata, name, None)


def _plain(values: Iterable[msgspec.Struct] | None) -> list[dict[str, Any]] | None:
    """``None`` stays what is not known; of each object all fields, where `to_builtins` would leave defaults out."""
    return None if values is None else [msgspec.structs.asdict(value) for value in values]


def _finish_objects(name: str, kind: str) -> Column:
    return name, kind, lambda request: _plain(getattr(request.metrics.finish_reason_metadata, name, None))


def _replay(name: str) -> Callable[[Request], Any]:
    def get(request: Request) -> Any:
        value = None if request.replay is None else getattr(request.replay, name)
        return None if value is msgspec.UNSET else value

    return get


def _key(name: str) -> Callable[[Request], str | None]:
    return lambda request: getattr(getattr(request.context, "session", None), name, None)


def _tenant(request: Request) -> str | None:
    return request.metrics.tenant or _key("tenant")(request)


def _candidate(candidate: Candidate) -> dict[str, Any]:
    blocks = candidate.blocks
    return msgspec.structs.asdict(candidate) | {
        "parts": list(candidate.parts.items()),
        "device_blocks": blocks.device,
        "host_blocks": blocks.host,
        "disk_blocks": blocks.disk,
        "external_blocks": blocks.external,
    }


def _started(tool: ToolSpan | ToolStart) -> int | None:
    if isinstance(tool, ToolStart):
        return tool.start_ms
    return round(tool.start_ms) if tool.timed else None


def _duration(tool: ToolSpan | ToolStart) -> float | None:
    return tool.end_ms - tool.start_ms if isinstance(tool, ToolSpan) and tool.timed else None


_REQUESTS: tuple[Column, ...] = (
    _metric("request_id", "text"),
    ("received", "time", lambda request: round(request.start_ms)),
    ("ended", "time", lambda request: round(request.end_ms)),
    ("event_time", "time", lambda request: request.event_time_ms),
    ("event_source", "word", lambda request: request.event_source or None),
    _context("session_id", "text"),
    _context("parent_session_id", "text"),
    ("tenant", "word", _tenant),
    ("session_family", "word", _key("family")),
    ("session_root", "text", _key("root")),
    ("session_agent", "text", _key("agent")),
    _context("session_final", "flag"),
    _context("input_trigger", "word"),
    _context("turn_id", "text"),
    _context("weak", "flag"),
    (
        "implicit_relation",
        "word",
        lambda request: getattr(getattr(request.context, "implicit", None), "relation", None),
    ),
    *(_turn(name) for name in ("agent_name", "root_turn_id", "parent_turn_id", "forked_from_session_id")),
    *(_turn(name, "int") for name in ("window_number", "forked_from_ordinal")),
    *(_compaction(name) for name in ("trigger", "reason", "implementation", "phase", "strategy")),
    _metric("x_request_id", "text"),
    _metric("response_id", "text"),
    *(_metric(name, "word") for name in ("model", "endpoint", "kind")),
    _metric("stream", "flag"),
    _metric("outcome", "word"),
    _metric("reason", "word"),
    *(_metric(name, "int") for name in ("status", "attempts", "input_tokens", "output_tokens", "max_output_tokens")),
    _metric("hedged", "word"),
    *(_metric(name, "int") for name in ("choices", "cached_tokens", "reasoning_tokens")),
    _metric("modalities", "words"),
    _metric("usage_estimated", "flag"),
    *(_metric(name, "int") for name in ("predicted_cached_tokens", "predicted_shared_tokens")),
    _metric("admission_wait_ms", "real"),
    _metric("hold_ms", "int"),
    _metric("hold_reason", "word"),
    _metric("decision_ms", "real"),
    *(_metric(name, "word") for name in ("decision_mode", "policy")),
    _metric("grant_id", "text"),
    *(_metric(name, "word") for name in ("index_health", "index_reason")),
    *(_metric(name, "real") for name in ("prefill_wait_time_ms", "prefill_time_ms", "ttft_ms", "avg_itl_ms")),
    *(_metric(name, "real") for name in ("total_time_ms", "kv_hit_rate")),
    _metric("queue_depth", "int"),
    ("worker", "word", lambda request: getattr(request.metrics.worker, "worker", None)),
    ("rank", "int", lambda request: getattr(request.metrics.worker, "rank", None)),
    _metric("replayable", "flag"),
    *(_finish(name, "word") for name in ("finish_reason", "backend_finish_reason", "stop_reason")),
    _finish_objects("tool_calls", "tool_calls"),
    ("finish_choices", "choices", _finish_objects("choices", "choices")[2]),
    ("trace_block_size", "int", _replay("trace_block_size")),
    ("input_length", "int", _replay("input_length")),
    ("input_sequence_hashes", "hashes", _replay("input_sequence_hashes")),
    ("completion_sequence_hashes", "hashes", _replay("completion_sequence_hashes")),
)

_TOOLS: tuple[Column, ...] = (
    _tool("tool_call_id", "text"),
    ("session_id", "text", lambda tool: tool.session),
    ("parent_session_id", "text", lambda tool: tool.parent),
    _tool("tool_class", "word"),
    ("status", "word", lambda tool: tool.status if isinstance(tool, ToolSpan) else "running"),
    ("started", "time", _started),
    ("ended", "time", lambda tool: round(tool.end_ms) if isinstance(tool, ToolSpan) else None),
    ("duration_ms", "real", _duration),
    ("event_time", "time", lambda tool: tool.event_time_ms),
    *(_tool(name, "int") for name in ("output_tokens", "output_bytes")),
    _tool("tool_name_hash", "text"),
    _tool("error_type", "word"),
    _tool("inferred", "flag"),
)

_DECISIONS: tuple[Column, ...] = (
    _decision("grant_id", "text"),
    _decision("request_id", "text"),
    ("event_time", "time", lambda row: row.time_ms),
    ("worker", "word", lambda row: row.decision.worker.worker),
    ("rank", "int", lambda row: row.decision.worker.rank),
    _decision("model", "word"),
    _decision("attempt", "int"),
    *(_decision(name, "word") for name in ("kind", "mode", "policy")),
    *(_decision(name, "int") for name in ("input_tokens", "block_size")),
    *(_decision(name, "int") for name in ("predicted_cached_tokens", "predicted_shared_tokens")),
    _decision("previous_worker", "word"),
    *(_decision(name, "word") for name in ("index_health", "index_reason")),
    _decision("hold_ms", "int"),
    _decision("hold_reason", "word"),
    *(_decision(name, "int") for name in ("decide_us", "candidates_seen")),
    ("candidates", "candidates", lambda row: [_candidate(each) for each in row.decision.candidates]),
    ("policies", "policies", lambda row: _plain(row.decision.policies)),
)
